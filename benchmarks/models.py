"""`minfer bench` on models of random weights made in memory, or on files; one result each.

    python benchmarks/models.py 0.5b:q4_k_m 7b:q4_k_m -- -p 512,2048 -n 128 -d 0,4096,16384
    python benchmarks/models.py models/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf

What stands behind `--` goes to `minfer bench`. Results are benchmarks/results/bench-NAME.json.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.family import FTYPES, SIZES
from benchmarks.measure import RESULTS, in_memory, say
from benchmarks.synthetic import write_synthetic

ROOT = Path(__file__).resolve().parent.parent


def bench(path: Path, options: Sequence[str]) -> dict[str, Any]:
    """The result of a process of its own. Raises CalledProcessError; stderr passes through."""
    command = [sys.executable, "-m", "cli", "bench", str(path), "--json", *options]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"command": shlex.join(["minfer", "bench", path.name, *options])} | result


def measure(model: str, options: Sequence[str]) -> dict[str, Any]:
    """Of SIZE:FTYPE, or of a file."""
    size, _, ftype = model.partition(":")
    if size not in SIZES:
        return bench(Path(model).resolve(), options)
    with in_memory(f"synthetic-{size}-{ftype}.gguf") as path:
        start = time.perf_counter()
        write_synthetic(path, size, ftype)
        say(f"{path.name}: written in {time.perf_counter() - start:.1f} s")
        return bench(path, options)


def main(words: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if words is None else words)
    cut = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="+", metavar="SIZE:FTYPE|FILE")
    parser.add_argument("--into", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--commit", help="of the source tree, where it cannot tell")
    options = parser.parse_args(words[:cut])
    for model in options.models:
        size, _, ftype = model.partition(":")
        if (size in SIZES and ftype not in FTYPES) or (size not in SIZES and ftype):
            parser.error(f"{model}: sizes are {', '.join(SIZES)}, types {', '.join(FTYPES)}")
    options.into.mkdir(parents=True, exist_ok=True)
    failed = 0
    for model in options.models:
        say(f"== {model}")
        try:
            result = measure(model, words[cut + 1 :])
        except subprocess.CalledProcessError as error:
            say(f"{model}: failed with exit code {error.returncode}")
            failed += 1
            continue
        result["commit"] = result["commit"] or options.commit
        out = options.into / f"bench-{Path(result['file']).stem}.json"
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(result), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
