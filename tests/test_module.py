"""The device: what it reports, compiles, loads and allocates, with fakes of the driver and CuPy."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from kernel_fakes import FakeArray, FakeCupy, FakeDriver, device_on

from minfer_cuda.errors import DeviceError, KernelError, OutOfMemoryError
from minfer_cuda.kernels import module
from minfer_cuda.kernels.driver import DriverFailure


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
    driver = FakeDriver()
    seen: list[tuple[int, int]] = []
    device = device_on(driver)
    pairs = [("fill", f"fill<{n}>") for n in (1, 2, 3, 2)]
    device.compile(pairs, lambda done, of: seen.append((done, of)))
    assert seen == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert sorted(compiles) == ["fill<1>", "fill<2>", "fill<3>"]
    assert device.kernel("fill", "fill<2>") is device.kernel("fill", "fill<2>")
    assert sorted(driver.loaded) == ["_Zfill<1>", "_Zfill<2>", "_Zfill<3>"]


def test_a_source_is_read_once_for_all_its_instances(
    cupy: FakeCupy, compiles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    source = module.Source
    monkeypatch.setattr(module, "Source", lambda *of: (read.append(of[0]), source(*of))[1])
    device = device_on(FakeDriver())
    device.compile([("fill", "fill<1>"), ("fill", "fill<2>")])
    device.kernel("fill", "fill<3>")
    assert read == ["fill"] and len(compiles) == 3


def test_only_what_the_disk_cache_lacks_is_compiled_and_counted(
    cupy: FakeCupy, compiles: list[str]
) -> None:
    told: list[tuple[int, int]] = []
    pairs = [("fill", f"fill<{n}>") for n in (1, 2, 3)]
    device_on(FakeDriver()).compile(pairs[1:2])
    driver = FakeDriver()
    device_on(driver).compile(pairs, lambda *counts: told.append(counts))
    assert told == [(0, 2), (1, 2), (2, 2)]
    assert driver.loaded == ["_Zfill<1>", "_Zfill<2>", "_Zfill<3>"]
    told.clear()
    device_on(FakeDriver()).compile(pairs, lambda *counts: told.append(counts))
    assert told == []


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


def test_a_matrix_is_described_to_the_driver_once(cupy: FakeCupy) -> None:
    driver = FakeDriver()
    device, array = device_on(driver), FakeArray()
    array.shape = (40, 128)
    first = device.tensor_map(array, 16)
    assert driver.mapped == [(array.data.ptr, 40, 128, 16)]
    assert device.tensor_map(array, 16) is first and bytes(first) == b"\x01" * 128
    assert bytes(device.tensor_map(array, 24)) == b"\x02" * 128
    driver.fail["tensor_map"] = DriverFailure(
        "cuTensorMapEncodeTiled", 1, "CUDA_ERROR_INVALID_VALUE"
    )
    with pytest.raises(KernelError, match=r"a tensor map of .*CUDA_ERROR_INVALID_VALUE"):
        device.tensor_map(array, 32)


def test_waiting_reports_a_failed_kernel(cupy: FakeCupy) -> None:
    driver = FakeDriver()
    driver.fail["synchronize"] = DriverFailure(
        "cuStreamSynchronize", 700, "CUDA_ERROR_ILLEGAL_ADDRESS"
    )
    with pytest.raises(KernelError, match="a kernel failed.*MINFER_SYNC=1"):
        device_on(driver).synchronize()
