"""rope_store: biases, NEOX rotation, and the store into the KV cache at device-held positions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minfer_cuda.errors import KernelError
from minfer_cuda.kernels import Device
from minfer_cuda.kernels.rope import rope_store

CONTEXT = 9


class Case:
    """Random arguments of one call; the cache and q start as NaN."""

    def __init__(self, tokens: int, heads: int, kv_heads: int, head_dim: int, kv: str):
        rng = np.random.default_rng(tokens * 100 + heads)
        width = (heads + 2 * kv_heads) * head_dim
        self.qkv = rng.standard_normal((tokens, width)).astype(np.float32)
        self.bias = (rng.standard_normal(width) * 100).astype(np.float32)
        angles = rng.uniform(-4, 4, (CONTEXT, head_dim // 2))
        self.table = np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)
        self.q = np.full((tokens, heads, head_dim), np.nan, np.float32)
        self.cache = np.full((2, CONTEXT, kv_heads, head_dim), np.nan, kv)

    def run(self, device: Device, position: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q, k cache and v cache after the kernel."""
        up = device.upload
        q, k, v = up(self.q), up(self.cache[0]), up(self.cache[1])
        at = up(np.array([position], np.int32))
        rope_store(device, up(self.qkv), up(self.bias), up(self.table), at, q, k, v)
        return device.download(q), device.download(k), device.download(v)

    def heads(self, dtype: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q, k, v (T, heads, E) with their biases."""
        tokens, heads, head_dim = self.q.shape
        kv_heads = self.cache.shape[2]
        x = (self.qkv.astype(dtype) + self.bias.astype(dtype)).reshape(tokens, -1, head_dim)
        return x[:, :heads], x[:, heads : heads + kv_heads], x[:, heads + kv_heads :]

    def rotated(self, x: np.ndarray, position: int) -> np.ndarray:
        """Pairs (i, i + E/2) turned by the table's angles, each product and sum rounded to x's
        type."""
        half = x.shape[-1] // 2
        rows = self.table[position : position + len(x)].astype(x.dtype)[:, None]
        cos, sin = rows[..., 0], rows[..., 1]
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


@pytest.mark.parametrize("kv", ["float16", "float32"])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head_dim", "position"),
    [(1, 14, 2, 64, 0), (1, 14, 2, 64, 8), (3, 5, 1, 128, 4), (4, 2, 2, 64, 5), (1, 1, 1, 64, 3)],
)
def test_bits_are_those_of_separate_float32_roundings(
    device: Device, tokens: int, heads: int, kv_heads: int, head_dim: int, position: int, kv: str
) -> None:
    case = Case(tokens, heads, kv_heads, head_dim, kv)
    q, k_cache, v_cache = case.run(device, position)
    want_q, want_k, want_v = case.heads(np.float32)
    here = slice(position, position + tokens)
    np.testing.assert_array_equal(q, case.rotated(want_q, position))
    np.testing.assert_array_equal(k_cache[here], case.rotated(want_k, position).astype(kv))
    np.testing.assert_array_equal(v_cache[here], want_v.astype(kv))


def test_rotation_is_the_float64_formula_within_four_roundings(device: Device) -> None:
    case = Case(2, 7, 1, 64, "float32")
    q, k_cache, _ = case.run(device, 3)
    want_q, want_k, _ = case.heads(np.float64)
    for got, x in [(q, want_q), (k_cache[3:5], want_k)]:
        # bias, two products, one sum: each at most 2^-24 of the pair's length (scale 1)
        half = x.shape[-1] // 2
        length = np.hypot(x[..., :half], x[..., half:])
        bound = 4 * 2.0**-24 * np.concatenate([length, length], axis=-1) * np.sqrt(2)
        assert np.all(np.abs(got - case.rotated(x, 3)) <= bound)


def test_rows_of_other_positions_stay_as_they_are(device: Device) -> None:
    _, k_cache, v_cache = Case(2, 4, 2, 64, "float16").run(device, 5)
    others = [0, 1, 2, 3, 4, 7, 8]
    assert np.isnan(k_cache[others]).all() and np.isnan(v_cache[others]).all()
    assert np.isfinite(k_cache[5:7]).all() and np.isfinite(v_cache[5:7]).all()


@pytest.mark.parametrize("position", [CONTEXT - 1, CONTEXT, -1, 2**31 - 1])
def test_a_position_outside_of_the_context_writes_nothing(device: Device, position: int) -> None:
    q, k_cache, v_cache = Case(2, 2, 1, 64, "float32").run(device, position)
    inside = [0 <= position + token < CONTEXT for token in range(2)]
    assert [bool(np.isfinite(row).all()) for row in q] == inside
    for cache in (k_cache, v_cache):
        assert np.isfinite(cache).all(axis=(1, 2)).sum() == sum(inside)


def test_wrong_arguments_are_named_with_what_was_expected(device: Device) -> None:
    case = Case(1, 2, 1, 64, "float16")
    case.bias = case.bias[:-1]
    with pytest.raises(KernelError, match=r"rope_store: bias is \(255,\).*expected \(256,\)"):
        case.run(device, 0)
    case = Case(1, 2, 1, 64, "float64")
    with pytest.raises(KernelError, match="k_cache is .* float64, expected .* float16 or float32"):
        case.run(device, 0)
