"""RMSNorm and what follows it. See cuda/norm.cu."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minfer_cuda.kernels import Device, DeviceArray
from minfer_cuda.kernels.checks import expect, expect_halves
from minfer_cuda.kernels.layouts import Activations

BLOCK = 512  # kNormThreads


def instances(types: Sequence[str] = ()) -> list[str]:
    """Every kernel of cuda/norm.cu."""
    return ["rms_norm"]


def rms_norm(
    device: Device, x: DeviceArray, weight: DeviceArray, out: Activations, eps: float
) -> None:
    """out = x * rsqrt(mean(x^2) + eps) * weight. x (T, K) float32, weight (K,) float32; a q8 form
    needs `out.scale`, which receives the rows' factors, an f16 form has them in `out.hs`."""
    tokens, k = x.shape
    expect("rms_norm", "x", x, (tokens, k), np.float32)
    expect("rms_norm", "weight", weight, (k,), np.float32)
    if out.qs is not None:
        expect("rms_norm", "scale", out.scale, (tokens,), np.float32)
    if out.h is not None:
        expect_halves("rms_norm", out, tokens, k)
    kernel = device.kernel("norm", "rms_norm")
    forms = (out.qs, out.ds, out.scale, out.h, out.hs, out.x)
    kernel(tokens, BLOCK, x, weight, *forms, k, eps)
