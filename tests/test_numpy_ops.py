"""Each operation of the CPU path against float64, and its corners."""

from __future__ import annotations

import math
import warnings
from dataclasses import fields

import numpy as np
import pytest
from ggufs import quantize

from minfer_cuda.config import Qwen2Config, RopeScaling
from minfer_cuda.errors import ContextFullError, UsageError
from minfer_cuda.ops import LayerWeights, numpy_ops
from minfer_cuda.ops.numpy_ops import NumpyOps, PackedMatrix
from minfer_cuda.quants import QUANT_TYPES, by_name
from minfer_cuda.rope import attention_scale, inverse_frequencies, rope_tables

EPS = 2.0**-24  # half an ulp of 1 in float32
TYPES = sorted(q.name for q in QUANT_TYPES.values())


def config(heads: int = 4, kv_heads: int = 2, head_dim: int = 64, **changed) -> Qwen2Config:
    values = {
        "name": "t", "n_layers": 2, "d_model": 256, "d_ffn": 512, "n_heads": heads,
        "n_kv_heads": kv_heads, "head_dim": head_dim, "n_vocab": 100, "n_ctx_train": 512,
        "rms_eps": 1e-6, "rope_base": 1e6,
    }  # fmt: skip
    return Qwen2Config(**(values | changed))


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def ops_at(positions: list[int], n_ctx: int = 64, dtype: type = np.float32, **sizes) -> NumpyOps:
    ops = NumpyOps(config(**sizes), n_ctx, dtype)
    ops.set_step([0] * len(positions), positions)
    return ops


def layer(**given: np.ndarray) -> LayerWeights:
    return LayerWeights(**{f.name: given.get(f.name) for f in fields(LayerWeights)})


# ---- steps


def test_a_position_at_n_ctx_is_refused_with_both_numbers_and_changes_nothing():
    ops = ops_at([62])
    ops.set_step([1], [63])
    with pytest.raises(ContextFullError, match=r"65 .* 64") as error:
        ops.set_step([1, 2], [63, 64])
    assert (error.value.needed, error.value.n_ctx) == (65, 64)
    assert ops.step.positions.tolist() == [63]
    assert not ops.cache.any()


@pytest.mark.parametrize("token", [-1, 100])
def test_a_token_outside_the_vocabulary_is_refused_with_the_id(token):
    with pytest.raises(UsageError, match=str(token)):
        ops_at([0]).set_step([5, token], [0, 1])


# ---- matrices


@pytest.mark.parametrize("name", TYPES)
def test_rows_of_every_type_are_looked_up_without_dequantising_the_table(name):
    k, rng = 256, np.random.default_rng(0)
    data = quantize(random(100, k), name, rng).view(np.uint8).reshape(100, -1)
    table = PackedMatrix(lambda a, b: data[a:b], by_name(name), (100, k))
    ops = ops_at([0])
    ops.set_step([99, 0, 99], [0, 1, 2])
    np.testing.assert_array_equal(ops.embed(table), ops.embed(table.dense()))
    np.testing.assert_array_equal(ops.embed(table)[1], by_name(name).dequantize(data[0]))


@pytest.mark.parametrize("rows", [1, 2, 7, 33])
@pytest.mark.parametrize("name", ["Q4_K", "F32"])
def test_products_hold_the_bound_of_float32_sums_packed_or_dense(monkeypatch, name, rows):
    monkeypatch.setattr(numpy_ops, "BLOCK_VALUES", 10 * 256)  # 10 rows at once: 7 blocks of 67
    n, k = 67, 256
    data = quantize(random(n, k), name, np.random.default_rng(0)).view(np.uint8).reshape(n, -1)
    weight = PackedMatrix(lambda a, b: data[a:b], by_name(name), (n, k))
    x, bias = random(rows, k, seed=1), random(n, seed=2)
    dense = weight.dense().astype(np.float64)
    expected = x @ dense.T + bias
    bound = (k + 1) * EPS * (np.abs(x) @ np.abs(dense).T + np.abs(bias))
    for w in (weight, weight.dense()):
        error = np.abs(ops_at([0]).linear(x, w, bias) - expected)
        assert (error <= bound).all()


def test_linear_add_is_add_of_linear_bit_for_bit():
    ops, x, w, residual = ops_at([0]), random(3, 8), random(5, 8, seed=1), random(3, 5, seed=2)
    expected = ops.add(residual, ops.linear(x, w))
    np.testing.assert_array_equal(ops.linear_add(x, w, residual), expected)


def test_rms_norm_against_float64():
    x, w = random(5, 896) * 30, random(896, seed=1)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * w
    # six rounded operations, and a pairwise sum of 896 terms in blocks of 8 x 16
    np.testing.assert_allclose(ops_at([0]).rms_norm(x, w), expected, rtol=40 * EPS)
    assert not ops_at([0]).rms_norm(np.zeros((1, 896), np.float32), w).any()


def test_swiglu_reaches_its_limits_without_a_warning():
    gates = np.array([-1e4, -100, -1, 0, 1, 100], np.float32)
    one = np.ones((1, 1), np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = ops_at([0]).gate_up(one, gates[:, None], np.full((6, 1), 2, np.float32))[0]
    expected = [2 * g / (1 + math.exp(-g)) if g > -700 else 0.0 for g in gates.tolist()]
    np.testing.assert_allclose(out, expected, rtol=8 * EPS, atol=1e-30)


def test_tail_takes_the_last_rows():
    assert ops_at([0]).tail(np.arange(6).reshape(3, 2), 2).tolist() == [[2, 3], [4, 5]]


# ---- rotary positions


def test_a_unit_vector_turns_only_into_the_element_half_a_head_away():
    x = np.zeros((1, 1, 64), np.float32)
    x[0, 0, 0] = 1
    turned = ops_at([1]).rotate(x)[0, 0]
    assert np.flatnonzero(turned).tolist() == [0, 32]
    np.testing.assert_allclose(turned[[0, 32]], [math.cos(1), math.sin(1)], rtol=EPS)


def test_angles_are_exact_at_far_positions():
    cos, sin = rope_tables(config(), 100_001)
    angle = 100_000 * 1e6 ** (-2 * 3 / 64)  # pair 3
    # rounding to float32 is half an ulp; the angle, about 27,000, is exact to 4e-12
    np.testing.assert_allclose(cos[100_000, 3], math.cos(angle), atol=EPS, rtol=0)
    np.testing.assert_allclose(sin[100_000, 3], math.sin(angle), atol=EPS, rtol=0)


def test_yarn_keeps_fast_pairs_divides_slow_ones_and_ramps_between():
    scaling = RopeScaling(factor=4.0, original_context=32768)
    plain = inverse_frequencies(config(head_dim=128))
    ratio = inverse_frequencies(config(head_dim=128, rope_scaling=scaling)) / plain
    # the pairs that turn 32 times and once in 32,768 positions, 64 ln(32768 / 2 pi n) / ln 1e6:
    # 23.6 and 39.7, so the ramp runs from 23 to 40
    np.testing.assert_allclose(ratio[:24], 1, rtol=1e-15)
    np.testing.assert_allclose(ratio[40:], 0.25, rtol=1e-15)
    np.testing.assert_allclose(ratio[23:41], 1 - 0.75 * np.arange(18) / 17, rtol=1e-12)


def test_yarn_scales_cos_and_sin_by_its_attention_factor():
    assert attention_scale(None) == 1.0
    assert attention_scale(RopeScaling(4.0, 32768)) == pytest.approx(1.1386294361119891)
    assert attention_scale(RopeScaling(4.0, 32768, 0.5)) == pytest.approx(1.1386294361119891 / 2)
    cos, _ = rope_tables(config(rope_scaling=RopeScaling(4.0, 32768)), 1)
    np.testing.assert_array_equal(cos, np.float32(1.1386294361119891))


# ---- attention


def exact_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, at: list[int]) -> np.ndarray:
    """float64, one query and head at a time: q (T, H, E), k and v (S, G, E)."""
    t, heads, dim = q.shape
    ratio = heads // k.shape[1]
    out = np.zeros((t, heads, dim))
    for i in range(t):
        for h in range(heads):
            keys = k[: at[i] + 1, h // ratio].astype(np.float64)
            scores = keys @ q[i, h].astype(np.float64) / math.sqrt(dim)
            p = np.exp(scores - scores.max())
            out[i, h] = p / p.sum() @ v[: at[i] + 1, h // ratio].astype(np.float64)
    return out.reshape(t, heads * dim)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads", [(14, 2), (12, 2), (16, 2), (28, 4), (40, 8), (8, 8)])
@pytest.mark.parametrize("at", [[0], [36], list(range(20, 37))], ids=["first", "decode", "chunk"])
def test_attention_of_any_head_ratio_against_float64(heads, head_dim, at):
    ops = ops_at(at, heads=heads[0], kv_heads=heads[1], head_dim=head_dim)
    n = at[-1] + 1
    ops.cache[1] = np.nan  # what is not written may be anything
    ops.cache[1, :, :n] = random(2, n, heads[1], head_dim)
    q = random(len(at), heads[0], head_dim, seed=1)
    # scores: head_dim products of N(0, 1), under 8 after scaling, so off by under
    # (head_dim + 2) * 8 * EPS; exp and the mean carry that over to values under 5
    expected = exact_attention(q, *ops.cache[1, :, :n], at)
    np.testing.assert_allclose(ops.attention(q, 1), expected, atol=10 * 8 * 130 * EPS, rtol=0)


def test_attention_in_blocks_equals_attention_at_once(monkeypatch):
    at = list(range(3, 40))
    ops = ops_at(at)
    ops.cache[0] = random(2, 64, 2, 64)
    q = random(len(at), 4, 64, seed=1)
    whole = ops.attention(q, 0)
    monkeypatch.setattr(numpy_ops, "SCORE_BUDGET", 4 * 40 * 5)  # 5 queries at once
    np.testing.assert_allclose(ops.attention(q, 0), whole, atol=1e-5)


def test_keys_and_queries_as_large_as_qwen2_biases_make_them_stay_finite():
    ops = ops_at([1], heads=2, kv_heads=2, head_dim=128)
    ops.cache[0, 0, 0] = 400
    ops.cache[0, 0, 1] = random(2, 128)
    ops.cache[0, 1, :2] = random(2, 2, 128, seed=2)
    q = np.full((1, 2, 128), 79, np.float32)  # q.k = 4e6: far past float16
    np.testing.assert_allclose(ops.attention(q, 0), ops.cache[0, 1, 0].reshape(1, -1))


def test_all_negative_scores_are_a_softmax_too():
    ops = ops_at([1], heads=2, kv_heads=1)
    ops.cache[0, 0, :2] = -3
    ops.cache[0, 1, 0], ops.cache[0, 1, 1] = 1, 3
    np.testing.assert_array_equal(ops.attention(np.full((1, 2, 64), 3, np.float32), 0), 2)


def test_a_float16_cache_costs_one_rounding_of_keys_and_values():
    at = list(range(8))
    weights = layer(
        q=random(256, 256) / 16, k=random(128, 256, seed=1) / 16, v=random(128, 256, seed=2) / 16,
        q_bias=random(256, seed=3), k_bias=random(128, seed=4), v_bias=random(128, seed=5),
    )  # fmt: skip
    x = random(8, 256, seed=4)
    full, half = ops_at(at), ops_at(at, dtype=np.float16)
    queries = full.qkv(x, weights, 0)
    np.testing.assert_array_equal(queries, half.qkv(x, weights, 0))
    np.testing.assert_array_equal(full.cache.astype(np.float16), half.cache)
    expected = exact_attention(queries, *half.cache[0, :, :8], at)
    np.testing.assert_allclose(half.attention(queries, 0), expected, atol=1e-4)


def test_qkv_adds_the_biases_before_it_rotates_and_stores_rows_at_their_positions():
    ops = ops_at([5, 2])
    zero = np.zeros((256, 256), np.float32)
    bias = random(256, seed=1)
    weights = layer(
        q=zero, k=zero[:128], v=zero[:128], q_bias=bias, k_bias=bias[:128], v_bias=bias[128:]
    )
    q = ops.qkv(random(2, 256), weights, 1)
    np.testing.assert_array_equal(q, ops.rotate(np.tile(bias, (2, 1)).reshape(2, 4, 64)))
    assert np.flatnonzero(ops.cache.any(axis=(0, 1, 3, 4))).tolist() == [2, 5]
    assert not ops.cache[0].any()
    np.testing.assert_array_equal(ops.cache[1, 0, [5, 2]], q[:, :2])
    np.testing.assert_array_equal(ops.cache[1, 1, 2], bias[128:].reshape(2, 64))
