"""`minfer bench` on models of random weights made in memory, or on files; one result each.

    python benchmarks/models.py 0.5b:q4_k_m 7b:q4_k_m -- -p 512,2048 -n 128 -d 0,4096,16384
    python benchmarks/models.py models/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf
    python benchmarks/models.py 7b:q4_k_m --what lengths -- -r 3

What stands behind `--` goes to `minfer bench`; `lengths` are prompts of 1 to 4,096 tokens whatever
it says of -p, -n and -d. Results are benchmarks/results/bench-NAME.json and lengths-NAME.json.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.family import FTYPES, SIZES
from benchmarks.measure import RESULTS, finish, in_memory, listed, say
from benchmarks.synthetic import write_synthetic

ROOT = Path(__file__).resolve().parent.parent
# around every row count at which another kernel or tile may begin, and between
LENGTHS = (
    "1,2,4,8,16,17,24,32,33,48,64,65,96,128,129,192,256,257,384,512,768,1024,1536,2048,3072,4096"
)
WHAT = ("bench", "lengths")


def bench(path: Path, options: Sequence[str]) -> dict[str, Any]:
    """The result of a process of its own. Raises CalledProcessError; stderr passes through."""
    command = [sys.executable, "-m", "cli", "bench", str(path), "--json", *options]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"command": shlex.join(["minfer", "bench", path.name, *options])} | result


def measure(path: Path, what: str, options: Sequence[str]) -> dict[str, Any]:
    """The result of `bench` or `lengths`, which is its kind."""
    if what == "lengths":
        options = [*options, "-p", LENGTHS, "-n", "0", "-d", "0"]
    return bench(path, options) | {"kind": what}


@contextmanager
def model_file(model: str) -> Iterator[Path]:
    """Of SIZE:FTYPE in memory, or the file of that name."""
    size, _, ftype = model.partition(":")
    if size not in SIZES:
        yield Path(model).resolve()
        return
    with in_memory(f"synthetic-{size}-{ftype}.gguf") as path:
        start = time.perf_counter()
        write_synthetic(path, size, ftype)
        say(f"{path.name}: written in {time.perf_counter() - start:.1f} s")
        yield path


def main(words: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if words is None else words)
    cut = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="+", metavar="SIZE:FTYPE|FILE")
    parser.add_argument("--what", type=listed, default=["bench"], help=",".join(WHAT))
    parser.add_argument("--into", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--commit", help="of the source tree, where it cannot tell")
    options = parser.parse_args(words[:cut])
    if unknown := set(options.what) - set(WHAT):
        parser.error(f"--what: {', '.join(sorted(unknown))} not in {', '.join(WHAT)}")
    for model in options.models:
        size, _, ftype = model.partition(":")
        if (size in SIZES and ftype not in FTYPES) or (size not in SIZES and ftype):
            parser.error(f"{model}: sizes are {', '.join(SIZES)}, types {', '.join(FTYPES)}")
    failed = 0
    for model in options.models:
        with model_file(model) as path:
            for what in options.what:
                failed += not _kept(path, what, words[cut + 1 :], options)
    return 1 if failed else 0


def _kept(path: Path, what: str, bench_options: Sequence[str], options: argparse.Namespace) -> bool:
    """Measure, write and print one result; False where it failed, which ends no other."""
    say(f"== {path.name}: {what}")
    try:
        result = measure(path, what, bench_options)
    except subprocess.CalledProcessError as error:
        say(f"{path.name}: {what} failed with exit code {error.returncode}")
        return False
    finish(result, options.into / f"{what}-{path.stem}.json", options.commit)
    return True


if __name__ == "__main__":
    sys.exit(main())
