"""Few tokens times matrices of all types but F32 on f16 tensor cores. See cuda/matmul_few.cu."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from minfer_cuda.kernels import Device
from minfer_cuda.kernels.layouts import ceil_div, padded
from minfer_cuda.quants import HALVES, QuantType, by_name

PARTIALS = 9 << 20  # most float32 elements of the parts' sums (36 MiB)
ARRIVALS = 4096  # most counters of what parts add up to
_HALVED = ("Q2_K", "Q3_K", "Q6_K")  # types with a scale every 16 values
TILES = (2, 3, 4)  # of 8 tokens, of a block
THREADS = 512
_WARPS = THREADS // 32
_WAVES = 4  # of blocks, to choose from
# clocks of a block, alone on an SM (H200, Q4_K): to begin and end; for 128 values of K, to copy a
# tile of tokens, to unpack 16 rows and to multiply them with a tile; to add up parts of K, and of
# each a unit's tile
_BLOCK, _COPY, _UNPACK, _MULTIPLY, _PARTS, _SHARE = 5500, 72, 85, 14, 2100, 30


@dataclass(frozen=True)
class Plan:
    """How a product is cut up; a pure function of its sizes and the card."""

    tiles: int  # of 8 tokens, of a block
    token_blocks: int
    units: int  # of 16 rows, of a block
    all_units: int
    parts: int  # of K
    groups: int  # of 128 values of K, of a part
    shared: int  # bytes of a block: tokens, sums of units' pieces, a table of pairs a warp

    @property
    def row_groups(self) -> int:
        return ceil_div(self.all_units, self.units)

    @property
    def grid(self) -> tuple[int, int]:
        return self.row_groups * self.parts, self.token_blocks

    @property
    def arrivals(self) -> int:
        """int32 counters of scratch."""
        return self.row_groups * self.token_blocks if self.parts > 1 else 0

    @property
    def partials(self) -> int:
        """float32 elements of scratch."""
        return self.arrivals * self.parts * self.units * self.tiles * 8 * 16

    def clocks(self, sm_count: int) -> int:
        """What it takes about: few parts copy more tokens a block, many have more to add up."""
        unit = _UNPACK + self.tiles * _MULTIPLY
        block = _BLOCK + self.groups * (self.tiles * _COPY + self.units * unit)
        shares = _PARTS + self.parts * self.units * self.tiles * _SHARE if self.parts > 1 else 0
        return ceil_div(self.grid[0] * self.token_blocks, sm_count) * block + shares


def scale_pairs(quant: QuantType) -> int:
    """{S, M} pairs of a block of 32 values in the tables of kernels, each of 4 bytes."""
    return 0 if quant.name in HALVES else 2 if quant.name in _HALVED else 1


def cut(
    quant: QuantType, all_units: int, all_groups: int, tokens: int, units: int, groups: int
) -> Plan:
    """Blocks of `units` units and `groups` groups of all."""
    tiles = next((tiles for tiles in TILES if tokens <= tiles * 8), TILES[-1])
    tables = _WARPS * 4 * 8 * 2 * scale_pairs(quant) * 4
    return Plan(
        tiles=tiles,
        token_blocks=ceil_div(tokens, tiles * 8),
        units=units,
        all_units=all_units,
        parts=ceil_div(all_groups, groups),
        groups=groups,
        shared=tiles * 8 * (groups * 128 * 2 + (units + _WARPS) * 16 * 4) + tables,
    )


def _cuts(
    quant: QuantType, units: int, groups: int, tokens: int, sm_count: int, shared_limit: int
) -> Iterator[Plan]:
    """Every number of parts, in as few waves of a block an SM as have the memory, and in more."""
    for each in sorted({ceil_div(groups, parts) for parts in range(1, groups + 1)}):
        one = cut(quant, units, groups, tokens, 1, each)
        most = 1 + (shared_limit - one.shared) // (one.tiles * 8 * 16 * 4)
        for wave in range(1, _WAVES + 1):
            row_groups = max(1, wave * sm_count // (one.parts * one.token_blocks))
            of_block = min(most, ceil_div(units, row_groups))
            if of_block > 0:
                yield cut(quant, units, groups, tokens, of_block, each)


@functools.cache
def plan(
    quant: QuantType,
    rows: int,
    cols: int,
    tokens: int,
    sm_count: int,
    shared_limit: int,
    *,
    gated: bool = False,
) -> Plan | None:
    """The cheapest cut; None where shared memory or scratch suffices for none.

    `rows` of one matrix; a gated product has as many of the second.
    """
    units = padded(rows) // 8 if gated else ceil_div(rows, 16)
    cuts = _cuts(quant, units, ceil_div(cols, 128), tokens, sm_count, shared_limit)
    fitting = [how for how in cuts if how.partials <= PARTIALS and how.arrivals <= ARRIVALS]
    return min(fitting, key=lambda how: how.clocks(sm_count), default=None)


def instance(quant: QuantType, tiles: int) -> str:
    """The kernel's name."""
    return f"matmul_few<{quant.cuda_name}, {tiles}>"


def instances(types: Sequence[str]) -> list[str]:
    """Of all types but F32."""
    quants = [by_name(name) for name in types if name != "F32"]
    return [instance(quant, tiles) for quant in quants for tiles in TILES]


class Product(ctypes.Structure):
    """F16Product of cuda/matmul_f16.cuh, what the products on f16 tensor cores are asked for, and
    their scratch, which comes next in the arguments of either kernel."""

    _fields_ = [
        ("w", ctypes.c_void_p * 3),
        *[
            (name, ctypes.c_void_p)
            for name in (
                *("peak", "up_peak", "h", "hs", "bias", "residual"),
                *("y", "neurons", "neuron_scale"),
            )
        ],
        *[(name, ctypes.c_int32) for name in ("n", "k", "tokens", "stride")],
        ("begins", ctypes.c_int32 * 2),
        ("gated", ctypes.c_int32),
        ("partial", ctypes.c_void_p),
        ("arrived", ctypes.c_void_p),
    ]


class _Few(ctypes.Structure):
    """FewArguments of cuda/matmul_few.cu."""

    _fields_ = [
        ("product", Product),
        *[(name, ctypes.c_int32) for name in ("units", "all", "parts", "groups")],
    ]


def launch(device: Device, product: Product, quant: QuantType, how: Plan) -> None:
    """What `product` asks for, of matrices of one type; the caller has checked its arrays.

    Its scratch, for parts of K: `how.partials` float32 and `how.arrivals` int32 elements or more,
    the latter zero before the first call and left zero.
    """
    arguments = _Few(product, how.units, how.all_units, how.parts, how.groups)
    kernel = device.kernel("matmul_few", instance(quant, how.tiles))
    kernel(how.grid, THREADS, arguments, shared=how.shared)
