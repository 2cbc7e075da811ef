"""Stand-ins for driver, CuPy and compiler, and kernel sources of a test's own."""

from __future__ import annotations

import ctypes
import types
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minfer_cuda.errors import KernelError
from minfer_cuda.kernels import compiler, module
from minfer_cuda.kernels.compiler import Cubin
from minfer_cuda.kernels.driver import DriverFailure
from minfer_cuda.kernels.launch import CudaKernel, LaunchQueue, Limits
from minfer_cuda.kernels.module import CudaDevice

HEADER = "#pragma once\n// a comment\n__device__ inline int one() { return 1; }\n"
KERNEL = '#include "one.cuh"\ntemplate <int N>\n__global__ void fill(int* x) { *x = N * one(); }\n'


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of kernel sources of its own, and an empty kernel cache."""
    folder = tmp_path / "cuda"
    folder.mkdir()
    (folder / "one.cuh").write_text(HEADER)
    (folder / "fill.cu").write_text(KERNEL)
    monkeypatch.setattr(compiler, "source_folder", lambda: folder)
    monkeypatch.setenv("MINFER_CACHE_DIR", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def nvrtc(sources: Path) -> None:
    try:
        compiler.nvrtc_version()
        compiler.header_folder()
    except (KernelError, ImportError) as error:
        pytest.skip(f"NVRTC: {error}")


@pytest.fixture
def compiles(sources: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A compiler that only records its calls."""
    calls: list[str] = []

    def compile_(stem: str, name: str, source: str, options: tuple[str, ...]) -> Cubin:
        calls.append(name)
        return Cubin(b"\x7fELF" + source.encode() + b"\0", f"_Z{name}", "log", 1)

    monkeypatch.setattr(compiler, "_compile", compile_)
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: (12, 9))
    return calls


class FakeDriver:
    """Records launches. `fail` maps a call's name to the failure it raises."""

    def __init__(self, **attributes: int) -> None:
        self.attributes = {
            "MAX_THREADS_PER_BLOCK": 1024, "MAX_BLOCK_DIM_X": 1024, "MAX_BLOCK_DIM_Y": 1024,
            "MAX_BLOCK_DIM_Z": 64, "MAX_GRID_DIM_X": 2**31 - 1, "MAX_GRID_DIM_Y": 65535,
            "MAX_GRID_DIM_Z": 65535, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 227 * 1024,
            "MULTIPROCESSOR_COUNT": 132, "COMPUTE_CAPABILITY_MAJOR": 9,
            "COMPUTE_CAPABILITY_MINOR": 0, **attributes,
        }  # fmt: skip
        self.cuda = (13, 0)
        self.devices = 1
        self.sizes: tuple[int, ...] | None = None
        self.count = 0  # parameters to read at a launch
        self.static_shared = 1024
        self.fail: dict[str, DriverFailure] = {}
        self.launches: list[tuple[dict[str, Any], list[int]]] = []
        self.allowed: list[int] = []
        self.clusters_allowed = 0
        self.mapped: list[tuple[int, ...]] = []
        self.loaded: list[str] = []
        self.synchronized = 0

    def _may_fail(self, call: str) -> None:
        if call in self.fail:
            raise self.fail[call]

    def version(self) -> tuple[int, int]:
        return self.cuda

    def device_count(self) -> int:
        return self.devices

    def device_name(self, ordinal: int) -> str:
        return "Fake GPU"

    def attribute(self, ordinal: int, name: str) -> int:
        return self.attributes[name]

    def primary_context(self, ordinal: int) -> str:
        return "context"

    def set_current(self, context: object) -> None:
        assert context == "context"

    def memory(self) -> tuple[int, int]:
        return 10, 100

    def synchronize(self, stream: int) -> None:
        self.synchronized += 1
        self._may_fail("synchronize")

    def load(self, cubin: bytes, lowered_name: str) -> str:
        self._may_fail("load")
        self.loaded.append(lowered_name)
        return lowered_name

    def function_attribute(self, function: object, name: str) -> int:
        return {"SHARED_SIZE_BYTES": self.static_shared, "MAX_THREADS_PER_BLOCK": 512}[name]

    def allow_shared(self, function: object, size_bytes: int) -> None:
        self.allowed.append(size_bytes)

    def parameter_sizes(self, function: object, count: int) -> tuple[int, ...] | None:
        return self.sizes

    def allow_cluster(self, function: object) -> None:
        self.clusters_allowed += 1

    def tensor_map(self, address: int, rows: int, columns: int, box_rows: int) -> bytes:
        self._may_fail("tensor_map")
        self.mapped.append((address, rows, columns, box_rows))
        return bytes([len(self.mapped)]) * 128

    def launch_config(
        self, grid, block, shared_bytes, stream, dependent, cluster=1
    ) -> dict[str, Any]:
        config = {"grid": grid, "block": block, "shared": shared_bytes, "dependent": dependent}
        return config | ({"cluster": cluster} if cluster > 1 else {})

    def launch(self, config: dict[str, Any], function: object, arguments: int) -> None:
        self._may_fail("launch")
        pointers = (ctypes.c_void_p * self.count).from_address(arguments)
        words = [ctypes.c_uint64.from_address(p).value for p in pointers if p]
        self.launches.append((config, words))


class FakeArray:
    def __init__(self, address: int = 0xABC000, contiguous: bool = True):
        self.shape, self.dtype, self.nbytes = (2, 3), np.dtype(np.float32), 24
        self.data = types.SimpleNamespace(ptr=address)
        self.flags = types.SimpleNamespace(c_contiguous=contiguous)


class Pair(ctypes.Structure):
    _fields_ = [("a", ctypes.c_int32), ("b", ctypes.c_float)]


def kernel_on(driver: FakeDriver, arch: int = 90) -> CudaKernel:
    queue = LaunchQueue(driver, "context", 7, Limits.of(driver, 0), arch)  # type: ignore[arg-type]
    return CudaKernel("fill<3>", "function", 1, queue)


class FakeCupy(types.SimpleNamespace):
    """The part of CuPy that CudaDevice uses, on the host."""

    def __init__(self) -> None:
        class Failure(Exception):
            pass

        self.stream_events: list[str] = []
        self.allocator: Callable[[int], None] | None = None
        self.full = False
        super().__init__(
            empty=self._empty,
            zeros=self._empty,
            get_default_memory_pool=lambda: types.SimpleNamespace(free_bytes=lambda: 5),
            cuda=types.SimpleNamespace(
                Device=lambda ordinal: nullcontext(),
                Stream=self._stream,
                using_allocator=self._using,
                memory=types.SimpleNamespace(OutOfMemoryError=MemoryError),
                runtime=types.SimpleNamespace(CUDARuntimeError=Failure),
                driver=types.SimpleNamespace(CUDADriverError=Failure),
            ),
        )

    def _empty(self, shape: Any, dtype: Any) -> FakeArray:
        if self.full:
            raise MemoryError
        return FakeArray()

    @contextmanager
    def _using(self, allocator: Callable[[int], None]) -> Any:
        self.allocator, before = allocator, self.allocator
        yield
        self.allocator = before

    def _stream(self, non_blocking: bool) -> Any:
        assert non_blocking

        class Stream(nullcontext):  # type: ignore[type-arg]
            ptr = 7
            begin_capture = staticmethod(lambda: self.stream_events.append("begin"))

            @staticmethod
            def end_capture() -> Any:
                self.stream_events.append("end")
                launch = lambda stream: self.stream_events.append("launch")  # noqa: E731
                return types.SimpleNamespace(launch=launch)

        return Stream()


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    fake = FakeCupy()
    monkeypatch.setattr(module, "_import_cupy", lambda: fake)
    monkeypatch.setattr(module, "nvrtc_version", lambda: (12, 9))
    return fake


def device_on(driver: FakeDriver, ordinal: int = 0) -> CudaDevice:
    return CudaDevice(ordinal, driver)  # type: ignore[arg-type]
