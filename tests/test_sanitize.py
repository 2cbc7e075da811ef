"""The run of compute-sanitizer: what is read of its logs, what is called clean, which tests run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sanitize
from kernel_coverage import all_kernels

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("log", "errors"),
    [
        ("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n", 0),
        ("========= ERROR SUMMARY: 1 error\n", 1),
        ("========= ERROR SUMMARY: 1204 errors were printed\n", 1204),
        ("========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)\n", 3),
        ("========= ERROR SUMMARY: 1 error\n========= ERROR SUMMARY: 2 errors\n", 3),
        ("= ERROR SUMMARY: 64 errors\n= ERROR SUMMARY: 44 errors were not printed. Use\n", 64),
        ("========= COMPUTE-SANITIZER\n", None),
        ("", None),
    ],
)
def test_the_summary_of_a_tool_is_its_number_of_errors(log, errors):
    assert sanitize.errors_of(log) == errors


def test_a_run_is_clean_only_where_every_tool_saw_every_kernel_and_no_error():
    good = {"passed": ["a"], "failed": [], "left_out": 1, "kernels": ["x"], "errors": 0}
    good |= {"problem": ""}
    more = good | {"passed": ["b", "c"], "kernels": ["y"]}
    part = sanitize.summed("memcheck", [good, more])
    assert (part["tests"], part["left_out"], part["kernels"]) == (3, 2, ["x", "y"])
    assert sanitize.complaints([part], {"x", "y"}) == []
    assert sanitize.complaints([part], {"x", "z"}) == ["memcheck: kernel z never ran"]
    for change, words in (
        ({"errors": 2}, "memcheck: 2 errors"),
        ({"failed": ["t"]}, "memcheck: t failed"),
        ({"problem": "memcheck-0 did not end"}, "memcheck-0 did not end"),
    ):
        wrong = sanitize.summed("memcheck", [good | change, more])
        assert sanitize.complaints([wrong], {"x", "y"}) == [words]


def test_a_process_that_did_not_end_is_a_problem(tmp_path):
    shard = sanitize.Shard.__new__(sanitize.Shard)
    shard.tool, shard.name = "initcheck", "initcheck-0"
    shard.log, shard.report = tmp_path / "log", tmp_path / "report"
    shard.process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])
    shard.process.wait()
    assert "did not end its tests (exit code 7)" in shard.result()["problem"]
    shard.report.write_text(json.dumps({"passed": [], "failed": [], "left_out": 0, "kernels": []}))
    assert "no summary" in shard.result()["problem"]
    shard.log.write_text("========= ERROR SUMMARY: 0 errors\n")
    assert shard.result()["problem"] == ""


SUITE = """
import pytest
@pytest.mark.parametrize("n", [1, 2, 3])
def test_many(device, n): pass
def test_once(device): assert device.name
@pytest.mark.gpu
def test_large(device): pass
@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.gpu)])
def test_partly_large(device, n): pass
@pytest.mark.gpu
def test_of_the_gpu_alone(): pass
def test_without(): pass
"""
CONFTEST = """
import types
import pytest
@pytest.fixture(scope="session", params=["simt", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    kernel = types.SimpleNamespace(name="fill<3>", launched=True)
    idle = types.SimpleNamespace(name="idle", launched=False)
    return types.SimpleNamespace(name="card", _kernels={1: kernel, 2: idle})
"""


def child(folder: Path, *options: str) -> dict:
    report = folder / "report.json"
    (folder / "test_it.py").write_text(SUITE)
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: needs a GPU\n")
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "sanitize", "-q"]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", f"--shard-report={report}", *options],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": paths, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    assert report.exists(), done.stdout + done.stderr
    return json.loads(report.read_text())


def test_the_gpu_halves_of_small_tests_run_the_first_case_of_each_before_the_second(tmp_path):
    found = child(tmp_path)
    cases = [name.split("::")[1] for name in found["passed"]]
    assert cases == [
        "test_many[cuda-1]", "test_once[cuda]", "test_partly_large[cuda-1]",
        "test_many[cuda-2]", "test_many[cuda-3]",
    ]  # fmt: skip
    assert found["kernels"] == ["fill"]
    halves = [child(tmp_path, f"--shard={i}/2")["passed"] for i in (0, 1)]
    assert sorted(halves[0] + halves[1]) == sorted(found["passed"])
    late = child(tmp_path, "--shard-seconds=-1")
    assert (late["passed"], late["failed"], late["left_out"]) == ([], [], 5)


def test_the_stored_record_is_of_all_tools_and_clean():
    if not sanitize.RECORD.exists():
        pytest.skip("no record yet: make sanitize, on a GPU")
    record = json.loads(sanitize.RECORD.read_text())
    assert [part["tool"] for part in record["tools"]] == list(sanitize.TOOLS)
    assert sanitize.complaints(record["tools"], all_kernels()) == []
    assert len(record["cuda_sha256"]) == 64 and record["driver"] and record["compute_sanitizer"]
