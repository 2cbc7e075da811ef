"""The `device` fixture: kernel tests run on the SIMT shim, and under `-m gpu` on a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from simt import build
from simt.device import SimtDevice

from minfer_cuda.kernels import Device


def simt_device() -> SimtDevice:
    """One with checks. Skips where there is no C++ compiler; with CI=true that is a failure."""
    if build.compiler() is None:
        missing = "no C++ compiler: g++ or clang++ runs the kernels on the CPU"
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)
    return SimtDevice()


@pytest.fixture(scope="session", params=["simt", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """Every test that takes it runs twice: `[simt]` anywhere, `[cuda]` with a GPU."""
    if request.param == "simt":
        yield simt_device()
    else:
        from minfer_cuda.kernels.module import CudaDevice

        yield CudaDevice()
