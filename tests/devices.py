"""The `device` fixture: kernel tests run on the SIMT shim, and under `-m gpu` on a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from kernel_resources import ALL_TYPES, instances, stems
from simt import build
from simt.device import SimtDevice

from minfer_cuda.kernels import Device, matmul
from minfer_cuda.quants import by_name


def simt_device(**options: Any) -> SimtDevice:
    """One with checks, or with other options of SimtDevice. Skips where there is no C++ compiler;
    with CI=true that is a failure."""
    if build.compiler() is None:
        missing = "no C++ compiler: g++ or clang++ runs the kernels on the CPU"
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)
    return SimtDevice(**options)


@pytest.fixture(scope="session", params=["simt", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """Every test that takes it runs twice: `[simt]` anywhere, `[cuda]` with a GPU."""
    if request.param == "simt":
        yield simt_device()
    else:
        from minfer_cuda.kernels.module import CudaDevice

        device = CudaDevice()
        if request.config.getoption("shard_report", None) is None:  # sanitize.py has done it
            device.compile(_instances(device))  # on threads; one by one it takes minutes
        yield device


def asked_kernels(device: Device, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(stem, name) of kernels, as they are asked for from now on."""
    asked: list[tuple[str, str]] = []
    kernel = device.kernel
    monkeypatch.setattr(device, "kernel", lambda *name: (asked.append(name), kernel(*name))[1])
    return asked


def _instances(device: Device) -> list[tuple[str, str]]:
    """(stem, name) of all kernels that this card can be asked for."""
    products = {
        matmul.instance(quant, matmul.plan(quant, 128, 512, tokens, 1, device.shared_limit))
        for quant in (by_name(name) for name in ALL_TYPES)
        if quant.block_size > 1
        for tokens in (8, 16, 32, 64)
    }
    others = [(stem, name) for stem in stems() if stem != "matmul" for name in instances(stem, 75)]
    return [("matmul", name) for name in sorted(products)] + others


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A case marked gpu for its size runs on a GPU alone: the shim's half of it is dropped, so that
    a GPU run is made of GPU tests."""

    def shim_of_a_gpu_case(item: pytest.Item) -> bool:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        return parameters.get("device") == "simt" and item.get_closest_marker("gpu") is not None

    dropped = [item for item in items if shim_of_a_gpu_case(item)]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if not shim_of_a_gpu_case(item)]
