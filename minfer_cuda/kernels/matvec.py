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

_PARTS = 120  # most of a strip; a block's 16 warps share them
_SHARED_BYTES = 100 * 1024  # of a block: two fit an SM of 227 KiB
_NORMED_BYTES = 256 * 1024  # of weights, where a block norms its row first: worth its while
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
    """Records of a part of a strip: the smallest divisor of the strip's that leaves at most _PARTS
    parts. Depends on the type and K alone, and with it the order of the sum."""
    return next(
        n for n in range(1, w.records + 1) if w.records % n == 0 and w.records // n <= _PARTS
    )


def _sum_bytes(w: Matrix) -> int:
    """Partial sums of one strip."""
    return 32 * (w.records // part_records(w))


def _shared(kernel: str, strips: int, w: Matrix, x: Row) -> int:
    """Sums of `strips`; for a row to be normed, that or the norm's weights before them, and the q8
    row."""
    wanted = strips * _sum_bytes(w)
    if isinstance(x, Unnormed):
        wanted = max(wanted, 4 * w.cols) + padded(w.cols) // 32 * (32 + 4 + 8)
    if wanted > _SHARED_BYTES:
        raise KernelError(f"{kernel}: K = {w.cols} needs {wanted} bytes of shared memory a block")
    return wanted


def _strips(w: Matrix, kind: str, sm_count: int) -> int:
    """Strips of a block of matvec, so that two blocks an SM hold all of them at once, or, where
    each norms its row, enough to be worth a block; no more than its sums have room for."""
    strips = ceil_div(w.rows, 8)
    each = ceil_div(strips, 2 * sm_count)
    if kind == "Normed":
        each = min(each, max(1, _NORMED_BYTES * strips // w.data.nbytes))
    return min(each, _SHARED_BYTES // 2 // _sum_bytes(w))


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
        normed = (None, None, None, x.x.data.ptr, x.weight.data.ptr, x.eps)
        return _Input(*normed, w.cols, part_records(w)), "Normed"
    if x.qs is None or x.ds is None:
        raise KernelError(f"{kernel}: the input has no q8 form")
    expect(kernel, "qs", x.qs, (1, padded(w.cols)), np.int8)
    expect(kernel, "ds", x.ds, (1, padded(w.cols) // 32), np.uint64)
    q8 = (x.qs.data.ptr, x.ds.data.ptr, pointer(x.scale), None, None, 0.0)
    return _Input(*q8, w.cols, part_records(w)), "Quantised"


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
    """y = w x (+ bias) (+ residual). x one row of K, q8 or not normed yet; y and residual (N,)
    float32, may be the same array; bias (N,)."""
    row, kind = _input("matvec", x, w)
    for name, array in (("y", y), ("bias", bias), ("residual", residual)):
        if array is not None:
            expect("matvec", name, array, (w.rows,), np.float32)
    each = _strips(w, kind, device.sm_count)
    out = _Output(pointer(bias), pointer(residual), pointer(y), w.rows)
    kernel = device.kernel("matvec", f"matvec<{w.quant.cuda_name}, {kind}>")
    shared = _shared("matvec", each, w, x)
    kernel(ceil_div(w.rows, 8 * each), BLOCK, w.data, row, out, each, shared=shared)


def matvec_gate_up(device: Device, gate: Matrix, up: Matrix, x: Row, out: Activations) -> None:
    """out = silu(gate x) * (up x), one row of F. gate and up (F, D), of one type."""
    row, kind = _input("matvec_gate_up", x, gate)
    if (gate.quant, gate.rows, gate.cols) != (up.quant, up.rows, up.cols):
        raise KernelError(
            f"matvec_gate_up: gate is {gate.quant.name} {gate.rows}x{gate.cols}, "
            f"up {up.quant.name} {up.rows}x{up.cols}, expected the same"
        )
    kernel = device.kernel("matvec", f"matvec_gate_up<{gate.quant.cuda_name}, {kind}>")
    arguments = (gate.data, up.data, row, out.qs, out.ds, out.x, gate.rows)
    shared = _shared("matvec_gate_up", 8, gate, x)
    kernel(padded(gate.rows) // 32, BLOCK, *arguments, shared=shared)


class _QkvArguments(ctypes.Structure):
    """QkvArguments of cuda/matvec.cu."""

    _fields_ = [
        ("w", ctypes.c_void_p * 3),
        ("bias", ctypes.c_void_p * 3),
        ("input", _Input),
        *[(name, ctypes.c_void_p) for name in ("rope", "position", "q", "k_cache", "v_cache")],
        *[
            (name, ctypes.c_int32)
            for name in ("heads", "kv_heads", "head_dim", "context", "strips")
        ],
        ("part_records", ctypes.c_int32 * 3),
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
    units = (heads + 2 * kv_heads) * head_dim // 16  # strips with their partners
    strips = next(n for n in (1, 2, 4) if units <= 2 * n * device.sm_count or n == 4)
    arguments = _QkvArguments(
        tuple(w.data.data.ptr for w in weights),
        tuple(bias.data.ptr for bias in biases),
        row,
        *(array.data.ptr for array in (table, position, q, k_cache, v_cache)),
        *(heads, kv_heads, head_dim, context, strips),
        tuple(part_records(w) for w in weights),
    )
    shared = max(_shared("matvec_qkv", 2 * strips, w, x) for w in weights)
    names = ", ".join(str(w.quant.cuda_name) for w in weights)
    cache = CACHE_TYPES[np.dtype(k_cache.dtype).name]
    kernel = device.kernel("matvec", f"matvec_qkv<{names}, {cache}, {kind}>")
    kernel(units // strips, BLOCK, arguments, shared=shared)
