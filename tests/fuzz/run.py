"""Coverage-guided fuzzing: `python tests/fuzz/run.py [--seconds N] [TARGET ...]`.

Begins at tests/fuzz/corpus/TARGET and what earlier runs have left in build/fuzz/TARGET. An input
that breaks a promise is written to tests/fuzz/corpus/TARGET/found-*, where `make test` replays it.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CORPUS = HERE / "corpus"
TARGETS = tuple(sorted(path.name for path in CORPUS.iterdir()))
LIMITS = ("-timeout=20", "-rss_limit_mb=2048", "-malloc_limit_mb=1024")  # of one input


def fuzz(name: str, options: list[str]) -> None:
    """Run one target in this process; libFuzzer ends it."""
    import atheris

    sys.path[:0] = [str(ROOT), str(HERE.parent), str(HERE)]
    with atheris.instrument_imports(include=["minfer_cuda", "cli"]):
        import targets
    if words := targets.WORDS.get(name):
        dictionary = Path(tempfile.gettempdir(), f"{name}.dict")
        dictionary.write_text("".join(f'"{_escaped(word)}"\n' for word in words))
        options.append(f"-dict={dictionary}")
    atheris.Setup([sys.argv[0], *options], targets.TARGETS[name])
    atheris.Fuzz()


def _escaped(word: str) -> str:
    """As libFuzzer's dictionaries have it."""
    return "".join(f"\\x{byte:02x}" for byte in word.encode())


def start(name: str, seconds: int, scratch: str) -> subprocess.Popen[str]:
    new = ROOT / "build" / "fuzz" / name
    new.mkdir(parents=True, exist_ok=True)
    seeds = CORPUS / name
    largest = max(path.stat().st_size for path in seeds.iterdir())
    options = [f"-max_total_time={seconds}", f"-artifact_prefix={seeds}/found-", *LIMITS]
    options += [f"-max_len={max(1024, 2 * largest)}", "-print_final_stats=1"]
    command = [sys.executable, __file__, "--one", name, *options, str(new), str(seeds)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": scratch}
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", cwd=ROOT, env=environment,
    )  # fmt: skip


def run(names: list[str], seconds: int, jobs: int, scratch: str) -> int:
    """Fuzz the targets, `jobs` at once; the number of those that failed."""
    waiting, running, failed = list(names), {}, 0
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            running[name] = start(name, seconds, scratch)
        name = next(iter(running))
        output, _ = running[name].communicate()
        code = running.pop(name).returncode
        done = [x for x in output.splitlines() if "stat::number_of_executed_units" in x]
        count = done[0].split()[-1] if done else "?"
        print(f"{name}: {'ok' if code == 0 else 'FAILED'}, {count} inputs", flush=True)
        if code:
            failed += 1
            told = [x for x in output.splitlines() if not x.startswith("#")]  # its progress
            print("\n".join(told[-40:]), flush=True)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--jobs", type=int, default=1 + (os.cpu_count() or 1), help="at once")
    chosen = parser.parse_args()
    if unknown := set(chosen.targets) - set(TARGETS):
        parser.error(f"no target {', '.join(unknown)}; there are {', '.join(TARGETS)}")
    if importlib.util.find_spec("atheris") is None:
        where = f"Python {platform.python_version()}, {sys.platform} {platform.machine()}"
        print(f"not fuzzed: no atheris here ({where}); `make test` still tries built inputs")
        return
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="minfer-fuzz-") as scratch:
        failed = run(chosen.targets or list(TARGETS), chosen.seconds, chosen.jobs, scratch)
    print(f"{len(chosen.targets or TARGETS)} targets fuzzed in {time.monotonic() - begin:.0f} s")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        fuzz(sys.argv[2], sys.argv[3:])
    else:
        main()
