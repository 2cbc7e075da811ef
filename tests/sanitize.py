"""compute-sanitizer over the kernel tests on their tiny shapes: `make sanitize`, on a GPU.

    python tests/sanitize.py [--tools memcheck,racecheck] [--shards 4] [--seconds 200] [--into DIR]

Compiles every kernel into the disk cache first, then runs the four tools at once, each over the
tests in some processes, and writes tests/sanitizer-record.json: what ran on which card, over which
kernels of which sources, and the errors found. Exits with 1 where a tool found one, a test failed,
or a kernel of cuda/ never ran. The logs of the tools stay in DIR.

The tests are those that also run on the SIMT device, which is what keeps their shapes tiny, the
two-layer models end to end among them. They are ordered so that the first case of each comes before
the second of any, and none begins after --seconds: what a slow machine leaves out is repetition.

As a pytest plugin (`-p sanitize`) this file is the child's side: selection, order, deadline, and a
report of what ran.

No tool is told to overlook anything. Two things that a reader may expect to be suppressed are not:
the launcher reads a kernel's parameter sizes by their number, so no API call fails on purpose; and
buffers come uninitialised from the device, but padding is written by the kernel that fills the rest
(rows of a key cache past the position are never loaded), which the SIMT device checks as well.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests" / "sanitizer-record.json"
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
OPTIONS = ("--print-limit", "20")
SUMMARY = re.compile(  # errors that were not printed are among the first line's
    r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)s?\b(?! were not)", re.MULTILINE
)
SLACK_S = 60  # for what runs at the deadline, and the tool's own end


# ---- the run ----


def find_tool() -> str:
    """compute-sanitizer of the PATH, CUDA_PATH or the usual place. Raises SystemExit."""
    toolkit = Path(os.environ.get("CUDA_PATH") or "/usr/local/cuda")
    found = shutil.which("compute-sanitizer")
    for folder in (toolkit / "bin", toolkit / "compute-sanitizer"):
        found = found or shutil.which("compute-sanitizer", path=folder)
    if found is None:
        raise SystemExit(f"no compute-sanitizer on the PATH or in {toolkit}: install the toolkit's")
    return found


def version_of(tool: str) -> str:
    words = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"Version (\S+)", words)
    return found[1] if found else words.strip().splitlines()[-1]


def precompile() -> None:
    """Every kernel that the card can be asked for, into the disk cache, on all cores."""
    import devices

    from minfer_cuda.kernels.module import CudaDevice

    device = CudaDevice()
    device.compile(devices._instances(device))


class Shard:
    """One tool over one part of the tests, in a process of its own."""

    def __init__(self, sanitizer: str, tool: str, index: int, count: int, options: Any):
        self.tool = tool
        self.name = f"{tool}-{index}"
        self.log = options.into / f"{self.name}.log"
        self.report = options.into / f"{self.name}.json"
        for left in (self.log, self.report):
            left.unlink(missing_ok=True)
        words = [sanitizer, "--tool", tool, *OPTIONS, "--log-file", str(self.log), sys.executable]
        words += ["-m", "pytest", "-m", "gpu", "-p", "sanitize", "-p", "no:cacheprovider", "-q"]
        words += [f"--shard={index}/{count}", f"--shard-seconds={options.seconds}"]
        words += [f"--shard-report={self.report}"]
        paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        self._output = (options.into / f"{self.name}.out").open("w")
        self.process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=environment,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait(self, deadline: float) -> None:
        """Until it ends; one that does not is killed, and has no report."""
        try:
            self.process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)  # the tool and what it runs
            self.process.wait()
        self._output.close()

    def result(self) -> dict[str, Any]:
        """Tests run and failed, the tool's errors, the kernels; `problem` where it did not end."""
        log = self.log.read_text(errors="replace") if self.log.exists() else ""
        errors = errors_of(log)
        found: dict[str, Any] = {"passed": [], "failed": [], "left_out": 0, "kernels": []}
        if self.report.exists():
            found |= json.loads(self.report.read_text())
        problem = ""
        if not self.report.exists():
            problem = f"{self.name} did not end its tests (exit code {self.process.returncode})"
        elif errors is None:
            problem = f"{self.name} has no summary in {self.log}"
        return found | {"errors": errors or 0, "problem": problem}


def errors_of(log: str) -> int | None:
    """The number in a tool's summary; None where there is none: it did not end."""
    found = SUMMARY.findall(log)
    return sum(map(int, found)) if found else None


def summed(tool: str, results: list[dict[str, Any]]) -> dict[str, Any]:
    """A tool's part of the record."""
    return {
        "tool": tool,
        "tests": sum(len(r["passed"]) for r in results),
        "failed": sorted(name for r in results for name in r["failed"]),
        "left_out": sum(r["left_out"] for r in results),
        "errors": sum(r["errors"] for r in results),
        "problems": [r["problem"] for r in results if r["problem"]],
        "kernels": sorted({name for r in results for name in r["kernels"]}),
    }


def complaints(tools: list[dict[str, Any]], kernels: set[str]) -> list[str]:
    """Why the run is not clean; `kernels` are those that each tool must have seen."""
    found = []
    for part in tools:
        tool = part["tool"]
        found += part["problems"]
        found += [f"{tool}: {name} failed" for name in part["failed"]]
        if part["errors"]:
            found.append(f"{tool}: {part['errors']} errors")
        found += [f"{tool}: kernel {k} never ran" for k in sorted(kernels - set(part["kernels"]))]
    return found


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tools", default=",".join(TOOLS), help="comma-separated")
    parser.add_argument("--shards", type=int, default=4, help="processes of each tool")
    parser.add_argument("--seconds", type=float, default=200.0, help="no test begins later")
    parser.add_argument("--into", type=Path, default=ROOT / "build" / "sanitize", metavar="DIR")
    parser.add_argument("--record", type=Path, default=RECORD, metavar="FILE")
    options = parser.parse_args(words)
    from gpu_record import cuda_sha256
    from kernel_coverage import all_kernels

    from minfer_cuda.kernels.about import about_gpu

    sanitizer = find_tool()
    options.into.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    subprocess.run([sys.executable, __file__, "--precompile"], cwd=ROOT, check=True)
    print(f"kernels compiled in {time.monotonic() - start:.0f} s", flush=True)
    start = time.monotonic()
    shards = [
        Shard(sanitizer, tool, i, options.shards, options)
        for tool in options.tools.split(",")
        for i in range(options.shards)
    ]
    results = defaultdict(list)
    for shard in shards:
        shard.wait(start + options.seconds + SLACK_S)
        results[shard.tool].append(shard.result())
    tools = [summed(tool, found) for tool, found in results.items()]
    record = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **about_gpu(),
        "cuda_sha256": cuda_sha256(ROOT / "cuda"),
        "compute_sanitizer": version_of(sanitizer),
        "seconds": round(time.monotonic() - start),
        "tools": tools,
    }
    options.record.write_text(json.dumps(record, indent=1) + "\n")
    for part in tools:
        print("{tool}: {tests} tests, {left_out} left out, {errors} errors".format(**part))
    wrong = complaints(tools, all_kernels())
    print("\n".join(wrong) or f"clean; record written to {options.record}")
    return 1 if wrong else 0


# ---- the child: a pytest plugin ----


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", default="0/1", metavar="I/N", help="every Nth test from I on")
    parser.addoption("--shard-seconds", type=float, default=1e9, metavar="S")
    parser.addoption("--shard-report", type=Path, metavar="FILE")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Child(config), "sanitize-child")


def tiny(items: list[pytest.Item]) -> list[pytest.Item]:
    """The GPU half of each test that runs on the SIMT device too, first cases first."""
    shim = {
        item.nodeid.replace("simt", "cuda")
        for item in items
        if "[simt" in item.nodeid and item.get_closest_marker("gpu") is None
    }
    by_test: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.nodeid in shim:
            by_test[item.nodeid.split("[")[0]].append(item)
    turns = [(i, item) for cases in by_test.values() for i, item in enumerate(cases)]
    return [item for _, item in sorted(turns, key=lambda turn: turn[0])]


class Child:
    """Selects, orders, stops in time, and writes down what ran."""

    def __init__(self, config: pytest.Config):
        index, count = config.getoption("shard").split("/")
        self._part = slice(int(index), None, int(count))
        self._deadline = time.monotonic() + config.getoption("shard_seconds")
        self._report = config.getoption("shard_report")
        self._device: Any = None
        self.outcomes: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = tiny(items)[self._part]

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if time.monotonic() > self._deadline:
            pytest.skip("no time is left")

    def pytest_runtest_call(self, item: pytest.Item) -> None:
        self._device = getattr(item, "funcargs", {}).get("device", self._device)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.outcomes["failed"].append(report.nodeid)
        elif report.skipped:
            self.outcomes["skipped"].append(report.nodeid)
        elif report.when == "call":
            self.outcomes["passed"].append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        if self._report is None:
            return
        loaded = self._device._kernels if self._device is not None else {}
        found = {
            "passed": self.outcomes["passed"],
            "failed": self.outcomes["failed"],
            "left_out": len(self.outcomes["skipped"]),
            "kernels": sorted({k.name.split("<")[0] for k in loaded.values() if k.launched}),
        }
        self._report.write_text(json.dumps(found))


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    if sys.argv[1:] == ["--precompile"]:
        precompile()
    else:
        sys.exit(main())
