"""Qwen2, written once: the CPU path, eager CUDA and the captured graph all run this function.

    x ─ norm ─ q,k,v + bias ─ RoPE ─ KV store ─ attention ─ o ─(+x)─
      ─ norm ─ gate,up ─ SwiGLU ─ down ─(+)─

Values are named as nnterp names them, so that a tap can be read by people who know those names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minfer_cuda.config import Qwen2Config
from minfer_cuda.ops import Array, LayerWeights, ModelWeights, Ops

# tap(name, layer or None, value): called with each named value as it is made
Tap = Callable[[str, "int | None", Array], Any]


class Qwen2:
    """The description of one forward pass over `Ops`."""

    def __init__(self, config: Qwen2Config, weights: ModelWeights):
        self.config = config
        self.weights = weights

    def forward(self, ops: Ops, n_out: int, tap: Tap | None = None) -> Array:
        """Logits (n_out, V) of the last n_out tokens of the step that `ops` holds.

        From the last block's output projection on, only those rows are computed.
        """
        see = tap or (lambda name, layer, value: None)
        x = ops.embed(self.weights.token_embd)
        see("token_embeddings", None, x)
        last = self.config.n_layers - 1
        for i, layer in enumerate(self.weights.layers):
            x = self._block(ops, layer, i, x, n_out if i == last else None, tap)
        h = ops.rms_norm(x, self.weights.output_norm)
        see("final_norm_output", None, h)
        logits = ops.linear(h, self.weights.output, self.weights.output_bias)
        see("logits", None, logits)
        return logits

    def _block(
        self, ops: Ops, w: LayerWeights, i: int, x: Array, n_out: int | None, tap: Tap | None
    ) -> Array:
        see = tap or (lambda name, layer, value: None)
        see("layer_input", i, x)
        h = ops.rms_norm(x, w.attn_norm)
        see("attention_norm_output", i, h)
        q = ops.qkv(h, w, i)
        see("attention_queries", i, q)
        mix = ops.attention(q, i)
        see("attention_premix", i, mix)
        if n_out is not None:
            x, mix = ops.tail(x, n_out), ops.tail(mix, n_out)
        x = self._add_projection(ops, mix, w.o, x, ("attention_output", "layer_mid"), i, tap)
        h = ops.rms_norm(x, w.ffn_norm)
        see("mlp_norm_output", i, h)
        neurons = ops.gate_up(h, w.gate, w.up)
        see("mlp_neurons", i, neurons)
        return self._add_projection(ops, neurons, w.down, x, ("mlp_output", "layer_output"), i, tap)

    @staticmethod
    def _add_projection(
        ops: Ops, y: Array, weight: Any, x: Array, names: tuple[str, str], i: int, tap: Tap | None
    ) -> Array:
        """x + y W^T; with a tap the contribution is a value of its own, as nnterp has it."""
        if tap is None:
            return ops.linear_add(y, weight, x)
        contribution = ops.linear(y, weight)
        tap(names[0], i, contribution)
        x = ops.add(x, contribution)
        tap(names[1], i, x)
        return x
