"""Rows of the embedding table. See cuda/embed.cu."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minfer_cuda.kernels import Device, DeviceArray
from minfer_cuda.kernels.checks import expect
from minfer_cuda.kernels.layouts import Matrix


def instances(types: Sequence[str]) -> list[str]:
    """Every instance of cuda/embed.cu for these types."""
    return [f"embed<{name}>" for name in types]


def embed(device: Device, table: Matrix, tokens: DeviceArray, x: DeviceArray) -> None:
    """x[i] = table[tokens[i]], exact float32, in place. tokens (T,) int32, below N: the caller has
    checked; x (T, D) float32."""
    count = tokens.shape[0]
    expect("embed", "tokens", tokens, (count,), np.int32)
    expect("embed", "x", x, (count, table.cols), np.float32)
    kernel = device.kernel("embed", f"embed<{table.quant.cuda_name}>")
    kernel(count, 512 if count == 1 else 128, table.data, tokens, x, table.cols)
