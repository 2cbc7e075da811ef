"""attention: one kernel for prefill and decode, against float64 NumPy.

Every cache is NaN behind the last key and every output starts as NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
from devices import simt_device
from test_matmul_f16 import unpermute

from minfer_cuda.errors import KernelError
from minfer_cuda.kernels import Device
from minfer_cuda.kernels import attention as attention_module
from minfer_cuda.kernels.attention import (
    DECODE_SPLITS,
    MAX_SPLITS,
    Plan,
    attention,
    instances,
    plan,
    scratch,
)
from minfer_cuda.kernels.compiler import expand_source

SMS = 6  # of the card that the tests' plans are for: few, so that calls are split little


@dataclass
class Case:
    """Arguments of one call: the tokens' positions are past..past + T - 1."""

    q: np.ndarray  # (T, H, E) float32
    k: np.ndarray  # (past + T, G, E)
    v: np.ndarray
    past: int

    @classmethod
    def random(
        cls, tokens: int, group: int, kv_heads: int, head_dim: int, past: int, kv: str = "float16"
    ) -> Case:
        rng = np.random.default_rng(1000 * past + 10 * tokens + group)
        q = rng.standard_normal((tokens, group * kv_heads, head_dim)).astype(np.float32)
        k, v = rng.standard_normal((2, past + tokens, kv_heads, head_dim)).astype(kv)
        return cls(q, k, v, past)

    def plan(self, splits: int = 1, min_keys: int = 0) -> Plan:
        """`min_keys`: in splits of so many keys, however few there are."""
        tokens, heads, head_dim = self.q.shape
        how = plan(tokens, heads, self.k.shape[1], head_dim, 1024, SMS)
        if not min_keys:
            return replace(how, splits=splits)
        return replace(how, splits=splits, alone_keys=0, min_keys=min_keys)

    def cache(self, x: np.ndarray) -> np.ndarray:
        full = np.full((len(x) + 70, *x.shape[1:]), np.nan, x.dtype)
        full[: len(x)] = x
        return full

    def run(self, device: Device, how: Plan | None = None, repeats: int = 1) -> np.ndarray:
        """The float output (T, H, E); with repeats all of them, from the same scratch."""
        how = how or self.plan()
        tokens, heads, head_dim = self.q.shape
        up = device.upload
        q, k, v = up(self.q), up(self.cache(self.k)), up(self.cache(self.v))
        position = up(np.array([self.past], np.int32))
        partials = up(np.full(how.partials + 1, np.nan, np.float32))
        arrivals = device.zeros(how.arrivals + 1, np.int32)
        outs = []
        for _ in range(repeats):
            out = up(np.full((tokens, heads * head_dim), np.nan, np.float32))
            attention(device, how, q, k, v, position, out=out, partials=partials, arrivals=arrivals)
            outs.append(device.download(out).reshape(self.q.shape))
        assert not device.download(arrivals).any()
        return np.array(outs) if repeats > 1 else outs[0]

    def reference(self, rounded: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Output, sum of weight * |v|, and the largest sum of |q k| of a score, in float64, each
        (T, H, E). `rounded`: from the float16 values that the kernel multiplies."""
        tokens, heads, head_dim = self.q.shape
        group = heads // self.k.shape[1]
        scale = np.log2(np.e) / np.sqrt(head_dim)
        q, k, v = self.q.astype(np.float64) * scale, self.k, self.v
        if rounded:
            q = (self.q * np.float32(scale)).astype(np.float16).astype(np.float64)
            k, v = k.astype(np.float16), v.astype(np.float16)
        k = np.repeat(k.astype(np.float64), group, axis=1)
        v = np.repeat(v.astype(np.float64), group, axis=1)
        hidden = np.arange(len(k)) > self.past + np.arange(tokens)[:, None, None]
        s = np.where(hidden, -np.inf, np.einsum("the,khe->thk", q, k))
        p = np.exp2(s - s.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        size = np.einsum("the,khe->thk", np.abs(q), np.abs(k)).max(axis=-1)
        out, spread = np.einsum("thk,khe->the", p, v), np.einsum("thk,khe->the", p, np.abs(v))
        return out, spread, np.broadcast_to(size[..., None], out.shape)

    def check(self, got: np.ndarray) -> None:
        """Within the arithmetic of float16 operands and float32 sums.

        A score sums E products in float32: it is off by at most E * 2^-24 * sum |q k|, its weight
        by ln 2 times that, twice (numerator and denominator). Weights are rounded to float16
        (2^-11; below 2^-14 by at most 2^-25 of the largest) and the two sums of n keys are off by
        n * 2^-24 each.
        """
        want, spread, size = self.reference(rounded=True)
        head_dim, keys = self.q.shape[2], len(self.k)
        relative = 2 * np.log(2) * head_dim * 2.0**-24 * size + 2.0**-11 + (keys + 8) * 2.0**-23
        bound = relative * spread + keys * 2.0**-25 * np.abs(self.v).max()
        error = np.abs(got - want)
        assert np.all(error <= bound), f"{np.nanmax(error / bound)} of the bound"


@pytest.mark.parametrize("keys", [1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 300])
def test_one_token_at_every_tile_edge(device: Device, keys: int) -> None:
    case = Case.random(1, 7, 2, 64, past=keys - 1)
    case.check(case.run(device))


@pytest.mark.parametrize("kv", ["float16", "float32"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 5, 6, 8, 16])
def test_any_number_of_query_heads_per_kv_head(
    device: Device, group: int, head_dim: int, kv: str
) -> None:
    case = Case.random(1, group, 2, head_dim, past=69, kv=kv)
    case.check(case.run(device))


@pytest.mark.parametrize("kv", ["float16", "float32"])
@pytest.mark.parametrize(
    ("tokens", "group", "head_dim", "past"),
    [(2, 7, 64, 63), (5, 5, 128, 30), (17, 7, 64, 0), (17, 4, 128, 100), (70, 1, 64, 33)],
)
def test_many_tokens_see_the_past_and_no_later_token(
    device: Device, tokens: int, group: int, head_dim: int, past: int, kv: str
) -> None:
    case = Case.random(tokens, group, 1, head_dim, past, kv)
    case.check(case.run(device))


def test_float16_operands_cost_what_their_rounding_costs(device: Device) -> None:
    case = Case.random(3, 7, 1, 64, past=40, kv="float32")
    want, spread, size = case.reference(rounded=False)
    # q, k: each score off by 2 * 2^-11 of its sum of |q k|; v and the weight: 2^-11 each
    relative = 2 * np.log(2) * 2.0**-10 * size + 2.0**-10 + 2.0**-16
    assert np.all(np.abs(case.run(device) - want) <= relative * spread)


@pytest.mark.parametrize(("tokens", "head_dim"), [(1, 64), (1, 128), (17, 64)])
@pytest.mark.parametrize("splits", [2, 5, 16])
def test_splits_agree_with_one_and_repeat_their_bits(
    device: Device, splits: int, tokens: int, head_dim: int
) -> None:
    # 17 tokens from 246 on cross 256: the last run of keys is hidden from the first of them
    case = Case.random(tokens, 7, 1, head_dim, past=246 if tokens > 1 else 299)
    first, second = case.run(device, case.plan(splits, min_keys=16), repeats=2)
    np.testing.assert_array_equal(first, second)
    case.check(first)
    one = case.run(device)
    # weights of another maximum are rounded to float16 apart: 2^-11 each way
    _, spread, _ = case.reference(rounded=True)
    assert np.all(np.abs(first - one) <= 2.0**-10 * spread + 2.0**-16)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [1, 7, 12])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_cluster_merges_splits_to_the_bits_of_global_memory(
    device: Device, monkeypatch: pytest.MonkeyPatch, head_dim: int, group: int
) -> None:
    if device.cluster_limit < DECODE_SPLITS:
        pytest.skip("no clusters of 16 blocks")
    for past in (0, 255, 256, 1500, 4095):
        case = Case.random(1, group, 2, head_dim, past)
        clustered = case.run(device, case.plan(DECODE_SPLITS), repeats=3)
        case.check(clustered[0])
        monkeypatch.setattr(device, "cluster_limit", 1)
        for one in clustered:
            np.testing.assert_array_equal(one, case.run(device, case.plan(DECODE_SPLITS)))
        monkeypatch.undo()


@pytest.mark.parametrize("ring", [(4, 1), (8, 1), (8, 2)])
def test_keys_come_through_a_ring_of_any_size(
    device: Device, monkeypatch: pytest.MonkeyPatch, ring: tuple[int, int]
) -> None:
    monkeypatch.setattr(attention_module, "_ring", lambda device, how, kv: ring)
    case = Case.random(1, 5, 1, 128, past=333)
    case.check(case.run(device))


@pytest.mark.gpu
def test_more_clusters_than_run_at_once_have_small_blocks(device: Device) -> None:
    if device.cluster_limit < DECODE_SPLITS:
        pytest.skip("no clusters of 16 blocks")
    for past in (0, 100, 255, 4095):
        case = Case.random(1, 5, 8, 128, past)
        for how in (case.plan(DECODE_SPLITS), case.plan(DECODE_SPLITS, min_keys=16)):
            first, second = case.run(device, how, repeats=2)
            np.testing.assert_array_equal(first, second)
            case.check(first)


def test_the_ring_is_what_a_card_has_room_for() -> None:
    def ring(kv_heads: int, cluster_limit: int, shared_limit: int, kv: str = "__half") -> object:
        device = SimpleNamespace(cluster_limit=cluster_limit, shared_limit=shared_limit)
        how = plan(1, 5 * kv_heads, kv_heads, 128, 4096, 132, cluster_limit)
        return attention_module._ring(device, how, kv)

    h200, rtx = 227 * 1024, 99 * 1024
    assert ring(4, 16, h200) == (8, 2)
    assert ring(8, 16, h200) == (8, 1)  # two blocks an SM: eight clusters of sixteen fit
    assert ring(8, 1, h200) == (8, 2)
    assert ring(4, 1, rtx) == (4, 1)
    assert ring(4, 16, h200, "float") == (4, 1)


@pytest.mark.parametrize(("tokens", "kv_heads"), [(1, 2), (1, 8), (2, 4)])
def test_clusters_split_few_keys_as_well(tokens: int, kv_heads: int) -> None:
    how = plan(tokens, 7 * kv_heads, kv_heads, 128, 4096, 132, 16)
    assert (how.alone_keys, how.min_keys, how.splits) == (16, 16, 16)


def test_a_short_context_leaves_the_partials_alone(device: Device) -> None:
    case = Case.random(1, 7, 1, 64, past=255)
    how = case.plan(splits=3)
    np.testing.assert_array_equal(case.run(device, how), case.run(device))


def test_one_plan_serves_every_position(device: Device) -> None:
    how = Case.random(1, 7, 1, 64, past=0).plan(splits=4, min_keys=32)
    for past in (0, 63, 64, 130, 255, 256):
        case = Case.random(1, 7, 1, 64, past)
        case.check(case.run(device, how))


@pytest.mark.parametrize("tokens", [1, 17])
def test_all_scores_negative(device: Device, tokens: int) -> None:
    case = Case.random(tokens, 5, 1, 64, past=66)
    case.q, case.k = -np.abs(case.q) - 4, np.abs(case.k) + 4
    case.check(case.run(device))


def test_key_biases_of_211_are_no_matter(device: Device) -> None:
    case = Case.random(2, 7, 1, 64, past=66)
    case.k = (case.k + np.where(np.arange(64) % 9 == 4, 211, 0)).astype(np.float16)
    case.check(case.run(device))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_scores_past_the_range_of_float16(device: Device, head_dim: int) -> None:
    case = Case.random(2, 6, 1, head_dim, past=66)
    case.q[:], case.k[:] = 79, 400  # q k / sqrt(E) = 252,800 and more
    mean = np.array([case.v[: 67 + t, 0].astype(np.float64).mean(axis=0) for t in (0, 1)])
    assert np.abs(case.run(device) - mean[:, None]).max() <= 4 * 2.0**-11
    case.k[21] = 402  # the winner by 1,264
    np.testing.assert_array_equal(
        case.run(device), np.broadcast_to(case.v[21], case.q.shape).astype(np.float32)
    )


@pytest.mark.parametrize(("tokens", "group", "head_dim"), [(1, 2, 64), (2, 7, 128), (1, 1, 64)])
def test_q8_output_is_the_float_output_quantised(
    device: Device, tokens: int, group: int, head_dim: int
) -> None:
    case = Case.random(tokens, group, 1, head_dim, past=5)
    width = group * head_dim
    padded = -(-width // 128) * 128
    up = device.upload
    out = device.empty((tokens, width), np.float32)
    qs = up(np.full((tokens, padded), 99, np.int8))
    ds = up(np.full((tokens, padded // 32), -1, np.int64))
    where = up(np.array([5], np.int32))
    k, v = up(case.cache(case.k)), up(case.cache(case.v))
    attention(device, case.plan(), up(case.q), k, v, where, out=out, qs=qs, ds=ds)

    x = np.zeros((tokens, padded), np.float32)
    x[:, :width] = device.download(out)
    amax = np.abs(x.reshape(tokens, -1, 32)).max(axis=-1, keepdims=True)
    inverse = np.divide(np.float32(127), amax, where=amax > 0, out=np.zeros(amax.shape, np.float32))
    want = np.rint(x.reshape(tokens, -1, 32) * inverse).astype(np.int8)
    # layout 1: value k of 128 at t*32 + b*8 + h*4 + e
    layout = device.download(qs).reshape(tokens, -1, 4, 4, 2, 4)  # group, t, b, h, e
    got = layout.transpose(0, 1, 3, 4, 2, 5).reshape(tokens, -1, 32)  # group, b, h, t, e
    np.testing.assert_array_equal(got, want)
    scales = device.download(ds)
    np.testing.assert_array_equal(
        scales.view(np.float32).reshape(tokens, -1, 2)[..., 0], amax[..., 0] * np.float32(1 / 127)
    )
    sums = scales.view(np.int16).reshape(tokens, -1, 4)[..., 2:]
    np.testing.assert_array_equal(sums, want.reshape(tokens, -1, 2, 16).sum(axis=-1))


@pytest.mark.parametrize(
    ("tokens", "group", "head_dim"), [(40, 1, 64), (2, 7, 128), (19, 3, 64), (9, 7, 128)]
)
def test_f16_output_is_the_float_output_rounded(
    device: Device, tokens: int, group: int, head_dim: int
) -> None:
    case = Case.random(tokens, group, 1, head_dim, past=5)
    width = group * head_dim
    padded = -(-width // 128) * 128
    up = device.upload
    out = device.empty((tokens, width), np.float32)
    h, hs = up(np.full((tokens, padded), 99, np.float16)), up(np.zeros(tokens, np.float32))
    k, v, where = up(case.cache(case.k)), up(case.cache(case.v)), up(np.array([5], np.int32))
    attention(device, case.plan(), up(case.q), k, v, where, out=out, h=h, hs=hs)
    want = np.zeros((tokens, padded), np.float16)
    want[:, :width] = device.download(out)
    np.testing.assert_array_equal(unpermute(device.download(h)), want)
    np.testing.assert_array_equal(device.download(hs), np.ones(tokens, np.float32))

    alone = up(np.full((tokens, padded), 99, np.float16)), up(np.zeros(tokens, np.float32))
    attention(device, case.plan(), up(case.q), k, v, where, h=alone[0], hs=alone[1])
    np.testing.assert_array_equal(device.download(alone[0]), device.download(h))
    np.testing.assert_array_equal(device.download(alone[1]), device.download(hs))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_card_with_64_kb_of_shared_memory_takes_fewer_warps(head_dim: int) -> None:
    device = simt_device(shared_limit=65536)
    case = Case.random(1, 7, 1, head_dim, past=299)
    case.check(case.run(device))
    case.check(case.run(device, case.plan(splits=3, min_keys=16)))


@pytest.mark.parametrize("moved", [-300, -30, -1, 1, 30, 300])
def test_a_position_that_moves_before_the_wait_is_taken_as_it_is_after(moved: int) -> None:
    guess = "max(read_position(position_at)"

    def source(stem: str) -> str:
        text = expand_source(stem)
        assert guess in text
        return text.replace(guess, f"{guess} + ({moved})")

    device, early = simt_device(), simt_device(source=source)
    for case in (Case.random(1, 7, 1, 64, past=299), Case.random(6, 7, 1, 64, past=299)):
        for how in (case.plan(), case.plan(splits=4, min_keys=48)):
            np.testing.assert_array_equal(case.run(early, how), case.run(device, how))


def test_plans_fill_the_card_and_never_more_than_the_context() -> None:
    assert plan(1, 14, 2, 64, 16384, 132) == Plan(2, 64, 1, 8, 16, 256, 128)
    assert plan(1, 28, 4, 128, 16384, 132) == Plan(4, 128, 1, 8, 16, 256, 128)
    assert plan(1, 14, 2, 64, 256, 132).splits == 1
    assert plan(64, 2, 1, 64, 2**20, 132).splits == MAX_SPLITS
    assert plan(2048, 28, 4, 128, 16384, 132) == Plan(4, 128, 224, 64, 1, 256, 256)
    assert plan(1, 14, 2, 64, 256, 132).partials == 0
    assert plan(1, 14, 2, 64, 1024, 132).partials == 2 * 16 * 16 * 34
    assert plan(64, 14, 2, 64, 1024, 132).partials == 2 * 7 * 4 * 64 * 66
    for head_dim in (64, 128):
        least = attention_module._least_ring(head_dim)
        assert plan(1, 14, 2, head_dim, 1024, 132).shared_bytes(*least) <= 65536
        assert plan(512, 14, 2, head_dim, 1024, 132).shared_bytes(*least) <= 65536


def test_scratch_suffices_for_every_number_of_tokens() -> None:
    sizes = (14, 2, 64, 1000, 20)
    partials, arrivals = scratch(512, *sizes)
    plans = [plan(tokens, *sizes) for tokens in range(1, 513)]
    assert partials == max(p.partials for p in plans) == 168960  # 2 heads x 10 tiles x 2 splits
    assert arrivals == max(p.arrivals for p in plans) == 20


def test_instances_are_named_once_each() -> None:
    names = instances([])
    assert len(names) == len(set(names)) == 12
    assert "attention_decode<__half, 64, 8, 2>" in names


def test_wrong_arguments_are_named_with_what_was_expected(device: Device) -> None:
    case = Case.random(1, 7, 1, 64, past=0)
    up = device.upload
    q, k, v = up(case.q), up(case.cache(case.k)), up(case.cache(case.v))
    position = up(np.zeros(1, np.int32))
    out = device.empty((1, 448), np.float32)
    with pytest.raises(KernelError, match="attention: v_cache is .* float32, expected .* float16"):
        attention(
            device, case.plan(), q, k, up(case.cache(case.v.astype(np.float32))), position, out=out
        )
    with pytest.raises(KernelError, match="expected out, or qs and ds, or h"):
        attention(device, case.plan(), q, k, v, position)
    with pytest.raises(KernelError, match="partials is missing, expected 8704 or more float32"):
        attention(device, case.plan(splits=2), q, k, v, position, out=out)
    with pytest.raises(KernelError, match="does not fit 1 tokens"):
        attention(device, replace(case.plan(), row_tiles=2), q, k, v, position, out=out)
