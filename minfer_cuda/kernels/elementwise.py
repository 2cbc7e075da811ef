"""What the unfused path does between matrices. See cuda/elementwise.cu."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from minfer_cuda.errors import KernelError
from minfer_cuda.kernels import Device, DeviceArray
from minfer_cuda.kernels.checks import expect, expect_halves
from minfer_cuda.kernels.layouts import Activations, ceil_div

_BLOCK = 256
_VALUES = 4 * _BLOCK  # of a block
_PICKED = 6  # arrays of a launch, most


def instances(types: Sequence[str] = ()) -> list[str]:
    """Every kernel of cuda/elementwise.cu."""
    return ["swiglu", "quantize", "add", "pick"]


def swiglu(device: Device, gate_up: DeviceArray, out: Activations) -> None:
    """out = silu(gate) * up. gate_up (T, 2F) float32: gate, then up, of each token."""
    tokens, width = gate_up.shape
    f = width // 2
    expect("swiglu", "gate_up", gate_up, (tokens, 2 * f), np.float32)
    if out.h is not None:
        expect_halves("swiglu", out, tokens, f)
    flat = gate_up.reshape(-1)
    grid = (ceil_div(ceil_div(f, 128) * 128, _VALUES), tokens)
    kernel = device.kernel("elementwise", "swiglu")
    kernel(grid, _BLOCK, flat, flat[f:], width, out.qs, out.ds, out.h, out.hs, out.x, f)


def quantize(device: Device, x: DeviceArray, out: Activations) -> None:
    """The q8 form of x (T, K) float32."""
    tokens, k = x.shape
    expect("quantize", "x", x, (tokens, k), np.float32)
    grid = (ceil_div(ceil_div(k, 128) * 128, _VALUES), tokens)
    device.kernel("elementwise", "quantize")(grid, _BLOCK, x, out.qs, out.ds, k)


def add(device: Device, a: DeviceArray, b: DeviceArray, out: DeviceArray) -> None:
    """out = a + b, float32, sizes a multiple of four."""
    expect("add", "b", b, tuple(a.shape), np.float32)
    expect("add", "out", out, tuple(a.shape), np.float32)
    device.kernel("elementwise", "add")(ceil_div(a.size, _VALUES), _BLOCK, a, b, out, int(a.size))


class _Picked(ctypes.Structure):
    """Picked of cuda/elementwise.cu."""

    _fields_ = [
        ("source", ctypes.c_void_p * _PICKED),
        ("to", ctypes.c_void_p * _PICKED),
        ("words", ctypes.c_int32 * _PICKED),
    ]


def pick(
    device: Device, row: DeviceArray, pairs: Sequence[tuple[DeviceArray, DeviceArray]]
) -> None:
    """to[0] = source[row[0]] of each pair (source, to). row (1,) int32, below T: the caller has
    checked; source (T, ...) and to (1, ...) of one dtype, rows of whole four bytes."""
    expect("pick", "row", row, (1,), np.int32)
    if not 1 <= len(pairs) <= _PICKED:
        raise KernelError(f"pick: {len(pairs)} arrays, expected 1 to {_PICKED}")
    words = []
    for source, to in pairs:
        expect("pick", "to", to, (1, *source.shape[1:]), source.dtype)
        if to.nbytes % 4:
            raise KernelError(f"pick: a row of {to.nbytes} bytes, expected a multiple of 4")
        words.append(to.nbytes // 4)
    unused = (0,) * (_PICKED - len(pairs))
    picked = _Picked(
        (*(source.data.ptr for source, _ in pairs), *unused),
        (*(to.data.ptr for _, to in pairs), *unused),
        (*words, *unused),
    )
    device.kernel("elementwise", "pick")(len(pairs), _BLOCK, picked, row)
