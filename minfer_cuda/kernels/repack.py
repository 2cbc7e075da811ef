"""From the file's blocks to weight records. See cuda/repack.cu."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minfer_cuda.kernels import Device, DeviceArray
from minfer_cuda.kernels.checks import expect
from minfer_cuda.kernels.layouts import Matrix, matrix_bytes
from minfer_cuda.quants import QuantType, by_name


def instances(types: Sequence[str]) -> list[str]:
    """Every instance of cuda/repack.cu for these types."""
    return [f"repack<{name}>" for name in types if by_name(name).block_size > 1]


def repack(device: Device, quant: QuantType, raw: DeviceArray, rows: int, cols: int) -> Matrix:
    """The matrix (N, K) whose file bytes are `raw` uint8, in records that are allocated here."""
    raw_bytes = rows * (cols // quant.block_size) * quant.block_bytes
    expect("repack", "raw", raw, (raw_bytes,), np.uint8)
    matrix = Matrix(quant, rows, cols, device.empty(matrix_bytes(quant, rows, cols), np.uint8))
    grid = -(-rows // 8) * matrix.records
    device.kernel("repack", f"repack<{quant.cuda_name}>")(grid, 64, raw, matrix.data, rows, cols)
    return matrix
