"""The engine: order of calls, KV reuse, ends, and an exact record of what the cache holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from ggufs import write_gguf

from minfer_cuda.config import Qwen2Config
from minfer_cuda.engine import Engine, Token
from minfer_cuda.errors import ContextFullError, DeviceError, GrammarError, UsageError
from minfer_cuda.gguf import GGUFFile
from minfer_cuda.runners.numpy_runner import NumpyRunner
from minfer_cuda.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
END = frozenset({99})
CONFIG = Qwen2Config("fake", 1, 64, 64, 1, 1, 64, 100, 512, 1e-6, 1e4)


class FakeRunner:
    """Draws from a script. `cache` is what a device would hold; like a device it executes calls in
    order, and like the CPU path it puts steps off until they are needed."""

    def __init__(self, script: Sequence[int], n_ctx: int = 16, n_batch: int = 4):
        self.n_ctx, self.n_batch = n_ctx, n_batch
        self.cache: dict[int, int] = {}
        self.calls: list[tuple] = []
        self.fail_at: dict[str, Callable[[], None]] = {}
        self._script = deque(script)
        self._waiting: deque[Callable[[], None]] = deque()
        self._unread: deque[int] = deque()
        self._last = -1

    def _call(self, name: str, *arguments: object) -> None:
        self.calls.append((name, *arguments))
        if name in self.fail_at:
            self.fail_at[name]()

    def _work(self) -> None:
        self._waiting.popleft()()

    def _forward(self, position: int) -> None:
        assert position < self.n_ctx
        self.cache[position] = self._last

    def _draw(self) -> None:
        self._last = self._script.popleft() if self._script else 1
        self._unread.append(self._last)

    def prefill(self, ids, start, n_out=1):
        while self._waiting:
            self._work()
        self._unread.clear()
        self._call("prefill", list(ids), start, n_out)
        assert len(ids) <= self.n_batch
        assert start + len(ids) <= self.n_ctx
        self.cache |= {start + i: token for i, token in enumerate(ids)}

    def logits(self, n_out=1):
        self._call("logits", n_out)
        return np.zeros((n_out, CONFIG.n_vocab), np.float32)

    def begin(self, params, seed, history, exempt, n_logprobs=0):
        self._call("begin", seed, list(history), exempt, n_logprobs)

    def sample(self, mask=None):
        self._call("sample", *([] if mask is None else [mask]))
        self._waiting.append(self._draw)

    def feed(self, position):
        self._call("feed", position)
        self._waiting.append(lambda: self._forward(position))

    def step(self, position):
        self._call("step", position)
        self._waiting += [lambda: self._forward(position), self._draw]

    def read(self):
        self._call("read")
        while not self._unread:
            self._work()
        return Token(self._unread.popleft())

    def describe(self):
        return "fake"

    def close(self):
        pass

    def settle(self) -> None:
        """What the device would have done by the time anyone looks."""
        while self._waiting:
            self._work()


def engine_of(*script: int, **options: int) -> Engine:
    return Engine(FakeRunner(script, **options), CONFIG)


def run(engine: Engine, prompt: list[int], *arguments, params=GREEDY, **options) -> list[int]:
    return [t.id for t in engine.generate(prompt, params, *arguments, **options)]


def held(engine: Engine) -> list[int]:
    """The cache's ids at the positions that the engine says are filled."""
    engine.runner.settle()
    return [engine.runner.cache[i] for i in range(len(engine.tokens))]


def prefilled(engine: Engine) -> list[tuple[list[int], int]]:
    return [(c[1], c[2]) for c in engine.runner.calls if c[0] == "prefill"]


# ---- prefill and reuse


def test_a_prompt_goes_in_chunks_of_n_batch():
    engine = engine_of(7)
    run(engine, list(range(10)), 1)
    assert prefilled(engine) == [([0, 1, 2, 3], 0), ([4, 5, 6, 7], 4), ([8, 9], 8)]


def test_a_following_prompt_forwards_only_what_the_cache_does_not_hold():
    engine = engine_of(10, 11, 99)
    assert run(engine, [1, 2, 3], end_ids=END) == [10, 11, 99]
    assert engine.tokens == [1, 2, 3, 10, 11, 99] == held(engine)
    engine.runner.calls.clear()
    run(engine, [1, 2, 3, 10, 11, 99, 4, 5], 1)
    assert prefilled(engine) == [([4, 5], 6)]
    assert (engine.stats.prompt_tokens, engine.stats.reused_tokens) == (8, 6)


def test_the_last_prompt_token_is_always_forwarded():
    engine = engine_of(10, 11)
    run(engine, [1, 2, 3], 1)
    engine.runner.calls.clear()
    run(engine, [1, 2, 3], 1)
    assert prefilled(engine) == [([3], 2)]
    assert engine.stats.reused_tokens == 2


def test_a_prompt_that_departs_keeps_only_the_common_prefix():
    engine = engine_of(10, 11, 12, 13)
    run(engine, [1, 2, 3], 3)
    run(engine, [1, 5, 3], 1)
    assert engine.stats.reused_tokens == 1
    assert engine.tokens == [1, 5, 3] == held(engine)


def test_a_token_stopped_by_length_was_never_forwarded_and_is_prefilled_next_time():
    engine = engine_of(10, 11)
    assert run(engine, [1], 2) == [10, 11]
    assert engine.tokens == [1, 10] == held(engine)
    engine.runner.calls.clear()
    run(engine, [1, 10, 11, 4], 1)
    assert prefilled(engine) == [([11, 4], 2)]


# ---- ends


def test_an_end_token_is_yielded_counted_and_the_last():
    engine = engine_of(10, 99, 11)
    assert run(engine, [1], end_ids=END) == [10, 99]
    assert (engine.stats.generated_tokens, engine.stats.finish_reason) == (2, "stop")


def test_an_end_token_as_the_last_allowed_one_is_a_stop_not_a_length():
    engine = engine_of(10, 99)
    run(engine, [1], 2, END)
    assert engine.stats.finish_reason == "stop"


@pytest.mark.parametrize(("n_prompt", "n_tokens"), [(14, 3), (15, 2), (16, 1)])
def test_the_context_gives_the_room_that_is_left_and_is_filled_to_its_last_position(
    n_prompt, n_tokens
):
    engine = engine_of(*range(20, 40), n_ctx=16)
    assert len(run(engine, [1] * n_prompt)) == n_tokens
    assert engine.stats.finish_reason == "length"
    assert len(engine.tokens) == 16
    assert held(engine) == engine.tokens


def test_a_prompt_of_one_more_than_the_context_is_refused_before_anything_happens():
    engine = engine_of(1, n_ctx=16)
    with pytest.raises(ContextFullError, match=r"17 .* 16"):
        engine.generate([1] * 17, GREEDY)
    assert engine.runner.calls == []


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "empty"),
        ([1, 100], {}, "100"),
        ([-1], {}, "-1"),
        ([1], {"max_tokens": -1}, "max_tokens"),
        ([1], {"params": SamplingParams(top_p=-1)}, "top_p"),
        ([1], {"params": SamplingParams(logit_bias={100: 1.0})}, "logit_bias"),
    ],
)
def test_what_cannot_be_generated_from_is_refused_at_once(prompt, options, message):
    engine = engine_of(1)
    with pytest.raises(UsageError, match=message):
        engine.generate(prompt, **{"params": GREEDY} | options)
    assert engine.runner.calls == []


def test_no_tokens_at_all_still_fills_the_cache():
    engine = engine_of(1)
    assert run(engine, [1, 2], 0) == []
    assert engine.stats.finish_reason == "length"
    assert engine.tokens == [1, 2] == held(engine)


# ---- the order of calls


def test_the_next_step_is_on_its_way_before_a_token_is_read():
    engine = engine_of(10, 11, 12)
    run(engine, [1, 2], 3)
    names = [c[0] if c[0] != "step" else c for c in engine.runner.calls]
    steps = ["sample", ("step", 2), "read", ("step", 3), "read", "read"]
    assert names == ["prefill", "begin", *steps]


def test_the_sampler_is_told_the_seed_the_prompt_and_the_end_tokens():
    engine = engine_of(10)
    run(engine, [1, 2], 1, END, n_logprobs=3, params=SamplingParams(seed=7))
    assert ("begin", 7, [1, 2], END, 3) in engine.runner.calls
    assert engine.stats.seed == 7


def test_a_seed_that_is_not_given_is_drawn_and_reported():
    engine = engine_of(1, 2)
    seeds = set()
    for _ in range(2):
        run(engine, [1], 1)
        begin = [c for c in engine.runner.calls if c[0] == "begin"][-1]
        assert begin[1] == engine.stats.seed
        seeds.add(engine.stats.seed)
    assert len(seeds) == 2


def test_logits_of_many_rows_come_from_all_chunks_that_hold_them():
    engine = engine_of()
    assert engine.logits(list(range(10))).shape == (10, 100)
    engine.runner.calls.clear()
    assert engine.logits(list(range(10)), 3).shape == (3, 100)
    assert [c[3] for c in engine.runner.calls if c[0] == "prefill"] == [1, 1, 2]
    assert [c[1] for c in engine.runner.calls if c[0] == "logits"] == [1, 2]
    assert engine.tokens == list(range(10)) == held(engine)
    with pytest.raises(UsageError, match="n_out"):
        engine.logits([1, 2], 3)


# ---- constraints


class Countdown:
    """Allows anything; complete after `n` tokens. Its masks are the tokens it has seen."""

    def __init__(self, n: int):
        self.n = n
        self.seen: list[int] = []
        self.fail_after = 1000

    @property
    def complete(self) -> bool:
        return len(self.seen) == self.n

    def mask(self):
        if len(self.seen) == self.fail_after:
            raise GrammarError("too complex")
        return list(self.seen)

    def accept(self, token: int) -> None:
        self.seen.append(token)


def test_a_mask_is_made_after_its_token_and_after_the_forward_is_on_its_way():
    engine = engine_of(10, 11, 12)
    assert run(engine, [1, 2], constraint=Countdown(3)) == [10, 11, 12]
    rounds = [
        ("read",),
        ("feed", 2),
        ("sample", [10]),
        ("read",),
        ("feed", 3),
        ("sample", [10, 11]),
    ]
    assert engine.runner.calls[2:] == [("sample", []), *rounds, ("read",)]
    assert engine.stats.finish_reason == "grammar"
    assert engine.tokens == [1, 2, 10, 11] == held(engine)


@pytest.mark.parametrize(
    ("script", "n", "limit", "want", "reason"),
    [
        ((10, 11), 2, 9, [10, 11], "grammar"),
        ((10, 11), 2, 2, [10, 11], "grammar"),
        ((10, 11), 3, 2, [10, 11], "length"),
        ((10, 99), 9, 9, [10, 99], "stop"),
        ((99,), 9, 1, [99], "stop"),
    ],
)
def test_what_ends_first_is_the_reason(script, n, limit, want, reason):
    engine, constraint = engine_of(*script), Countdown(n)
    assert run(engine, [1], limit, END, constraint=constraint) == want
    assert engine.stats.finish_reason == reason
    assert constraint.seen == [token for token in want if token not in END]
    assert engine.tokens == [1, *want[:-1]] == held(engine)


@pytest.mark.parametrize("stop_after", [1, 2, 3])
def test_the_record_is_exact_when_the_consumer_of_constrained_tokens_stops(stop_after):
    engine = engine_of(10, 11, 12, 13)
    tokens = engine.generate([1, 2], GREEDY, 9, constraint=Countdown(4))
    for _ in range(stop_after):
        next(tokens)
    tokens.close()
    assert engine.tokens == [1, 2, 10, 11, 12][: 2 + stop_after] == held(engine)
    assert engine.stats.finish_reason == "interrupted"


@pytest.mark.parametrize("call", ["feed", "sample", "read"])
def test_an_interrupt_between_constrained_tokens_keeps_only_what_is_certain(call):
    engine = engine_of(10, 11, 12)
    tokens = engine.generate([1, 2], GREEDY, 9, constraint=Countdown(4))
    next(tokens)
    engine.runner.fail_at[call] = interrupt
    with pytest.raises(KeyboardInterrupt):
        next(tokens)
    assert engine.tokens == held(engine)
    assert engine.tokens == [1, 2, 10][: 2 if call == "read" else 3]


def test_a_constraint_that_fails_leaves_nothing_that_would_be_reused():
    engine, constraint = engine_of(10, 11, 12), Countdown(4)
    constraint.fail_after = 2
    with pytest.raises(GrammarError):
        run(engine, [1, 2], constraint=constraint)
    assert engine.tokens == []


# ---- what the cache holds, whatever happens


@pytest.mark.parametrize("stop_after", [1, 2, 3, 4])
def test_the_record_is_exact_at_every_token_and_when_the_consumer_stops(stop_after):
    engine = engine_of(10, 11, 12, 13)
    tokens = engine.generate([1, 2], GREEDY, 4)
    for n in range(1, stop_after + 1):
        next(tokens)
        assert engine.tokens == [1, 2, 10, 11, 12][: min(2 + n, 5)] == held(engine)
    tokens.close()
    assert engine.tokens == held(engine)
    assert engine.stats.finish_reason == ("length" if stop_after == 4 else "interrupted")
    assert engine.stats.generated_tokens == stop_after


def interrupt() -> None:
    raise KeyboardInterrupt


def lose_device() -> None:
    raise DeviceError("the device is gone")


@pytest.mark.parametrize("call", ["step", "read"])
def test_an_interrupt_inside_a_step_keeps_only_what_is_certain(call):
    engine = engine_of(10, 11, 12)
    tokens = engine.generate([1, 2], GREEDY, 4)
    next(tokens)
    next(tokens)
    engine.runner.fail_at[call] = interrupt
    with pytest.raises(KeyboardInterrupt):
        next(tokens)
    # token 11's forward may never have run: token 12 was not read
    assert engine.tokens == [1, 2, 10]
    assert engine.stats.finish_reason == "interrupted"
    engine.runner.fail_at.clear()
    run(engine, [1, 2, 10, 11, 5], 1)
    assert engine.stats.reused_tokens == 3
    assert engine.tokens == held(engine)


def test_an_interrupt_during_a_long_prompt_keeps_the_chunks_that_are_done():
    engine = engine_of(10)

    def interrupt_third() -> None:
        if len(prefilled(engine)) == 3:
            raise KeyboardInterrupt

    engine.runner.fail_at["prefill"] = interrupt_third
    with pytest.raises(KeyboardInterrupt):
        run(engine, list(range(10)), 1)
    assert engine.tokens == list(range(8)) == held(engine)


@pytest.mark.parametrize("call", ["prefill", "begin", "sample", "step", "read"])
def test_a_failing_device_leaves_nothing_that_would_be_reused(call):
    engine = engine_of(10, 11, 12)
    run(engine, [1, 2], 1)
    engine.runner.fail_at[call] = lose_device
    with pytest.raises(DeviceError):
        run(engine, [1, 2, 3], 3)
    assert engine.tokens == []


def test_a_later_generation_ends_an_earlier_one_without_mixing_their_tokens():
    engine = engine_of(10, 11, 12, 13)
    first = engine.generate([1, 2], GREEDY, 4)
    never_started = engine.generate([5], GREEDY, 4)
    assert list(first) == []
    assert run(engine, [3], 2) == [10, 11]
    assert list(never_started) == []
    assert engine.tokens == [3, 10] == held(engine)


def test_rollback_forgets_the_end_of_the_cache():
    engine = engine_of(10, 11, 12)
    run(engine, [1, 2], 3)
    engine.rollback(2)
    assert engine.tokens == [1, 2]
    run(engine, [1, 2, 10, 5], 1)
    assert engine.stats.reused_tokens == 2


# ---- with a real model on the CPU


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("engine") / "tiny.gguf")


def real(path, n_ctx: int = 40, n_batch: int = 8) -> Engine:
    file = GGUFFile.open(path)
    config = Qwen2Config.from_gguf(file)
    return Engine(NumpyRunner(file, config, n_ctx, "f32", n_batch), config)


def test_greedy_tokens_are_the_argmax_of_the_logits_of_the_whole_sequence(model):
    engine = real(model)
    prompt = list(range(30, 41))
    ids = run(engine, prompt, 12)
    logits = real(model).logits([*prompt, *ids[:-1]], len(ids))
    assert ids == logits.argmax(1).tolist()


def test_a_turn_on_a_reused_cache_equals_a_fresh_one(model):
    engine = real(model)
    first = run(engine, [1, 2, 3], 5)
    longer = [1, 2, 3, *first, 9, 9]
    again = run(engine, longer, 6)
    assert engine.stats.reused_tokens == 7
    assert again == run(real(model), longer, 6)


def test_the_same_seed_gives_the_same_tokens_and_another_others(model):
    engine = real(model)

    def draw(seed: int) -> list[int]:
        return run(engine, [1, 2, 3], 16, params=SamplingParams(temperature=2.0, seed=seed))

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_a_chunked_prompt_and_one_shot_draw_the_same(model):
    prompt = list(range(25))
    params = SamplingParams(seed=3)
    a = run(real(model, n_batch=3), prompt, 8, params=params)
    assert a == run(real(model, n_batch=25), prompt, 8, params=params)


def test_two_engines_take_turns_without_touching_each_other(model):
    alone = run(real(model), [1, 2, 3], 8)
    a, b = real(model), real(model)
    first, second = a.generate([1, 2, 3], GREEDY, 8), b.generate([7, 7], GREEDY, 8)
    together = [pair[0].id for pair in zip(first, second, strict=True)]
    assert together == alone


def test_logprobs_name_the_most_likely_and_the_drawn(model):
    engine = real(model)
    (token,) = engine.generate([1, 2, 3], GREEDY, 1, n_logprobs=4)
    assert len(token.logprobs) == 4
    assert token.logprobs[0] == (token.id, token.logprob)
    assert sum(np.exp(p) for _, p in token.logprobs) < 1
    logits = engine.logits([1, 2, 3], 1)[0].astype(np.float64)
    expected = logits[token.id] - np.log(np.exp(logits).sum())
    assert token.logprob == pytest.approx(expected, abs=1e-5)


def test_penalties_see_the_prompt_and_the_output_but_never_end_tokens(model):
    engine = real(model)
    free = run(engine, [1, 2, 3], 1)[0]
    forbid = SamplingParams(temperature=0.0, presence_penalty=1e9)
    ids = run(engine, [1, 2, free], 8, params=forbid)
    assert len({1, 2, free, *ids}) == 11
    exempted = run(engine, [1, 2, 3], 2, frozenset({free}), params=forbid)
    assert exempted == [free]
