"""The launch site and the bindings' structures, with a fake driver."""

from __future__ import annotations

import struct
import threading
from typing import Any

import numpy as np
import pytest
from kernel_fakes import FakeArray, FakeDriver, Pair, kernel_on

from minfer_cuda.errors import KernelError
from minfer_cuda.kernels.driver import Driver, DriverFailure

# ---- the bindings


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
