"""Token ids in, token ids out: prefill, the decode loop, KV reuse. Knows no text.

The engine drives a `Runner` (NumPy or CUDA). A runner owns the model's buffers, its KV cache and
the state of the sampler; the engine owns the order of calls and the record of what the cache holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from minfer_cuda.sampling import SamplingParams


@dataclass(frozen=True)
class Token:
    """One sampled token. `logprobs`: the most likely ids with natural-log probabilities, of the
    distribution before temperature and filters, when they were asked for; `logprob` is this id's."""

    id: int
    logprob: float | None = None
    logprobs: tuple[tuple[int, float], ...] = ()


class Runner(Protocol):
    """The device side of the engine. Calls are enqueued in order; only `logits` and `read` wait."""

    n_ctx: int
    n_batch: int  # most rows of one `prefill` call

    def describe(self) -> str:
        """One line: device, types, bytes."""

    def prefill(self, ids: Sequence[int], start: int, n_out: int = 1) -> None:
        """Forward `ids` at positions start, start+1, ...; keeps the last n_out rows' logits."""

    def logits(self, n_out: int = 1) -> np.ndarray:
        """The logits kept by the last forward, float32 (n_out, V), on the host."""

    def begin(
        self,
        params: SamplingParams,
        seed: int,
        history: Sequence[int],
        exempt: frozenset[int],
        n_logprobs: int = 0,
    ) -> None:
        """Load the sampler's state: `history` seeds the penalty window, `exempt` (end tokens) are
        never penalised. The random counter is the number of tokens sampled since."""

    def sample(self) -> None:
        """Enqueue: draw the next token from the logits at hand."""

    def step(self, position: int) -> None:
        """Enqueue: forward the last drawn token at `position`, then draw the next one."""

    def read(self) -> Token:
        """Wait for the oldest draw not read yet."""

    def close(self) -> None:
        """Free everything."""
