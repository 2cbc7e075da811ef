"""Pytest plugin of `make test-gpu`: writes what ran on which GPU, and fails when nothing did.

    PYTHONPATH=tests python -m pytest -m gpu -p gpu_record [--gpu-record FILE]

The record ties a result to the kernels it belongs to: `cuda_sha256` is the sha256 of
`cat $(ls cuda/*.cu cuda/*.cuh | LC_ALL=C sort)`.
"""

import hashlib
import json
from datetime import datetime, timezone
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OUTCOMES = ("passed", "failed", "skipped")


def cuda_sha256(folder: Path) -> str:
    """The digest of all kernel sources in byte order of their names."""
    sources = sorted([*folder.glob("*.cu"), *folder.glob("*.cuh")], key=lambda p: p.name.encode())
    return hashlib.sha256(b"".join(p.read_bytes() for p in sources)).hexdigest()


class GpuRecord:
    """Collects one outcome per test: the worst of its set-up, call and tear-down."""

    def __init__(self, path: Path):
        self.path = path
        self.outcomes: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        self.problem = ""  # why there is no record
        self.measured: dict[str, dict] = {}  # what tests give to `record_property`

    def pytest_runtest_logreport(self, report):
        name = report.nodeid
        if report.user_properties:
            self.measured[name] = dict(report.user_properties)
        if report.failed:
            self.outcomes[name] = "failed"
        elif report.skipped and self.outcomes.get(name) != "failed":
            self.outcomes[name] = "skipped"
            self.reasons[name] = str(
                report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            )
        elif report.when == "call":
            self.outcomes.setdefault(name, "passed")

    def names(self, outcome: str) -> list[str]:
        return sorted(name for name, o in self.outcomes.items() if o == outcome)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session):
        from minfer_cuda.kernels.about import about_gpu

        if not self.names("passed") and not self.names("failed"):
            self.problem = "no GPU test ran"
        else:
            try:
                record = self.record(about_gpu())
            except Exception as e:  # CuPy's own: no driver, no card
                self.problem = f"there is no usable GPU ({e})"
        if self.problem:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        else:
            self.path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")

    def record(self, gpu: dict) -> dict:
        return {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            **gpu,
            "cuda_sha256": cuda_sha256(ROOT / "cuda"),
            "counts": {o: len(self.names(o)) for o in OUTCOMES},
            "passed": self.names("passed"),
            "failed": self.names("failed"),
            "skipped": {name: self.reasons[name] for name in self.names("skipped")},
            "measured": self.measured,
        }

    def pytest_terminal_summary(self, terminalreporter):
        if self.problem:
            terminalreporter.write_line(f"error: {self.problem}: no record written", red=True)
        else:
            terminalreporter.write_line(f"record written to {self.path}")


def pytest_addoption(parser):
    parser.addoption(
        "--gpu-record", type=Path, default=ROOT / "tests" / "gpu-record.json", metavar="FILE"
    )


def pytest_configure(config):
    config.pluginmanager.register(GpuRecord(config.getoption("--gpu-record")), "gpu-record")
