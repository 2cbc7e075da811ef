"""The operations in float32 NumPy: the CPU path, and the oracle of the CUDA kernels."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from minfer_cuda.config import Qwen2Config
from minfer_cuda.errors import ContextFullError, UsageError
from minfer_cuda.ops import LayerWeights
from minfer_cuda.quants import QuantType
from minfer_cuda.rope import rope_tables

# float32 scores held at once by `attention`: 32 MiB
SCORE_BUDGET = 1 << 23
# values of a packed matrix dequantised at once by one thread: 4 MiB
BLOCK_VALUES = 1 << 20

_threads = ThreadPoolExecutor(os.cpu_count() or 1, "minfer-dequantize")


@dataclass(frozen=True)
class PackedMatrix:
    """A weight (N, K) that stays in the file and is read and dequantised row by row at use."""

    read: Callable[[int, int], np.ndarray]  # rows start..stop: uint8 (stop - start, row bytes)
    type: QuantType
    shape: tuple[int, int]

    def rows(self, start: int, stop: int, out: np.ndarray | None = None) -> np.ndarray:
        """Rows start..stop as float32 (stop - start, K)."""
        return self.type.dequantize(self.read(start, stop), out)

    def gather(self, indices: np.ndarray) -> np.ndarray:
        """Single rows as float32 (len(indices), K)."""
        return self.type.dequantize(np.concatenate([self.read(i, i + 1) for i in indices.tolist()]))

    def ranges(self) -> list[tuple[int, int]]:
        """Row ranges of about BLOCK_VALUES values that cover the matrix."""
        n, k = self.shape
        step = max(1, BLOCK_VALUES // k)
        return [(a, min(a + step, n)) for a in range(0, n, step)]

    def dense(self) -> np.ndarray:
        """The whole matrix as float32 (N, K), dequantised on every core."""
        out = np.empty(self.shape, np.float32)

        def part(rows: tuple[int, int]) -> None:
            self.rows(*rows, out[rows[0] : rows[1]])

        for _ in _threads.map(part, self.ranges()):
            pass
        return out


Matrix = np.ndarray | PackedMatrix  # float32 (N, K), or packed


@dataclass(frozen=True)
class Step:
    """The tokens of one forward pass and their positions, int64 (T) each."""

    tokens: np.ndarray
    positions: np.ndarray


class NumpyOps:
    """`Ops` over NumPy arrays, with the KV cache and the step at hand.

    `cache` is (L, 2, S, G, E), keys then values, float32 or float16; a row is written in the step
    that first reads it. Scores, softmax and sums are float32 whatever the cache holds.
    """

    def __init__(self, config: Qwen2Config, n_ctx: int, kv_dtype: type = np.float32):
        self.config = config
        self.n_ctx = n_ctx
        shape = (config.n_layers, 2, n_ctx, config.n_kv_heads, config.head_dim)
        self.cache: np.ndarray = np.zeros(shape, kv_dtype)
        self.cos, self.sin = rope_tables(config, n_ctx)
        self.step = Step(np.empty(0, np.int64), np.empty(0, np.int64))

    def set_step(self, tokens: Sequence[int], positions: Sequence[int]) -> None:
        """Make these the tokens of the next forward pass.

        Raises ContextFullError for a position at or past n_ctx and UsageError for a token or
        position that does not exist; the step at hand and the cache are then unchanged.
        """
        ids = np.asarray(tokens, np.int64)
        at = np.asarray(positions, np.int64)
        if ids.size == 0 or ids.shape != at.shape:
            raise UsageError(f"a step of {ids.size} tokens at {at.size} positions")
        bad = ids[(ids < 0) | (ids >= self.config.n_vocab)]
        if bad.size:
            raise UsageError(f"token id {bad[0]} is not in 0..{self.config.n_vocab - 1}")
        if at.min() < 0:
            raise UsageError(f"position {at.min()} is negative")
        if at.max() >= self.n_ctx:
            raise ContextFullError(int(at.max()) + 1, self.n_ctx)
        self.step = Step(ids, at)

    def embed(self, table: Matrix) -> np.ndarray:
        tokens = self.step.tokens
        if isinstance(table, PackedMatrix):
            return table.gather(tokens)
        rows: np.ndarray = table[tokens]
        return rows

    def rms_norm(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        mean_square = np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32)
        out: np.ndarray = x / np.sqrt(mean_square + np.float32(self.config.rms_eps))
        out *= weight
        return out

    def linear(self, x: np.ndarray, weight: Matrix, bias: np.ndarray | None = None) -> np.ndarray:
        out = _matmul(x, weight)
        if bias is not None:
            out += bias
        return out

    def linear_add(self, x: np.ndarray, weight: Matrix, residual: np.ndarray) -> np.ndarray:
        return self.add(residual, self.linear(x, weight))

    def add(self, residual: np.ndarray, y: np.ndarray) -> np.ndarray:
        out: np.ndarray = residual + y
        return out

    def gate_up(self, x: np.ndarray, gate: Matrix, up: Matrix) -> np.ndarray:
        g = self.linear(x, gate)
        with np.errstate(over="ignore"):  # exp(-g) = inf gives silu(g) = -0, its limit
            g /= 1 + np.exp(-g)
        g *= self.linear(x, up)
        return g

    def tail(self, x: np.ndarray, n: int) -> np.ndarray:
        return x[len(x) - n :]

    def qkv(self, x: np.ndarray, layer: LayerWeights, index: int) -> np.ndarray:
        c, at = self.config, self.step.positions
        q = self.linear(x, layer.q, layer.q_bias).reshape(-1, c.n_heads, c.head_dim)
        k = self.linear(x, layer.k, layer.k_bias).reshape(-1, c.n_kv_heads, c.head_dim)
        v = self.linear(x, layer.v, layer.v_bias).reshape(-1, c.n_kv_heads, c.head_dim)
        self.cache[index, 0, at] = self.rotate(k)
        self.cache[index, 1, at] = v
        return self.rotate(q)

    def rotate(self, x: np.ndarray) -> np.ndarray:
        """The heads (T, heads, E) turned by this step's positions, pairs (i, i + E/2)."""
        half = x.shape[-1] // 2
        cos = self.cos[self.step.positions][:, None, :]
        sin = self.sin[self.step.positions][:, None, :]
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def attention(self, q: np.ndarray, index: int) -> np.ndarray:
        """Queries go in blocks whose scores fit SCORE_BUDGET, so memory does not grow as T * S."""
        at = self.step.positions
        rows = max(1, SCORE_BUDGET // (self.config.n_heads * (int(at.max()) + 1)))
        blocks = range(0, len(at), rows)
        mixes = [self._attend(q[i : i + rows], at[i : i + rows], index) for i in blocks]
        return np.concatenate(mixes).reshape(len(at), -1)

    def _attend(self, q: np.ndarray, at: np.ndarray, index: int) -> np.ndarray:
        t, heads, dim = q.shape
        groups = self.config.n_kv_heads
        n = int(at.max()) + 1
        k, v = self.cache[index, :, :n].astype(np.float32, copy=False)  # (n, G, E)
        # query head h reads kv head h // R: (G, R*t, E) against (G, E, n)
        queries = q.reshape(t, groups, -1, dim).transpose(1, 2, 0, 3).reshape(groups, -1, dim)
        scores = (queries * np.float32(dim**-0.5)) @ k.transpose(1, 2, 0)
        seen = int(at.min()) + 1  # every query sees the keys before this one
        if seen < n:
            later = np.arange(seen, n) > at[:, None]  # (t, n - seen)
            by_query = scores.reshape(groups, -1, t, n)
            np.copyto(by_query[..., seen:], -np.inf, where=later)
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        sums = scores.sum(axis=-1, keepdims=True)
        mix = (scores @ v.transpose(1, 0, 2)) / sums
        by_token: np.ndarray = mix.reshape(heads, t, dim).transpose(1, 0, 2)
        return by_token


def _matmul(x: np.ndarray, weight: Matrix) -> np.ndarray:
    """x W^T: float32 (T, N)."""
    out: np.ndarray = np.empty((len(x), weight.shape[0]), np.float32)
    if not isinstance(weight, PackedMatrix):
        np.matmul(x, weight.T, out=out)
        return out

    def part(rows: tuple[int, int]) -> None:
        np.matmul(x, weight.rows(*rows).T, out=out[:, rows[0] : rows[1]])

    for _ in _threads.map(part, weight.ranges()):
        pass
    return out
