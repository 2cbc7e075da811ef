"""minfer perplexity: how well a model predicts a text, and how far it is from a saved base."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minfer_cuda.errors import MinferError, UsageError

from . import options
from .app import counted, say
from .files import read_text
from .model import Settings, open_model
from .terminal import bar, is_smart, redraw

if TYPE_CHECKING:
    import numpy as np

    from minfer_cuda.llm import LLM
    from minfer_cuda.perplexity import Comparison, Perplexity, Rows
    from minfer_cuda.saved_logits import SavedLogits

CHUNK = 512


def perplexity(
    model: options.Model,
    text: Annotated[
        Path | None,
        options.existing_file("-f", "--file", help="UTF-8 text to score."),
    ] = None,
    n_ctx: Annotated[
        int | None,
        typer.Option(
            "--n-ctx", "-c", metavar="N", min=8, help="Tokens of a chunk.", show_default=str(CHUNK)
        ),
    ] = None,
    n_chunks: Annotated[
        int | None,
        typer.Option("--chunks", metavar="N", min=1, help="Most chunks.", show_default="all"),
    ] = None,
    save_logits: Annotated[
        Path | None,
        typer.Option(
            "--save-logits", metavar="FILE", dir_okay=False, help="Keep the predictions as a base."
        ),
    ] = None,
    base: Annotated[
        Path | None,
        options.existing_file("--kl-divergence", help="Compare with this base, over its text."),
    ] = None,
    token_by_token: Annotated[
        bool, typer.Option("--token-by-token", help="Score as when generating: one at a time.")
    ] = False,
    device: options.Device = "auto",
    kv_type: options.KV = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure how well a model predicts a text.

    Or, with a base, how far its predictions are from the base's. The text is cut into chunks and
    the second half of each is scored. Chunks, statistics and files of saved predictions are those
    of llama-perplexity. A chunk of 512 tokens takes 78 MB of a file.

    Example: minfer perplexity model.gguf -f text.txt --chunks 20 --save-logits base.bin
    """
    if save_logits and base:
        raise UsageError("--save-logits and --kl-divergence exclude each other")
    if not text and not base:
        raise UsageError("nothing to score: give a text with -f, or a base with --kl-divergence")
    from minfer_cuda.saved_logits import SavedLogits

    saved = SavedLogits(base) if base else None
    size = _chunk_size(n_ctx, saved)
    words = read_text(text) if text else None
    with open_model(model, Settings(size, device, kv_type and kv_type.value)) as llm:
        _check_target(save_logits, (text, llm.file.path))
        chunks = _chunks(llm, words, size, n_chunks, saved)
        result = _measure(llm, chunks, saved, save_logits, token_by_token)
        about = _about(llm, chunks, text, base, token_by_token)
    print(_json(about, result) if as_json else _table(chunks, result))


def _check_target(target: Path | None, inputs: Iterable[Path | None]) -> None:
    """Raise UsageError where saving would replace what is read."""
    for path in inputs:
        if target and path and target.exists() and target.samefile(path):
            raise UsageError(f"--save-logits would replace {path}, which is read")


def _chunk_size(n_ctx: int | None, saved: SavedLogits | None) -> int:
    if saved is None:
        return n_ctx or CHUNK
    size = saved.chunks.shape[1]
    if n_ctx not in (None, size):
        raise UsageError(f"-c is {n_ctx}, the chunks of {saved.path} have {size} tokens")
    return size


def _chunks(
    llm: LLM, text: str | None, size: int, limit: int | None, saved: SavedLogits | None
) -> np.ndarray:
    """The base's chunks, which must be the text's if there is one; else the text's."""
    from minfer_cuda.perplexity import cut

    if saved is not None and saved.n_vocab != llm.config.n_vocab:
        raise MinferError(
            f"{saved.path} is of a model with {saved.n_vocab} ids, this one has "
            f"{llm.config.n_vocab}"
        )
    of_text = None
    if text is not None:
        of_text = cut(llm.tokenizer.encode(text, parse_special=False), size, limit)
    if saved is None:
        assert of_text is not None  # one of the two was asked for
        return of_text
    chunks = saved.chunks[:limit]
    if of_text is not None and of_text[: len(chunks)].tolist() != chunks.tolist():
        raise MinferError(f"{saved.path} is of another text: leave -f out to use its own")
    return chunks


def _measure(
    llm: LLM,
    chunks: np.ndarray,
    saved: SavedLogits | None,
    save_logits: Path | None,
    token_by_token: bool,
) -> Perplexity | Comparison:
    from minfer_cuda import perplexity as measure
    from minfer_cuda.saved_logits import saving_logits

    source = measure.decoded if token_by_token else measure.prefilled
    rows: Rows = source(llm.engine.runner, chunks)
    if saved is not None:
        pairs = measure.compare(chunks, saved.rows, rows)
        return _watch((result for (result,) in pairs), len(chunks))
    if save_logits is None:
        return _watch(measure.perplexity(rows, chunks), len(chunks))
    with saving_logits(save_logits, chunks, llm.config.n_vocab) as add:
        return _watch(measure.perplexity(rows, chunks, add), len(chunks))


def _watch(estimates: Iterator[Perplexity | Comparison], n_chunks: int) -> Perplexity | Comparison:
    """The last estimate; all of them are shown on stderr as they come, on a terminal with a bar."""
    start = time.perf_counter()
    terminal = is_smart(sys.stderr)
    result: Perplexity | Comparison | None = None
    for done, result in enumerate(estimates, 1):
        left = (time.perf_counter() - start) / done * (n_chunks - done)
        line = f"chunk {done}/{n_chunks}: {_running(result)}, {left:.0f} s left"
        if terminal:
            redraw(f"{bar(done, n_chunks)} {line}")
        else:
            say(line)
    if terminal:
        redraw("")
    assert result is not None  # there is at least one chunk
    return result


def _running(result: Perplexity | Comparison) -> str:
    words = f"PPL {result.ppl:.4f} ± {result.ppl_error:.4f}"
    kld = getattr(result, "kld_mean", None)
    return words if kld is None else f"{words}, KLD {kld:.6f}"


def _about(
    llm: LLM, chunks: np.ndarray, text: Path | None, base: Path | None, token_by_token: bool
) -> dict[str, Any]:
    """All that one needs to repeat the measurement."""
    from minfer_cuda.bench import about_software

    return {
        "model": llm.config.name,
        "file": llm.file.path.name,
        "text": text.name if text else None,
        "base": base.name if base else None,
        "n_ctx": chunks.shape[1],
        "n_chunks": len(chunks),
        "token_by_token": token_by_token,
        "runs_on": llm.engine.runner.describe(),
        **about_software(),
    }


def _json(about: dict[str, Any], result: Perplexity | Comparison) -> str:
    import json
    from dataclasses import asdict

    return json.dumps(about | asdict(result), ensure_ascii=False)


def _table(chunks: np.ndarray, result: Perplexity | Comparison) -> str:
    from minfer_cuda.perplexity import Perplexity

    size = f"{counted(len(chunks), 'chunk')} of {chunks.shape[1]}"
    lines = [
        ("tokens scored", f"{result.n_tokens} in {size}"),
        ("PPL", f"{result.ppl:.4f} ± {result.ppl_error:.4f}"),
    ]
    if not isinstance(result, Perplexity):
        lines += [
            ("PPL of the base", f"{result.ppl_base:.4f} ± {result.ppl_base_error:.4f}"),
            ("ln(PPL / base)", f"{result.ln_ppl_ratio:.6f} ± {result.ln_ppl_ratio_error:.6f}"),
            ("KLD mean", f"{result.kld_mean:.6f} ± {result.kld_error:.6f}"),
            ("KLD median", f"{result.kld_median:.6f}"),
            ("KLD 99 %", f"{result.kld_p99:.6f}"),
            ("KLD 99.9 %", f"{result.kld_p99_9:.6f}"),
            ("KLD maximum", f"{result.kld_max:.6f}"),
            ("RMS delta-p", f"{100 * result.delta_p_rms:.3f} %"),
            ("same top token", f"{100 * result.same_top:.3f} %"),
        ]
    return "\n".join(f"{name:<16}{value}" for name, value in lines)
