"""Tokens times matrices of all types but F32 on f16 tensor cores. See cuda/matmul_f16.cu,
cuda/matmul_wgmma.cu for sm_90, and cuda/matmul_few.cu for few tokens."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from minfer_cuda.errors import KernelError
from minfer_cuda.kernels import Device, DeviceArray, matmul_few
from minfer_cuda.kernels.checks import expect, expect_halves, expect_room, pointer
from minfer_cuda.kernels.layouts import Activations, Matrix, ceil_div, padded, record_cols
from minfer_cuda.kernels.matmul import check_output
from minfer_cuda.kernels.matmul_few import Product, scale_pairs
from minfer_cuda.quants import HALVES, QuantType, by_name

PARTIALS = matmul_few.PARTIALS  # most float32 elements of shared tiles' sums, too
ARRIVALS = matmul_few.ARRIVALS  # most shared tiles, too
ROWS = 128  # what a row tile of any other matrix begins at
SM90_SHARED = 227 << 10  # bytes that a block may have there
_NEVER = 1 << 30  # a row tile past all
_RESERVED = 1 << 10  # bytes of shared memory that the driver keeps of each block


@dataclass(frozen=True)
class Cost:
    """Clocks on an H200."""

    start: int  # of a launch, whatever it does,
    start_more: int  # and for each 8 tokens of a tile
    chunk: int  # of an SM for 128 values of K of a tile, where blocks have many,
    chunk_more: int  # and for each 8 tokens of it
    write_more: int = 0  # of an SM to write a tile, for each 8 tokens
    # where blocks have one tile, as those of a wide tile may: of a launch, and for each 8 tokens;
    # and of a chunk to a block where one, two, ... are on an SM, as a part of an SM's
    alone_start: int = 0
    alone_more: int = 0
    alone: tuple[float, ...] = ()


@dataclass(frozen=True)
class Tile:
    """A tile of rows by tokens, and the kernel whose blocks multiply it."""

    kernel: str  # with {} for the type and for the number of stages
    rows: int
    tokens: int  # at most
    by: int  # tokens of a tile are a multiple of it
    threads: int
    blocks: int  # that share an SM
    sums: int  # of a thread
    cost: Cost

    @property
    def stem(self) -> str:
        """The kernel's file, without its ending."""
        return self.kernel.partition("<")[0]

    @property
    def wide(self) -> bool:
        """By cuda/matmul_wgmma.cu."""
        return self.stem == "matmul_wgmma"


def _wide(rows: int, tokens: int, by: int, blocks: int, sums: int, cost: Cost) -> Tile:
    kernel = f"matmul_wgmma<{{}}, Wide<{rows}, {tokens}>, {{}}>"
    return Tile(kernel, rows, tokens, by, 2 * rows, blocks, sums, cost)


_MMA = "matmul_f16<{}, Tile<%s>, {}>"
_TWO = Cost(16400, 575, 1122, 21, 495, 12500, 670, (1.0, 1.85))
SQUARE = Tile(_MMA % "2, 2, 4, 8, 2, false", 128, 128, 128, 128, 2, 128, Cost(14000, 0, 3850, 0))
NARROW = Tile(_MMA % "4, 1, 2, 8, 3, true", 128, 64, 8, 128, 3, 64, Cost(14000, 0, 1240, 137))
WGMMA_96 = _wide(128, 96, 8, 2, 64, _TWO)
WGMMA_128 = _wide(128, 128, 8, 2, 64, _TWO)
WGMMA_160 = _wide(192, 160, 16, 1, 80, Cost(19700, 820, 1700, 49, 640, 12500, 490, (1.01,)))
WGMMA_256 = _wide(128, 256, 16, 1, 128, Cost(15400, 465, 1756, 33, 345, 10950, 250, (0.89,)))
TILES = (NARROW, SQUARE)  # of every card and type
_SHARE_CLOCKS = 25  # to add up another block's part of a tile, for each sum of a thread
_SHARED_CHUNKS = 4  # fewest of a tile that one of the blocks that share it is worth
_CLUSTER_CHUNKS = 2  # the same in a cluster
_CLUSTER_NEURONS = 550  # for each 8 tokens, where a cluster's blocks add up gates and ups
_TWO_SCALES = 1.35  # of `chunk` of a wide tile, for types with a scale every 16 values
_GPCS = 8  # of a card of sm_90, at most; the blocks of a cluster are on one
_SMALL_GPC = 2  # SMs that one of them has less: an H200 holds seven clusters of 16 SMs, not eight


@functools.cache
def tiles_of(arch: int, quant: QuantType, shared_limit: int) -> tuple[Tile, ...]:
    """Those to choose from: wgmma is sm_90's, for records. Q6_K's are so large that two blocks of
    128 tokens have no room on an SM."""
    if arch != 90 or quant.name in HALVES:
        return TILES
    fits = stages(quant, WGMMA_128, shared_limit) >= 2
    return (WGMMA_128 if fits else WGMMA_96, WGMMA_160, WGMMA_256)


def chunk_values(quant: QuantType) -> int:
    """Values of K of a stage, the unit of work. Chunk::kValues."""
    return 64 if quant.name in HALVES else 128


def stage_bytes(quant: QuantType, tile: Tile) -> int:
    """A chunk: activations, and rows or the planes and the scales of a record: Stage::kBytes. Of a
    wide tile activations alone."""
    tokens = tile.tokens * chunk_values(quant) * 2
    if tile.wide:
        return tokens
    if quant.name in HALVES:
        return tokens + tile.rows * chunk_values(quant) * 2
    chunks = record_cols(quant) // 128
    planes = 128 * (math.ceil(quant.bits_per_weight) - 1)  # 8 rows of a chunk
    strip = planes + record_bytes(quant) - chunks * planes
    return tokens + tile.rows // 8 * strip


def record_bytes(quant: QuantType) -> int:
    """Of 8 rows: layout 2."""
    return 8 * record_cols(quant) // quant.block_size * quant.block_bytes


def shared_bytes(quant: QuantType, tile: Tile, stage_count: int) -> int:
    """Of a block: stages and two tables of scale pairs; of a wide tile a ring for each warp, 16
    bytes a stage, a cursor and a word."""
    pairs = 4 * 4 * scale_pairs(quant)  # bytes of a row
    of_stages = stage_count * stage_bytes(quant, tile)
    if tile.wide:
        ring = 4 * record_bytes(quant) + 16 * pairs + 64
        return of_stages + tile.threads // 32 * ring + 16 * stage_count + 32
    return of_stages + 2 * tile.rows * pairs


def stages(quant: QuantType, tile: Tile, shared_limit: int) -> int:
    """As many as the blocks of an SM have room for, at most four; less than two: it does not fit.

    A card whose blocks may have all of an SM's memory but 1 KiB shares it among `tile.blocks`.
    """
    room = (shared_limit + _RESERVED) // tile.blocks - _RESERVED
    fitting = [n for n in (4, 3, 2) if shared_bytes(quant, tile, n) <= room]
    if not fitting and not tile.wide and shared_bytes(quant, tile, 2) <= shared_limit:
        return 2  # fewer blocks an SM
    return fitting[0] if fitting else 0


@dataclass(frozen=True)
class Plan:
    """How a product is cut up; a pure function of its sizes and the card."""

    tile: Tile
    stages: int
    grid: int
    cluster: int  # blocks that share each of `grid` tiles; 1: none
    waves: int  # of whole tiles
    token_tiles: int
    tokens_each: int  # of a tile
    chunks: int  # of K
    units: int  # chunks of the tiles that are left
    clocks: float  # that it takes about


@functools.cache
def plan(
    quant: QuantType,
    rows: int,
    cols: int,
    tokens: int,
    sm_count: int,
    shared_limit: int,
    *,
    tiles: tuple[Tile, ...],
    cluster_limit: int = 1,
    gated: bool = False,
) -> Plan:
    """The cheapest of the tiles and of the ways to share them out.

    `rows` of one matrix; a gated product has as many of the second.
    """
    chunks = ceil_div(cols, chunk_values(quant))
    ways: list[Plan] = []
    for tile in tiles:
        count = stages(quant, tile, shared_limit)
        if count < 2:
            continue
        row_tiles = ceil_div(2 * padded(rows) if gated else rows, tile.rows)
        token_tiles = ceil_div(tokens, tile.tokens)
        each = tile.by * ceil_div(tokens, tile.by * token_tiles)
        none = Plan(tile, count, 0, 1, 0, token_tiles, each, chunks, 0, 0.0)
        ways.append(_in_waves(none, row_tiles * token_tiles, quant, sm_count))
        if tile.wide:
            ways += _alone(none, row_tiles * token_tiles, quant, sm_count, cluster_limit, gated)
    if not ways:
        raise KernelError(f"matmul_f16: {quant.name} needs more than {shared_limit} bytes a block")
    return min(ways, key=lambda way: way.clocks)


def _chunk_clocks(of: Plan, quant: QuantType) -> float:
    """Of an SM for a chunk of a tile, where blocks have many."""
    cost = of.tile.cost
    unpack = cost.chunk * (_TWO_SCALES if of.tile.wide and scale_pairs(quant) == 2 else 1)
    return (unpack + cost.chunk_more * of.tokens_each / 8) * chunk_values(quant) / 128


def _in_waves(of: Plan, count: int, quant: QuantType, sm_count: int) -> Plan:
    """Whole waves of `count` tiles before those that blocks share."""
    tile, cost = of.tile, of.tile.cost
    blocks, units = sm_count * tile.blocks, count * of.chunks
    grid = min(blocks, units, PARTIALS // (2 * tile.sums * tile.threads))
    if count < grid and not (tile.wide and grid < 2 * count):  # as many blocks for each tile
        grid = count * max(1, min(grid // count, of.chunks // _SHARED_CHUNKS))
    waves = count // grid if count % grid == 0 else max(0, count // grid - 1)
    shares = 0 if count % blocks == 0 else min(blocks, units) / min(count, blocks)
    clocks = _chunk_clocks(of, quant) * max(1.0, units / sm_count)
    clocks += cost.start + cost.start_more * of.tokens_each / 8
    clocks += count / sm_count * cost.write_more * of.tokens_each / 8
    clocks += shares * tile.sums * _SHARE_CLOCKS * of.tokens_each / tile.tokens
    left = units - waves * grid * of.chunks
    return replace(of, grid=grid, waves=waves, units=left, clocks=clocks)


def _alone(
    of: Plan, count: int, quant: QuantType, sm_count: int, cluster_limit: int, gated: bool
) -> Iterator[Plan]:
    """Every block has one of `count` tiles, or a cluster of blocks has: as many as all run at
    once."""
    tile, cost = of.tile, of.tile.cost
    most = min(of.chunks // _CLUSTER_CHUNKS, cluster_limit)
    for cluster in range(1, max(1, most) + 1):
        of_sm = ceil_div(count * cluster, sm_count)
        if of_sm > tile.blocks or (
            cluster > 1 and clusters_at_once(tile, cluster, sm_count) < count
        ):
            continue
        clocks = _chunk_clocks(of, quant) * of.chunks / cluster * cost.alone[of_sm - 1]
        more = cost.alone_more + (_CLUSTER_NEURONS if gated and cluster > 1 else 0)
        clocks += cost.alone_start + more * of.tokens_each / 8
        yield replace(of, grid=count, cluster=cluster, waves=1, clocks=clocks)


def clusters_at_once(tile: Tile, cluster: int, sm_count: int) -> int:
    """How many clusters of blocks a card of sm_90 is sure to run at once."""
    sms = sm_count // _GPCS
    small = max(0, sms - _SMALL_GPC)
    return (_GPCS - 1) * (sms * tile.blocks // cluster) + small * tile.blocks // cluster


def instance(quant: QuantType, tile: Tile, stage_count: int) -> str:
    """The kernel's name."""
    return tile.kernel.format(quant.cuda_name, stage_count)


def instances(types: Sequence[str]) -> list[str]:
    """Those of cuda/matmul_f16.cu, with as many stages as sm_90 has room for."""
    quants = [by_name(name) for name in types if name != "F32"]
    products = [
        instance(quant, tile, stages(quant, tile, SM90_SHARED))
        for quant in quants
        for tile in TILES
    ]
    return [*products, *(f"peak<{q.cuda_name}>" for q in quants if has_peak(q)), "halve"]


def instances_of(device: Device, quant: QuantType) -> set[tuple[str, str]]:
    """(stem, kernel) of those that the matrices of a type may need on a device."""
    tiles = tiles_of(device.arch, quant, device.shared_limit)
    fitting = {tile: stages(quant, tile, device.shared_limit) for tile in tiles}
    kernels = {(tile.stem, instance(quant, tile, n)) for tile, n in fitting.items() if n >= 2}
    if has_peak(quant):
        kernels.add(("matmul_f16", f"peak<{quant.cuda_name}>"))
    few = {("matmul_few", matmul_few.instance(quant, tiles)) for tiles in matmul_few.TILES}
    return kernels | few


class _Tiled(ctypes.Structure):
    """F16Arguments of cuda/matmul_f16.cu."""

    _fields_ = [
        ("product", Product),
        *[
            (name, ctypes.c_int32)
            for name in ("token_tiles", "chunks", "tokens_each", "waves", "whole", "units")
        ],
    ]


def has_peak(quant: QuantType) -> bool:
    """Whether products lift a type's values by its matrix's peak: all but F16, taken as it is."""
    return quant.name != "F16"


def with_peak(device: Device, w: Matrix) -> Matrix:
    """The matrix with its largest |scale|, or of BF16 |value|, where f16 products need it."""
    return with_one_peak(device, (w,))[0]


def with_one_peak(device: Device, matrices: Sequence[Matrix]) -> tuple[Matrix, ...]:
    """The same of several of one type: the largest of all, so that one launch can take them."""
    if not has_peak(matrices[0].quant):
        return tuple(matrices)
    found = device.zeros((1,), np.float32)
    for w in matrices:
        records = w.rows * w.cols // 4 if w.is_float else ceil_div(w.rows, 8) * w.records
        kernel = device.kernel("matmul_f16", f"peak<{w.quant.cuda_name}>")
        kernel(min(ceil_div(records, 8), 4 * device.sm_count), 256, w.data, found, records)
    return tuple(replace(w, peak=found) for w in matrices)


def stack(weights: Sequence[Matrix]) -> list[tuple[Matrix, ...]]:
    """The matrices in order, those that one launch can take together: up to three neighbours of one
    type with one peak, all but the last of whole row tiles."""
    stacks: list[tuple[Matrix, ...]] = []
    for w in weights:
        last = stacks[-1] if stacks else ()
        alike = last and all((v.quant, v.cols) == (w.quant, w.cols) for v in last)
        if alike and len(last) < 3 and last[-1].peak is w.peak and last[-1].rows % ROWS == 0:
            stacks[-1] = (*last, w)
        else:
            stacks.append((w,))
    return stacks


def halve(device: Device, x: DeviceArray, out: Activations) -> None:
    """The f16 form of x (T, K) float32."""
    tokens, k = x.shape
    expect("halve", "x", x, (tokens, k), np.float32)
    expect_halves("halve", out, tokens, k)
    device.kernel("matmul_f16", "halve")(tokens, 256, x, out.h, out.hs, k)


def matmul_f16(
    device: Device,
    weights: Matrix | tuple[Matrix, ...],
    x: Activations,
    y: DeviceArray,
    *,
    column: int = 0,
    bias: DeviceArray | None = None,
    residual: DeviceArray | None = None,
    partials: DeviceArray,
    arrivals: DeviceArray,
    tile: Tile | None = None,
) -> None:
    """y[:, column : column + N] = x w^T (+ bias) (+ residual), in place.

    w with its peak, or matrices above each other as `stack` gives them; x f16 of T rows of K; y,
    residual (T, stride) float32, may be the same array; bias (N,). Scratch for shared tiles:
    `partials` float32 of PARTIALS elements, `arrivals` int32 of ARRIVALS, zero before the first
    call and left zero. `tile` forces one, else few tokens have a kernel of their own.
    """
    matrices = weights if isinstance(weights, tuple) else (weights,)
    if len(stack(matrices)) != 1:
        raise KernelError(f"matmul_f16: {len(matrices)} matrices that are no stack()")
    rows = sum(w.rows for w in matrices)
    stride = check_output("matmul_f16", y, residual, bias, x.tokens, rows, column)
    begins = [sum(w.rows for w in matrices[:n]) // ROWS for n in range(1, len(matrices))]
    product = Product(
        w=tuple(w.data.data.ptr for w in matrices),
        begins=tuple([*begins, _NEVER, _NEVER][:2]),
        n=rows,
        bias=pointer(bias),
        residual=None if residual is None else residual.data.ptr + 4 * column,
        y=y.data.ptr + 4 * column,
        stride=stride,
    )
    _launch(device, product, matrices[0], x, partials, arrivals, tile)


def gate_up_f16(
    device: Device,
    gate: Matrix,
    up: Matrix,
    x: Activations,
    out: Activations,
    *,
    partials: DeviceArray,
    arrivals: DeviceArray,
    tile: Tile | None = None,
) -> None:
    """out = silu(x gate^T) * (x up^T) as f16 activations, in one launch; scratch as matmul_f16's.

    gate and up (F, K) of one type. Values past 4.2e6 become infinite.
    """
    if (gate.quant, gate.rows, gate.cols) != (up.quant, up.rows, up.cols):
        raise KernelError(
            f"gate_up_f16: gate is {gate.quant.name} ({gate.rows}, {gate.cols}), "
            f"up {up.quant.name} ({up.rows}, {up.cols})"
        )
    expect_halves("gate_up_f16", out, x.tokens, gate.rows)
    product = Product(
        w=(gate.data.data.ptr, up.data.data.ptr), begins=(_NEVER, _NEVER), gated=1,
        n=gate.rows, up_peak=pointer(up.peak), neurons=pointer(out.h), neuron_scale=pointer(out.hs),
    )  # fmt: skip
    _launch(device, product, gate, x, partials, arrivals, tile)


def _launch(
    device: Device,
    product: Product,
    w: Matrix,
    x: Activations,
    partials: DeviceArray,
    arrivals: DeviceArray,
    tile: Tile | None,
) -> None:
    """What `product` begins, of matrices like w."""
    gated = bool(product.gated)
    expect_halves("matmul_f16", x, x.tokens, w.cols)
    if w.is_float and (w.quant.name not in HALVES or w.cols % 8):
        raise KernelError(
            f"matmul_f16: {w.quant.name} ({w.rows}, {w.cols}), expected {' or '.join(HALVES)} with "
            "a multiple of 8 columns"
        )
    if has_peak(w.quant) and (w.peak is None or (gated and not product.up_peak)):
        raise KernelError("matmul_f16: a matrix without its peak: with_peak() finds it")
    if w.data.nbytes >= 1 << 32:
        raise KernelError(
            f"matmul_f16: a matrix of {w.data.nbytes} bytes, expected less than 4 GiB"
        )
    expect_room("matmul_f16", "partials", partials, PARTIALS, np.float32)
    expect_room("matmul_f16", "arrivals", arrivals, ARRIVALS, np.int32)
    product.peak = pointer(w.peak)
    product.h, product.hs = pointer(x.h), pointer(x.hs)
    product.partial, product.arrived = pointer(partials), pointer(arrivals)
    product.k, product.tokens = w.cols, x.tokens
    sizes = (w.quant, product.n, product.k, x.tokens, device.sm_count, device.shared_limit)
    tiles = (tile,) if tile else tiles_of(device.arch, w.quant, device.shared_limit)
    tiled = plan(*sizes, tiles=tiles, cluster_limit=device.cluster_limit, gated=gated)
    few = None if tile else matmul_few.plan(*sizes, gated=gated)
    if few is not None and few.clocks(device.sm_count) < tiled.clocks:
        matmul_few.launch(device, product, w.quant, few)
    else:
        _launch_tiles(device, product, w.quant, tiled, x)


def _launch_tiles(
    device: Device, product: Product, quant: QuantType, how: Plan, x: Activations
) -> None:
    whole = how.waves * how.grid
    grid = (how.grid, 1, how.cluster)
    arguments = _Tiled(
        product, how.token_tiles, how.chunks, how.tokens_each, how.waves, whole, how.units
    )
    kernel = device.kernel(how.tile.stem, instance(quant, how.tile, how.stages))
    tokens = (device.tensor_map(x.h, how.tokens_each),) if how.tile.wide else ()
    shared = shared_bytes(quant, how.tile, how.stages)
    kernel(grid, how.tile.threads, arguments, *tokens, shared=shared, cluster=how.cluster)
