"""Buffers that the cases of kernels.py run on: on a device, or only seemingly."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from benchmarks.synthetic import Pools
from minfer_cuda.kernels import Device, DeviceArray
from minfer_cuda.kernels.elementwise import quantize
from minfer_cuda.kernels.layouts import Activations, Matrix, Unnormed, matrix_bytes
from minfer_cuda.kernels.repack import repack
from minfer_cuda.quants import QuantType, by_name

COLD_BYTES = 192 << 20  # that copies come to, at least: three times the L2 of an H200
MOST_COPIES = 512
NORMALS = 1_000_003  # random values, repeated


class Bed:
    """Buffers of cases, on a device."""

    def __init__(self, device: Device, pools: Pools | None = None, cold_bytes: int = COLD_BYTES):
        self.device: Any = device
        self._normals = np.random.default_rng(0).standard_normal(NORMALS, np.float32)
        self._pools = pools or Pools(0)
        self._cold_bytes = cold_bytes

    def copies(self, n_bytes: int) -> int:
        """How many exceed the cache together."""
        return min(MOST_COPIES, max(1, -(-self._cold_bytes // n_bytes)))

    def raw(self, quant: QuantType, n: int, k: int) -> DeviceArray:
        """The bytes of a random matrix as a file has them."""
        n_bytes = n * k // quant.block_size * quant.block_bytes
        pool = self._pools.pool(quant.name, k**-0.5)
        return self.device.upload(np.resize(pool, n_bytes))

    def matrices(self, type_name: str, n: int, k: int, copies: int | None = None) -> list[Matrix]:
        """Copies of a random matrix (N, K) in the device's layout."""
        quant = by_name(type_name)
        if copies is None:
            copies = self.copies(matrix_bytes(quant, n, k))
        raw = self.raw(quant, n, k)
        if quant.block_size > 1:
            return [repack(self.device, quant, raw, n, k) for _ in range(copies)]
        return [Matrix(quant, n, k, self._copy(raw)) for _ in range(copies)]

    def _copy(self, array: DeviceArray) -> DeviceArray:
        return self.device.upload(self.device.download(array))

    def activations(self, tokens: int, k: int) -> Activations:
        """Normal values, in both forms."""
        x = Activations.empty(self.device, tokens, k, floats=True, q8=True)
        self.device.upload(np.resize(self._normals, (tokens, k)), into=x.x)
        quantize(self.device, x.x, x)
        return x

    def unnormed(self, k: int) -> Unnormed:
        """A row as decode's products take it behind a norm."""
        return Unnormed(self.normal(1, k), self.normal(k), 1e-6)

    def nan(self, *shape: int) -> DeviceArray:
        return self.device.upload(np.full(shape, np.nan, np.float32))

    def normal(self, *shape: int, dtype: DTypeLike = np.float32) -> DeviceArray:
        return self.device.upload(np.resize(self._normals.astype(dtype), shape))


class _Unbacked(np.ndarray):
    """Shape and dtype, and an address that nothing follows."""

    @property
    def data(self) -> SimpleNamespace:  # type: ignore[override]
        return SimpleNamespace(ptr=256)


class _DryDevice:
    """Stands for a device; `launched` collects the (stem, name) of every launch."""

    def __init__(self, device: Any):
        self.sm_count, self.shared_limit, self.arch = (
            device.sm_count, device.shared_limit, device.arch,
        )  # fmt: skip
        self.cluster_limit = 1
        self.launched: set[tuple[str, str]] = set()

    def kernel(self, stem: str, name: str) -> Callable[..., None]:
        self.launched.add((stem, name))
        return lambda *arguments, shared=0, cluster=1: None

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        return np.empty(shape, dtype).view(_Unbacked)  # pages are never touched

    zeros = empty

    def tensor_map(self, array: DeviceArray, box_rows: int) -> None:
        return None

    def upload(self, host: np.ndarray, into: DeviceArray | None = None) -> DeviceArray:
        return self.empty(host.shape, host.dtype) if into is None else into


class DryBed(Bed):
    """Runs cases without a device: which kernels they need, and whether launchers take them."""

    def __init__(self, device: Any):
        super().__init__(device)
        self.device = _DryDevice(device)

    def copies(self, n_bytes: int) -> int:
        return 1

    def raw(self, quant: QuantType, n: int, k: int) -> DeviceArray:
        return self.device.empty(n * k // quant.block_size * quant.block_bytes, np.uint8)

    def _copy(self, array: DeviceArray) -> DeviceArray:
        return array

    def activations(self, tokens: int, k: int) -> Activations:
        x = Activations.empty(self.device, tokens, k, floats=True, q8=True)
        quantize(self.device, x.x, x)
        return x

    def nan(self, *shape: int) -> DeviceArray:
        return self.device.empty(shape, np.float32)

    def normal(self, *shape: int, dtype: DTypeLike = np.float32) -> DeviceArray:
        return self.device.empty(shape, dtype)
