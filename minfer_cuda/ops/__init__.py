"""The operations a model is written in. NumPy (reference, CPU) and CUDA implement them.

Arrays are whatever the backend works with: NumPy float32 arrays, or handles of device buffers.
Shape letters as in ARCHITECTURE.md: T tokens of this call, D hidden, F ffn, H heads, G kv heads,
E head dim, V vocabulary, N rows out, K columns in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

Array = Any
Weight = Any


@dataclass(frozen=True)
class LayerWeights:
    """One block. Matrices are (N, K) in the backend's own form, vectors float32."""

    attn_norm: Weight  # (D)
    q: Weight  # (H*E, D)
    k: Weight  # (G*E, D)
    v: Weight  # (G*E, D)
    q_bias: Weight  # (H*E)
    k_bias: Weight  # (G*E)
    v_bias: Weight  # (G*E)
    o: Weight  # (D, H*E)
    ffn_norm: Weight  # (D)
    gate: Weight  # (F, D)
    up: Weight  # (F, D)
    down: Weight  # (D, F)


@dataclass(frozen=True)
class ModelWeights:
    """A whole model."""

    token_embd: Weight  # (V, D)
    layers: tuple[LayerWeights, ...]
    output_norm: Weight  # (D)
    output: Weight  # (V, D); the same object as token_embd where the file has no output.weight
    output_bias: Weight | None = None  # (V)


class Ops(Protocol):
    """What a forward pass is made of. Each call may reuse the buffer of an earlier result of the
    same name, so a result lives until the same operation runs again."""

    def embed(self, table: Weight) -> Array:
        """Rows of `table` for this step's tokens: (T, D)."""

    def rms_norm(self, x: Array, weight: Weight) -> Array:
        """x * rsqrt(mean(x^2) + eps) * weight: (T, D)."""

    def qkv(self, x: Array, layer: LayerWeights, index: int) -> Array:
        """Project, add the biases, rotate q and k (NEOX pairs i, i + E/2), store k and v at this
        step's positions of layer `index` of the cache. Returns the rotated queries (T, H, E)."""

    def attention(self, q: Array, index: int) -> Array:
        """Causal softmax(q k^T / sqrt(E)) v over the cache, query head h reading kv head
        h // (H / G): (T, H*E)."""

    def linear(self, x: Array, weight: Weight, bias: Weight | None = None) -> Array:
        """x W^T (+ bias): (T, N)."""

    def add(self, residual: Array, y: Array) -> Array:
        """residual + y: (T, D)."""

    def linear_add(self, x: Array, weight: Weight, residual: Array) -> Array:
        """residual + x W^T: (T, D), what `add(residual, linear(x, weight))` gives."""

    def gate_up(self, x: Array, gate: Weight, up: Weight) -> Array:
        """silu(x Wg^T) * (x Wu^T): (T, F)."""

    def tail(self, x: Array, n: int) -> Array:
        """The last n rows of x."""
