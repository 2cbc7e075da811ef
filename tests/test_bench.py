"""`minfer_cuda.bench` over a scripted runner."""

import numpy as np
import pytest

from minfer_cuda import bench
from minfer_cuda.config import Qwen2Config
from minfer_cuda.engine import Engine, Token
from minfer_cuda.errors import ContextFullError, MinferError, NumericsError

N_VOCAB = 100


class ScriptedRunner:
    """Draws (position + 1) % V, plus `drift` for every run so far."""

    n_batch = 8

    def __init__(self, n_ctx=64, drift=0, logit=0.0):
        self.n_ctx = n_ctx
        self.drift = drift
        self.logit = logit
        self.runs = 0
        self.calls = []
        self.draws = []

    def describe(self):
        return "scripted"

    def prefill(self, ids, start, n_out=1):
        self.calls.append(("prefill", start, len(ids)))
        self.position = start + len(ids)

    def logits(self, n_out=1):
        return np.full((n_out, N_VOCAB), self.logit, np.float32)

    def begin(self, params, seed, history, exempt, n_logprobs=0):
        self.runs += 1
        self.draws = []
        self.calls.append(("begin", params.temperature, seed))

    def sample(self):
        self.draws.append(Token((self.position + self.drift * self.runs) % N_VOCAB))

    def step(self, position):
        self.calls.append(("step", position))
        self.position = position + 1
        self.sample()

    def read(self):
        return self.draws.pop(0)

    def close(self):
        pass


def engine(**options) -> Engine:
    config = Qwen2Config(
        name="scripted", n_layers=1, d_model=4, d_ffn=4, n_heads=1, n_kv_heads=1, head_dim=4,
        n_vocab=N_VOCAB, n_ctx_train=64, rms_eps=1e-6, rope_base=1e6,
    )  # fmt: skip
    return Engine(ScriptedRunner(**options), config)


def test_a_prefill_row_forwards_the_whole_prompt_anew_each_time_and_draws_one_token():
    e = engine()
    row = bench.Bench(e).prefill(20, repetitions=3)
    prefills = [c for c in e.runner.calls if c[0] == "prefill"]
    assert prefills == [("prefill", 0, 8), ("prefill", 8, 8), ("prefill", 16, 4)] * 4
    assert not [c for c in e.runner.calls if c[0] == "step"]
    assert (row.name, len(row.seconds)) == ("pp20", 3)


def test_a_decode_row_times_exactly_n_steps_behind_a_one_token_prompt():
    e = engine()
    row = bench.Bench(e).decode(5, repetitions=2)
    steps = [c[1] for c in e.runner.calls if c[0] == "step"]
    assert steps == [1, 2, 3, 4, 5] * 3
    assert (row.name, len(row.seconds)) == ("tg5", 2)


def test_mean_and_spread_are_of_the_rates():
    row = bench.BenchRow("decode", 10, (1.0, 2.0))
    assert row.mean == pytest.approx(7.5)
    assert row.spread == pytest.approx(np.std([10.0, 5.0], ddof=1))
    assert bench.BenchRow("decode", 10, (1.0,)).spread == 0


def test_every_run_has_the_same_seed():
    e = engine()
    bench.Bench(e).decode(2, repetitions=2)
    assert {c[2] for c in e.runner.calls if c[0] == "begin"} == {bench.BENCH_SEED}


def test_a_test_longer_than_the_context_is_refused_with_both_numbers():
    with pytest.raises(ContextFullError, match="65 positions needed, n_ctx is 64"):
        bench.Bench(engine()).prefill(65, 1)
    bench.Bench(engine()).decode(63, 1)
    with pytest.raises(ContextFullError):
        bench.Bench(engine()).decode(64, 1)


def test_no_speed_is_reported_for_logits_that_are_not_finite():
    with pytest.raises(NumericsError, match="100 logits are not finite after a prefill of 3"):
        bench.Bench(engine(logit=np.nan)).prefill(3, 1)
    with pytest.raises(NumericsError, match="after 3 decode steps"):
        bench.Bench(engine(logit=np.inf)).decode(3, 1)


def test_a_greedy_run_that_does_not_repeat_itself_is_refused():
    with pytest.raises(MinferError, match="the same greedy run gave"):
        bench.Bench(engine(drift=1)).check_repeats()


def test_the_digest_is_of_the_greedy_ids():
    e = engine()
    assert bench.Bench(e).check_repeats() == bench.Bench(engine()).check_repeats()
    assert {c[1] for c in e.runner.calls if c[0] == "begin"} == {0.0}


def test_a_run_leaves_out_sizes_of_zero_and_says_how_it_sampled():
    result = bench.run(bench.Bench(engine()), [0, 4], [0], repetitions=1)
    assert [row["name"] for row in result["results"]] == ["pp4"]
    assert result["sampling"].startswith("included: temperature 0.8")
    assert len(result["greedy_sha256"]) == 64
