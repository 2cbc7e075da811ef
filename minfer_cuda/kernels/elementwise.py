"""What the unfused path does between matrices. See cuda/elementwise.cu."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minfer_cuda.kernels import Device, DeviceArray
from minfer_cuda.kernels.checks import expect, expect_halves
from minfer_cuda.kernels.layouts import Activations, ceil_div

_BLOCK = 256
_VALUES = 4 * _BLOCK  # of a block


def instances(types: Sequence[str] = ()) -> list[str]:
    """Every kernel of cuda/elementwise.cu."""
    return ["swiglu", "quantize", "add"]


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
