"""Causal attention over the KV cache, prefill and decode. See cuda/attention.cu."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minfer_cuda.errors import KernelError
from minfer_cuda.kernels import Device, DeviceArray
from minfer_cuda.kernels.checks import expect, expect_room
from minfer_cuda.kernels.rope import CACHE_TYPES

HEAD_DIMS = (64, 128)
MAX_SPLITS = 128  # of a prefill: kMaxSplits of the kernel
DECODE_SPLITS = 16  # kSplits: blocks of a cluster, where there are clusters
PREFILL_ROWS, DECODE_ROWS = 64, 8  # of a row tile
_DECODE_MOST = 32  # rows of a kv head up to which tiles of 8 are taken
_PREFILL_BLOCKS = 2  # an SM, aimed at; a block streams tiles of 64 keys through two stages
_PREFILL_KEYS = 256  # that a split takes at least
_DECODE_KEYS = 128  # that a split takes at least: a tile of 16 for each of 8 warps
_ALONE_KEYS = 256  # up to so many, two rounds of 8 warps cost less than adding up splits
_CLUSTER_KEYS = 16  # both in a cluster, whose splits cost nothing to add up
_LARGE_RING = (8, 2)  # warps of a decode's block, tiles of each under way: one block an SM
_SMALL_RING = (8, 1)  # two blocks an SM
_LARGE_CLUSTERS = 7  # of blocks with the large ring, that an H200 holds at once, of 16 SMs each


class _Shape(ctypes.Structure):
    """AttentionShape of cuda/attention.cu."""

    _fields_ = [
        (name, ctypes.c_int32)
        for name in ("tokens", "heads", "kv_heads", "context", "alone_keys", "min_keys")
    ]


@dataclass(frozen=True)
class Plan:
    """How one call is cut up; a pure function of its sizes."""

    kv_heads: int
    head_dim: int
    row_tiles: int
    rows: int  # of a tile: 8 (attention_decode) or 64 (attention)
    splits: int  # most runs of keys; how many have work follows from the position
    alone_keys: int  # up to so many keys one split takes all
    min_keys: int  # else each takes at least so many

    @property
    def grid(self) -> tuple[int, int, int]:
        return (self.kv_heads, self.row_tiles, self.splits)

    def shared_bytes(self, warps: int, depth: int) -> int:
        """Keys and values under way in float16; in decode also each warp's 16 x 8 weights, 8 rows
        of q and what 16 splits say of half a row: kSharedBytes of the kernel."""
        if self.rows == PREFILL_ROWS:
            return 2 * 2 * 64 * self.head_dim * 2
        rows = warps * depth * 2 * 16 + DECODE_ROWS
        box = DECODE_SPLITS * (self.head_dim // 2 + 2) * 4
        return rows * self.head_dim * 2 + warps * 16 * DECODE_ROWS * 2 + box

    @property
    def partials(self) -> int:
        """float32 elements of scratch: sums, and {m, l}, of every row of every split; in decode of
        every half row, with room for all splits."""
        tiles = self.kv_heads * self.row_tiles if self.splits > 1 else 0
        if self.rows == DECODE_ROWS:
            return tiles * 2 * DECODE_ROWS * DECODE_SPLITS * (self.head_dim // 2 + 2)
        return tiles * self.splits * self.rows * (self.head_dim + 2)

    @property
    def arrivals(self) -> int:
        """int32 counters of scratch, zero before the first call; each call leaves them zero."""
        return self.kv_heads * self.row_tiles if self.splits > 1 else 0


@functools.cache
def plan(
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    context: int,
    sm_count: int,
    cluster_limit: int = 1,
) -> Plan:
    """The cut for T tokens on a card: keys are split where row tiles alone do not fill the SMs.

    T=1: 1 row tile of 8, 16 splits. T=2,048 on 132 SMs: 7B (H 28, G 4, E 128) 224 of 64, 1.
    """
    rows_in_all = tokens * (heads // kv_heads)
    decode = rows_in_all <= _DECODE_MOST
    rows = DECODE_ROWS if decode else PREFILL_ROWS
    alone = _ALONE_KEYS if decode else _PREFILL_KEYS
    least = _DECODE_KEYS if decode else _PREFILL_KEYS
    row_tiles = -(-rows_in_all // rows)
    splits = min(
        sm_count * _PREFILL_BLOCKS // (row_tiles * kv_heads), -(-context // least), MAX_SPLITS
    )
    splits = DECODE_SPLITS if decode else max(1, splits)
    splits = splits if context > alone else 1
    if decode and DECODE_SPLITS <= cluster_limit:
        least = alone = _CLUSTER_KEYS
    return Plan(kv_heads, head_dim, row_tiles, rows, splits, alone, least)


def scratch(
    tokens: int, heads: int, kv_heads: int, head_dim: int, context: int, sm_count: int
) -> tuple[int, int]:
    """Elements of `partials` and `arrivals` that suffice for every call of 1..`tokens` tokens."""
    sizes = (heads, kv_heads, head_dim, context, sm_count)
    plans = [plan(count, *sizes) for count in range(1, tokens + 1)]
    return max(p.partials for p in plans), max(p.arrivals for p in plans)


def instances(types: Sequence[str] = ()) -> list[str]:
    """Every instance of cuda/attention.cu; weight types make no difference."""
    prefill = [f"attention<{kv}, {e}>" for kv in CACHE_TYPES.values() for e in HEAD_DIMS]
    decode = [
        f"attention_decode<{kv}, {e}, {warps}, {depth}>"
        for kv in CACHE_TYPES.values()
        for e in HEAD_DIMS
        for warps, depth in sorted(
            {_least_ring(e), _SMALL_RING, _LARGE_RING} if kv == "__half" else {_least_ring(e)}
        )
    ]
    return prefill + decode


def _least_ring(head_dim: int) -> tuple[int, int]:
    """Warps of a decode's block, and tiles each has under way, that every card has room for."""
    return (4, 2 if head_dim == 64 else 1)


def _ring(device: Device, how: Plan, kv: str) -> tuple[int, int]:
    """8 warps, with two tiles each under way, where a decode's keys can be on their way before the
    wait and there is room for them; with one in clusters so many that they would wait for one
    another if two blocks did not share an SM."""
    least = _least_ring(how.head_dim)
    if how.rows == PREFILL_ROWS or kv != "__half":
        return least
    if _cluster(device, how) > 1 and how.row_tiles * how.kv_heads > _LARGE_CLUSTERS:
        return _SMALL_RING
    return _LARGE_RING if how.shared_bytes(*_LARGE_RING) <= device.shared_limit else least


def _cluster(device: Device, how: Plan) -> int:
    """Blocks of a cluster: all splits of a decode, where each block merges one slice; 1: none."""
    whole = how.rows == DECODE_ROWS and how.splits == DECODE_SPLITS
    return how.splits if whole and how.splits <= device.cluster_limit else 1


def attention(
    device: Device,
    how: Plan,
    q: DeviceArray,
    k_cache: DeviceArray,
    v_cache: DeviceArray,
    position: DeviceArray,
    *,
    out: DeviceArray | None = None,
    qs: DeviceArray | None = None,
    ds: DeviceArray | None = None,
    h: DeviceArray | None = None,
    hs: DeviceArray | None = None,
    partials: DeviceArray | None = None,
    arrivals: DeviceArray | None = None,
) -> None:
    """softmax(q k^T / sqrt(E)) v of every token over the keys at or before it, written in place.

    `how` from plan(); q (T, H, E) float32, rotated; k_cache and v_cache (S, G, E), one layer,
    float16 or float32, holding the keys of these tokens already; position (1,) int32, where token
    0 sits. Results, at least one of: out (T, H*E) float32; the same as q8 activations (layout 1),
    qs (T, Kp) int8 and ds (T, Kp/32) of 8 bytes, Kp = H*E rounded up to 128; as f16 activations, h
    (T, Kp) float16 and hs (T,) float32. Scratch where how.splits > 1: `partials` float32 and
    `arrivals` int32, of how.partials and how.arrivals elements. Raises KernelError for any other
    shape or dtype.
    """
    tokens, heads, head_dim = q.shape
    context, kv_heads, _ = k_cache.shape
    _check_plan(how, tokens, heads, kv_heads, head_dim)
    expect("attention", "q", q, (tokens, heads, head_dim), np.float32)
    cache = (context, kv_heads, head_dim)
    expect("attention", "k_cache", k_cache, cache, np.float16, np.float32)
    expect("attention", "v_cache", v_cache, cache, k_cache.dtype)
    expect("attention", "position", position, (1,), np.int32)
    _check_outputs(tokens, heads * head_dim, out, qs, ds, h, hs)
    if how.splits > 1:
        expect_room("attention", "partials", partials, how.partials, np.float32)
        expect_room("attention", "arrivals", arrivals, how.arrivals, np.int32)
    kv = CACHE_TYPES[np.dtype(k_cache.dtype).name]
    warps, depth = _ring(device, how, kv)
    name = f"attention<{kv}, {head_dim}>"
    if how.rows == DECODE_ROWS:
        name = f"attention_decode<{kv}, {head_dim}, {warps}, {depth}>"
    kernel = device.kernel("attention", name)
    shape = _Shape(tokens, heads, kv_heads, context, how.alone_keys, how.min_keys)
    arguments = (q, k_cache, v_cache, position, out, qs, ds, h, hs, partials, arrivals, shape)
    shared = how.shared_bytes(warps, depth)
    kernel(how.grid, 32 * warps, *arguments, shared=shared, cluster=_cluster(device, how))


def _check_plan(how: Plan, tokens: int, heads: int, kv_heads: int, head_dim: int) -> None:
    if head_dim not in HEAD_DIMS or heads % kv_heads:
        raise KernelError(
            f"attention: {heads} heads of {head_dim} over {kv_heads} kv heads, "
            f"expected head dim {HEAD_DIMS} and whole groups"
        )
    rows = tokens * (heads // kv_heads)
    fits = how.rows in (DECODE_ROWS, PREFILL_ROWS) and how.row_tiles == -(-rows // how.rows)
    fits = fits and (how.kv_heads, how.head_dim) == (kv_heads, head_dim)
    most = DECODE_SPLITS if how.rows == DECODE_ROWS else MAX_SPLITS
    if not (fits and 1 <= how.splits <= most and how.min_keys >= 1):
        raise KernelError(
            f"attention: {how} does not fit {tokens} tokens, {heads} heads of {head_dim}, "
            f"{kv_heads} kv heads"
        )


def _check_outputs(
    tokens: int,
    width: int,
    out: DeviceArray | None,
    qs: DeviceArray | None,
    ds: DeviceArray | None,
    h: DeviceArray | None,
    hs: DeviceArray | None,
) -> None:
    halves = (qs is None) != (ds is None) or (h is None) != (hs is None)
    if halves or (out is None and qs is None and h is None):
        raise KernelError("attention: expected out, or qs and ds, or h and hs, or several")
    if out is not None:
        expect("attention", "out", out, (tokens, width), np.float32)
    padded = -(-width // 128) * 128
    if h is not None and hs is not None:
        expect("attention", "h", h, (tokens, padded), np.float16)
        expect("attention", "hs", hs, (tokens,), np.float32)
    if qs is not None and ds is not None:
        expect("attention", "qs", qs, (tokens, padded), np.int8)
        if ds.nbytes != tokens * padded // 4:
            raise KernelError(
                f"attention: ds has {ds.nbytes} bytes, expected {tokens} x {padded // 32} x 8"
            )
