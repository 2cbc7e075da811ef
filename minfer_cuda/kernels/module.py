"""The CUDA device: kernels found, compiled and launched, arrays allocated, all on one stream.

`CudaKernel.__call__` is the only launch site of the engine. CuPy passes Python numbers as 64 bits,
ignores strides, clamps an empty grid to one block and knows no launch attributes; here all of that
is checked, and the launch goes through cuLaunchKernelEx.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from minfer_cuda.errors import DeviceError, KernelError, MinferError, OutOfMemoryError
from minfer_cuda.kernels import DeviceArray
from minfer_cuda.kernels.compiler import Cubin, compile_cubin, nvrtc_version
from minfer_cuda.kernels.driver import Driver, DriverFailure

MIN_ARCH = 75
_DEFAULT_SHARED = 48 * 1024  # what every kernel may have without asking


@dataclass(frozen=True)
class Limits:
    """Asked of the device, never assumed."""

    threads: int  # per block
    block: tuple[int, int, int]
    grid: tuple[int, int, int]
    shared_bytes: int  # per block, with the opt-in

    @classmethod
    def of(cls, driver: Driver, ordinal: int) -> Limits:
        def ask(name: str) -> int:
            return driver.attribute(ordinal, name)

        return cls(
            threads=ask("MAX_THREADS_PER_BLOCK"),
            block=(ask("MAX_BLOCK_DIM_X"), ask("MAX_BLOCK_DIM_Y"), ask("MAX_BLOCK_DIM_Z")),
            grid=(ask("MAX_GRID_DIM_X"), ask("MAX_GRID_DIM_Y"), ask("MAX_GRID_DIM_Z")),
            shared_bytes=ask("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        )


class LaunchQueue:
    """What a kernel needs to be launched: driver, stream, limits, and how to launch."""

    def __init__(self, driver: Driver, context: Any, stream: int, limits: Limits, arch: int):
        self.driver = driver
        self.stream = stream
        self.limits = limits
        self.pdl = arch >= 90  # dependent launch: griddepcontrol exists from sm_90 on
        self.sync = os.environ.get("MINFER_SYNC") == "1"
        self._context = context
        self._thread = threading.local()

    def enter(self) -> None:
        """Make the device's context current, once for each thread that launches."""
        if not getattr(self._thread, "ready", False):
            self.driver.set_current(self._context)
            self._thread.ready = True


def _dim3(value: int | tuple[int, ...]) -> tuple[int, int, int]:
    sizes = (value,) if isinstance(value, int) else tuple(value)
    return (*sizes, 1, 1, 1)[:3]  # type: ignore[return-value]


class CudaKernel:
    """One compiled instance, loaded on a device."""

    def __init__(self, name: str, function: Any, queue: LaunchQueue):
        self.name = name
        self._function = function
        self._queue = queue
        driver = queue.driver
        self._static_shared = driver.function_attribute(function, "SHARED_SIZE_BYTES")
        self._max_threads = driver.function_attribute(function, "MAX_THREADS_PER_BLOCK")
        self._sizes = driver.parameter_sizes(function)
        self._allowed_shared = _DEFAULT_SHARED
        self._configs: dict[tuple[Any, ...], Any] = {}
        self._room(8)

    def __call__(
        self,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        *args: DeviceArray | int | float | ctypes.Structure | None,
        shared: int = 0,
    ) -> None:
        """Enqueue on the device's stream; `Kernel.__call__` has the rules. Raises KernelError."""
        queue = self._queue
        key = (grid, block, shared, queue.pdl)
        config = self._configs.get(key)
        if config is None:
            config = self._configs[key] = self._configure(grid, block, shared, args)
        sizes = self._pack(args)
        if self._sizes is not None and sizes != self._sizes:
            raise KernelError(
                f"{self.name} takes parameters of {self._sizes} bytes, got {sizes}: {_words(args)}"
            )
        try:
            queue.enter()
            queue.driver.launch(config, self._function, self._arguments)
        except DriverFailure as error:
            raise self._failure(error, key, args) from error
        if queue.sync:
            try:
                queue.driver.synchronize(queue.stream)
            except DriverFailure as error:
                raise KernelError(f"{self._told(key, args)} failed: {error}") from error

    def _pack(self, args: tuple[Any, ...]) -> tuple[int, ...]:
        """Write the arguments into their slots; returns their sizes in bytes."""
        if len(args) > len(self._slots):
            self._room(len(args))
        sizes = []
        for i, value in enumerate(args):
            self._pointers[i] = self._slot_address + 8 * i
            address = getattr(getattr(value, "data", None), "ptr", None)
            if address is not None:
                if not value.flags.c_contiguous:
                    raise KernelError(f"{self.name}: argument {i}, {_word(value)}, has gaps")
                self._slots[i] = address
                sizes.append(8)
            elif value is None:
                self._slots[i] = 0
                sizes.append(8)
            elif isinstance(value, int):
                if not -(2**31) <= value < 2**31:
                    raise KernelError(f"{self.name}: argument {i}, {value}, is not an int32")
                self._slots[i] = value & 0xFFFFFFFF
                sizes.append(4)
            elif isinstance(value, float):
                self._floats[2 * i] = value
                sizes.append(4)
            elif isinstance(value, ctypes.Structure):
                self._pointers[i] = ctypes.addressof(value)
                sizes.append(ctypes.sizeof(value))
            else:
                raise KernelError(f"{self.name}: argument {i} is a {type(value).__name__}")
        return tuple(sizes)

    def _room(self, count: int) -> None:
        """Slots of 8 bytes for `count` arguments, and the array of pointers to them."""
        self._slots = (ctypes.c_uint64 * count)()
        self._floats = (ctypes.c_float * (2 * count)).from_buffer(self._slots)
        self._pointers = (ctypes.c_void_p * count)()
        self._slot_address = ctypes.addressof(self._slots)
        self._arguments = ctypes.addressof(self._pointers)

    def _configure(
        self, grid: int | tuple[int, ...], block: int | tuple[int, ...], shared: int, args: Any
    ) -> Any:
        """Check a launch shape seen for the first time against the limits."""
        limits, full_grid, full_block = self._queue.limits, _dim3(grid), _dim3(block)
        threads = full_block[0] * full_block[1] * full_block[2]
        wrong = None
        if min(full_grid) < 1 or min(full_block) < 1 or shared < 0:
            wrong = "is empty"
        elif any(n > most for n, most in zip(full_grid, limits.grid, strict=True)):
            wrong = f"exceeds the grid limit {limits.grid}"
        elif any(n > most for n, most in zip(full_block, limits.block, strict=True)):
            wrong = f"exceeds the block limit {limits.block}"
        elif threads > min(limits.threads, self._max_threads):
            wrong = f"exceeds {min(limits.threads, self._max_threads)} threads a block"
        elif shared + self._static_shared > limits.shared_bytes:
            wrong = (
                f"needs {shared} + {self._static_shared} bytes of shared memory, "
                f"the device has {limits.shared_bytes} a block"
            )
        key = (grid, block, shared, self._queue.pdl)
        if wrong is not None:
            raise KernelError(f"{self._told(key, args)} {wrong}")
        try:
            self._queue.enter()
            if shared + self._static_shared > self._allowed_shared:
                self._queue.driver.allow_shared(self._function, shared)
                self._allowed_shared = shared + self._static_shared
        except DriverFailure as error:
            raise self._failure(error, key, args) from error
        return self._queue.driver.launch_config(
            full_grid, full_block, shared, self._queue.stream, self._queue.pdl
        )

    def _failure(self, error: DriverFailure, key: tuple[Any, ...], args: Any) -> KernelError:
        if error.sticky:
            return KernelError(
                f"an earlier kernel failed, reported at the launch of {self.name}: {error}. "
                "MINFER_SYNC=1 names the kernel; the device needs a new process"
            )
        return KernelError(f"{self._told(key, args)} was refused: {error}")

    def _told(self, key: tuple[Any, ...], args: Any) -> str:
        grid, block, shared, _ = key
        return f"{self.name} with grid {grid}, block {block}, shared {shared} on ({_words(args)})"


def _word(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if hasattr(value, "dtype") else repr(value)


def _words(args: Sequence[Any]) -> str:
    return ", ".join(
        type(value).__name__ if isinstance(value, ctypes.Structure) else _word(value)
        for value in args
    )


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
        self._cupy = _import_cupy()
        with self._cupy.cuda.Device(ordinal):
            # Non-blocking: the legacy default stream of other code never orders itself with ours.
            self.stream = self._cupy.cuda.Stream(non_blocking=True)
        self.queue = LaunchQueue(driver, context, self.stream.ptr, limits, self.arch)
        self._kernels: dict[tuple[str, str], CudaKernel] = {}
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
            found = self._load(stem, name, compile_cubin(stem, name, self.arch))
        return found

    def compile(
        self,
        kernels: Sequence[tuple[str, str]],
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Compile (stem, name) pairs on threads, then load them; progress(done, of) as they end."""
        wanted = [pair for pair in dict.fromkeys(kernels) if pair not in self._kernels]
        if not wanted:
            return
        cubins: dict[tuple[str, str], Cubin] = {}
        with ThreadPoolExecutor(max_workers=min(len(wanted), os.cpu_count() or 1)) as pool:
            jobs = {pool.submit(compile_cubin, *pair, self.arch): pair for pair in wanted}
            try:
                for job in as_completed(jobs):
                    cubins[jobs[job]] = job.result()
                    if progress is not None:
                        progress(len(cubins), len(wanted))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        for pair in wanted:
            self._load(*pair, cubins[pair])

    def _load(self, stem: str, name: str, cubin: Cubin) -> CudaKernel:
        try:
            self.queue.enter()
            function = self.queue.driver.load(cubin.data, cubin.lowered_name)
            kernel = self._kernels[stem, name] = CudaKernel(name, function, self.queue)
        except DriverFailure as error:
            raise KernelError(
                f"{name} of cuda/{stem}.cu does not load on {self.name}: {error}"
            ) from error
        return kernel

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
            raise KernelError(f"upload of {_word(host)} into {_word(array)}")
        with self.told(f"copying {host.nbytes} bytes to the device"), self.current():
            array.data.copy_from_host_async(host.ctypes.data, host.nbytes, self.stream)
        return array

    def download(self, array: DeviceArray) -> np.ndarray:
        """Copy to the host; waits for everything enqueued before."""
        with self.told("copying to the host"), self.current():
            host: np.ndarray = self._cupy.asnumpy(array, stream=self.stream)
            return host

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

    def release_unused(self) -> None:
        """Give freed arrays' memory back to the driver."""
        self.synchronize()
        self._cupy.get_default_memory_pool().free_all_blocks()

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
