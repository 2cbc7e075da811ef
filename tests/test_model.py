"""The whole forward pass on tiny files: against independent float64 formulas and itself."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from ggufs import write_gguf

from minfer_cuda.config import Qwen2Config
from minfer_cuda.errors import ContextFullError, ModelFileError, NumericsError, UsageError
from minfer_cuda.gguf import GGUFFile
from minfer_cuda.host_memory import available_bytes
from minfer_cuda.runners import numpy_runner
from minfer_cuda.runners.numpy_runner import NumpyRunner
from minfer_cuda.sampling import SamplingParams

IDS = [5, 71, 3, 3, 250, 0, 17, 99, 42]
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


def runner_of(path: Path, n_ctx: int = 32, kv_type: str = "f32", n_batch: int = 32) -> NumpyRunner:
    file = GGUFFile.open(path)
    return NumpyRunner(file, Qwen2Config.from_gguf(file), n_ctx, kv_type, n_batch)


def logits_of(path: Path, ids: list[int] = IDS, **options) -> np.ndarray:
    runner = runner_of(path, **options)
    runner.prefill(ids, 0, len(ids))
    return runner.logits(len(ids))


class Formulas:
    """Qwen2 in float64, one query, head and pair at a time, over what gguf-py reads. The options
    are the classic mistakes."""

    def __init__(self, path: Path, pairs="halves", base=None, head_map="blocks", biases=True):
        reader = gguf.GGUFReader(path)
        self.w = {
            t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float64)
            for t in reader.tensors
        }
        key = {k: f.contents() for k, f in reader.fields.items() if k.startswith("qwen2.")}
        self.heads = key["qwen2.attention.head_count"]
        self.kv_heads = key["qwen2.attention.head_count_kv"]
        self.layers = key["qwen2.block_count"]
        self.eps = key["qwen2.attention.layer_norm_rms_epsilon"]
        self.dim = key["qwen2.embedding_length"] // self.heads
        self.base = base or key["qwen2.rope.freq_base"]
        self.pairs, self.head_map, self.biases = pairs, head_map, biases

    def norm(self, x, name):
        return np.array([r / np.sqrt(np.mean(r**2) + self.eps) for r in x]) * self.w[name]

    def project(self, x, name):
        y = x @ self.w[f"{name}.weight"].T
        return y + self.w[f"{name}.bias"] if self.biases else y

    def rope(self, head, position):
        out, half = head.copy(), self.dim // 2
        for i in range(half):
            a, b = (i, i + half) if self.pairs == "halves" else (2 * i, 2 * i + 1)
            angle = position * self.base ** (-2 * i / self.dim)
            c, s = np.cos(angle), np.sin(angle)
            out[a], out[b] = head[a] * c - head[b] * s, head[b] * c + head[a] * s
        return out

    def attention(self, x, blk):
        t, e = len(x), self.dim
        q, k, v = (self.project(x, f"{blk}.attn_{n}").reshape(t, -1, e) for n in ("q", "k", "v"))
        mix = np.zeros((t, self.heads, e))
        for h in range(self.heads):
            ratio = self.heads // self.kv_heads
            g = h // ratio if self.head_map == "blocks" else h % self.kv_heads
            keys = np.array([self.rope(k[j, g], j) for j in range(t)])
            for i in range(t):
                p = np.exp(keys[: i + 1] @ self.rope(q[i, h], i) / np.sqrt(e))
                mix[i, h] = p / p.sum() @ v[: i + 1, g]
        return mix.reshape(t, -1) @ self.w[f"{blk}.attn_output.weight"].T

    def logits(self, ids):
        x = self.w["token_embd.weight"][ids]
        for i in range(self.layers):
            blk = f"blk.{i}"
            x = x + self.attention(self.norm(x, f"{blk}.attn_norm.weight"), blk)
            h = self.norm(x, f"{blk}.ffn_norm.weight")
            gate = h @ self.w[f"{blk}.ffn_gate.weight"].T
            up = h @ self.w[f"{blk}.ffn_up.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ self.w[f"{blk}.ffn_down.weight"].T
        head = self.w.get("output.weight", self.w["token_embd.weight"])
        logits = self.norm(x, "output_norm.weight") @ head.T
        return logits + self.w.get("output.bias", 0)


# float32 against float64 over two layers of sums of at most 512 terms, on logits of a few units
TOLERANCE = 2e-4


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"types": "Q8_0", "tied": True},
        {"types": {"default": "Q4_0", "attn_v": "Q6_K", "output": "Q8_0", "token_embd": "Q4_K"}},
        {"d": 448, "heads": 7, "kv_heads": 1, "ffn": 256, "output_bias": True},
        {"d": 512, "heads": 4, "kv_heads": 4, "ffn": 256, "types": "F16"},
    ],
    ids=["plain", "tied", "mixed", "seven-to-one-and-bias", "head-128"],
)
def test_logits_equal_independent_float64_formulas(tmp_path, sizes):
    path = write_gguf(tmp_path / "m.gguf", **sizes)
    np.testing.assert_allclose(logits_of(path), Formulas(path).logits(IDS), atol=TOLERANCE)


@pytest.mark.parametrize(
    "mistake",
    [{"pairs": "neighbours"}, {"base": 1e4}, {"head_map": "striped"}, {"biases": False}],
    ids=str,
)
def test_each_classic_mistake_would_be_seen(model, mistake):
    wrong = np.abs(logits_of(model) - Formulas(model, **mistake).logits(IDS)).max()
    assert wrong > 50 * TOLERANCE


def test_a_missing_bias_is_refused_by_name(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", drop=["blk.1.attn_k.bias"])
    with pytest.raises(ModelFileError, match=r"blk\.1\.attn_k\.bias"):
        runner_of(path)


def test_an_output_bias_is_added(tmp_path):
    with_bias = write_gguf(tmp_path / "a.gguf", output_bias=True)
    bias = next(t.data for t in gguf.GGUFReader(with_bias).tensors if t.name == "output.bias")
    without = write_gguf(tmp_path / "b.gguf", output_bias=True, drop=["output.bias"])
    np.testing.assert_allclose(logits_of(with_bias), logits_of(without) + bias, atol=1e-6)


# ---- positions are data


@pytest.mark.parametrize("cut", [[9], [1] * 9, [4, 5], [2, 1, 6]], ids=str)
def test_any_way_of_cutting_a_prompt_gives_the_same_logits(model, cut):
    whole, runner = logits_of(model), runner_of(model)
    at = 0
    for n in cut:
        runner.prefill(IDS[at : at + n], at, n)
        got = runner.logits(n)
        np.testing.assert_allclose(got, whole[at : at + n], rtol=1e-5, atol=1e-5)
        at += n


@pytest.mark.parametrize("n", [1, 2, 8])
def test_tail_rows_equal_those_of_the_full_computation(model, n):
    runner = runner_of(model)
    runner.prefill(IDS, 0, n)
    assert runner.logits(n).shape == (n, runner.model.config.n_vocab)
    np.testing.assert_allclose(runner.logits(n), logits_of(model)[-n:], rtol=1e-5, atol=1e-5)


def test_repeats_are_equal_bit_for_bit(model):
    runner = runner_of(model)
    prefills, decodes = set(), set()
    for _ in range(24):
        runner.prefill(IDS[:-1], 0)
        prefills.add(runner.logits().tobytes())
        runner.prefill(IDS[-1:], len(IDS) - 1)
        decodes.add(runner.logits().tobytes())
    assert (len(prefills), len(decodes)) == (1, 1)


def test_rollback_and_replay_gives_the_same_bits(model):
    runner = runner_of(model)
    runner.prefill(IDS, 0)
    first = runner.logits()
    runner.prefill([9, 8, 7], 4)
    runner.prefill(IDS, 0)
    np.testing.assert_array_equal(runner.logits(), first)


def test_two_runners_of_one_file_do_not_touch_each_other(model):
    a, b = runner_of(model), runner_of(model)
    a.prefill(IDS[:5], 0)
    b.prefill(IDS[::-1], 0)
    a.prefill(IDS[5:], 5)
    alone = runner_of(model)
    alone.prefill(IDS[:5], 0)
    alone.prefill(IDS[5:], 5)
    np.testing.assert_array_equal(a.logits(), alone.logits())


def test_a_float16_cache_stays_close_to_a_float32_one(model):
    full, half = logits_of(model), logits_of(model, kv_type="f16")
    # keys and values move by 2^-11 of themselves; two layers carry it to logits of a few units
    assert 0 < np.abs(full - half).max() < 0.02


# ---- the runner's own rules


def test_weights_that_do_not_fit_are_dequantised_at_use_with_the_same_logits(monkeypatch, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", types="Q8_0")
    resident = logits_of(path)
    assert "float32 in memory" in runner_of(path).describe()
    monkeypatch.setattr(numpy_runner, "available_bytes", lambda: 1000)
    heard: list[str] = []
    file = GGUFFile.open(path)
    runner = NumpyRunner(file, Qwen2Config.from_gguf(file), 8, notify=heard.append)
    assert "dequantised at each use" in runner.describe()
    assert any("dequantised at each use" in notice for notice in heard)
    np.testing.assert_allclose(logits_of(path), resident, rtol=1e-5, atol=1e-5)


def test_the_memory_that_may_be_used_is_some_of_what_there_is():
    assert 1 << 20 < available_bytes() < 1 << 50


def test_the_last_position_works_and_the_next_is_refused_before_any_write(model):
    runner = runner_of(model, n_ctx=9)
    runner.prefill(IDS, 0)
    before = runner.ops.cache.tobytes()
    with pytest.raises(ContextFullError, match=r"10 .* 9"):
        runner.prefill([1], 9)
    with pytest.raises(ContextFullError):
        runner.step(9)
    with pytest.raises(ContextFullError):
        runner.prefill([1, 2], 8)
    assert runner.ops.cache.tobytes() == before


def test_a_bad_token_or_row_count_is_refused_before_any_work(model):
    runner = runner_of(model, n_batch=4)
    for ids, n_out in (([10**6], 1), ([-1], 1), ([1, 2], 3), ([1] * 5, 1), ([1], 0)):
        with pytest.raises(UsageError):
            runner.prefill(ids, 0, n_out)
    assert not runner.ops.cache.any()


def test_an_unknown_cache_type_is_refused_with_those_that_exist(model):
    with pytest.raises(UsageError, match="q4_0.*f32, f16"):
        runner_of(model, kv_type="q4_0")


def test_logits_that_are_not_finite_are_an_error_that_names_the_position(tmp_path):
    norm = np.full(256, np.nan, np.float32)
    path = write_gguf(tmp_path / "m.gguf", tensors={"output_norm.weight": norm})
    with pytest.raises(NumericsError, match="position 2"):
        runner_of(path).prefill([1, 2, 3], 0)


def test_steps_put_off_are_computed_when_a_prefill_comes(model):
    runner = runner_of(model)
    runner.prefill(IDS, 0)
    runner.begin(GREEDY, 0, IDS, frozenset())
    runner.sample()
    runner.step(len(IDS))
    first = runner.read().id
    runner.prefill([7], len(IDS) + 1)  # position 9 is read here
    late = runner.logits()
    runner.prefill([*IDS, first, 7], 0)
    np.testing.assert_allclose(late, runner.logits(), rtol=1e-5, atol=1e-5)


def test_taps_see_values_under_their_names_and_change_nothing(model):
    seen: dict[tuple[str, int | None], np.ndarray] = {}
    runner = runner_of(model)
    runner.forward(IDS, 0, 9, tap=lambda n, i, x: seen.__setitem__((n, i), np.array(x)))
    np.testing.assert_array_equal(runner.logits(9), logits_of(model))
    for i in (0, 1):
        total = seen["layer_input", i] + seen["attention_output", i] + seen["mlp_output", i]
        np.testing.assert_allclose(total, seen["layer_output", i], atol=1e-5)
    np.testing.assert_array_equal(seen["logits", None], runner.logits(9))
    np.testing.assert_array_equal(seen["layer_output", 0], seen["layer_input", 1])
