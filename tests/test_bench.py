"""`minfer_cuda.bench` over a scripted runner."""

from contextlib import contextmanager

import numpy as np
import pytest
from ggufs import write_gguf

from minfer_cuda import bench, bench_output
from minfer_cuda.config import Qwen2Config
from minfer_cuda.engine import Engine, Token
from minfer_cuda.errors import ContextFullError, MinferError, NumericsError
from minfer_cuda.gguf import GGUFFile
from minfer_cuda.roofline import Roofline

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

    def sample(self, mask=None):
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
    runs = bench.PREFILL_WARM_UPS + 3
    assert prefills == [("prefill", 0, 8), ("prefill", 8, 8), ("prefill", 16, 4)] * runs
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


def test_a_run_leaves_out_sizes_of_zero_and_goes_through_the_depths():
    rows = bench.run(bench.Bench(engine()), [0, 4], [2, 0], repetitions=1, depths=[0, 9])
    assert [row.name for row in rows] == ["pp4", "tg2", "pp4 @ 9", "tg2 @ 9"]


def test_progress_names_what_is_measured_and_ends_with_all():
    told = []
    bench.run(bench.Bench(engine()), [4], [2], 1, progress=lambda *words: told.append(words))
    assert told == [("pp4", 0, 2), ("tg2", 1, 2), ("", 2, 2)]


def test_at_a_depth_only_the_warm_up_fills_the_cache():
    e = engine()
    row = bench.Bench(e).decode(3, repetitions=2, depth=10)
    prefills = [c[1:] for c in e.runner.calls if c[0] == "prefill"]
    assert prefills == [(0, 8), (8, 3), (10, 1), (10, 1)]
    assert [c[1] for c in e.runner.calls if c[0] == "step"] == [11, 12, 13] * 3
    assert row.name == "tg3 @ 10"
    e.runner.calls.clear()
    bench.Bench(e).prefill(5, repetitions=2, depth=10)
    prefills = [c[1:] for c in e.runner.calls if c[0] == "prefill"]
    assert prefills == [(0, 8), (8, 7)] + [(10, 5)] * 4  # run once, captured, timed twice


def test_a_run_without_graphs_that_draws_otherwise_is_refused():
    e = engine()

    @contextmanager
    def eager():
        e.runner.drift = 1
        yield

    e.runner.eager = eager
    with pytest.raises(MinferError, match="without graphs"):
        bench.Bench(e).check_repeats()


ROOFLINE = Roofline(
    weight_bytes=1000, kv_bytes=10, layer_weights=500, head_weights=70, attention_width=3
)


def test_a_decode_row_says_what_share_of_the_read_ceiling_its_bytes_come_to():
    row = bench.BenchRow("decode", 9, (0.9,), depth=4)  # 10 tokens a second, 5 to 14 positions seen
    seen = np.mean([row.depth + 1 + step for step in range(1, 10)])
    result = bench.result_of(row, ROOFLINE, read=20000.0)
    assert result["mbu"] == (1000 + 10 * seen) * 10 / 20000
    assert bench.result_of(row, ROOFLINE, read=None)["mbu"] is None
    assert result["tops"] is None


def test_a_prefill_row_says_how_many_operations_it_did():
    row = bench.BenchRow("prefill", 2, (1e-9,), depth=5)
    products = 2 * (2 * 500 + 70)
    attention = 2 * 2 * 3 * (6 + 7)  # scores and mix of the positions seen
    result = bench.result_of(row, ROOFLINE, read=1.0)
    assert result["tops"] == pytest.approx(1e-3 * (products + attention))
    assert result["mbu"] is None


def test_the_roofline_of_a_file_counts_what_a_token_reads(tmp_path):
    with GGUFFile.open(write_gguf(tmp_path / "m.gguf", types="Q8_0", vocab=320)) as file:
        config = Qwen2Config.from_gguf(file)
        roofline = Roofline.of(file, config, "f16")
        table = file.tensors["token_embd.weight"].nbytes
        assert roofline.weight_bytes == sum(t.nbytes for t in file.tensors.values()) - table
        assert roofline.kv_bytes == 2 * 2 * 2 * 128
        layer = 256 * (2 * 256 + 2 * 128 + 3 * 512)
        assert (roofline.layer_weights, roofline.head_weights) == (2 * layer, 320 * 256)
        assert roofline.attention_width == 2 * 256


def test_a_tied_table_is_read_whole_as_the_head(tmp_path):
    with GGUFFile.open(write_gguf(tmp_path / "m.gguf", tied=True)) as file:
        roofline = Roofline.of(file, Qwen2Config.from_gguf(file), "f32")
        assert roofline.weight_bytes == sum(t.nbytes for t in file.tensors.values())
        assert roofline.head_weights == 256 * file.tensors["token_embd.weight"].shape[0]


def test_the_table_begins_with_the_ceiling_and_has_each_rows_share():
    rows = [bench.BenchRow("prefill", 2, (1.0,)), bench.BenchRow("decode", 9, (0.9,))]
    result = {
        "model": "m", "file": "m.gguf", "types": {"Q8_0": 2}, "device": "card", "runs_on": "card",
        "n_ctx": 8, "kv_type": "f16", "sampling": "greedy", "minfer": "0", "commit": "c",
        "date": "d", "greedy_sha256": "0" * 64, "read_gb_s": 4000.0,
        "weight_bytes_per_token": 10**9, "kv_bytes_per_position": 2048,
        "results": [bench.result_of(row, ROOFLINE, 20000.0) for row in rows],
    }  # fmt: skip
    lines = bench_output.as_markdown(result).splitlines()
    assert lines[0].startswith("ceiling: 4,000 GB/s read here, 1.000 GB of weights a token")
    assert lines[0].endswith("4,000 tok/s")
    assert "| tg9 | 10 | ± 0 | 53.0% of the ceiling |" in lines
    result["read_gb_s"] = result["commit"] = None  # on the CPU; installed, not a source tree
    assert bench_output.as_markdown(result).startswith("| test |")
    assert "minfer 0, d\n" in bench_output.as_markdown(result)
