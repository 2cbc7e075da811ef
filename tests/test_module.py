"""The loader, the launch site and step graphs: with NVRTC where it is installed, and fakes of the
driver and CuPy in place of a GPU."""

from __future__ import annotations

import ctypes
import logging
import re
import struct
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minfer_cuda.errors import DeviceError, KernelError, OutOfMemoryError
from minfer_cuda.graph import StepGraphs
from minfer_cuda.kernels import compiler, module
from minfer_cuda.kernels.compiler import Cubin, compile_cubin, expand_source
from minfer_cuda.kernels.driver import Driver, DriverFailure
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


# ---- sources


def test_includes_are_expanded_once_and_every_line_keeps_its_number(sources: Path) -> None:
    (sources / "two.cuh").write_text('#include "one.cuh"\nint two;\n')
    (sources / "x.cu").write_text(
        '#include "two.cuh"\n#include "one.cuh"\n#include <math.h>\nint x;\n'
    )
    text = expand_source("x")
    assert text.count("int one()") == 1
    assert "#pragma once" not in text and "#include <math.h>" in text
    place, at = "", 0
    places = {}
    for line in text.splitlines():
        if line.startswith("#line"):
            _, number, place = line.split()
            at = int(number)
        else:
            places[line] = (place, at)
            at += 1
    assert places["int x;"] == ('"cuda/x.cu"', 4)
    assert places["int two;"] == ('"cuda/two.cuh"', 2)
    assert places["__device__ inline int one() { return 1; }"] == ('"cuda/one.cuh"', 3)


def test_a_missing_include_is_named(sources: Path) -> None:
    (sources / "x.cu").write_text('#include "gone.cuh"\n')
    with pytest.raises(KernelError, match="gone.cuh"):
        expand_source("x")


def test_the_engines_own_sources_are_found() -> None:
    assert (compiler.source_folder() / "common.cuh").is_file()


def test_the_parameters_of_every_kernel_are_counted_by_its_declaration() -> None:
    found = {}
    for path in compiler.source_folder().glob("*.cu"):
        source = expand_source(path.stem)
        for name in re.findall(r"__launch_bounds__\([^()]*\)\s*(\w+)\(", path.read_text()):
            found[name] = compiler.parameter_count(source, path.stem, f"{name}<int, 2>")
    assert len(found) > 20 and min(found.values()) == 1
    assert (found["read_xor"], found["matmul"], found["attention_decode"]) == (3, 1, 12)
    with pytest.raises(KernelError, match="cuda/norm.cu declares no kernel rms<int>"):
        compiler.parameter_count(expand_source("norm"), "norm", "rms<int>")


# ---- NVRTC


def test_a_kernel_compiles_to_an_elf_file_with_its_lowered_name(nvrtc: None) -> None:
    cubin = compile_cubin("fill", "fill<3>", 90)
    assert cubin.data.startswith(b"\x7fELF")
    assert cubin.lowered_name.encode() in cubin.data
    assert "registers" in cubin.log


def test_an_error_in_a_header_shows_kernel_file_and_line(nvrtc: None, sources: Path) -> None:
    (sources / "one.cuh").write_text(HEADER + "\nint wrong() { return nothing; }\n")
    with pytest.raises(KernelError, match=r"(?s)fill<3>.*sm_90.*cuda/one\.cuh\(5\): error"):
        compile_cubin("fill", "fill<3>", 90)


def test_architecture_specific_code_is_compiled_only_where_a_source_asks(
    nvrtc: None, sources: Path
) -> None:
    asks = "#ifndef __CUDA_ARCH_FEAT_SM90_ALL\n#error plain\n#endif\n"
    (sources / "fill.cu").write_text(KERNEL + asks)
    with pytest.raises(KernelError, match="plain"):
        compile_cubin("fill", "fill<3>", 90)
    (sources / "fill.cu").write_text("// arch-specific: sm_90a\n" + KERNEL + asks)
    assert compile_cubin("fill", "fill<3>", 90).data


def test_missing_headers_are_told_with_a_hint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nvrtc: None
) -> None:
    monkeypatch.setattr(Path, "is_file", lambda path: False)
    compiler.header_folder.cache_clear()
    with pytest.raises(KernelError, match=r"cuda_fp16\.h.*pip install nvidia-cuda-runtime"):
        compiler.header_folder()


# ---- disk cache


def test_a_second_start_compiles_nothing(compiles: list[str]) -> None:
    first = compile_cubin("fill", "fill<3>", 90)
    assert compile_cubin("fill", "fill<3>", 90) == first
    assert compiles == ["fill<3>"]


def test_another_name_architecture_compiler_or_header_compiles_again(
    compiles: list[str], sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_cubin("fill", "fill<3>", 90)
    compile_cubin("fill", "fill<4>", 90)
    compile_cubin("fill", "fill<3>", 80)
    (sources / "one.cuh").write_text(HEADER.replace("return 1", "return 2"))
    compile_cubin("fill", "fill<3>", 90)
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: (13, 0))
    compile_cubin("fill", "fill<3>", 90)
    assert len(compiles) == 5


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-1], lambda b: b[:40] + b"x" + b[41:], lambda b: b""]
)
def test_a_damaged_entry_is_compiled_again(
    compiles: list[str], tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    first = compile_cubin("fill", "fill<3>", 90)
    (entry,) = (tmp_path / "cache").rglob("*.cubin")
    entry.write_bytes(damage(entry.read_bytes()))
    assert compile_cubin("fill", "fill<3>", 90) == first
    assert len(compiles) == 2
    assert compile_cubin("fill", "fill<3>", 90) == first
    assert len(compiles) == 2


def test_an_unusable_cache_folder_is_told_once_and_kernels_still_compile(
    compiles: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("MINFER_CACHE_DIR", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert compile_cubin("fill", "fill<3>", 90).data
    assert len(compiles) == 3
    assert sum("MINFER_CACHE_DIR" in r.message for r in caplog.records) == 1


def test_a_full_disk_leaves_no_partial_entry(
    compiles: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compiler.os, "replace", full)
    assert compile_cubin("fill", "fill<3>", 90).data
    assert list((tmp_path / "cache" / "kernels").iterdir()) == []


def test_two_writers_of_one_entry_leave_a_whole_one(compiles: list[str], tmp_path: Path) -> None:
    threads = [
        threading.Thread(target=compile_cubin, args=("fill", "fill<3>", 90)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.suffix for path in (tmp_path / "cache" / "kernels").iterdir()] == [".cubin"]
    before = len(compiles)
    compile_cubin("fill", "fill<3>", 90)
    assert len(compiles) == before


# ---- a fake driver


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


def test_the_bindings_carry_a_launch_attribute_to_the_driver() -> None:
    """With cuda-bindings and no driver: the structures are made here, only the call needs a GPU."""
    api = pytest.importorskip("cuda.bindings.driver")
    driver = Driver.__new__(Driver)
    driver._api = api
    plain, dependent = (
        driver.launch_config((5, 4, 3), (64, 2, 1), 100, 7, on) for on in (False, True)
    )
    assert (plain.numAttrs, dependent.numAttrs) == (0, 1)
    assert dependent.attrs[0].value.programmaticStreamSerializationAllowed == 1
    assert (dependent.gridDimX, dependent.gridDimY, dependent.gridDimZ) == (5, 4, 3)
    assert (dependent.blockDimX, dependent.blockDimY, dependent.blockDimZ) == (64, 2, 1)
    assert (dependent.sharedMemBytes, int(dependent.hStream)) == (100, 7)


def test_the_bindings_carry_a_cluster_to_the_driver() -> None:
    driver = Driver.__new__(Driver)
    driver._api = pytest.importorskip("cuda.bindings.driver")
    config = driver.launch_config((2, 1, 16), (64, 1, 1), 0, 7, True, 16)
    assert config.numAttrs == len(config.attrs) == 2
    sizes = config.attrs[1].value.clusterDim
    assert (sizes.x, sizes.y, sizes.z) == (1, 1, 16)


# ---- the launch site


def test_clusters_divide_the_grid_and_large_ones_are_asked_for() -> None:
    driver = FakeDriver()
    kernel = kernel_on(driver)
    kernel((2, 1, 16), 32, cluster=8)
    assert driver.clusters_allowed == 0
    kernel((2, 1, 16), 32, cluster=16)
    assert driver.clusters_allowed == 1
    assert [config["cluster"] for config, _ in driver.launches] == [8, 16]
    with pytest.raises(KernelError, match="not made of clusters of 16"):
        kernel((2, 1, 15), 32, cluster=16)


def test_arguments_are_passed_as_pointer_int32_float32_null_and_structure() -> None:
    driver = FakeDriver()
    driver.count = 5
    kernel_on(driver)(2, 64, FakeArray(), -5, 1.5, None, Pair(3, 0.5))
    config, words = driver.launches[0]
    assert config == {"grid": (2, 1, 1), "block": (64, 1, 1), "shared": 0, "dependent": True}
    assert words[0] == 0xABC000
    assert words[1] & 0xFFFFFFFF == 2**32 - 5
    assert words[2] & 0xFFFFFFFF == struct.unpack("I", struct.pack("f", 1.5))[0]
    assert words[3] == 0
    assert struct.pack("Q", words[4]) == bytes(Pair(3, 0.5))


def test_each_launch_passes_its_own_values_whatever_the_one_before_had() -> None:
    driver = FakeDriver()
    driver.count = 2
    kernel = kernel_on(driver)
    kernel(1, 32, 7, FakeArray(0x1000))
    kernel(1, 32, Pair(1, 1.0), 2)
    kernel(1, 32, 8, FakeArray(0x2000))
    kernel(1, 32, 9, None)
    words = [words for _, words in driver.launches]
    assert [w[0] & 0xFFFFFFFF for w in words] == [7, 1, 8, 9]
    assert [words[0][1], words[1][1] & 0xFFFFFFFF, words[2][1], words[3][1]] == [
        0x1000,
        2,
        0x2000,
        0,
    ]


@pytest.mark.parametrize(
    "bad", [2**31, -(2**31) - 1, 1e39, "text", np.int64(1), np.zeros(2, np.float32), [1]], ids=repr
)
def test_other_argument_types_are_refused_with_the_kernels_name(bad: Any) -> None:
    with pytest.raises(KernelError, match=r"fill<3>.*argument 1"):
        kernel_on(FakeDriver())(1, 32, FakeArray(), bad)


def test_an_array_with_gaps_is_refused() -> None:
    with pytest.raises(KernelError, match=r"argument 0, float32\[2, 3\], has gaps"):
        kernel_on(FakeDriver())(1, 32, FakeArray(contiguous=False))


def test_arguments_that_do_not_match_the_kernels_parameters_are_refused() -> None:
    driver = FakeDriver()
    driver.sizes = (8, 4)
    kernel = kernel_on(driver)
    kernel(1, 32, FakeArray(), 1)
    for wrong in [(FakeArray(),), (1, FakeArray()), (FakeArray(), 1, 2)]:
        with pytest.raises(KernelError, match=r"takes parameters of \(8, 4\) bytes"):
            kernel(1, 32, *wrong)
    assert len(driver.launches) == 1


@pytest.mark.parametrize(
    ("grid", "block", "shared", "words"),
    [
        (0, 32, 0, "empty"),
        ((1, 0), 32, 0, "empty"),
        (1, 0, 0, "empty"),
        ((1, 65536), 32, 0, "grid limit"),
        (1, (1, 1, 65), 0, "block limit"),
        (1, 513, 0, "512 threads"),  # the kernel's own limit, by its registers
        (1, 32, 227 * 1024 - 1023, "shared memory"),
    ],
)
def test_launches_outside_the_devices_limits_are_refused_with_the_shape(
    grid: Any, block: Any, shared: int, words: str
) -> None:
    driver = FakeDriver()
    with pytest.raises(KernelError, match=words) as error:
        kernel_on(driver)(grid, block, FakeArray(), 3, shared=shared)
    assert f"grid {grid}, block {block}" in str(error.value)
    assert "float32[2, 3], 3" in str(error.value)
    assert driver.launches == []


def test_shared_memory_above_48_kb_is_asked_for_once() -> None:
    driver = FakeDriver()
    kernel = kernel_on(driver)
    for shared in (40_000, 100_000, 100_000, 60_000, 226 * 1024):
        kernel(1, 32, shared=shared)
    assert driver.allowed == [100_000, 226 * 1024]
    assert len(driver.launches) == 5


@pytest.mark.parametrize(("arch", "dependent"), [(75, False), (89, False), (90, True), (120, True)])
def test_launches_are_dependent_from_sm_90_on_and_can_be_plain(arch: int, dependent: bool) -> None:
    driver = FakeDriver()
    kernel = kernel_on(driver, arch)
    kernel(1, 32)
    kernel._queue.pdl = False
    kernel(1, 32)
    assert [config["dependent"] for config, _ in driver.launches] == [dependent, False]


def test_a_refused_launch_names_its_kernel_and_shapes() -> None:
    driver = FakeDriver()
    driver.fail["launch"] = DriverFailure(
        "cuLaunchKernelEx", 701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"
    )
    with pytest.raises(KernelError, match=r"fill<3> with grid 1.*was refused.*OUT_OF_RESOURCES"):
        kernel_on(driver)(1, 32)


def test_an_earlier_kernels_error_is_not_blamed_on_the_launch_that_reports_it() -> None:
    driver = FakeDriver()
    driver.fail["launch"] = DriverFailure("cuLaunchKernelEx", 700, "CUDA_ERROR_ILLEGAL_ADDRESS")
    with pytest.raises(KernelError, match=r"^an earlier kernel failed.*MINFER_SYNC=1"):
        kernel_on(driver)(1, 32)


def test_with_minfer_sync_each_launch_waits_and_names_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MINFER_SYNC", "1")
    driver = FakeDriver()
    kernel = kernel_on(driver)
    kernel(1, 32)
    assert driver.synchronized == 1
    driver.fail["synchronize"] = DriverFailure(
        "cuStreamSynchronize", 700, "CUDA_ERROR_ILLEGAL_ADDRESS"
    )
    with pytest.raises(KernelError, match=r"^fill<3> with grid 1.*failed"):
        kernel(1, 32)


def test_a_thread_that_launches_gets_the_context_first() -> None:
    driver, current = FakeDriver(), []
    driver.set_current = lambda context: current.append(threading.get_ident())  # type: ignore[method-assign]
    kernel = kernel_on(driver)
    kernel(1, 32)
    kernel(1, 32)
    thread = threading.Thread(target=kernel, args=(1, 32))
    thread.start()
    thread.join()
    assert current == [threading.get_ident(), thread.ident]


# ---- the device


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


def test_the_device_reports_what_the_driver_says(cupy: FakeCupy) -> None:
    device = device_on(FakeDriver(COMPUTE_CAPABILITY_MAJOR=8, COMPUTE_CAPABILITY_MINOR=6))
    assert (device.name, device.arch, device.sm_count) == ("Fake GPU", 86, 132)
    assert device.shared_limit == 227 * 1024
    assert not device.pdl
    assert (device.free_bytes, device.total_bytes, device.driver_version) == (15, 100, (13, 0))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"devices": 0}, "this machine has 0"),
        ({"devices": 2}, "CUDA device 2 does not exist: this machine has 2"),
        ({"cuda": (11, 8), "devices": 3}, r"driver supports CUDA 11\.8.*update the driver"),
        ({"attributes": {"COMPUTE_CAPABILITY_MAJOR": 7, "COMPUTE_CAPABILITY_MINOR": 0},
          "devices": 3}, r"compute capability 7\.0.*--device cpu"),
    ],
)  # fmt: skip
def test_an_unusable_device_is_told_with_what_to_do(
    cupy: FakeCupy, change: dict[str, Any], words: str
) -> None:
    driver = FakeDriver()
    for name, value in change.items():
        setattr(driver, name, value)
    with pytest.raises(DeviceError, match=words):
        device_on(driver, 2)


def test_a_driver_older_than_nvrtc_is_refused(
    cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = FakeDriver()
    driver.cuda = (12, 4)
    assert device_on(driver)
    monkeypatch.setattr(module, "nvrtc_version", lambda: (13, 0))
    with pytest.raises(DeviceError, match=r"CUDA 12\.4, NVRTC is 13\.0"):
        device_on(driver)


def test_without_cupy_the_hint_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "nvrtc_version", lambda: (12, 9))
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceError, match="pip install cupy"):
        device_on(FakeDriver())


def test_the_loader_imports_without_cupy_and_cuda_bindings() -> None:
    code = (
        "import sys; sys.modules['cupy'] = sys.modules['cuda'] = None\n"
        "import minfer_cuda.graph, minfer_cuda.kernels.sampling\n"
        "from minfer_cuda.errors import DeviceError\n"
        "from minfer_cuda.kernels.module import CudaDevice\n"
        "try: CudaDevice()\n"
        "except DeviceError as e: print(e)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install cuda-bindings" in done.stdout


def test_kernels_compile_on_threads_once_each_with_progress(
    cupy: FakeCupy, compiles: list[str]
) -> None:
    driver, seen = FakeDriver(), []
    device = device_on(driver)
    pairs = [("fill", f"fill<{n}>") for n in (1, 2, 3, 2)]
    device.compile(pairs, lambda done, of: seen.append((done, of)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert sorted(compiles) == ["fill<1>", "fill<2>", "fill<3>"]
    assert device.kernel("fill", "fill<2>") is device.kernel("fill", "fill<2>")
    assert sorted(driver.loaded) == ["_Zfill<1>", "_Zfill<2>", "_Zfill<3>"]


def test_one_kernel_that_does_not_compile_fails_the_whole_call(
    cupy: FakeCupy, compiles: list[str]
) -> None:
    with pytest.raises(KernelError, match="gone"):
        device_on(FakeDriver()).compile([("fill", "fill<1>"), ("gone", "gone")])


def test_a_cubin_that_does_not_load_names_the_kernel(cupy: FakeCupy, compiles: list[str]) -> None:
    driver = FakeDriver()
    driver.fail["load"] = DriverFailure("cuModuleLoadData", 209, "CUDA_ERROR_NO_BINARY_FOR_GPU")
    with pytest.raises(KernelError, match=r"fill<1> of cuda/fill\.cu does not load on Fake GPU"):
        device_on(driver).kernel("fill", "fill<1>")


def test_a_frozen_device_allocates_nothing_not_even_by_cupys_own_calls(cupy: FakeCupy) -> None:
    device = device_on(FakeDriver())
    with device.freeze():
        for allocate in (device.empty, device.zeros):
            with pytest.raises(KernelError, match=r"\(2, 3\) float32 inside a step"):
                allocate((2, 3), np.float32)
        with pytest.raises(KernelError, match="inside a step"):
            device.upload(np.zeros(3))
        assert cupy.allocator is not None
        with pytest.raises(KernelError, match="512 bytes inside a step"):
            cupy.allocator(512)
    assert device.empty((2, 3), np.float32).nbytes == 24


def test_memory_that_does_not_suffice_is_told_with_the_sizes(cupy: FakeCupy) -> None:
    device = device_on(FakeDriver())
    cupy.full = True
    with pytest.raises(OutOfMemoryError, match=r"\(7, 9\) float32: 15 of 100 bytes"):
        device.empty((7, 9), np.float32)


def test_waiting_reports_a_failed_kernel(cupy: FakeCupy) -> None:
    driver = FakeDriver()
    driver.fail["synchronize"] = DriverFailure(
        "cuStreamSynchronize", 700, "CUDA_ERROR_ILLEGAL_ADDRESS"
    )
    with pytest.raises(KernelError, match="a kernel failed.*MINFER_SYNC=1"):
        device_on(driver).synchronize()


# ---- step graphs


def test_a_step_runs_eagerly_then_is_captured_then_replayed(cupy: FakeCupy) -> None:
    graphs, steps = StepGraphs(device_on(FakeDriver())), []
    for _ in range(4):
        graphs.run("decode", lambda: steps.append("decode"))
    graphs.run("other", lambda: steps.append("other"))
    assert steps == ["decode", "decode", "other"]
    assert cupy.stream_events == ["begin", "end", "launch", "launch", "launch"]
    assert (graphs.captures, graphs.replays) == (1, 2)
    graphs.clear()
    graphs.run("decode", lambda: steps.append("again"))
    assert steps[-1] == "again"


def test_disabled_graphs_or_minfer_sync_run_every_step_eagerly(
    cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    device = device_on(FakeDriver())
    monkeypatch.setenv("MINFER_SYNC", "1")
    for graphs in (StepGraphs(device, enabled=False), StepGraphs(device_on(FakeDriver()))):
        for _ in range(3):
            graphs.run("decode", lambda: steps.append(1))
    assert len(steps) == 6
    assert cupy.stream_events == []


def test_an_allocation_in_a_capture_is_an_error_and_the_stream_is_usable_after_it(
    cupy: FakeCupy,
) -> None:
    device = device_on(FakeDriver())
    graphs = StepGraphs(device)

    def step() -> None:
        device.empty((2, 3), np.float32)

    graphs.run("decode", step)
    for _ in range(2):
        with pytest.raises(KernelError, match="inside a step"):
            graphs.run("decode", step)
    assert cupy.stream_events == ["begin", "end"] * 2
    assert device.empty((2, 3), np.float32) is not None
