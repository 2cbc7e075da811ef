"""The project's own promises: what is packaged, what may be imported where, what the docs say."""

import ast
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAY_IMPORT_CUPY = ("minfer_cuda/kernels/", "minfer_cuda/ops/cuda", "minfer_cuda/runners/cuda")
MAY_IMPORT_CUPY += ("minfer_cuda/graph.py", "minfer_cuda/kv_cache.py", "minfer_cuda/workspace.py")


def run(*command, **options):
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, **options)


def sources(*folders):
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def imported(path: Path) -> set[str]:
    """Top-level names of all imports in a file."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module.split(".")[0])
    return names


def test_the_folder_cuda_is_no_package_and_does_not_shadow_nvidias():
    assert not list((ROOT / "cuda").rglob("__init__.py"))
    code = "import sys; sys.path.insert(0, '.'); import cuda; assert cuda.__file__ is None"
    assert run(sys.executable, "-c", code).returncode == 0


def test_every_folder_of_the_package_is_listed_for_installation():
    listed = set(PROJECT["tool"]["setuptools"]["packages"])
    folders = {path.parent for path in sources("minfer_cuda")}
    there = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert listed == there | {"minfer_cuda.cli", "minfer_cuda.cuda"}


def test_an_installed_package_has_kernels_and_command_and_no_generic_names(tmp_path):
    pytest.importorskip("setuptools", minversion="70.1")
    source = tmp_path / "source"
    tracked = run("git", "ls-files", "-co", "--exclude-standard", "minfer_cuda", "cli", "cuda")
    files = tracked.stdout.split() if tracked.returncode == 0 else []
    if not files:
        pytest.skip("not a git checkout")
    for name in [*files, "pyproject.toml", "README.md", "LICENSE"]:
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    target = tmp_path / "site"
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--target", str(target)]
    done = run(sys.executable, "-m", "pip", "install", "-q", *options, str(source))
    assert done.returncode == 0, done.stderr
    names = {path.name for path in target.iterdir() if not path.name.endswith(".dist-info")}
    assert names == {"minfer_cuda", "bin"}
    kernels = {path.name for path in (ROOT / "cuda").glob("*.cu*")}
    assert {path.name for path in (target / "minfer_cuda" / "cuda").iterdir()} == kernels
    environment = os.environ | {"PYTHONPATH": str(target)}
    command = [sys.executable, "-m", "minfer_cuda.cli", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.stdout == "minfer 0.1.0\n", done.stderr


def test_cupy_is_imported_only_by_what_owns_the_device():
    for path in sources("minfer_cuda", "cli"):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(MAY_IMPORT_CUPY):
            assert not imported(path) & {"cupy", "cuda"}, name


def test_no_folder_for_tests_or_the_command_line_is_imported_by_the_engine():
    for path in sources("minfer_cuda"):
        assert not imported(path) & {"cli", "tests", "benchmarks", "scripts"}, path


def test_the_readme_is_current():
    done = run(sys.executable, "scripts/docs.py", "--check")
    assert done.returncode == 0, done.stderr


def test_the_readme_names_every_environment_variable_of_the_code_and_no_other():
    pattern = re.compile(r"MINFER_[A-Z_]+[A-Z]")
    code = {
        name for path in sources("minfer_cuda", "cli") for name in pattern.findall(path.read_text())
    }
    table = (ROOT / "README.md").read_text().split("## Environment variables")[1]
    assert set(pattern.findall(table)) == code


def test_no_function_is_longer_than_80_lines():
    for path in sources("minfer_cuda", "cli", "scripts"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno - node.lineno < 80, f"{path}: {node.name}"


def test_the_kernel_digest_is_of_the_sources_in_byte_order(tmp_path):
    import gpu_record

    for name, text in (("b.cu", "2"), ("Z.cuh", "1"), ("a_.cu", "x"), ("aB.cu", "y"), ("n.md", "")):
        (tmp_path / name).write_text(text)
    assert gpu_record.cuda_sha256(tmp_path) == hashlib.sha256(b"1yx2").hexdigest()


@pytest.fixture
def gpu_suite(tmp_path):
    """Runs a file of tests as `make test-gpu` does; returns (exit code, output, record)."""

    def run_suite(text: str, card: str = "{'device': 'a card'}"):
        (tmp_path / "test_it.py").write_text("import pytest\n" + text)
        (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: needs a GPU\n")
        stub = (
            f"import minfer_cuda.kernels.about as about\nabout.about_gpu = lambda index=0: {card}\n"
        )
        (tmp_path / "conftest.py").write_text(stub)
        record = tmp_path / "record.json"
        paths = os.pathsep.join([str(ROOT / "tests"), str(ROOT)])
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "gpu_record"]
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider", f"--gpu-record={record}"],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": paths, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            capture_output=True,
            text=True,
        )
        return done, json.loads(record.read_text()) if record.exists() else None

    return run_suite


def test_the_gpu_record_lists_every_test_by_name_and_outcome(gpu_suite):
    done, record = gpu_suite(
        "pytestmark = pytest.mark.gpu\n"
        "def test_good(record_property): record_property('kld', 0.001)\n"
        "def test_bad(): assert False\n"
        "@pytest.fixture\n"
        "def broken():\n    yield\n    raise OSError\n"
        "def test_bad_teardown(broken): pass\n"
        "def test_left_out(): pytest.skip('one card only')\n"
    )
    assert done.returncode == 1
    assert record["device"] == "a card"
    assert record["passed"] == ["test_it.py::test_good"]
    assert record["failed"] == ["test_it.py::test_bad", "test_it.py::test_bad_teardown"]
    assert list(record["skipped"]) == ["test_it.py::test_left_out"]
    assert "one card only" in record["skipped"]["test_it.py::test_left_out"]
    assert record["measured"] == {"test_it.py::test_good": {"kld": 0.001}}
    assert len(record["cuda_sha256"]) == 64


def test_a_gpu_run_without_a_gpu_test_fails_and_writes_nothing(gpu_suite):
    for text in (
        "def test_other(): pass\n",
        "@pytest.mark.gpu\ndef test_left_out(): pytest.skip('no GPU')\n",
    ):
        done, record = gpu_suite(text)
        assert done.returncode != 0
        assert record is None
        assert "no GPU test ran" in done.stdout


def test_tests_that_pass_on_a_machine_without_a_gpu_make_no_record(gpu_suite):
    done, record = gpu_suite("@pytest.mark.gpu\ndef test_good(): pass\n", card="1 / 0")
    assert done.returncode != 0
    assert record is None
    assert "no usable GPU (division by zero)" in done.stdout


def test_an_interrupted_gpu_run_fails(gpu_suite):
    done, _ = gpu_suite("@pytest.mark.gpu\ndef test_stop(): raise KeyboardInterrupt\n")
    assert done.returncode != 0


# the audit of the dependencies

SOUND = {"name": "numpy", "version": "2", "vulns": []}
BAD = {"name": "x", "version": "1", "vulns": [{"id": "CVE-1", "fix_versions": ["1.1"]}]}
SKIPPED = {"name": "y", "skip_reason": "not found"}
OURS = {"name": "minfer-cuda", "skip_reason": "editable"}


@pytest.mark.parametrize(
    ("packages", "told", "expected"),
    [
        ([SOUND, OURS], "", "sound"),
        ([SOUND, BAD, SKIPPED], "", "vulnerable"),
        ([SOUND, SKIPPED], "", "incomplete"),
        ([SKIPPED, OURS], "", "unreachable"),
        ([], "requests.exceptions.ConnectionError: no route", "unreachable"),
        ([], "No module named pip_audit", "incomplete"),
        ([], "", "incomplete"),
    ],
)
def test_an_audit_passes_only_what_was_looked_up(packages, told, expected):
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        from audit import verdict
    finally:
        sys.path.pop(0)
    found, lines = verdict(packages, told)
    assert found == expected and lines
    assert ("no known vulnerability" in lines[0]) == (expected == "sound")
