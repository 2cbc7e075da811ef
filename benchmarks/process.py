"""What a whole process costs: time to one token, in parts; the first start; end to end; memory.

    python benchmarks/process.py models/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf

Every figure is of processes of their own (`minfer generate`, `minfer bench`, and one that loads the
model part by part) over a kernel cache that the first of them fills. The result, with card, driver,
commit and command, is the last line of stdout and benchmarks/results/process-NAME.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.measure import RESULTS, command, finish, say

ROOT = Path(__file__).resolve().parent.parent
PROMPT = "Write a long story about a lighthouse."
PENALTIES = ["--repeat-penalty", "1.1", "--frequency-penalty", "0.1", "--presence-penalty", "0.1"]
FULL_SAMPLER = ["--temp", "0.8", "--top-k", "40", "--top-p", "0.95", *PENALTIES, "--seed", "1"]
RATE = re.compile(r"(\d+) generated \(([\d.]+) tok/s\)")  # of the line that ends an answer
LONG_PROMPT = 600  # tokens: loads the kernels of long prompts before memory is looked at
FIRST_TOKENS = 5
LEAST_BAR = 256 << 20  # bytes beside weights and KV that are allowed; or 5 % of those
FROM_BENCH = (
    "model", "file", "file_bytes", "date", "minfer", "commit", "python", "platform", "device",
    "arch", "driver", "cupy", "nvrtc", "kv_type", "read_gb_s",
)  # fmt: skip


class Processes:
    """Runs `minfer` and this script on one model and device, over a kernel cache of their own."""

    def __init__(self, path: Path, device: str, cache: Path):
        self._path, self._device = path, device
        self._environment = os.environ | {"MINFER_CACHE_DIR": str(cache)}

    def run(self, *words: str) -> tuple[float, str, str]:
        """Seconds from start to exit, stdout, stderr. Raises CalledProcessError."""
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, *words, "--device", self._device],
            cwd=ROOT,
            env=self._environment,
            capture_output=True,
            text=True,
        )
        seconds = time.perf_counter() - start
        if done.returncode:
            say(done.stderr)
            done.check_returncode()
        return seconds, done.stdout, done.stderr

    def one_token(self) -> float:
        """Seconds of a process that generates one token."""
        words = ["generate", str(self._path), PROMPT, "-n", "1", "--temp", "0"]
        return self.run("-m", "cli", *words)[0]

    def stages(self) -> dict[str, Any]:
        """What `load_in_parts` finds in a process of its own."""
        words = [str(Path(__file__)), str(self._path), "--stages", repr(time.time())]
        found: dict[str, Any] = json.loads(self.run(*words)[1].splitlines()[-1])
        return found

    def bench(self, tokens: int) -> dict[str, Any]:
        """`minfer bench` of 128 and of `tokens` decode steps."""
        words = ["bench", str(self._path), "-p", "0", "-n", f"128,{tokens}", "-r", "3", "--json"]
        found: dict[str, Any] = json.loads(self.run("-m", "cli", *words)[1].splitlines()[-1])
        return found

    def end_to_end(self, tokens: int) -> float:
        """tok/s of `minfer generate`: after the first token, `tokens` more."""
        words = ["generate", str(self._path), PROMPT, "-n", str(tokens + 1), "--ignore-eos"]
        told = self.run("-m", "cli", *words, *FULL_SAMPLER)[2]
        found = RATE.search(told)
        if found is None or int(found[1]) != tokens + 1:
            raise ValueError(f"no rate of {tokens + 1} tokens in {told!r}")
        return float(found[2])


def load_in_parts(path: Path, device: str, spawned: float) -> dict[str, Any]:
    """Seconds of each part of a start in this process, begun at time.time() `spawned`, milliseconds
    of the first tokens (the second runs kernel by kernel, the third is captured), and bytes of
    device memory by purpose, None on the CPU."""
    import cli.main  # noqa: F401
    from minfer_cuda.kernels.module import CudaDevice
    from minfer_cuda.llm import LLM

    seconds = {"import": time.time() - spawned}
    start = time.perf_counter()
    ordinal = int(device.partition(":")[2] or 0)
    card = None if device == "cpu" else CudaDevice(ordinal)
    seconds["device"] = time.perf_counter() - start
    free = _free_bytes(card)
    with LLM(path, device=device) as llm:
        loaded = dict(llm.load_seconds)
        seconds |= {"kernels": loaded.pop("device")} | loaded  # the device itself is there already
        ids = llm.encode(PROMPT)
        greedy = llm.sampling(temperature=0.0)
        stamps = [time.perf_counter()]
        for _ in llm.engine.generate(ids, greedy, FIRST_TOKENS):
            stamps.append(time.perf_counter())
        seconds["first token"] = stamps[1] - stamps[0]
        long = (ids * LONG_PROMPT)[:LONG_PROMPT]
        list(llm.engine.generate(long, greedy, FIRST_TOKENS))
        memory = None
        if card is not None:
            parts = llm.engine.runner.memory()
            memory = parts | {"used": free - _free_bytes(card)}
            memory["bar"] = max(LEAST_BAR, (parts["weights"] + parts["KV cache"]) // 20)
    each = zip(stamps[:-1], stamps[1:], strict=True)
    return {
        "stages": {name: round(value, 4) for name, value in seconds.items()},
        "token_ms": [round(1e3 * (after - before), 3) for before, after in each],
        "memory": memory,
    }


def _free_bytes(card: Any) -> int:
    """Of the card by its driver, which counts what our allocator keeps as used."""
    if card is None:
        return 0
    card.synchronize()
    return int(card.queue.driver.memory()[0])


def measure(path: Path, device: str, runs: int, tokens: int) -> dict[str, Any]:
    """The whole result."""
    with tempfile.TemporaryDirectory() as cache:
        processes = Processes(path, device, Path(cache))
        first = processes.one_token()
        say(f"first start, kernels compiled: {first:.2f} s")
        one_token = [processes.one_token() for _ in range(runs)]
        say(f"one token: {statistics.median(one_token):.3f} s")
        stages = processes.stages()
        say(f"{stages}")
        bench = processes.bench(tokens)
        tg128, tg = (row["tokens_per_s"] for row in bench["results"])
        rates = [processes.end_to_end(tokens) for _ in range((runs + 1) // 2)]
        say(f"minfer generate {statistics.median(rates):,.0f} tok/s, bench {tg:,.0f}")
    return {
        "kind": "process",
        "command": command(),
        **{key: bench[key] for key in FROM_BENCH if key in bench},
        "prompt": PROMPT,
        "one_token_s": [round(value, 4) for value in one_token],
        "first_start_s": round(first, 3),
        **stages,
        "generate": {
            "options": FULL_SAMPLER,
            "tokens": tokens,
            "rates": rates,
            "tokens_per_s": statistics.median(rates),
            "bench_tokens_per_s": tg,
            "tg128_tokens_per_s": tg128,
        },
    }


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, metavar="FILE")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--runs", type=int, default=5, help="processes of one token")
    parser.add_argument("--tokens", type=int, default=1023, help="of minfer generate")
    parser.add_argument("--into", type=Path, default=RESULTS, help="folder for the result")
    parser.add_argument("--commit", help="of the source tree, where it cannot tell")
    parser.add_argument("--stages", type=float, help=argparse.SUPPRESS)  # see Processes.stages
    options = parser.parse_args(words)
    path = options.model.resolve()
    if options.stages is not None:
        print(json.dumps(load_in_parts(path, options.device, options.stages)))
        return
    result = measure(path, options.device, options.runs, options.tokens)
    finish(result, options.into / f"process-{path.stem}.json", options.commit)


if __name__ == "__main__":
    main()
