"""How fast a device's memory can be read: the ceiling of everything that reads weights. See
cuda/read.cu."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import numpy as np

from minfer_cuda.errors import KernelError
from minfer_cuda.kernels import Device, DeviceArray
from minfer_cuda.kernels.checks import expect

_BLOCK = 512
_BLOCKS_PER_SM = 2
MOST_BYTES = 4 << 30  # the rate grows with the size up to about here
_LAUNCHES = 4  # in a row: waiting for the last costs little beside them
_REPETITIONS = 7


def instances(types: Sequence[str] = ()) -> list[str]:
    """The one kernel of read.cu."""
    return ["read_xor"]


def threads(device: Device) -> int:
    """Of a launch: the elements of `out`."""
    return _BLOCKS_PER_SM * device.sm_count * _BLOCK


def read_xor(device: Device, x: DeviceArray, out: DeviceArray) -> None:
    """Read x (n, 4) uint32 once; out (threads(device),) uint32: xors of what a thread read."""
    n = x.shape[0]
    expect("read_xor", "x", x, (n, 4), np.uint32)
    expect("read_xor", "out", out, (threads(device),), np.uint32)
    if n < 1:
        raise KernelError("read_xor: x is empty")
    device.kernel("read", "read_xor")(_BLOCKS_PER_SM * device.sm_count, _BLOCK, x, out, n)


def read_bandwidth(device: Device, n_bytes: int | None = None) -> float:
    """Bytes per second, the median of several passes over `n_bytes` (None: 4 GiB, or half of what
    is free). Waits for the device; the buffer is freed."""
    size = min(MOST_BYTES, device.free_bytes // 2) if n_bytes is None else n_bytes
    x = device.zeros((size // 16, 4), np.uint32)
    out = device.empty(threads(device), np.uint32)
    read_xor(device, x, out)
    rates: list[float] = []
    for _ in range(_REPETITIONS):
        device.synchronize()
        start = time.perf_counter()
        for _ in range(_LAUNCHES):
            read_xor(device, x, out)
        device.synchronize()
        rates.append(_LAUNCHES * x.nbytes / (time.perf_counter() - start))
    return statistics.median(rates)
