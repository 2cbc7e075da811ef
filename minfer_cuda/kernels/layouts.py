"""The two data layouts of ARCHITECTURE.md as they lie in device memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minfer_cuda.kernels import Device, DeviceArray
from minfer_cuda.quants import QuantType


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def padded(k: int) -> int:
    """Kp: K rounded up to the 128 values of a chunk."""
    return ceil_div(k, 128) * 128


@dataclass(frozen=True)
class Matrix:
    """A weight (N, K) on the device: records of a quantised type, row-major for a float type."""

    quant: QuantType
    rows: int  # N
    cols: int  # K
    data: DeviceArray  # uint8, matrix_bytes(...)
    peak: DeviceArray | None = None  # (1,) float32, largest |scale|: what f16 products need

    @property
    def is_float(self) -> bool:
        return self.quant.block_size == 1

    @property
    def records(self) -> int:
        """Records along K of one strip of 8 rows."""
        return ceil_div(self.cols, record_cols(self.quant))


def record_cols(quant: QuantType) -> int:
    """Values of K in a record: 128 for types of 32-value blocks, 256 for K types."""
    return max(quant.block_size, 128)


def matrix_bytes(quant: QuantType, rows: int, cols: int) -> int:
    """Bytes on the device; those of the file where N % 8 == 0 and K % 128 == 0."""
    if quant.block_size == 1:
        return rows * cols * quant.block_bytes
    blocks = 8 * record_cols(quant) // quant.block_size
    return ceil_div(rows, 8) * ceil_div(cols, record_cols(quant)) * blocks * quant.block_bytes


@dataclass(frozen=True)
class Unnormed:
    """A row that its consumer norms itself: x * rsqrt(mean(x^2) + eps) * weight."""

    x: DeviceArray  # (1, K) float32
    weight: DeviceArray  # (K,) float32
    eps: float


@dataclass(frozen=True)
class Activations:
    """T rows of K values, as float32, q8 (layout 1) and/or f16 (cuda/quants_f16.cuh); what a
    consumer does not need is None."""

    x: DeviceArray | None  # (T, K) float32
    qs: DeviceArray | None  # (T, Kp) int8
    ds: DeviceArray | None  # (T, Kp / 32) uint64: GroupScale
    h: DeviceArray | None = None  # (T, Kp) float16: x / hs, in half_offset's order
    hs: DeviceArray | None = None  # (T,) float32: a power of two
    scale: DeviceArray | None = None  # (T,) float32: factor of the q8 form's rows; None: 1

    @classmethod
    def empty(
        cls,
        device: Device,
        tokens: int,
        k: int,
        *,
        floats: bool = False,
        q8: bool = False,
        f16: bool = False,
        scaled: bool = False,
    ) -> Activations:
        kp = padded(k)
        return cls(
            device.empty((tokens, k), np.float32) if floats else None,
            device.empty((tokens, kp), np.int8) if q8 else None,
            device.empty((tokens, kp // 32), np.uint64) if q8 else None,
            device.empty((tokens, kp), np.float16) if f16 else None,
            device.empty((tokens,), np.float32) if f16 else None,
            device.empty((tokens,), np.float32) if scaled else None,
        )

    @property
    def tokens(self) -> int:
        array = next(a for a in (self.x, self.qs, self.h) if a is not None)
        return int(array.shape[0])

    def rows(self, start: int, stop: int) -> Activations:
        def part(array: DeviceArray | None) -> DeviceArray | None:
            return None if array is None else array[start:stop]

        return Activations(
            part(self.x), part(self.qs), part(self.ds), part(self.h), part(self.hs),
            part(self.scale),
        )  # fmt: skip
