"""Products with float weights. See cuda/matmul_float.cu."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from minfer_cuda.kernels import Device, DeviceArray
from minfer_cuda.kernels.checks import expect, pointer
from minfer_cuda.kernels.layouts import Activations, Matrix, ceil_div
from minfer_cuda.kernels.matmul import check_output
from minfer_cuda.quants import by_name


def instances(types: Sequence[str]) -> list[str]:
    """Every instance of cuda/matmul_float.cu for these types."""
    return [f"matmul_float<{name}>" for name in types if by_name(name).block_size == 1]


class _Arguments(ctypes.Structure):
    """FloatArguments of cuda/matmul_float.cu."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("w", "x", "bias", "residual", "y")],
        *[(name, ctypes.c_int32) for name in ("n", "k", "tokens", "stride")],
    ]


def matmul_float(
    device: Device,
    w: Matrix,
    x: Activations,
    y: DeviceArray,
    *,
    column: int = 0,
    bias: DeviceArray | None = None,
    residual: DeviceArray | None = None,
) -> None:
    """y[:, column : column + N] = x w^T (+ bias) (+ residual) with float32 activations, in place.

    x float32 of T rows of K; y, residual (T, stride) float32, may be the same array; bias (N,).
    """
    tokens = x.tokens
    expect("matmul_float", "x", x.x, (tokens, w.cols), np.float32)
    stride = check_output("matmul_float", y, residual, bias, tokens, w.rows, column)
    arguments = _Arguments(
        *(w.data.data.ptr, pointer(x.x), pointer(bias)),
        *(None if residual is None else residual.data.ptr + 4 * column, y.data.ptr + 4 * column),
        *(w.rows, w.cols, tokens, stride),
    )
    kernel = device.kernel("matmul_float", f"matmul_float<{w.quant.cuda_name}>")
    kernel((ceil_div(w.rows, 8), ceil_div(tokens, 4)), 256, arguments)
