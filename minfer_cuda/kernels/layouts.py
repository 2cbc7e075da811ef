"""The two data layouts of ARCHITECTURE.md as they lie in device memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minfer_cuda.kernels import Device, DeviceArray
from minfer_cuda.quants import QuantType


def ceil_div(a: int, b: int) -> int:
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
    """T rows of K values, as float32 and/or as q8 (layout 1); what a consumer does not need is
    None."""

    x: DeviceArray | None  # (T, K) float32
    qs: DeviceArray | None  # (T, Kp) int8
    ds: DeviceArray | None  # (T, Kp / 32) uint64: GroupScale

    @classmethod
    def empty(cls, device: Device, tokens: int, k: int, *, floats: bool, q8: bool) -> Activations:
        kp = padded(k)
        return cls(
            device.empty((tokens, k), np.float32) if floats else None,
            device.empty((tokens, kp), np.int8) if q8 else None,
            device.empty((tokens, kp // 32), np.uint64) if q8 else None,
        )

    @property
    def tokens(self) -> int:
        array = self.x if self.x is not None else self.qs
        assert array is not None
        return int(array.shape[0])

    def rows(self, start: int, stop: int) -> Activations:
        def part(array: DeviceArray | None) -> DeviceArray | None:
            return None if array is None else array[start:stop]

        return Activations(part(self.x), part(self.qs), part(self.ds))
