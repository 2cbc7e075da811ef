"""What launchers and the CUDA operations need of a device.

`minfer_cuda.kernels.module.CudaDevice` is the real one. The tests' SIMT device runs the same
sources on a CPU behind the same interface, so launchers never name CuPy: they take a `Device`,
read shapes and dtypes of its arrays and call its kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike

DeviceArray = Any  # has shape, dtype, nbytes and basic slicing; C-contiguous when launched on


class Kernel(Protocol):
    """One compiled instance, for example `matvec<Q4_K>`."""

    name: str

    def __call__(
        self,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        *args: DeviceArray | int | float | ctypes.Structure | None,
        shared: int = 0,
        cluster: int = 1,
    ) -> None:
        """Enqueue on the device's one stream. int -> int32, float -> float32, None -> null, a
        Structure by value; `cluster` blocks along z, at most the device's limit, are one cluster.
        Raises KernelError naming kernel, grid, block and shapes for any other type, a
        non-contiguous array, an empty grid, or more than the device's limits."""


class Device(Protocol):
    """A GPU with the one stream that all our work runs on."""

    name: str
    arch: int  # compute capability times ten: 90 for sm_90
    sm_count: int
    shared_limit: int  # bytes of shared memory a block may have
    cluster_limit: int  # blocks that a cluster may have; 1: no clusters

    @property
    def free_bytes(self) -> int:
        """Device memory that can be allocated."""

    def kernel(self, stem: str, name: str) -> Kernel:
        """The instance `name` of cuda/<stem>.cu, compiled or from the cache on first use."""

    def compile(
        self,
        kernels: Sequence[tuple[str, str]],
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Make many (stem, name) pairs ready at once; `progress(done, of)` counts those that have
        to be compiled, from 0 on."""

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> DeviceArray: ...

    def zeros(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> DeviceArray: ...

    def upload(self, host: np.ndarray, into: DeviceArray | None = None) -> DeviceArray:
        """Copy to the device, enqueued on the stream; into an existing array where one is given."""

    def download(self, array: DeviceArray) -> np.ndarray:
        """Copy to the host; waits for everything enqueued before."""

    def tensor_map(self, array: DeviceArray, box_rows: int) -> ctypes.Structure:
        """A matrix of f16 as kernels for sm_90 copy it, `box_rows` by 64 columns at once: TensorMap
        of cuda/wgmma.cuh."""

    def pinned(self, shape: tuple[int, ...], dtype: DTypeLike) -> tuple[np.ndarray, DeviceArray]:
        """Host memory that kernels write directly: as the host sees it, and as they do."""

    def record(self) -> Any:
        """A mark in the stream; `wait(mark)` returns once everything before it is done."""

    def wait(self, mark: Any) -> None: ...

    def synchronize(self) -> None: ...
