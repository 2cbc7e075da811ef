"""One row of activations times quantised matrices: decode's linear layers. See cuda/matvec.cu."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from minfer_cuda.errors import KernelError
from minfer_cuda.kernels import Device, DeviceArray
from minfer_cuda.kernels.checks import expect, pointer
from minfer_cuda.kernels.layouts import Activations, Matrix, Unnormed, ceil_div, padded
from minfer_cuda.kernels.norm import BLOCK
from minfer_cuda.kernels.rope import CACHE_TYPES
from minfer_cuda.quants import by_name

_MOST_PARTS = 20  # of a strip along K: two for each of a block's ten warps
_BLOCK_BYTES = 96 * 1024  # of weights that a block streams
_SHARED_BYTES = 100 * 1024  # of a block: two fit an SM of 227 KiB
_INPUTS = ("Quantised", "Normed")

Row = Activations | Unnormed


def instances(types: Sequence[str]) -> list[str]:
    """matvec and matvec_gate_up for each type, matvec_qkv for one type and for the mixes that
    files have: q and k of one type, v of one with more bits; each for both kinds of input that a
    model gives it."""
    quantised = [name for name in types if by_name(name).block_size > 1]
    names = [f"matvec<{name}, {row}>" for name in quantised for row in _INPUTS]
    names += [f"matvec_gate_up<{name}, Normed>" for name in quantised]
    mixes = [(name, name) for name in quantised]
    for low, high in (("Q4_K", "Q6_K"), ("Q5_K", "Q6_K"), ("Q5_0", "Q8_0"), ("Q5_1", "Q8_0")):
        if low in quantised and high in quantised:
            mixes.append((low, high))
    return names + [f"matvec_qkv<{q}, {q}, {v}, __half, Normed>" for q, v in mixes]


def part_records(w: Matrix) -> int:
    """Records of a part of a strip. Depends on the type and K alone, and with it the order of the
    sum."""
    return ceil_div(w.records, _MOST_PARTS)


def _sum_bytes(w: Matrix) -> int:
    """Partial sums of one strip."""
    return 32 * ceil_div(w.records, part_records(w))


def _shared(strips: int, w: Matrix, x: Row) -> int:
    """Sums of `strips`; for a row to be normed, that or the norm's weights before them, and the q8
    row."""
    if isinstance(x, Activations):
        return strips * _sum_bytes(w)
    return max(strips * _sum_bytes(w), 4 * w.cols) + padded(w.cols) // 32 * (32 + 8)


def _blocks(units: int, strips: int, w: Matrix, x: Row, sm_count: int, most: int) -> int:
    """Blocks for `units` of `strips` strips each: one a unit while two blocks an SM hold them all,
    else about _BLOCK_BYTES each, so that the card's scheduler balances them. `most`: units that a
    block may have; its shared memory bounds them too."""
    room = (_SHARED_BYTES - _shared(0, w, x)) // (strips * _sum_bytes(w))
    if room < 1:
        raise KernelError(f"matvec: K = {w.cols} needs more than {_SHARED_BYTES} bytes a block")
    unit_bytes = strips * w.data.nbytes // ceil_div(w.rows, 8)
    each = 1 if units <= 2 * sm_count else max(1, _BLOCK_BYTES // unit_bytes)
    return ceil_div(units, min(each, room, most))


class _Input(ctypes.Structure):
    """Input of cuda/matvec.cu."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("qs", "ds", "scale", "x", "weight")],
        ("eps", ctypes.c_float),
        ("k", ctypes.c_int32),
        ("part_records", ctypes.c_int32),
    ]


def _input(kernel: str, x: Row, w: Matrix) -> tuple[_Input, str]:
    """The kernel's input and what the kernel calls its kind."""
    if isinstance(x, Unnormed):
        expect(kernel, "x", x.x, (1, w.cols), np.float32)
        expect(kernel, "weight", x.weight, (w.cols,), np.float32)
        rows = (None, None, None, x.x.data.ptr, x.weight.data.ptr, x.eps)
        return _Input(*rows, w.cols, part_records(w)), "Normed"
    if x.qs is None or x.ds is None:
        raise KernelError(f"{kernel}: the input has no q8 form")
    expect(kernel, "qs", x.qs, (1, padded(w.cols)), np.int8)
    expect(kernel, "ds", x.ds, (1, padded(w.cols) // 32), np.uint64)
    rows = (x.qs.data.ptr, x.ds.data.ptr, pointer(x.scale), None, None, 0.0)
    return _Input(*rows, w.cols, part_records(w)), "Quantised"


class _Output(ctypes.Structure):
    """Output of cuda/matvec.cu."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("bias", "residual", "y")],
        ("n", ctypes.c_int32),
    ]


def matvec(
    device: Device,
    w: Matrix,
    x: Row,
    y: DeviceArray,
    *,
    bias: DeviceArray | None = None,
    residual: DeviceArray | None = None,
) -> None:
    """y = w x (+ bias) (+ residual). x one row of K, q8 or not normed yet; y, residual (N,) float32,
    may be the same array; bias (N,)."""
    row, kind = _input("matvec", x, w)
    for name, array in (("y", y), ("bias", bias), ("residual", residual)):
        if array is not None:
            expect("matvec", name, array, (w.rows,), np.float32)
    strips = ceil_div(w.rows, 8)
    blocks = _blocks(strips, 1, w, x, device.sm_count, strips)
    out = _Output(pointer(bias), pointer(residual), pointer(y), w.rows)
    kernel = device.kernel("matvec", f"matvec<{w.quant.cuda_name}, {kind}>")
    kernel(blocks, BLOCK, w.data, row, out, shared=_shared(ceil_div(strips, blocks), w, x))


def matvec_gate_up(device: Device, gate: Matrix, up: Matrix, x: Row, out: Activations) -> None:
    """out = silu(gate x) * (up x), one row of F. gate and up (F, D), of one type."""
    row, kind = _input("matvec_gate_up", x, gate)
    if (gate.quant, gate.rows, gate.cols) != (up.quant, up.rows, up.cols):
        raise KernelError(
            f"matvec_gate_up: gate is {gate.quant.name} {gate.rows}x{gate.cols}, "
            f"up {up.quant.name} {up.rows}x{up.cols}, expected the same"
        )
    units = padded(gate.rows) // 32
    blocks = _blocks(units, 8, gate, x, device.sm_count, units)
    kernel = device.kernel("matvec", f"matvec_gate_up<{gate.quant.cuda_name}, {kind}>")
    arguments = (gate.data, up.data, row, out.qs, out.ds, out.x, gate.rows)
    kernel(blocks, BLOCK, *arguments, shared=_shared(ceil_div(units, blocks) * 8, gate, x))


class _QkvArguments(ctypes.Structure):
    """QkvArguments of cuda/matvec.cu."""

    _fields_ = [
        ("w", ctypes.c_void_p * 3),
        ("bias", ctypes.c_void_p * 3),
        ("input", _Input),
        *[(name, ctypes.c_void_p) for name in ("rope", "position", "q", "k_cache", "v_cache")],
        *[(name, ctypes.c_int32) for name in ("heads", "kv_heads", "head_dim", "context")],
        ("part_records", ctypes.c_int32 * 3),
        ("blocks", ctypes.c_int32 * 3),
    ]


def matvec_qkv(
    device: Device,
    weights: tuple[Matrix, Matrix, Matrix],
    biases: tuple[DeviceArray, DeviceArray, DeviceArray],
    x: Row,
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
        if (w.rows, w.cols) != (n_heads * head_dim, weights[0].cols):
            raise KernelError(f"matvec_qkv: {w.rows} rows, expected {n_heads} x {head_dim}")
    expect("matvec_qkv", "table", table, (context, head_dim // 2, 2), np.float32)
    expect("matvec_qkv", "position", position, (1,), np.int32)
    expect("matvec_qkv", "q", q, (1, heads, head_dim), np.float32)
    expect("matvec_qkv", "v_cache", v_cache, tuple(k_cache.shape), k_cache.dtype)
    row, kind = _input("matvec_qkv", x, weights[0])
    units = [w.rows // 16 for w in weights]
    share = device.sm_count // 3  # of the card, as the three products are one launch
    blocks = [
        _blocks(n, 2, w, x, share, BLOCK // 8) for n, w in zip(units, weights, strict=True)
    ]
    arguments = _QkvArguments(
        tuple(w.data.data.ptr for w in weights),
        tuple(bias.data.ptr for bias in biases),
        row,
        *(array.data.ptr for array in (table, position, q, k_cache, v_cache)),
        *(heads, kv_heads, head_dim, context),
        tuple(part_records(w) for w in weights),
        tuple(blocks),
    )
    shared = max(
        _shared(ceil_div(n, count) * 2, w, x)
        for n, count, w in zip(units, blocks, weights, strict=True)
    )
    names = ", ".join(str(w.quant.cuda_name) for w in weights)
    cache = CACHE_TYPES[np.dtype(k_cache.dtype).name]
    kernel = device.kernel("matvec", f"matvec_qkv<{names}, {cache}, {kind}>")
    kernel(sum(blocks), BLOCK, arguments, shared=shared)
