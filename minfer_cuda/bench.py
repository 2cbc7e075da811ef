"""How fast an engine is: prefill and pure decode, apart, with checks that make figures credible.

A prefill row is `n` prompt tokens from an empty cache up to the first drawn token; a decode row is
`n` tokens drawn one after the other behind that first one. Both are the engine's own loop and its
own clock, include sampling with the parameters given, and neither tokenise nor print. Each row
starts with an untimed warm-up.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import os
import platform
import statistics
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from minfer_cuda.engine import Engine, Runner, Stats
from minfer_cuda.errors import ContextFullError, MinferError, NumericsError
from minfer_cuda.kernels.about import about_gpu
from minfer_cuda.runners.numpy_runner import NumpyRunner
from minfer_cuda.sampling import SamplingParams

if TYPE_CHECKING:
    from minfer_cuda.llm import LLM

CHECK_TOKENS = 16  # length of the greedy run that must repeat itself
PROMPT_STRIDE = 7919  # a prime: the prompt's ids spread over the vocabulary
BENCH_SEED = 1


@dataclass(frozen=True)
class BenchRow:
    """One line of the result: `n_tokens` a repetition, seconds of each repetition."""

    test: str  # "prefill" or "decode"
    n_tokens: int
    seconds: tuple[float, ...]

    @property
    def rates(self) -> tuple[float, ...]:
        """Tokens per second of each repetition."""
        return tuple(self.n_tokens / s for s in self.seconds)

    @property
    def mean(self) -> float:
        """Mean of the rates, tokens per second."""
        return statistics.fmean(self.rates)

    @property
    def spread(self) -> float:
        """Sample standard deviation of the rates; 0 for one repetition."""
        return statistics.stdev(self.rates) if len(self.rates) > 1 else 0.0

    @property
    def name(self) -> str:
        """Short name: pp512, tg128."""
        return f"{'pp' if self.test == 'prefill' else 'tg'}{self.n_tokens}"


class Bench:
    """The tests of one engine, whose cache they overwrite."""

    def __init__(self, engine: Engine, params: SamplingParams | None = None):
        self.engine = engine
        self.params = replace(params or SamplingParams(), seed=BENCH_SEED)

    def prompt(self, n: int) -> list[int]:
        """The same n ids on every run."""
        return [(i + 1) * PROMPT_STRIDE % self.engine.config.n_vocab for i in range(n)]

    def prefill(self, n: int, repetitions: int) -> BenchRow:
        """Time n prompt tokens from an empty cache, up to and with the first drawn token.

        Raises ContextFullError when n tokens do not fit, NumericsError for logits that are not
        finite.
        """
        stats = [self._generate(n, 1, self.params)[1] for _ in range(1 + repetitions)]
        self._check_finite(f"after a prefill of {n} tokens")
        return BenchRow("prefill", n, tuple(s.prefill_seconds for s in stats[1:]))

    def decode(self, n: int, repetitions: int) -> BenchRow:
        """Time n tokens drawn after a prompt of one token and a first token; raises as `prefill`
        does."""
        stats = [self._generate(1, n + 1, self.params)[1] for _ in range(1 + repetitions)]
        self._check_finite(f"after {n} decode steps")
        return BenchRow("decode", n, tuple(s.decode_seconds for s in stats[1:]))

    def check_repeats(self) -> str:
        """Run greedily twice over the same prompt; returns the sha256 of the ids.

        Raises MinferError where the runs differ: such figures would be of wrong answers.
        """
        n = min(CHECK_TOKENS, self.engine.n_ctx)
        greedy = replace(self.params, temperature=0.0)
        first, second = (self._generate(1, n, greedy)[0] for _ in range(2))
        if first != second:
            raise MinferError(
                f"the same greedy run gave {first} and then {second}: no speed is reported for "
                "wrong answers"
            )
        return hashlib.sha256(np.array(first, "<i4").tobytes()).hexdigest()

    def _generate(self, n_prompt: int, n: int, params: SamplingParams) -> tuple[list[int], Stats]:
        """Ids and times of n tokens after n_prompt, from an empty cache, past any end token."""
        needed = n_prompt + n - 1
        if needed > self.engine.n_ctx:
            raise ContextFullError(
                needed, self.engine.n_ctx, "raise --n-ctx or measure fewer tokens"
            )
        self.engine.rollback(0)
        ids = [token.id for token in self.engine.generate(self.prompt(n_prompt), params, n)]
        return ids, self.engine.stats

    def _check_finite(self, when: str) -> None:
        bad = int(np.count_nonzero(~np.isfinite(self.engine.runner.logits())))
        if bad:
            raise NumericsError(f"{bad} logits are not finite {when}: no speed is reported")


def run(
    bench: Bench, n_prompt: Sequence[int], n_generate: Sequence[int], repetitions: int
) -> dict[str, Any]:
    """All rows and the checks as a JSON-ready object; sizes of 0 are left out."""
    rows = [bench.prefill(n, repetitions) for n in n_prompt if n]
    rows += [bench.decode(n, repetitions) for n in n_generate if n]
    return {
        "greedy_sha256": bench.check_repeats(),
        "sampling": _sampling_words(bench.params),
        "results": [
            {
                "test": row.test,
                "name": row.name,
                "n_tokens": row.n_tokens,
                "tokens_per_s": _rounded(row.mean),
                "spread": _rounded(row.spread),
                "seconds": list(row.seconds),
            }
            for row in rows
        ],
    }


def report(
    llm: LLM,
    kv_type: str,
    n_prompt: Sequence[int],
    n_generate: Sequence[int],
    repetitions: int,
) -> dict[str, Any]:
    """`run` on a loaded model, with all that one needs to repeat it."""
    runner = llm.engine.runner
    tensors = llm.file.tensors.values()
    return {
        "model": llm.config.name,
        "file": llm.file.path.name,
        "file_bytes": llm.file.size_bytes,
        "n_params": sum(math.prod(info.shape) for info in tensors),
        "types": dict(Counter(info.type_name for info in tensors)),
        "n_ctx": llm.n_ctx,
        "kv_type": kv_type,
        "runs_on": runner.describe(),
        **about_software(),
        **_about_device(runner),
        **run(Bench(llm.engine, llm.sampling()), n_prompt, n_generate, repetitions),
    }


def as_json(result: dict[str, Any]) -> str:
    """One line."""
    return json.dumps(result, ensure_ascii=False)


def as_csv(result: dict[str, Any]) -> str:
    """A header and one line per row, each with the model, the device and the commit."""
    common = {key: result[key] for key in ("model", "device", "n_ctx", "kv_type", "commit", "date")}
    rows = [{k: v for k, v in row.items() if k != "seconds"} | common for row in result["results"]]
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().removesuffix("\n")


def as_markdown(result: dict[str, Any]) -> str:
    """A table, and under it what it was measured on."""
    types = ", ".join(f"{count} {name}" for name, count in result["types"].items())
    versions = ", ".join(
        f"{key} {result[key]}" for key in ("driver", "cupy", "nvrtc", "python") if result.get(key)
    )
    lines = ["| test | tok/s | spread |", "|---|---|---|"]
    lines += [
        f"| {row['name']} | {row['tokens_per_s']:g} | ± {row['spread']:g} |"
        for row in result["results"]
    ]
    lines += [
        "",
        f"{result['model']} ({result['file']}, tensors: {types})",
        f"{result['device']}; {result['runs_on']}",
        f"n_ctx {result['n_ctx']}, KV {result['kv_type']}, sampling {result['sampling']}",
        f"minfer {result['minfer']}, commit {result['commit']}, {versions}, {result['date']}",
        f"greedy run repeats: sha256 {result['greedy_sha256'][:16]}",
    ]
    return "\n".join(lines)


def about_software() -> dict[str, Any]:
    """Versions, machine, date and the source tree's commit (None for an installed package)."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "minfer": metadata_version("minfer-cuda"),
        "commit": source_commit(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "platform": platform.platform(terse=True),
    }


def metadata_version(package: str) -> str | None:
    """The installed version; None where the package is used from its source tree."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def source_commit() -> str | None:
    """Commit of the source tree this runs from, `+changes` appended where files differ from it."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(root), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    commit = git("rev-parse", "--short=12", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no")
    return f"{commit}+changes" if commit and changed else commit


def _about_device(runner: Runner) -> dict[str, Any]:
    """The card with its driver, or the CPU."""
    if isinstance(runner, NumpyRunner):
        return {"device": platform.processor() or platform.machine(), "cpus": os.cpu_count()}
    return about_gpu()


def _sampling_words(params: SamplingParams) -> str:
    if params.greedy:
        return "included: greedy"
    return (
        f"included: temperature {params.temperature:g}, top-k {params.top_k}, "
        f"top-p {params.top_p:g}, min-p {params.min_p:g}"
    )


def _rounded(value: float) -> float:
    """Five significant digits: more would be noise."""
    return float(f"{value:.5g}") if math.isfinite(value) else value
