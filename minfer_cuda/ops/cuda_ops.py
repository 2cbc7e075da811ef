"""The operations on a device: each picks its kernels by tensor type and row count, and launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from minfer_cuda.config import Qwen2Config
from minfer_cuda.kernels import Device, DeviceArray
from minfer_cuda.kernels.attention import attention
from minfer_cuda.kernels.attention import plan as attention_plan
from minfer_cuda.kernels.elementwise import add, pick, swiglu
from minfer_cuda.kernels.embed import embed
from minfer_cuda.kernels.layouts import Activations, Matrix, Unnormed
from minfer_cuda.kernels.matmul import matmul
from minfer_cuda.kernels.matmul_f16 import gate_up_f16, matmul_f16, stack
from minfer_cuda.kernels.matmul_float import matmul_float
from minfer_cuda.kernels.matvec import matvec, matvec_gate_up, matvec_qkv
from minfer_cuda.kernels.norm import rms_norm
from minfer_cuda.kernels.rope import rope_store
from minfer_cuda.kv_cache import KVCache
from minfer_cuda.ops import LayerWeights
from minfer_cuda.quants import HALVES
from minfer_cuda.workspace import Workspace

Rows = DeviceArray | Activations
Normed = Activations | Unnormed  # what rms_norm gives: rows, or a row that its consumer will norm


@dataclass(frozen=True)
class Step:
    """One call of the model, in device memory: the ids, where the first of them sits and, where
    more ids follow than are meant, which of them is the last."""

    tokens: DeviceArray  # (T,) int32
    position: DeviceArray  # (1,) int32
    last: DeviceArray | None = None  # (1,) int32; None: T - 1


class CudaOps:
    """`Ops` over device buffers. Nothing here allocates, except the rows of logits when more are
    asked for than ever before."""

    def __init__(
        self,
        device: Device,
        config: Qwen2Config,
        workspace: Workspace,
        cache: KVCache,
        rope_table: DeviceArray,
        qkv_biases: Sequence[DeviceArray],
        *,
        fuse_qkv: bool = True,
        fuse_ffn: bool = True,
    ):
        """rope_table (S, E/2, 2) float32; qkv_biases (H+2G)*E float32 of each layer."""
        self.device = device
        self.config = config
        self.fuse_qkv = fuse_qkv
        self.fuse_ffn = fuse_ffn
        self._buffers = workspace
        self._scratch = {name: workspace[name] for name in ("partials", "arrivals")}
        self._cache = cache
        self._table = rope_table
        self._qkv_biases = qkv_biases
        # (width, one row?) -> logits, what a tap looks at; a captured step keeps the one-row ones
        self._results: dict[tuple[int, bool], DeviceArray] = {}
        self._step = Step(workspace["tokens"][:1], workspace["place"][:1])

    def set_step(self, step: Step) -> None:
        """The ids that `forward` is about to run over."""
        self._step = step

    def embed(self, table: Matrix) -> DeviceArray:
        x = self._buffers.rows("x", self._step.tokens.shape[0])
        embed(self.device, table, self._step.tokens, x)
        return x

    def rms_norm(self, x: DeviceArray, weight: DeviceArray) -> Normed:
        if x.shape[0] == 1:
            return Unnormed(x, weight, self.config.rms_eps)
        return self._normed(x, weight)

    def _normed(self, x: DeviceArray, weight: DeviceArray) -> Activations:
        out = self._buffers.activations("normed", x.shape[0])
        rms_norm(self.device, x, weight, out, self.config.rms_eps)
        return out

    def _rows(self, x: Normed) -> Activations:
        """For a consumer that cannot norm its input."""
        return self._normed(x.x, x.weight) if isinstance(x, Unnormed) else x

    def qkv(self, x: Normed, layer: LayerWeights, index: int) -> DeviceArray:
        tokens = self._step.tokens.shape[0]
        q = self._buffers.rows("q", tokens)
        keys, values = self._cache.keys(index), self._cache.values(index)
        weights = (layer.q, layer.k, layer.v)
        if self.fuse_qkv and isinstance(x, Unnormed) and not any(w.is_float for w in weights):
            biases = (layer.q_bias, layer.k_bias, layer.v_bias)
            matvec_qkv(
                self.device, weights, biases, x, self._table, self._step.position, q, keys, values
            )
            return q
        projected, rows = self._buffers.rows("qkv", tokens), self._rows(x)
        column = 0
        for matrices in stack(weights):
            if len(matrices) > 1 and _reads_f16(rows, matrices[0]):
                matmul_f16(self.device, matrices, rows, projected, column=column, **self._scratch)
                column += sum(w.rows for w in matrices)
                continue
            for w in matrices:
                self._product(rows, w, projected, column=column)
                column += w.rows
        bias = self._qkv_biases[index]
        rope_store(self.device, projected, bias, self._table, self._step.position, q, keys, values)
        return q

    def attention(self, q: DeviceArray, index: int) -> Activations:
        c, keys = self.config, self._cache.keys(index)
        out = self._buffers.activations("mix", q.shape[0])
        sizes = (c.n_heads, c.n_kv_heads, c.head_dim, keys.shape[0])
        how = attention_plan(q.shape[0], *sizes, self.device.sm_count, self.device.cluster_limit)
        attention(
            self.device, how, q, keys, self._cache.values(index), self._step.position,
            out=out.x, qs=out.qs, ds=out.ds, h=out.h, hs=out.hs,
            partials=self._buffers["attention_partials"],
            arrivals=self._buffers["attention_arrivals"],
        )  # fmt: skip
        return out

    def linear(self, x: Normed, weight: Matrix, bias: DeviceArray | None = None) -> DeviceArray:
        tokens = 1 if isinstance(x, Unnormed) else x.tokens
        key = (weight.rows, tokens == 1)
        held = self._results.get(key)
        if held is None or held.shape[0] < tokens:
            held = self._results[key] = self.device.empty((tokens, weight.rows), np.float32)
        y = held[:tokens]
        if isinstance(x, Unnormed) and not weight.is_float:
            matvec(self.device, weight, x, y[0], bias=bias)
        else:
            self._product(self._rows(x), weight, y, bias=bias)
        return y

    def add(self, residual: DeviceArray, y: DeviceArray) -> DeviceArray:
        add(self.device, residual, y, residual)
        return residual

    def linear_add(self, x: Activations, weight: Matrix, residual: DeviceArray) -> DeviceArray:
        self._product(x, weight, residual, residual=residual)
        return residual

    def gate_up(self, x: Normed, gate: Matrix, up: Matrix) -> Activations:
        if isinstance(x, Unnormed):
            out = self._buffers.activations("neurons", 1)
            if self.fuse_ffn and not gate.is_float and gate.quant == up.quant:
                matvec_gate_up(self.device, gate, up, x, out)
                return out
            x = self._rows(x)
        tokens = x.tokens
        out = self._buffers.activations("neurons", tokens)
        only_f16 = out.x is None and out.qs is None
        if self.fuse_ffn and only_f16 and _reads_f16(x, gate) and gate.quant == up.quant:
            gate_up_f16(self.device, gate, up, x, out, **self._scratch)
            return out
        apart = self._buffers["gate_up"]
        for start in range(0, tokens, len(apart)):
            stop = min(start + len(apart), tokens)
            both, rows = apart[: stop - start], x.rows(start, stop)
            self._product(rows, gate, both)
            self._product(rows, up, both, column=gate.rows)
            swiglu(self.device, both, out.rows(start, stop))
        return out

    def tail(self, x: Rows, n: int) -> Rows:
        if self._step.last is not None:
            return self._last_row(x, self._step.last)
        if isinstance(x, Activations):
            return x.rows(x.tokens - n, x.tokens)
        return x[x.shape[0] - n :]

    def _last_row(self, x: Rows, last: DeviceArray) -> Rows:
        """Of the residual stream, or of attention's result in the forms that it has."""
        if not isinstance(x, Activations):
            row = self._buffers["last.x"]
            pick(self.device, last, [(x, row)])
            return row
        names = [name for name in ("x", "qs", "ds", "h", "hs") if getattr(x, name) is not None]
        rows = {name: self._buffers[f"last.mix.{name}"] for name in names}
        pick(self.device, last, [(getattr(x, name), row) for name, row in rows.items()])
        return replace(x, **rows)

    def _product(
        self,
        x: Activations,
        w: Matrix,
        y: DeviceArray,
        *,
        column: int = 0,
        bias: DeviceArray | None = None,
        residual: DeviceArray | None = None,
    ) -> None:
        """y[:, column : column + N] = x w^T (+ bias) (+ residual)."""
        if _reads_f16(x, w):
            matmul_f16(
                self.device, w, x, y, column=column, bias=bias, residual=residual, **self._scratch
            )
        elif w.is_float:
            matmul_float(self.device, w, x, y, column=column, bias=bias, residual=residual)
        elif x.tokens == 1:
            row = y.reshape(-1)[column : column + w.rows]
            added = None if residual is None else residual.reshape(-1)[column : column + w.rows]
            matvec(self.device, w, x, row, bias=bias, residual=added)
        else:
            matmul(
                self.device, w, x, y, column=column, bias=bias, residual=residual, **self._scratch
            )


def _reads_f16(x: Activations, w: Matrix) -> bool:
    """Whether f16 tensor cores make the product of these; else x has the form that w reads."""
    if x.h is None:
        return False
    return w.quant.name in HALVES if w.is_float else x.qs is None
