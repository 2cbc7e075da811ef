"""The one launch site: arguments and launch shape checked, then cuLaunchKernelEx.

CuPy passes Python numbers as 64 bits, ignores strides, clamps an empty grid to one block and knows
no launch attributes, so launches do not go through it.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from minfer_cuda.errors import KernelError
from minfer_cuda.kernels import DeviceArray
from minfer_cuda.kernels.driver import Driver, DriverFailure

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


class _Refused(Exception):
    """Why a value cannot be an argument."""


def _int_word(value: int) -> int:
    if not -(2**31) <= value < 2**31:
        raise _Refused(f"{value}, is not an int32")
    return value & 0xFFFFFFFF


def _float_word(value: float) -> int:
    try:
        return int.from_bytes(struct.pack("<f", value), "little")
    except OverflowError:
        raise _Refused(f"{value}, is not a float32") from None


def _array_word(value: DeviceArray) -> int:
    if not value.flags.c_contiguous:
        raise _Refused(f"{_word(value)}, has gaps")
    return int(value.data.ptr)


class _Packer:
    """Writes arguments of given Python types into 8-byte slots, as the kernel's parameters.

    Made once for each combination of types, so that a launch only fills the slots.
    """

    def __init__(self, kernel: str, args: tuple[Any, ...], expected: tuple[int, ...] | None):
        self._kernel = kernel
        self._words: list[Callable[[Any], int]] = []
        self._structures: list[int] = []  # passed by the address of the value itself
        sizes = []
        for i, value in enumerate(args):
            word, size = self._kind(i, value)
            self._words.append(word)
            sizes.append(size)
        if expected is not None and tuple(sizes) != expected:
            raise KernelError(
                f"{kernel} takes parameters of {expected} bytes, got {tuple(sizes)}: "
                f"{argument_words(args)}"
            )
        count = len(args)
        self._slots = (ctypes.c_uint64 * count)()
        first = ctypes.addressof(self._slots)
        self._pointers = (ctypes.c_void_p * count)(*(first + 8 * i for i in range(count)))
        self._address = ctypes.addressof(self._pointers)

    def _kind(self, index: int, value: Any) -> tuple[Callable[[Any], int], int]:
        """How a value of this type becomes a slot's word, and its size in bytes."""
        if value is None:
            return lambda _: 0, 8
        if isinstance(value, int):
            return _int_word, 4
        if isinstance(value, float):
            return _float_word, 4
        if isinstance(value, ctypes.Structure):
            self._structures.append(index)
            return lambda _: 0, ctypes.sizeof(value)
        if hasattr(getattr(value, "data", None), "ptr"):
            return _array_word, 8
        raise KernelError(f"{self._kernel}: argument {index} is a {type(value).__name__}")

    def pack(self, args: tuple[Any, ...]) -> int:
        """The address of the array of pointers to the arguments, valid until the next call."""
        try:
            self._slots[:] = [word(value) for word, value in zip(self._words, args, strict=True)]
        except _Refused:
            for i, (word, value) in enumerate(zip(self._words, args, strict=True)):
                try:
                    word(value)
                except _Refused as reason:
                    raise KernelError(f"{self._kernel}: argument {i}, {reason}") from None
        for i in self._structures:
            self._pointers[i] = ctypes.addressof(args[i])
        return self._address


class CudaKernel:
    """One compiled instance with so many parameters, loaded on a device."""

    def __init__(self, name: str, function: Any, n_parameters: int, queue: LaunchQueue):
        self.name = name
        self._function = function
        self._queue = queue
        driver = queue.driver
        self._static_shared = driver.function_attribute(function, "SHARED_SIZE_BYTES")
        self._max_threads = driver.function_attribute(function, "MAX_THREADS_PER_BLOCK")
        self._sizes = driver.parameter_sizes(function, n_parameters)
        self._allowed_shared = _DEFAULT_SHARED
        self._configs: dict[tuple[Any, ...], Any] = {}
        self._packers: dict[tuple[type, ...], _Packer] = {}

    @property
    def launched(self) -> bool:
        """Whether it has been, once at least."""
        return bool(self._configs)

    def __call__(
        self,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        *args: DeviceArray | int | float | ctypes.Structure | None,
        shared: int = 0,
        cluster: int = 1,
    ) -> None:
        """Enqueue on the device's stream; `Kernel.__call__` has the rules. Raises KernelError."""
        queue = self._queue
        key = (grid, block, shared, cluster, queue.pdl)
        config = self._configs.get(key)
        if config is None:
            config = self._configs[key] = self._configure(key, args)
        types = tuple(map(type, args))
        packer = self._packers.get(types)
        if packer is None:
            packer = self._packers[types] = _Packer(self.name, args, self._sizes)
        arguments = packer.pack(args)
        try:
            queue.enter()
            queue.driver.launch(config, self._function, arguments)
        except DriverFailure as error:
            raise self._failure(error, key, args) from error
        if queue.sync:
            try:
                queue.driver.synchronize(queue.stream)
            except DriverFailure as error:
                raise KernelError(f"{self._told(key, args)} failed: {error}") from error

    def _configure(self, key: tuple[Any, ...], args: Any) -> Any:
        """Check a launch shape seen for the first time against the limits."""
        grid, block, shared, cluster, dependent = key
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
        elif full_grid[2] % cluster:
            wrong = f"is not made of clusters of {cluster}"
        if wrong is not None:
            raise KernelError(f"{self._told(key, args)} {wrong}")
        try:
            self._queue.enter()
            if shared + self._static_shared > self._allowed_shared:
                self._queue.driver.allow_shared(self._function, shared)
                self._allowed_shared = shared + self._static_shared
            if cluster > 8:
                self._queue.driver.allow_cluster(self._function)
        except DriverFailure as error:
            raise self._failure(error, key, args) from error
        return self._queue.driver.launch_config(
            full_grid, full_block, shared, self._queue.stream, dependent, cluster
        )

    def _failure(self, error: DriverFailure, key: tuple[Any, ...], args: Any) -> KernelError:
        if error.sticky:
            return KernelError(
                f"an earlier kernel failed, reported at the launch of {self.name}: {error}. "
                "MINFER_SYNC=1 names the kernel; the device needs a new process"
            )
        return KernelError(f"{self._told(key, args)} was refused: {error}")

    def _told(self, key: tuple[Any, ...], args: Any) -> str:
        grid, block, shared, *_ = key
        words = argument_words(args)
        return f"{self.name} with grid {grid}, block {block}, shared {shared} on ({words})"


def _word(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if hasattr(value, "dtype") else repr(value)


def argument_words(args: Sequence[Any]) -> str:
    """Types and shapes of arguments, for messages: `float32[2, 3], 7`."""
    return ", ".join(
        type(value).__name__ if isinstance(value, ctypes.Structure) else _word(value)
        for value in args
    )
