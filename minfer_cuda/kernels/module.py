"""The CUDA device: kernels found, compiled and loaded, arrays allocated, all on one stream."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from minfer_cuda.errors import DeviceError, KernelError, MinferError, OutOfMemoryError
from minfer_cuda.kernels import DeviceArray
from minfer_cuda.kernels.compiler import Cubin, Request, Source, nvrtc_version
from minfer_cuda.kernels.driver import Driver, DriverFailure
from minfer_cuda.kernels.launch import CudaKernel, LaunchQueue, Limits, argument_words

MIN_ARCH = 75
# Python sees a signal that comes just as it begins to wait for a lock only after the wait.
SIGNAL_S = 0.1


class TensorMap(ctypes.Structure):
    """CUtensorMap."""

    _fields_ = [("words", ctypes.c_uint64 * 16)]


class CudaDevice:
    """A GPU and the one stream that all our work runs on.

    `driver_version` as (12, 9). With MINFER_SYNC=1 each launch waits, so that an error names its
    kernel.
    """

    def __init__(self, ordinal: int = 0, driver: Driver | None = None):
        """Raises DeviceError where driver, device or CuPy is missing or too old."""
        driver = driver or Driver()
        self.ordinal = ordinal
        try:
            self._check(driver, ordinal)
            self.name = driver.device_name(ordinal)
            self.driver_version = driver.version()
            self.sm_count = driver.attribute(ordinal, "MULTIPROCESSOR_COUNT")
            limits = Limits.of(driver, ordinal)
            context = driver.primary_context(ordinal)
            driver.set_current(context)
        except DriverFailure as error:
            raise DeviceError(f"CUDA device {ordinal} cannot be used: {error}") from error
        self.arch = _arch(driver, ordinal)
        self.shared_limit = limits.shared_bytes
        self.cluster_limit = 16 if self.arch in (90, 100) else 1  # 8 on others: not worth it
        self._cupy = _import_cupy()
        with self._cupy.cuda.Device(ordinal):
            # Non-blocking: the legacy default stream of other code never orders itself with ours.
            self.stream = self._cupy.cuda.Stream(non_blocking=True)
        self.queue = LaunchQueue(driver, context, self.stream.ptr, limits, self.arch)
        self._kernels: dict[tuple[str, str], CudaKernel] = {}
        self._sources: dict[str, Source] = {}
        self._tensor_maps: dict[tuple[int, ...], TensorMap] = {}
        self._frozen = False

    @staticmethod
    def _check(driver: Driver, ordinal: int) -> None:
        count = driver.device_count()
        if not 0 <= ordinal < count:
            raise DeviceError(f"CUDA device {ordinal} does not exist: this machine has {count}")
        arch = _arch(driver, ordinal)
        if arch < MIN_ARCH:
            raise DeviceError(
                f"{driver.device_name(ordinal)} has compute capability {arch / 10}, "
                f"{MIN_ARCH / 10} or newer is needed: use --device cpu"
            )
        compiler, supported = nvrtc_version(), driver.version()
        if supported[0] < max(12, compiler[0]):
            raise DeviceError(
                f"the driver supports CUDA {supported[0]}.{supported[1]}, NVRTC is {compiler[0]}."
                f"{compiler[1]}: update the driver, or install the packages of its CUDA version"
            )

    # ---- kernels ----

    @property
    def pdl(self) -> bool:
        """Whether launches are dependent (may start before their predecessor ends)."""
        return self.queue.pdl

    @pdl.setter
    def pdl(self, on: bool) -> None:
        self.queue.pdl = on

    def kernel(self, stem: str, name: str) -> CudaKernel:
        """The instance `name` of cuda/<stem>.cu, compiled or from the cache on first use."""
        found = self._kernels.get((stem, name))
        if found is None:
            self.compile([(stem, name)])
            found = self._kernels[stem, name]
        return found

    def compile(
        self,
        kernels: Sequence[tuple[str, str]],
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Load (stem, name) pairs; what the cache does not have is compiled, on threads, and told
        as progress(done, of), from 0 on.

        An interrupt does not wait for what is being compiled. Files are written by this thread
        alone, so that none is half-written when the process ends then.
        """
        wanted = [pair for pair in dict.fromkeys(kernels) if pair not in self._kernels]
        if not wanted:
            return
        pool = ThreadPoolExecutor(max_workers=min(len(wanted), os.cpu_count() or 1))
        try:
            requests = [Request(self._source(stem), name) for stem, name in wanted]
            kept = zip(requests, pool.map(Request.cached, requests), strict=True)
            cubins = {request: cubin for request, cubin in kept if cubin is not None}
            jobs = {pool.submit(r.compiled): r for r in requests if r not in cubins}
            if progress and jobs:
                progress(0, len(jobs))
            running, done = set(jobs), 0
            while running:
                ended, running = wait(running, SIGNAL_S, FIRST_COMPLETED)
                for job in ended:
                    cubins[jobs[job]] = job.result()
                    jobs[job].keep(job.result())
                    done += 1
                    if progress:
                        progress(done, len(jobs))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        for pair, request in zip(wanted, requests, strict=True):
            self._load(*pair, cubins[request])

    def _source(self, stem: str) -> Source:
        found = self._sources.get(stem)
        if found is None:
            found = self._sources[stem] = Source(stem, self.arch)
        return found

    def _load(self, stem: str, name: str, cubin: Cubin) -> None:
        try:
            self.queue.enter()
            function = self.queue.driver.load(cubin.data, cubin.lowered_name)
            kernel = CudaKernel(name, function, cubin.n_parameters, self.queue)
        except DriverFailure as error:
            raise KernelError(
                f"{name} of cuda/{stem}.cu does not load on {self.name}: {error}"
            ) from error
        self._kernels[stem, name] = kernel

    # ---- arrays ----

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> DeviceArray:
        """Uninitialised, C-contiguous. Raises KernelError while frozen, OutOfMemoryError."""
        return self._allocate(self._cupy.empty, shape, dtype)

    def zeros(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> DeviceArray:
        return self._allocate(self._cupy.zeros, shape, dtype)

    def _allocate(
        self, make: Callable[..., DeviceArray], shape: int | tuple[int, ...], dtype: DTypeLike
    ) -> DeviceArray:
        if self._frozen:
            raise KernelError(f"allocation of {shape} {np.dtype(dtype)} inside a step")
        with self.told(f"allocating {shape} {np.dtype(dtype)}"), self.current():
            return make(shape, dtype)

    def upload(self, host: np.ndarray, into: DeviceArray | None = None) -> DeviceArray:
        """Copy to the device, enqueued; `host` may be changed once this returns."""
        host = np.ascontiguousarray(host)
        array = self.empty(host.shape, host.dtype) if into is None else into
        if array.nbytes != host.nbytes or array.dtype != host.dtype:
            raise KernelError(f"upload of {argument_words([host])} into {argument_words([array])}")
        with self.told(f"copying {host.nbytes} bytes to the device"), self.current():
            array.data.copy_from_host_async(host.ctypes.data, host.nbytes, self.stream)
        return array

    def download(self, array: DeviceArray) -> np.ndarray:
        """Copy to the host; waits for everything enqueued before."""
        with self.told("copying to the host"), self.current():
            host: np.ndarray = self._cupy.asnumpy(array, stream=self.stream)
            return host

    def tensor_map(self, array: DeviceArray, box_rows: int) -> ctypes.Structure:
        key = (array.data.ptr, *array.shape, box_rows)
        found = self._tensor_maps.get(key)
        if found is None:
            try:
                words = self.queue.driver.tensor_map(*key)
            except DriverFailure as error:
                raise KernelError(f"a tensor map of {argument_words([array])}: {error}") from error
            found = self._tensor_maps[key] = TensorMap.from_buffer_copy(words)
        return found

    def pinned(self, shape: tuple[int, ...], dtype: DTypeLike) -> tuple[np.ndarray, DeviceArray]:
        """Host memory that kernels write directly: as the host sees it, and as they do."""
        cupy, size = self._cupy, int(np.prod(shape)) * np.dtype(dtype).itemsize
        with self.told(f"pinning {size} bytes of host memory"), self.current():
            memory = cupy.cuda.alloc_pinned_memory(size)
            host = np.frombuffer(memory, dtype, count=int(np.prod(shape))).reshape(shape)
            mapped = cupy.cuda.UnownedMemory(memory.ptr, size, memory, self.ordinal)
            array = cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(mapped, 0))
        host[...] = 0
        return host, array

    def record(self) -> Any:
        """A mark in the stream; `wait(mark)` returns once everything before it is done."""
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(self.stream)
        return event

    def wait(self, mark: Any) -> None:
        with self.told("waiting for a step"):
            mark.synchronize()

    def synchronize(self) -> None:
        """Wait for everything enqueued. Raises KernelError for a kernel that failed."""
        try:
            self.queue.enter()
            self.queue.driver.synchronize(self.queue.stream)
        except DriverFailure as error:
            raise KernelError(f"a kernel failed: {error}. MINFER_SYNC=1 names it") from error

    @property
    def free_bytes(self) -> int:
        """Device memory that can be allocated: the driver's free bytes and our pool's."""
        self.queue.enter()
        pooled = int(self._cupy.get_default_memory_pool().free_bytes())
        return self.queue.driver.memory()[0] + pooled

    @property
    def total_bytes(self) -> int:
        self.queue.enter()
        return self.queue.driver.memory()[1]

    @contextmanager
    def freeze(self) -> Iterator[None]:
        """Inside, any allocation raises KernelError: a step works in buffers made before it."""

        def refuse(size_bytes: int) -> None:
            raise KernelError(f"allocation of {size_bytes} bytes inside a step")

        self._frozen = True
        try:
            with self._cupy.cuda.using_allocator(refuse):
                yield
        finally:
            self._frozen = False

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the device and its stream CuPy's current ones."""
        with self._cupy.cuda.Device(self.ordinal), self.stream:
            yield

    @contextmanager
    def told(self, doing: str) -> Iterator[None]:
        """CuPy's errors as ours, saying what was being done."""
        cuda = self._cupy.cuda
        try:
            yield
        except MinferError:
            raise
        except cuda.memory.OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"{self.name}: {doing}: {self.free_bytes} of {self.total_bytes} bytes are free: "
                "a smaller --n-ctx or model needs less"
            ) from error
        except (cuda.runtime.CUDARuntimeError, cuda.driver.CUDADriverError) as error:
            raise DeviceError(
                f"{self.name}: {doing}: {error}; the cause may be an earlier kernel: "
                "MINFER_SYNC=1 names it"
            ) from error


def _arch(driver: Driver, ordinal: int) -> int:
    major = driver.attribute(ordinal, "COMPUTE_CAPABILITY_MAJOR")
    return major * 10 + driver.attribute(ordinal, "COMPUTE_CAPABILITY_MINOR")


def _import_cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise DeviceError(
            f"CuPy is not usable ({error}): pip install cupy-cuda12x, or use --device cpu"
        ) from error
    return cupy
