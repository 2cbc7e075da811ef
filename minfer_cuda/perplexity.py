"""How well a model predicts a text, and how far two ways of computing a model lie apart.

A text is cut into chunks of n_ctx tokens, each starting from an empty context, and the second half
of each is scored, so that every prediction has at least n_ctx/2 tokens before it. That is what
llama-perplexity does, with the same statistics, and its saved files can be compared with.

A `Rows` gives the predictions: called with the number of a chunk, it yields for each scored
position the natural-log probabilities of all next tokens, float32 (V,). They come one by one, so
at most one prefill's logits are held at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from minfer_cuda.engine import Runner
from minfer_cuda.errors import UsageError
from minfer_cuda.saved_logits import MIN_CONTEXT

Rows = Callable[[int], Iterator[np.ndarray]]

PIECE = 512  # tokens of a forward: 311 MB of logits with a vocabulary of 151,936
FLOOR = -16.0  # nats: less likely tokens than e^-16 are left out of a divergence


def cut(ids: Sequence[int], n_ctx: int, limit: int | None = None) -> np.ndarray:
    """The chunks of a text, int32 (C, n_ctx); a shorter rest is dropped, `limit` bounds C.

    Raises UsageError where n_ctx is too small or the text has fewer tokens than one chunk.
    """
    if n_ctx < MIN_CONTEXT:
        raise UsageError(f"chunks of {n_ctx} tokens: at least {MIN_CONTEXT} are needed")
    n_chunks = len(ids) // n_ctx
    if n_chunks == 0:
        raise UsageError(
            f"the text has {len(ids)} tokens, one chunk needs {n_ctx}: take a longer text or a "
            f"smaller -c"
        )
    if limit is not None:
        n_chunks = min(n_chunks, limit)
    return np.array(ids[: n_chunks * n_ctx], np.int32).reshape(n_chunks, n_ctx)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Natural-log probabilities of a row of logits, float32 (V,), summed in float64."""
    shifted = logits - logits.max()
    total = np.exp(shifted).sum(dtype=np.float64)
    log_probs: np.ndarray = shifted - np.float32(np.log(total))
    return log_probs


def prefilled(runner: Runner, chunks: np.ndarray) -> Rows:
    """Predictions of a runner that forwards many tokens at once, whole chunks where they have at
    most 512 tokens. The runner must not be used for anything else while a chunk is read."""

    def rows(chunk: int) -> Iterator[np.ndarray]:
        ids = chunks[chunk]
        size = min(PIECE, runner.n_batch)
        for start in range(0, len(ids), size):
            piece = ids[start : start + size]
            end = start + len(piece)
            n_out = end - max(start, len(ids) // 2)
            runner.prefill(piece.tolist(), start, max(n_out, 1))
            if n_out > 0:
                scored = runner.logits(n_out)
                yield from map(log_softmax, scored[:-1] if end == len(ids) else scored)

    return rows


def decoded(runner: Runner, chunks: np.ndarray) -> Rows:
    """As `prefilled`, but the scored half is forwarded token by token, as when generating."""

    def rows(chunk: int) -> Iterator[np.ndarray]:
        ids = chunks[chunk].tolist()
        first = len(ids) // 2
        for start in range(0, first, runner.n_batch):
            runner.prefill(ids[start : min(start + runner.n_batch, first)], start)
        for position in range(first, len(ids) - 1):
            runner.prefill([ids[position]], position)
            yield log_softmax(runner.logits()[0])

    return rows


@dataclass(frozen=True)
class Perplexity:
    """exp of the mean of -log p of the text's tokens, and its standard error."""

    n_tokens: int  # scored
    ppl: float
    ppl_error: float


@dataclass(frozen=True)
class Comparison:
    """Predictions against a base's, over the same tokens. KLD is the Kullback-Leibler divergence
    from the base at a position, in nats; delta-p is the difference of the probabilities of the
    text's token; same_top is the share of positions where both find the same token most likely.
    An `_error` is the standard error of a mean."""

    n_tokens: int
    ppl: float
    ppl_error: float
    ppl_base: float
    ppl_base_error: float
    ln_ppl_ratio: float  # ln(ppl / ppl_base)
    ln_ppl_ratio_error: float
    kld_mean: float
    kld_error: float
    kld_median: float
    kld_p99: float
    kld_p99_9: float
    kld_max: float
    delta_p_rms: float
    same_top: float


def perplexity(
    rows: Rows, chunks: np.ndarray, keep: Callable[[np.ndarray], None] | None = None
) -> Iterator[Perplexity]:
    """The estimate after each chunk; the last is the result. `keep` is given every row."""
    nll: list[float] = []
    for i, ids in enumerate(chunks):
        for target, row in zip(_targets(ids), rows(i), strict=True):
            nll.append(-float(row[target]))
            if keep:
                keep(row)
        yield Perplexity(len(nll), *_ppl(np.array(nll)))


def compare(chunks: np.ndarray, base: Rows, *others: Rows) -> Iterator[tuple[Comparison, ...]]:
    """Each of `others` against `base`, which is asked once: the statistics after each chunk; the
    last are the result. Two sources need two runners, since they are read side by side."""
    positions: list[list[Position]] = [[] for _ in others]
    for i, ids in enumerate(chunks):
        streams = (rows(i) for rows in others)
        for target, base_row, *their_rows in zip(_targets(ids), base(i), *streams, strict=True):
            for table, row in zip(positions, their_rows, strict=True):
                table.append(position(base_row, row, target))
        yield tuple(summary(table) for table in positions)


# -log p, that of the base, KLD, delta-p, same top
Position = tuple[float, float, float, float, bool]


def position(base: np.ndarray, log_probs: np.ndarray, target: int) -> Position:
    """What one scored position contributes. `base` and `log_probs` float32 (V,), natural logs."""
    likely = np.flatnonzero(base > FLOOR)
    of_base = base[likely].astype(np.float64)
    kld = float(np.exp(of_base) @ (of_base - log_probs[likely]))
    delta_p = float(np.exp(log_probs[target]) - np.exp(base[target]))
    same = bool(base.argmax() == log_probs.argmax())
    return -float(log_probs[target]), -float(base[target]), kld, delta_p, same


def summary(positions: Sequence[Position]) -> Comparison:
    """The statistics of at least two positions; quantiles are interpolated linearly."""
    nll, nll_base, kld, delta_p, same = np.array(positions, np.float64).T
    ppl, ppl_error = _ppl(nll)
    ppl_base, ppl_base_error = _ppl(nll_base)
    ln_ppl_ratio, ln_ppl_ratio_error = _mean(nll - nll_base)
    kld_mean, kld_error = _mean(kld)
    median, p99, p99_9, largest = map(float, np.quantile(kld, [0.5, 0.99, 0.999, 1.0]))
    return Comparison(
        n_tokens=len(positions),
        ppl=ppl,
        ppl_error=ppl_error,
        ppl_base=ppl_base,
        ppl_base_error=ppl_base_error,
        ln_ppl_ratio=ln_ppl_ratio,
        ln_ppl_ratio_error=ln_ppl_ratio_error,
        kld_mean=kld_mean,
        kld_error=kld_error,
        kld_median=median,
        kld_p99=p99,
        kld_p99_9=p99_9,
        kld_max=largest,
        delta_p_rms=float(np.sqrt(np.mean(delta_p**2))),
        same_top=float(np.mean(same)),
    )


def _targets(ids: np.ndarray) -> list[int]:
    """The tokens that a chunk's scored positions should predict."""
    targets: list[int] = ids[len(ids) // 2 + 1 :].tolist()
    return targets


def _mean(values: np.ndarray) -> tuple[float, float]:
    """The mean and its standard error."""
    return float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values)))


def _ppl(nll: np.ndarray) -> tuple[float, float]:
    """Perplexity of -log p, and its error to first order: that of the mean times the value."""
    mean, error = _mean(nll)
    ppl = float(np.exp(mean))
    return ppl, ppl * error
