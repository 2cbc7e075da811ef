"""Rows of q8 activations times a quantised matrix, by int8 products. See cuda/matmul.cu."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minfer_cuda.errors import KernelError
from minfer_cuda.kernels import Device, DeviceArray
from minfer_cuda.kernels.checks import expect, expect_room, pointer
from minfer_cuda.kernels.layouts import Activations, Matrix, ceil_div, padded, record_cols
from minfer_cuda.quants import QuantType, by_name

_BLOCK = 256
_ROWS = 128  # of a tile
_TILES = (8, 16, 32, 64)  # tokens of a tile; 128 fill the registers and gain nothing
_TOKEN_BYTES = 144 + 48  # a chunk of one token in a stage: values and scales, padded
PARTIALS = 1 << 23  # most float32 elements of partial sums a call may use (32 MiB)
ARRIVALS = 4096  # most tiles of a split call


def instances(types: Sequence[str]) -> list[str]:
    """Every instance of cuda/matmul.cu for these types."""
    return [
        instance(by_name(name), Plan(tile, stages, 1))
        for name in types
        if by_name(name).block_size > 1
        for tile in _tiles(by_name(name))
        for stages in _stages(tile)
    ]


def _tiles(quant: QuantType) -> tuple[int, ...]:
    """Without the largest for the types whose unpacking fills the registers."""
    dropped = {"Q2_K": 2, "Q5_K": 1, "Q6_K": 1}.get(quant.name, 0)
    return _TILES[: len(_TILES) - dropped]


def _stages(tile: int) -> tuple[int, ...]:
    """Numbers of stages that there are kernels for, by preference: few tokens leave the room, and
    need the bytes in flight."""
    return (3, 2) if tile <= 16 else (2,)


def stage_bytes(quant: QuantType, tile: int) -> int:
    """One record of 16 strips and its chunks of `tile` tokens: Stage::kBytes."""
    record = 8 * record_cols(quant) // quant.block_size * quant.block_bytes
    return 16 * record + record_cols(quant) // 128 * tile * _TOKEN_BYTES


@dataclass(frozen=True)
class Plan:
    """How a product is cut up; a pure function of its sizes and the card."""

    tile: int  # tokens
    stages: int
    splits: int  # of K

    def grid(self, rows: int, tokens: int) -> tuple[int, int, int]:
        return (ceil_div(rows, _ROWS), ceil_div(tokens, self.tile), self.splits)


@functools.cache
def plan(
    quant: QuantType, rows: int, cols: int, tokens: int, sm_count: int, shared_limit: int
) -> Plan:
    """The smallest tile that holds the tokens (or the largest that fits), as many stages as fit,
    and K split until two blocks an SM have work, at four records or more a split."""
    fits = [tile for tile in _tiles(quant) if 2 * stage_bytes(quant, tile) <= shared_limit]
    if not fits:
        raise KernelError(f"matmul: {quant.name} needs more than {shared_limit} bytes a block")
    tile = next((t for t in fits if t >= tokens), fits[-1])
    stages = next(n for n in _stages(tile) if n * stage_bytes(quant, tile) <= shared_limit)
    tiles = ceil_div(rows, _ROWS) * ceil_div(tokens, tile)
    records = ceil_div(cols, record_cols(quant))
    splits = min(2 * sm_count // tiles, records // 4, PARTIALS // (tokens * rows))
    return Plan(tile, stages, max(1, splits) if tiles <= ARRIVALS else 1)


def instance(quant: QuantType, how: Plan) -> str:
    """The kernel of a plan."""
    return f"matmul<{quant.cuda_name}, Tokens{how.tile}, {how.stages}>"


class _Arguments(ctypes.Structure):
    """MatmulArguments of cuda/matmul.cu."""

    _fields_ = [
        *[
            (name, ctypes.c_void_p)
            for name in ("w", "qs", "ds", "scale", "bias", "residual", "y", "partial", "arrived")
        ],
        *[(name, ctypes.c_int32) for name in ("n", "k", "tokens", "stride")],
    ]


def matmul(
    device: Device,
    w: Matrix,
    x: Activations,
    y: DeviceArray,
    *,
    column: int = 0,
    bias: DeviceArray | None = None,
    residual: DeviceArray | None = None,
    partials: DeviceArray | None = None,
    arrivals: DeviceArray | None = None,
) -> None:
    """y[:, column : column + N] = x w^T (+ bias) (+ residual), in place.

    x q8 of T rows of K; y, residual (T, stride) float32, may be the same array; bias (N,). Scratch
    for splits of K: `partials` float32 of PARTIALS elements, `arrivals` int32 of ARRIVALS, zero
    before the first call and left zero; without them K is not split.
    """
    tokens = x.tokens
    expect("matmul", "qs", x.qs, (tokens, padded(w.cols)), np.int8)
    expect("matmul", "ds", x.ds, (tokens, padded(w.cols) // 32), np.uint64)
    stride = check_output("matmul", y, residual, bias, tokens, w.rows, column)
    how = plan(w.quant, w.rows, w.cols, tokens, device.sm_count, device.shared_limit)
    if partials is None:
        how = Plan(how.tile, how.stages, 1)
    if how.splits > 1:
        expect_room("matmul", "partials", partials, how.splits * tokens * w.rows, np.float32)
        expect_room("matmul", "arrivals", arrivals, 1, np.int32)
    arguments = _Arguments(
        *(w.data.data.ptr, pointer(x.qs), pointer(x.ds), pointer(x.scale), pointer(bias)),
        *(None if residual is None else residual.data.ptr + 4 * column, y.data.ptr + 4 * column),
        *(pointer(partials), pointer(arrivals), w.rows, w.cols, tokens, stride),
    )
    shared = how.stages * stage_bytes(w.quant, how.tile)
    kernel = device.kernel("matmul", instance(w.quant, how))
    kernel(how.grid(w.rows, tokens), _BLOCK, arguments, shared=shared)


def check_output(
    kernel: str,
    y: DeviceArray,
    residual: DeviceArray | None,
    bias: DeviceArray | None,
    tokens: int,
    rows: int,
    column: int,
) -> int:
    """Check shapes of a product's results; returns the stride of y in floats."""
    stride = int(y.shape[1])
    expect(kernel, "y", y, (tokens, stride), np.float32)
    if not 0 <= column <= stride - rows:
        raise KernelError(f"{kernel}: columns {column}..{column + rows} of y with {stride}")
    if residual is not None:
        expect(kernel, "residual", residual, (tokens, stride), np.float32)
    if bias is not None:
        expect(kernel, "bias", bias, (rows,), np.float32)
    return stride
