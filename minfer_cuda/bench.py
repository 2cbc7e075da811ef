"""How fast an engine is: prefill and pure decode, apart, with checks that make figures credible.

A prefill row is `n` prompt tokens up to the first drawn token; a decode row is `n` tokens drawn one
after the other behind that first one; both behind `depth` tokens that the cache holds already. Both
are the engine's own loop and its own clock, include sampling with the parameters given, and neither
tokenise nor print. Each row starts with untimed warm-ups.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import statistics
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from minfer_cuda.engine import Engine, Runner, Stats
from minfer_cuda.errors import ContextFullError, MinferError, NumericsError
from minfer_cuda.kernels.about import about_gpu
from minfer_cuda.roofline import Roofline
from minfer_cuda.runners.numpy_runner import NumpyRunner
from minfer_cuda.sampling import SamplingParams

if TYPE_CHECKING:
    from minfer_cuda.llm import LLM

CHECK_TOKENS = 64  # length of the greedy run that must repeat itself
Progress = Callable[[str, int, int], None]  # what is measured now, rows done, rows in all
PROMPT_STRIDE = 7919  # a prime: the prompt's ids spread over the vocabulary
BENCH_SEED = 1
PREFILL_WARM_UPS = 3  # fill the cache, run a length for the first time, capture its graph


@dataclass(frozen=True)
class BenchRow:
    """One line of the result: `n_tokens` a repetition, seconds of each repetition."""

    test: str  # "prefill" or "decode"
    n_tokens: int
    seconds: tuple[float, ...]
    depth: int = 0  # tokens in the cache before

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
        """Short name: pp512, tg128, tg128 @ 4096."""
        return row_name(self.test, self.n_tokens, self.depth)


def row_name(test: str, n_tokens: int, depth: int) -> str:
    """As llama-bench names its tests, so that figures can be set side by side."""
    behind = f" @ {depth}" if depth else ""
    return f"{'pp' if test == 'prefill' else 'tg'}{n_tokens}{behind}"


class Bench:
    """The tests of one engine, whose cache they overwrite."""

    def __init__(self, engine: Engine, params: SamplingParams | None = None):
        self.engine = engine
        self.params = replace(params or SamplingParams(), seed=BENCH_SEED)

    def prompt(self, n: int) -> list[int]:
        """The same n ids on every run."""
        return [(i + 1) * PROMPT_STRIDE % self.engine.config.n_vocab for i in range(n)]

    def prefill(self, n: int, repetitions: int, depth: int = 0) -> BenchRow:
        """Time n prompt tokens behind `depth` others, up to and with the first drawn token.

        Raises ContextFullError when they do not fit, NumericsError for logits that are not finite.
        """
        stats = self._repeated(depth + n, 1, depth, PREFILL_WARM_UPS, repetitions)
        self._check_finite(f"after a prefill of {n} tokens")
        return BenchRow("prefill", n, tuple(s.prefill_seconds for s in stats), depth)

    def decode(self, n: int, repetitions: int, depth: int = 0) -> BenchRow:
        """Time n tokens drawn after `depth` tokens, one more and a first drawn one; raises as
        `prefill` does."""
        stats = self._repeated(depth + 1, n + 1, depth, 1, repetitions)
        self._check_finite(f"after {n} decode steps")
        return BenchRow("decode", n, tuple(s.decode_seconds for s in stats), depth)

    def check_repeats(self) -> str:
        """Run greedily twice over the same prompt, the second time without graphs where the runner
        has them; returns the sha256 of the ids.

        Raises MinferError where the runs differ: such figures would be of wrong answers.
        """
        n = min(CHECK_TOKENS, self.engine.n_ctx)
        greedy = replace(self.params, temperature=0.0)
        first = self._generate(1, n, greedy)[0]
        with getattr(self.engine.runner, "eager", nullcontext)():
            second = self._generate(1, n, greedy)[0]
        if first != second:
            raise MinferError(
                f"the same greedy run gave {first} and then, without graphs, {second}: no speed is "
                "reported for wrong answers"
            )
        return hashlib.sha256(np.array(first, "<i4").tobytes()).hexdigest()

    def _repeated(
        self, n_prompt: int, n: int, depth: int, warm_ups: int, repetitions: int
    ) -> list[Stats]:
        """Times of each repetition; the first untimed warm-up fills the cache up to `depth`."""
        runs = [0] + [depth] * (warm_ups - 1 + repetitions)
        stats = [self._generate(n_prompt, n, self.params, start)[1] for start in runs]
        return stats[warm_ups:]

    def _generate(
        self, n_prompt: int, n: int, params: SamplingParams, depth: int = 0
    ) -> tuple[list[int], Stats]:
        """Ids and times of n tokens after n_prompt, of which the cache keeps `depth`, past any end
        token."""
        needed = n_prompt + n - 1
        if needed > self.engine.n_ctx:
            raise ContextFullError(
                needed, self.engine.n_ctx, "raise --n-ctx or measure fewer tokens"
            )
        self.engine.rollback(depth)
        ids = [token.id for token in self.engine.generate(self.prompt(n_prompt), params, n)]
        return ids, self.engine.stats

    def _check_finite(self, when: str) -> None:
        bad = int(np.count_nonzero(~np.isfinite(self.engine.runner.logits())))
        if bad:
            raise NumericsError(f"{bad} logits are not finite {when}: no speed is reported")


def run(
    bench: Bench,
    n_prompt: Sequence[int],
    n_generate: Sequence[int],
    repetitions: int,
    depths: Sequence[int] = (0,),
    progress: Progress | None = None,
) -> list[BenchRow]:
    """All rows, prefill before decode at each depth; sizes of 0 are left out."""
    wanted = [
        (test, n, depth)
        for depth in depths
        for test, ns in (("prefill", n_prompt), ("decode", n_generate))
        for n in ns
        if n
    ]
    rows = []
    for i, (test, n, depth) in enumerate(wanted):
        if progress:
            progress(row_name(test, n, depth), i, len(wanted))
        measure = bench.prefill if test == "prefill" else bench.decode
        rows.append(measure(n, repetitions, depth))
    if progress:
        progress("", len(wanted), len(wanted))
    return rows


def result_of(row: BenchRow, roofline: Roofline, read: float | None) -> dict[str, Any]:
    """A row, JSON-ready. `mbu`: the share of `read` (bytes per second, None where it is not known)
    that a decode row's bytes come to; `tops`: a prefill row's operations, 1e12 per second."""
    result: dict[str, Any] = {
        "test": row.test,
        "name": row.name,
        "n_tokens": row.n_tokens,
        "depth": row.depth,
        "tokens_per_s": _rounded(row.mean),
        "spread": _rounded(row.spread),
        "mbu": None,
        "tops": None,
        "seconds": list(row.seconds),
    }
    if row.test == "prefill":
        work = roofline.prefill_operations(row.n_tokens, row.depth)
        result["tops"] = _rounded(1e-12 * work / row.n_tokens * row.mean)
    elif read:
        seen = row.depth + 1 + (row.n_tokens + 1) / 2  # positions, in the mean of the steps
        result["mbu"] = _rounded(roofline.decode_bytes(seen) * row.mean / read)
    return result


def report(
    llm: LLM,
    n_prompt: Sequence[int],
    n_generate: Sequence[int],
    repetitions: int,
    depths: Sequence[int] = (0,),
    progress: Progress | None = None,
) -> dict[str, Any]:
    """`run` on a loaded model, the ceiling, the checks, and all that one needs to repeat it."""
    runner = llm.engine.runner
    tensors = llm.file.tensors.values()
    roofline = Roofline.of(llm.file, llm.config, runner.kv_type)
    measure_read: Callable[[], float | None] = getattr(runner, "read_bandwidth", lambda: None)
    read = measure_read()
    bench = Bench(llm.engine, llm.sampling())
    digest = bench.check_repeats()
    rows = run(bench, n_prompt, n_generate, repetitions, depths, progress)
    return {
        "kind": "bench",
        "model": llm.config.name,
        "file": llm.file.path.name,
        "file_bytes": llm.file.size_bytes,
        "n_params": sum(math.prod(info.shape) for info in tensors),
        "types": dict(Counter(info.type_name for info in tensors)),
        "n_ctx": llm.n_ctx,
        "kv_type": runner.kv_type,
        "runs_on": runner.describe(),
        **about_software(),
        **_about_device(runner),
        "read_gb_s": _rounded(1e-9 * read) if read else None,
        "weight_bytes_per_token": roofline.weight_bytes,
        "kv_bytes_per_position": roofline.kv_bytes,
        "greedy_sha256": digest,
        "sampling": _sampling_words(bench.params),
        "results": [result_of(row, roofline, read) for row in rows],
    }


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
