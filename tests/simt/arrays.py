"""Device memory of the SIMT device: NumPy arrays that know their shadow words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

_ALIGNMENT = 256  # what cudaMalloc promises
# Bytes behind an allocation that are nobody's: a read past its end never meets the next one.
_GUARD = 1 << 16
_WRITTEN = 4  # shadow word of bytes that an earlier launch or the host has written (memory.cpp)


class Allocation:
    """Bytes of device memory and, where accesses are checked, two shadow words for each."""

    def __init__(self, nbytes: int, checked: bool):
        self.nbytes = nbytes
        self._raw = np.empty(_ALIGNMENT + nbytes + _GUARD, np.uint8)
        start = -self._raw.ctypes.data % _ALIGNMENT
        self.bytes = self._raw[start : start + nbytes]
        self.bytes[...] = 0xFF  # NaN to every float type
        self.address = self.bytes.ctypes.data
        self.writes = np.zeros(nbytes if checked else 0, np.uint64)
        self.reads = np.zeros(nbytes if checked else 0, np.uint64)

    def written(self, address: int, nbytes: int) -> None:
        start = address - self.address
        self.writes[start : start + nbytes] = _WRITTEN


@dataclass(frozen=True)
class _Pointer:
    ptr: int


class SimtArray(np.ndarray):
    """An array in device memory. `data.ptr` is its address, as CuPy spells it."""

    allocation: Allocation | None = None

    def __array_finalize__(self, source: Any) -> None:
        self.allocation = getattr(source, "allocation", None)

    @property
    def data(self) -> _Pointer:  # type: ignore[override]
        return _Pointer(self.ctypes.data)

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(index, value)
        part = np.asarray(self)[index] if _is_basic(index) else np.asarray(self)
        if self.allocation is not None and part.size:
            steps = zip(part.shape, part.strides, strict=True)
            last = sum((count - 1) * step for count, step in steps)
            self.allocation.written(part.ctypes.data, last + part.itemsize)

    def fill(self, value: Any) -> None:
        self[...] = value


def _is_basic(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return all(isinstance(part, (slice, type(...))) for part in parts)


def holds(array: Any) -> bool:
    """Whether the array lies in the device memory that it was made from."""
    allocation = getattr(array, "allocation", None)
    if allocation is None:
        return False
    start = array.ctypes.data - allocation.address
    return 0 <= start and start + array.nbytes <= allocation.nbytes
