"""A whole test run fails where a kernel of cuda/ has not run on the SIMT device.

tests/simt/unsupported.json lists the kernels that cannot, each with the GPU test that covers it.
The hooks below are conftest.py's.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from simt.device import SimtDevice

from minfer_cuda.kernels.compiler import source_folder

UNSUPPORTED = Path(__file__).parent / "simt" / "unsupported.json"
_KERNEL = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\([^()]*\)\s*)?(\w+)\s*\(")

_launched: set[str] = set()  # of all workers: names without template arguments
_complaints: list[str] = []


def all_kernels() -> set[str]:
    return {
        name
        for path in source_folder().glob("*.cu*")
        for name in _KERNEL.findall(path.read_text(encoding="utf-8"))
    }


def unsupported() -> dict[str, str]:
    """Kernel -> the GPU test that covers it, as `tests/test_x.py::test_y`."""
    return json.loads(UNSUPPORTED.read_text())


def complaints(launched: set[str]) -> list[str]:
    listed = set(unsupported())
    never = sorted(all_kernels() - launched - listed)
    stale = sorted(listed & launched)
    return [
        *(f"kernel {name} has not run on the SIMT device, nor is it listed" for name in never),
        *(f"kernel {name} is listed in unsupported.json, but runs" for name in stale),
    ]


def _own() -> set[str]:
    return {name.split("<")[0] for _, name in SimtDevice.launched}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    """A worker of pytest-xdist has ended."""
    _launched.update(getattr(node, "workeroutput", {}).get("simt_launched", ()))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    config = session.config
    if hasattr(config, "workeroutput"):
        config.workeroutput["simt_launched"] = sorted(_own())
        return
    _launched.update(_own())
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.keyword
    if whole and exitstatus == 0 and _launched:
        _complaints.extend(complaints(_launched))
    if _complaints:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for line in _complaints:
        terminalreporter.write_line(f"FAILED {line}", red=True)
