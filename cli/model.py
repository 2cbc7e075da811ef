"""From options to a loaded model, and what is said about it on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .app import notice, say
from .store import local_path
from .terminal import is_smart, redraw

if TYPE_CHECKING:
    from minfer_cuda.llm import LLM, Completion
    from minfer_cuda.sampling import SamplingParams


STOPPED = {
    "stop": "end token",
    "stop string": "stop string",
    "grammar": "grammar complete",
    "length": "length limit",
    "interrupted": "interrupted",
}


@dataclass(frozen=True)
class Settings:
    """How a model is loaded; the names are those of `LLM`."""

    n_ctx: int
    device: str
    kv_type: str | None  # None: what suits the device
    chat_template: str | None = None
    rope_freq_base: float | None = None


@dataclass(frozen=True)
class Sampling:
    """The sampling options that were given; None leaves them to the file and the library."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None

    def check(self) -> None:
        """Raise UsageError for a bad value, before a model is loaded."""
        from minfer_cuda.sampling import SamplingParams

        SamplingParams.from_metadata({}, **vars(self))

    def params(self, llm: LLM, never: Iterable[int] = ()) -> SamplingParams:
        """All parameters for a model; the ids of `never` are not drawn."""
        params = llm.sampling(**vars(self))
        bias = dict.fromkeys(never, float("-inf"))
        return replace(params, logit_bias=params.logit_bias | bias)


@contextmanager
def open_model(reference: str, settings: Settings, verbose: bool = False) -> Iterator[LLM]:
    """The model, closed at the end. Notices and, on a terminal, progress go to stderr."""
    start = time.perf_counter()
    from minfer_cuda.llm import LLM

    imported = time.perf_counter() - start
    file = local_path(reference)
    progress = show_progress if is_smart(sys.stderr) else None
    try:
        llm = LLM(file, progress=progress, notify=notice, **vars(settings))
    except BaseException:
        if progress:
            redraw("")  # what it has shown
        raise
    with llm:
        if verbose:
            seconds = {"import": imported} | llm.load_seconds
            parts = ", ".join(f"{name} {spent:.2f}" for name, spent in seconds.items())
            say(f"{file}: loaded in {sum(seconds.values()):.2f} s ({parts})")
            say(f"{llm.engine.runner.describe()}")
        yield llm
        if verbose and (captured := llm.engine.runner.capture_seconds):
            say(f"graphs captured in {captured:.3f} s")


def closing_line(completion: Completion, show_seed: bool) -> str:
    """Counts, speeds and why it ended."""
    stats = completion.stats
    new = stats.prompt_tokens - stats.reused_tokens
    seed = f", seed {stats.seed}" if show_seed else ""
    return (
        f"{stats.prompt_tokens} prompt tokens ({new} new, {stats.reused_tokens} kept, "
        f"{stats.prefill_rate:.1f} tok/s), {stats.generated_tokens} generated "
        f"({stats.decode_rate:.1f} tok/s), stopped: {STOPPED[completion.finish_reason]}{seed}"
    )


def draws_at_random(params: SamplingParams) -> bool:
    """Whether the seed matters and nobody chose it."""
    return params.seed is None and not params.greedy


def show_progress(doing: str, done: int, total: int) -> None:
    """Redraw the line of `LLM`'s progress; it goes once all is done."""
    part = f"{100 * done // total} %" if doing == "loading" else f"{done} of {total}"
    redraw(f"{doing} {part}" if done < total else "")
