"""Biases, rotation of q and k, and the store into the KV cache. See cuda/rope.cu."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from minfer_cuda.errors import KernelError
from minfer_cuda.kernels import Device, DeviceArray
from minfer_cuda.kernels.checks import expect

CACHE_TYPES = {"float16": "__half", "float32": "float"}  # NumPy's name -> CUDA's
_BLOCK = 128


class _Shape(ctypes.Structure):
    """RopeShape of cuda/rope.cu."""

    _fields_ = [
        (name, ctypes.c_int32) for name in ("tokens", "heads", "kv_heads", "head_dim", "context")
    ]


def instances(types: Sequence[str] = ()) -> list[str]:
    """Every instance of cuda/rope.cu; weight types make no difference."""
    return [f"rope_store<{kv}>" for kv in CACHE_TYPES.values()]


def rope_store(
    device: Device,
    qkv: DeviceArray,
    bias: DeviceArray,
    table: DeviceArray,
    position: DeviceArray,
    q: DeviceArray,
    k_cache: DeviceArray,
    v_cache: DeviceArray,
) -> None:
    """Add the biases, rotate q and k, write q and store k and v, in place.

    qkv (T, (H+2G)*E) float32, projections without biases: q's heads, then k's, then v's;
    bias ((H+2G)*E) float32; table (S, E/2, 2) float32, cos and sin of every position with YaRN's
    scale folded in; position (1,) int32, where token 0 sits (tokens that would sit outside 0..S-1
    are left out: the caller has checked); q (T, H, E) float32; k_cache and v_cache (S, G, E), one
    layer, float16 or float32. Raises KernelError for any other shape or dtype.
    """
    tokens, heads, head_dim = q.shape
    context, kv_heads, _ = k_cache.shape
    width = (heads + 2 * kv_heads) * head_dim
    if head_dim % 2:
        raise KernelError(f"rope_store: head dim {head_dim} is odd, expected pairs")
    expect("rope_store", "qkv", qkv, (tokens, width), np.float32)
    expect("rope_store", "bias", bias, (width,), np.float32)
    expect("rope_store", "table", table, (context, head_dim // 2, 2), np.float32)
    expect("rope_store", "position", position, (1,), np.int32)
    expect("rope_store", "q", q, (tokens, heads, head_dim), np.float32)
    cache = (context, kv_heads, head_dim)
    expect("rope_store", "k_cache", k_cache, cache, np.float16, np.float32)
    expect("rope_store", "v_cache", v_cache, cache, k_cache.dtype)
    kernel = device.kernel("rope", f"rope_store<{CACHE_TYPES[np.dtype(k_cache.dtype).name]}>")
    shape = _Shape(tokens, heads, kv_heads, head_dim, context)
    grid = (tokens, -(-width // (2 * _BLOCK)))
    kernel(grid, _BLOCK, qkv, bias, table, position, q, k_cache, v_cache, shape)
