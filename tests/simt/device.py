"""SimtDevice: the Device that runs cuda/*.cu on the CPU and tells what a kernel does wrong."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from minfer_cuda.errors import KernelError
from minfer_cuda.kernels.compiler import expand_source
from minfer_cuda.kernels.module import TensorMap

from . import build
from .abi import Fault, Launch, Module, Parameter, Range
from .arrays import Allocation, SimtArray, holds

_KINDS = (
    "",  # in the order of FaultKind in runtime.h
    "out of bounds",
    "misaligned",
    "uninitialised",
    "race",
    "divergence",
    "barrier",
    "forbidden",
    "crash",
)
_MAX_THREADS = 1024
_lock = threading.Lock()  # the runtime runs one launch at a time


class SimtError(KernelError):
    """What a kernel did wrong. `kind` is one of out of bounds, misaligned, uninitialised, race,
    divergence, barrier, forbidden, crash; `places` are source places, innermost first
    (`matvec.cu:88`), `other_places` those of a race's first access."""

    def __init__(self, message: str, kind: str, places: list[str], other_places: list[str]):
        super().__init__(message)
        self.kind = kind
        self.places = places
        self.other_places = other_places


_POINTEES = {
    "f": (np.float32,),
    "h": (np.float16, np.uint16),
    "b": (np.uint16,),
    "i": (np.int32, np.uint32),
}


def _dim3(size: int | tuple[int, ...]) -> tuple[int, int, int]:
    sizes = (size,) if isinstance(size, int) else tuple(size)
    return (*sizes, 1, 1, 1)[:3]  # type: ignore[return-value]


def _words(args: Sequence[Any]) -> str:
    return ", ".join(
        f"{a.dtype}{list(a.shape)}"
        if hasattr(a, "dtype")
        else type(a).__name__
        if isinstance(a, ctypes.Structure)
        else repr(a)
        for a in args
    )


def _is_structure(value: Any, size: int) -> bool:
    return isinstance(value, ctypes.Structure) and ctypes.sizeof(value) == size


def _check_array(array: SimtArray, pointee: str, checks: bool, wrong: str) -> None:
    """Raises KernelError for an array that a GPU would read wrongly or not at all."""
    if not array.flags.c_contiguous:
        raise KernelError(f"{wrong} is not contiguous")
    if not holds(array):
        raise KernelError(f"{wrong} is not a device array")
    if checks and array.nbytes and not array.allocation.writes.size:
        raise KernelError(f"{wrong} comes from a device without checks")
    fitting = _POINTEES.get(pointee, (array.dtype,))
    if array.dtype.itemsize > 1 and array.dtype not in fitting:  # bytes may hold anything
        expected = np.dtype(fitting[0]).name
        raise KernelError(f"{wrong} is {array.dtype}, the parameter points to {expected}")


def range_of(allocation: Allocation, address: int, nbytes: int) -> Range:
    """The bytes, with their shadow words; keeps them alive."""
    offset = 8 * (address - allocation.address)
    writes = allocation.writes.ctypes.data + offset
    found = Range(address, address + nbytes, writes, allocation.reads.ctypes.data + offset)
    found.allocation = allocation
    return found


class SimtKernel:
    """One instance, loaded. `Kernel` has the rules of a call; beyond them the arguments are checked
    against the kernel's parameters."""

    def __init__(self, device: SimtDevice, stem: str, name: str, library: Path):
        self.name = name
        self.stem = stem
        self._device = device
        self._path = library
        self._library = ctypes.CDLL(str(library))
        self._library.simt_touch_shared.restype = ctypes.c_void_p
        self._library.simt_parameters.restype = ctypes.POINTER(Parameter)
        table = self._library.simt_parameters()
        self._parameters: list[tuple[str, str, int]] = []
        while (p := table[len(self._parameters)]).kind != b"\0":
            self._parameters.append((p.kind.decode(), p.pointee.decode(), p.bytes))

    def __call__(
        self,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        *args: Any,
        shared: int = 0,
        cluster: int = 1,
    ) -> None:
        told = f"{self.name} with grid {grid}, block {block}, shared {shared} on ({_words(args)})"
        full_grid, full_block = _dim3(grid), _dim3(block)
        threads = full_block[0] * full_block[1] * full_block[2]
        if min(full_grid) < 1 or min(full_block) < 1 or shared < 0:
            raise KernelError(f"{told} is empty")
        if threads > _MAX_THREADS or full_block[2] > 64 or max(full_grid[1:]) > 65535:
            raise KernelError(f"{told} exceeds the launch limits")
        with _lock:
            module = self._device.module(self._library)
            fixed = module.shared_end - module.shared_begin
            if shared + fixed > self._device.shared_limit:
                raise KernelError(
                    f"{told} needs {shared} + {fixed} bytes of shared memory, "
                    f"the device has {self._device.shared_limit} a block"
                )
            values, ranges = self._pack(args, told)
            pointers = (ctypes.c_void_p * (len(values) + 1))(*map(ctypes.addressof, values))
            table = (Range * (len(ranges) + 1))(*ranges)
            launch = Launch(
                full_grid, full_block, shared, self._device.checks,
                ctypes.cast(self._library.simt_run, ctypes.c_void_p).value,
                ctypes.addressof(pointers), module, ctypes.addressof(table), len(ranges),
            )  # fmt: skip
            fault = Fault()
            self._device.note_launch(self)
            if self._device.runtime.simt_launch(ctypes.byref(launch), ctypes.byref(fault)):
                raise self._error(fault, module, args)

    def _pack(self, args: tuple[Any, ...], told: str) -> tuple[list[Any], list[Range]]:
        """The arguments as C values, and the memory that they give access to."""
        wanted = self._parameters
        if len(args) != len(wanted):
            raise KernelError(f"{told}: it takes {len(wanted)} arguments, got {len(args)}")
        values: list[Any] = []
        ranges: list[Range] = []
        for i, (value, (kind, pointee, size)) in enumerate(zip(args, wanted, strict=True)):
            wrong = f"{told}: argument {i}"
            if isinstance(value, np.ndarray) and kind == "p":
                _check_array(value, pointee, self._device.checks, wrong)
                values.append(ctypes.c_void_p(value.ctypes.data))
                ranges.append(range_of(value.allocation, value.ctypes.data, value.nbytes))
            elif value is None and kind == "p":
                values.append(ctypes.c_void_p(0))
            elif isinstance(value, int) and kind == "i":
                if not -(2**31) <= value < 2**31:
                    raise KernelError(f"{wrong}, {value}, is not an int32")
                values.append(ctypes.c_int32(value))
            elif isinstance(value, float) and kind == "f":
                values.append(ctypes.c_float(value))
            elif _is_structure(value, size) and kind == "s":
                values.append(value)
                ranges += self._device.ranges_in(value)
            else:
                names = dict(p="a pointer", i="int", f="float", s=f"a structure of {size} bytes")
                raise KernelError(f"{wrong} is {_words([value])}, the parameter is {names[kind]}")
        return values, ranges

    def _error(self, fault: Fault, module: Module, args: tuple[Any, ...]) -> SimtError:
        def places(frames: Any) -> list[str]:
            inside = [f - 1 - module.image_begin for f in frames if f]
            return build.places(self._path, inside)

        kind = _KINDS[fault.kind]
        here, there = places(fault.frames), places(fault.other_frames)
        text = fault.text.decode()
        if fault.address and "shared memory" not in text:
            text += self._nearest(fault.address, args)
        message = (
            f"{self.name}: {kind}: {text}; block {tuple(fault.block)}, "
            f"thread {tuple(fault.thread)} at {' < '.join(here) or 'an unknown place'}"
        )
        if there:
            other = f"thread {tuple(fault.other_thread)} " if fault.has_other else ""
            message += f"; {other}at {' < '.join(there)}"
        return SimtError(message, kind, here, there)

    def _nearest(self, address: int, args: tuple[Any, ...]) -> str:
        """Which argument the address belongs to or lies next to."""
        arrays = [(i, a) for i, a in enumerate(args) if isinstance(a, np.ndarray)]

        def distance(array: np.ndarray) -> int:
            start = array.ctypes.data
            return max(start - address, address - (start + array.nbytes) + 1, 0)

        near = min(arrays, key=lambda pair: distance(pair[1]), default=None)
        if near is None or distance(near[1]) > 1 << 20:
            return f" (address {address:#x})"
        i, array = near
        at = address - array.ctypes.data
        return f" (byte {at} of argument {i}, {_words([array])}, {array.nbytes} bytes)"


class SimtDevice:
    """Runs launches at once, on the calling thread.

    `checks` finds wrong accesses; without it barriers, collectives and launch arguments are still
    checked. `source` gives the text of a kernel file, for planted faults. `launched` collects the
    (stem, name) pairs of our own files that have run on any device of the process.
    """

    launched: set[tuple[str, str]] = set()

    def __init__(
        self,
        checks: bool = True,
        arch: int = 90,
        sm_count: int = 4,
        shared_limit: int = 227 * 1024,
        source: Callable[[str], str] = expand_source,
    ):
        self.name = "SIMT shim"
        self.arch = arch
        self.sm_count = sm_count
        self.shared_limit = shared_limit
        self.cluster_limit = 1
        self.checks = checks
        self.runtime = ctypes.CDLL(str(build.runtime()), mode=ctypes.RTLD_GLOBAL)
        self._source = source
        self._kernels: dict[tuple[str, str], SimtKernel] = {}
        self._allocations = weakref.WeakValueDictionary[int, Allocation]()

    def kernel(self, stem: str, name: str) -> SimtKernel:
        if (stem, name) not in self._kernels:
            library = build.kernel(stem, name, self._source(stem), self.checks)
            self._kernels[stem, name] = SimtKernel(self, stem, name, library)
        return self._kernels[stem, name]

    def compile(
        self,
        kernels: Sequence[tuple[str, str]],
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda pair: self.kernel(*pair), dict.fromkeys(kernels)))

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> SimtArray:
        """Unwritten: bytes 0xff, and an error to read from a kernel."""
        dtype = np.dtype(dtype)
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        allocation = Allocation(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize, self.checks)
        self._allocations[allocation.address] = allocation
        array = np.ndarray(shape, dtype, allocation.bytes).view(SimtArray)
        array.allocation = allocation
        return array

    def zeros(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> SimtArray:
        array = self.empty(shape, dtype)
        array[...] = 0
        return array

    def upload(self, host: np.ndarray, into: SimtArray | None = None) -> SimtArray:
        host = np.ascontiguousarray(host)
        array = self.empty(host.shape, host.dtype) if into is None else into
        if array.nbytes != host.nbytes or array.dtype != host.dtype:
            raise KernelError(f"upload of {_words([host])} into {_words([array])}")
        array[...] = host.reshape(array.shape)
        return array

    def download(self, array: SimtArray) -> np.ndarray:
        return np.array(array, subok=False)

    @property
    def free_bytes(self) -> int:
        return 1 << 40

    def tensor_map(self, array: SimtArray, box_rows: int) -> ctypes.Structure:
        """Address, columns, rows: what that of cuda/wgmma.cuh has under MINFER_SIMT."""
        words = TensorMap()
        words.words[:3] = [array.data.ptr, array.shape[1], array.shape[0]]
        return words

    def pinned(self, shape: tuple[int, ...], dtype: DTypeLike) -> tuple[np.ndarray, SimtArray]:
        array = self.zeros(shape, dtype)
        return array.view(np.ndarray), array

    def record(self) -> None:
        """Nothing is ever pending."""

    def wait(self, mark: None) -> None:
        """Nothing is ever pending."""

    def synchronize(self) -> None:
        """Nothing is ever pending."""

    # ---- what kernels ask ----

    def note_launch(self, kernel: SimtKernel) -> None:
        if self._source is expand_source:
            self.launched.add((kernel.stem, kernel.name))

    def module(self, library: ctypes.CDLL) -> Module:
        library.simt_touch_shared()
        module = Module()
        code = ctypes.cast(library.simt_run, ctypes.c_void_p)
        self.runtime.simt_module(code, ctypes.byref(module))
        return module

    def ranges_in(self, structure: ctypes.Structure) -> list[Range]:
        """Whole allocations that a structure's 64-bit fields point into."""
        words = np.frombuffer(bytes(structure)[: ctypes.sizeof(structure) // 8 * 8], np.uint64)
        return [
            range_of(a, a.address, a.nbytes)
            for a in list(self._allocations.values())
            if any(a.address <= int(word) < a.address + max(a.nbytes, 1) for word in words)
        ]
