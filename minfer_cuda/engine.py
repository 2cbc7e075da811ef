"""Token ids in, token ids out: prefill, the decode loop, KV reuse. Knows no text.

The engine drives a `Runner` (NumPy or CUDA). A runner owns the model's buffers, its KV cache and
the state of the sampler; the engine owns the order of calls and the record of what the cache holds.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from minfer_cuda.config import MAX_LOGPROBS, MAX_SIZE, Qwen2Config
from minfer_cuda.errors import ContextFullError, UsageError
from minfer_cuda.sampling import SamplingParams

SEED_BITS = 32  # of a seed that is drawn: short enough to be typed again


@dataclass(frozen=True)
class Token:
    """One sampled token. `logprobs`: the most likely ids with natural-log probabilities, of the
    distribution before temperature and filters, when they were asked for; `logprob` is of `id`."""

    id: int
    logprob: float | None = None
    logprobs: tuple[tuple[int, float], ...] = ()


class Runner(Protocol):
    """The device side of the engine. Calls are enqueued in order; only `logits` and `read` wait.

    A runner may put an enqueued `step` off until something needs it, so an error of the step may
    come out of a later call; what the cache holds after the calls is the same.
    """

    n_ctx: int
    n_batch: int  # most rows of one `prefill` call
    kv_type: str  # f16 or f32

    @property
    def capture_seconds(self) -> float:
        """What capturing graphs has taken until now."""

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
        """Load the sampler's state and forget draws not read: `history` seeds the penalty window,
        `exempt` (end tokens) are never penalised. The random counter is the number of tokens
        sampled since."""

    def sample(self, mask: np.ndarray | None = None) -> None:
        """Enqueue: draw the next token from the logits at hand; with a `mask` (of
        `sampling.mask_words`) one that it allows."""

    def feed(self, position: int) -> None:
        """Enqueue: forward the last drawn token at `position`."""

    def step(self, position: int) -> None:
        """Enqueue `feed` and `sample` without a mask, as one."""

    def read(self) -> Token:
        """Wait for the oldest draw not read yet."""

    def close(self) -> None:
        """Free everything."""


class Constraint(Protocol):
    """What says which tokens an answer may consist of; see `grammar.Matcher`."""

    @property
    def complete(self) -> bool:
        """Whether the answer is complete and nothing can follow."""

    def mask(self) -> np.ndarray:
        """The ids that may come next, at least one; uint32, as `sampling.mask_words` has it. End
        tokens are among them where the answer may end."""

    def accept(self, token: int) -> None:
        """Go on after `token`, one that the mask allowed and no end token."""


def check_sizes(n_ctx: int, n_batch: int) -> None:
    """What every runner asks of its sizes. Raises UsageError."""
    if n_ctx < 1 or n_batch < 1:
        raise UsageError(f"n_ctx is {n_ctx}, n_batch {n_batch}: both must be >= 1")
    if n_ctx > MAX_SIZE:
        raise UsageError(f"n_ctx is {n_ctx}: positions end at {MAX_SIZE}")


def check_rows(n_tokens: int, n_out: int, n_batch: int) -> None:
    """What every runner asks of a prefill. Raises UsageError."""
    if not 1 <= n_out <= n_tokens <= n_batch:
        raise UsageError(
            f"prefill of {n_tokens} tokens for {n_out} rows of logits: expected "
            f"1 <= rows <= tokens <= n_batch {n_batch}"
        )


Progress = Callable[[str, int, int], None]  # what is being done, how much of how much
COMPILING, LOADING = "compiling kernels", "loading"  # what runners do of it; bytes are loaded

FinishReason = Literal["stop", "grammar", "length", "interrupted"]


@dataclass
class Stats:
    """What a generation did; kept current while it runs. Seconds are of the wall clock."""

    seed: int
    prompt_tokens: int
    reused_tokens: int = 0  # of the prompt, already in the cache
    prefill_seconds: float = 0.0  # from the start until the first token
    generated_tokens: int = 0
    decode_seconds: float = 0.0  # from the first token until the last
    finish_reason: FinishReason = "interrupted"  # until it ends by itself

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens forwarded per second."""
        return _rate(self.prompt_tokens - self.reused_tokens, self.prefill_seconds)

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first."""
        return _rate(self.generated_tokens - 1, self.decode_seconds)


def _rate(tokens: int, seconds: float) -> float:
    return max(tokens, 0) / seconds if seconds > 0 else 0.0


class Engine:
    """Generates from prompts, forwarding only what the cache does not hold yet.

    `tokens` are the ids whose keys and values the cache holds, at positions 0, 1, ...: exact
    whenever the caller has control, after an early end of the iteration and after an error too.
    """

    def __init__(self, runner: Runner, config: Qwen2Config):
        self.runner = runner
        self.config = config
        self.tokens: list[int] = []
        self.stats = Stats(seed=0, prompt_tokens=0)
        self._settled = 0  # tokens whose forward is certain; a step put off may yet fail
        self._closed = False

    @property
    def n_ctx(self) -> int:
        return self.runner.n_ctx

    def close(self) -> None:
        """Free what the runner holds. Whoever generates from then on, also in an iteration begun
        before, gets a UsageError."""
        self._closed = True
        self.runner.close()

    def rollback(self, n: int) -> None:
        """Keep only the first n tokens of the cache."""
        del self.tokens[n:]
        self._settled = min(self._settled, n)

    def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        max_tokens: int | None = None,
        end_ids: frozenset[int] = frozenset(),
        n_logprobs: int = 0,
        constraint: Constraint | None = None,
    ) -> Iterator[Token]:
        """Yield tokens until an end token (yielded and counted too), the last that `constraint`
        allows, `max_tokens`, or the context.

        None takes the room that is left: the prompt and all tokens but the last must fit n_ctx.
        A later call of `generate` or `logits` ends this one. Raises at once, before anything is
        written: UsageError for an empty prompt, an id that does not exist or a bad parameter;
        ContextFullError for a prompt longer than n_ctx.
        """
        prompt = self._checked(prompt_ids)
        params.validate(self.config.n_vocab)
        if max_tokens is not None and max_tokens < 0:
            raise UsageError(f"max_tokens is {max_tokens}: must be >= 0")
        if not 0 <= n_logprobs <= MAX_LOGPROBS:
            raise UsageError(f"n_logprobs is {n_logprobs}: must be in 0..{MAX_LOGPROBS}")
        room = self.n_ctx - len(prompt) + 1
        limit = room if max_tokens is None else min(max_tokens, room)
        seed = secrets.randbits(SEED_BITS) if params.seed is None else params.seed
        self.stats = Stats(seed=seed, prompt_tokens=len(prompt))
        return self._generate(prompt, params, limit, end_ids, n_logprobs, constraint, self.stats)

    def logits(self, ids: Sequence[int], n_out: int | None = None) -> np.ndarray:
        """Logits of the last `n_out` of `ids` (None: all): float32 (n_out, V), on the host.

        All of `ids` are forwarded, from position 0. Raises as `generate` does.
        """
        prompt = self._checked(ids)
        wanted = len(prompt) if n_out is None else n_out
        if not 1 <= wanted <= len(prompt):
            raise UsageError(f"n_out is {wanted}: must be in 1..{len(prompt)}")
        self.stats = Stats(seed=0, prompt_tokens=len(prompt))
        self.rollback(0)
        parts = []
        with self._exact_tokens():
            for chunk in self._chunks(prompt):
                rows = min(len(chunk), len(self.tokens) + len(chunk) - (len(prompt) - wanted))
                self._prefill(chunk, max(rows, 1))
                if rows > 0:
                    parts.append(self.runner.logits(rows))
        return np.concatenate(parts)

    def _is_over(self, stats: Stats) -> bool:
        """Whether a later call has ended the generation of `stats`: the cache is no longer its."""
        self._check_open()
        return self.stats is not stats

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the model is closed: generate before `close` or the end of `with`")

    def _checked(self, ids: Sequence[int]) -> list[int]:
        self._check_open()
        prompt = [int(i) for i in ids]
        if not prompt:
            raise UsageError("the prompt is empty: there is no token to continue from")
        for token in prompt:
            if not 0 <= token < self.config.n_vocab:
                raise UsageError(f"token id {token} is not in 0..{self.config.n_vocab - 1}")
        if len(prompt) > self.n_ctx:
            raise ContextFullError(len(prompt), self.n_ctx)
        return prompt

    def _generate(
        self,
        prompt: list[int],
        params: SamplingParams,
        limit: int,
        end_ids: frozenset[int],
        n_logprobs: int,
        constraint: Constraint | None,
        stats: Stats,
    ) -> Iterator[Token]:
        start = first = time.perf_counter()
        with self._exact_tokens():
            if self._is_over(stats):
                return
            stats.reused_tokens = self._common_prefix(prompt)
            self.rollback(stats.reused_tokens)
            for chunk in self._chunks(prompt[stats.reused_tokens :]):
                self._prefill(chunk, 1)
            self.runner.begin(params, stats.seed, prompt, end_ids, n_logprobs)
            if limit > 0:
                self.runner.sample(None if constraint is None else constraint.mask())
            for n in range(limit):
                if self._is_over(stats):
                    return
                more = n + 1 < limit
                position = len(prompt) + n if more else None
                if constraint is None:
                    token = self._next(position)
                else:
                    token = self._next_allowed(position, constraint, end_ids)
                now = time.perf_counter()
                if n == 0:
                    first, stats.prefill_seconds = now, now - start
                stats.decode_seconds = now - first
                stats.generated_tokens = n + 1
                if token.id in end_ids or (constraint is not None and constraint.complete):
                    stats.finish_reason = "stop" if token.id in end_ids else "grammar"
                    yield token
                    return
                if not more:
                    stats.finish_reason = "length"
                yield token
            stats.finish_reason = "length"

    def _next(self, position: int | None) -> Token:
        """The oldest draw, after its forward at `position` has been put on its way: the device
        works on the next token while the host deals with this one."""
        settled = len(self.tokens)
        if position is not None:
            self.runner.step(position)
        token = self.runner.read()
        self._settled = settled
        if position is not None:
            self.tokens.append(token.id)
        return token

    def _next_allowed(
        self, position: int | None, constraint: Constraint, end_ids: frozenset[int]
    ) -> Token:
        """The oldest draw, and after it, if there is a `position` and the answer goes on, its
        forward and the next draw: what that may be is found out while the device forwards."""
        token = self.runner.read()
        self._settled = len(self.tokens)
        if token.id in end_ids:
            return token
        constraint.accept(token.id)
        if position is not None and not constraint.complete:
            self.runner.feed(position)
            self.runner.sample(constraint.mask())
            self.tokens.append(token.id)
        return token

    def _common_prefix(self, prompt: list[int]) -> int:
        """How many of the cache's tokens begin `prompt`; its last token is always forwarded."""
        for i, (held, wanted) in enumerate(zip(self.tokens, prompt, strict=False)):
            if held != wanted:
                return i
        return min(len(self.tokens), len(prompt) - 1)

    def _chunks(self, ids: list[int]) -> Iterator[list[int]]:
        n = self.runner.n_batch
        return (ids[i : i + n] for i in range(0, len(ids), n))

    def _prefill(self, ids: list[int], n_out: int) -> None:
        self.runner.prefill(ids, len(self.tokens), n_out)
        self.tokens.extend(ids)
        self._settled = len(self.tokens)

    @contextmanager
    def _exact_tokens(self) -> Iterator[None]:
        """After an error, `tokens` has only what the cache holds for certain."""
        try:
            yield
        except GeneratorExit:
            raise  # the consumer stopped at a yield
        except KeyboardInterrupt:
            self.rollback(self._settled)
            raise
        except BaseException:
            self.rollback(0)  # the device, or the numbers, cannot be trusted
            raise
