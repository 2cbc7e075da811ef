"""One row of activations times quantised matrices: decode's linear layers. See cuda/matvec.cu."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from minfer_cuda.errors import KernelError
from minfer_cuda.kernels import Device, DeviceArray
from minfer_cuda.kernels.checks import expect
from minfer_cuda.kernels.layouts import Activations, Matrix, ceil_div, padded
from minfer_cuda.kernels.rope import CACHE_TYPES
from minfer_cuda.quants import by_name

_WARPS = 12  # kWarps of the kernel
_BLOCK = 32 * _WARPS
_SHARED_BYTES = 96 * 1024  # of a block: two fit an SM of 227 KiB


def instances(types: Sequence[str]) -> list[str]:
    """matvec and matvec_gate_up for each type, matvec_qkv for one type and for the mixes that
    files have: q and k of one type, v of one with more bits."""
    quantised = [name for name in types if by_name(name).block_size > 1]
    names = [f"{kernel}<{name}>" for kernel in ("matvec", "matvec_gate_up") for name in quantised]
    mixes = [(name, name) for name in quantised]
    for low, high in (("Q4_K", "Q6_K"), ("Q5_K", "Q6_K"), ("Q5_0", "Q8_0"), ("Q5_1", "Q8_0")):
        if low in quantised and high in quantised:
            mixes.append((low, high))
    return names + [f"matvec_qkv<{q}, {q}, {v}, __half>" for q, v in mixes]


def segments(w: Matrix) -> int:
    """Warps that share a strip: each keeps three records or more (two of a K type). Depends on the
    type and K alone, and with it the order of the sum."""
    least = 2 if w.quant.block_size == 256 else 3
    return max(s for s in (1, 2, 3, 4, 6, 12) if s == 1 or w.records >= s * least)


def _blocks(units: int, strips: int, w: Matrix, sm_count: int) -> int:
    """Blocks for `units` of `strips` strips each: one a unit or one an SM, more where the partial
    sums of a block would not fit its shared memory."""
    room = _SHARED_BYTES - _row_bytes(w)
    most = room // (strips * segments(w) * 32)
    if most < 1:
        raise KernelError(f"matvec: K = {w.cols} needs {_row_bytes(w)} bytes of shared memory")
    return max(min(units, sm_count), ceil_div(units, most))


def _row_bytes(w: Matrix) -> int:
    """Shared memory of a q8 row: values, scales, and the sums of types with minima."""
    return padded(w.cols) // 32 * (32 + 4 + 8)


def _shared(units: int, blocks: int, strips: int, w: Matrix) -> int:
    return ceil_div(units, blocks) * strips * segments(w) * 32 + _row_bytes(w)


def _expect_row(kernel: str, x: Activations, w: Matrix) -> None:
    expect(kernel, "qs", x.qs, (1, padded(w.cols)), np.int8)
    expect(kernel, "ds", x.ds, (1, padded(w.cols) // 32), np.uint64)


def matvec(
    device: Device,
    w: Matrix,
    x: Activations,
    y: DeviceArray,
    *,
    bias: DeviceArray | None = None,
    residual: DeviceArray | None = None,
) -> None:
    """y = w x (+ bias) (+ residual). x one q8 row of K; y, residual (N,) float32, may be the same
    array; bias (N,)."""
    _expect_row("matvec", x, w)
    for name, array in (("y", y), ("bias", bias), ("residual", residual)):
        if array is not None:
            expect("matvec", name, array, (w.rows,), np.float32)
    strips = ceil_div(w.rows, 8)
    blocks = _blocks(strips, 1, w, device.sm_count)
    kernel = device.kernel("matvec", f"matvec<{w.quant.cuda_name}>")
    arguments = (w.data, x.qs, x.ds, bias, residual, y, w.rows, w.cols, segments(w))
    kernel(blocks, _BLOCK, *arguments, shared=_shared(strips, blocks, 1, w))


def matvec_gate_up(
    device: Device, gate: Matrix, up: Matrix, x: Activations, out: Activations
) -> None:
    """out = silu(gate x) * (up x), one row of F. gate and up (F, D), of one type."""
    _expect_row("matvec_gate_up", x, gate)
    if (gate.quant, gate.rows, gate.cols) != (up.quant, up.rows, up.cols):
        raise KernelError(
            f"matvec_gate_up: gate is {gate.quant.name} {gate.rows}x{gate.cols}, "
            f"up {up.quant.name} {up.rows}x{up.cols}, expected the same"
        )
    units = padded(gate.rows) // 32
    blocks = _blocks(units, 8, gate, device.sm_count)
    kernel = device.kernel("matvec", f"matvec_gate_up<{gate.quant.cuda_name}>")
    arguments = (gate.data, up.data, x.qs, x.ds, out.qs, out.ds, out.x)
    sizes = (gate.rows, gate.cols, segments(gate))
    kernel(blocks, _BLOCK, *arguments, *sizes, shared=_shared(units, blocks, 8, gate))


class _QkvArguments(ctypes.Structure):
    """QkvArguments of cuda/matvec.cu."""

    _fields_ = [
        ("w", ctypes.c_void_p * 3),
        ("bias", ctypes.c_void_p * 3),
        *[
            (name, ctypes.c_void_p)
            for name in ("qs", "ds", "rope", "position", "q", "k_cache", "v_cache")
        ],
        *[(name, ctypes.c_int32) for name in ("k", "heads", "kv_heads", "head_dim", "context")],
        ("segments", ctypes.c_int32 * 3),
        ("blocks", ctypes.c_int32 * 3),
    ]


def matvec_qkv(
    device: Device,
    weights: tuple[Matrix, Matrix, Matrix],
    biases: tuple[DeviceArray, DeviceArray, DeviceArray],
    x: Activations,
    table: DeviceArray,
    position: DeviceArray,
    q: DeviceArray,
    k_cache: DeviceArray,
    v_cache: DeviceArray,
) -> None:
    """q, k, v of one row: projected, biased, rotated; k and v stored at `position` of the cache.

    weights q (H*E, D), k and v (G*E, D), types as they come; table (S, E/2, 2) float32; position
    (1,) int32; q (1, H, E) float32; caches (S, G, E). The bits of matvec, then rope_store.
    """
    _, heads, head_dim = q.shape
    context, kv_heads, _ = k_cache.shape
    for w, n_heads in zip(weights, (heads, kv_heads, kv_heads), strict=True):
        _expect_row("matvec_qkv", x, w)
        if w.rows != n_heads * head_dim:
            raise KernelError(f"matvec_qkv: {w.rows} rows, expected {n_heads} x {head_dim}")
    expect("matvec_qkv", "table", table, (context, head_dim // 2, 2), np.float32)
    expect("matvec_qkv", "position", position, (1,), np.int32)
    expect("matvec_qkv", "q", q, (1, heads, head_dim), np.float32)
    expect("matvec_qkv", "v_cache", v_cache, tuple(k_cache.shape), k_cache.dtype)
    units = [w.rows // 16 for w in weights]
    each = ceil_div(sum(units), device.sm_count)
    blocks = [
        max(ceil_div(n, each), _blocks(n, 2, w, 1)) for n, w in zip(units, weights, strict=True)
    ]
    pointers = (x.qs, x.ds, table, position, q, k_cache, v_cache)
    arguments = _QkvArguments(
        tuple(w.data.data.ptr for w in weights),
        tuple(bias.data.ptr for bias in biases),
        *(array.data.ptr for array in pointers),
        *(weights[0].cols, heads, kv_heads, head_dim, context),
        tuple(segments(w) for w in weights),
        tuple(blocks),
    )
    shared = max(
        _shared(n, count, 2, w) for n, count, w in zip(units, blocks, weights, strict=True)
    )
    names = ", ".join(str(w.quant.cuda_name) for w in weights)
    cache = CACHE_TYPES[np.dtype(k_cache.dtype).name]
    kernel = device.kernel("matvec", f"matvec_qkv<{names}, {cache}>")
    kernel(sum(blocks), _BLOCK, arguments, shared=shared)
