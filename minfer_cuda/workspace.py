"""Every device buffer of a step: shape and type in one table, allocated once."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from minfer_cuda.config import Qwen2Config
from minfer_cuda.kernels import Device, DeviceArray
from minfer_cuda.kernels.attention import scratch as attention_scratch
from minfer_cuda.kernels.layouts import Activations, padded
from minfer_cuda.kernels.matmul import ARRIVALS, PARTIALS
from minfer_cuda.kernels.matmul_f16 import ARRIVALS as F16_ARRIVALS
from minfer_cuda.kernels.matmul_f16 import PARTIALS as F16_PARTIALS
from minfer_cuda.quants import HALVES, QuantType

FFN_BYTES = 128 << 20  # most of gate and up side by side in float32, where they are made apart

Shape = tuple[tuple[int, ...], type]


@dataclass(frozen=True)
class Sizes:
    """What the buffers' shapes follow from."""

    rows: int  # B: most tokens of a step
    context: int  # S
    float_rows: int  # most tokens of a step with products that read float32; 0: none do
    q8_rows: int  # the same of q8: quantised matrices, which in longer steps read f16
    f16_rows: int  # fewest tokens of a step with products that read f16; more than rows: none do
    unlike_ffn: bool  # gate and up of some layer are of two types
    sm_count: int

    @property
    def f16(self) -> bool:
        """Whether long steps read f16 activations."""
        return self.rows >= self.f16_rows

    def reads_f16(self, quant: QuantType) -> bool:
        """Whether long steps read f16 activations for a matrix of this type."""
        return self.f16 and (
            quant.name in HALVES if quant.block_size == 1 else self.rows > self.q8_rows
        )

    @property
    def rows_apart(self) -> int:
        """Most tokens of a step whose gate and up are made apart."""
        return self.rows if self.unlike_ffn else max(self.float_rows, self.q8_rows)


def shapes(c: Qwen2Config, s: Sizes) -> dict[str, Shape]:
    """Name -> (shape, dtype). B rows, letters of ARCHITECTURE.md."""
    b, d, heads = s.rows, c.d_model, c.q_width
    partials, arrivals = attention_scratch(
        b, c.n_heads, c.n_kv_heads, c.head_dim, s.context, s.sm_count
    )
    products = max(PARTIALS, F16_PARTIALS if s.f16 else 0) if b > 1 else 1
    ffn_rows = min(s.rows_apart, max(1, FFN_BYTES // (8 * c.d_ffn * 128)) * 128)  # whole tiles
    table: dict[str, Shape] = {
        "tokens": ((b,), np.int32),
        "place": ((2,), np.int32),  # position of the first token of a prefill; which is the last
        "x": ((b, d), np.float32),  # the residual stream
        "qkv": ((b, heads + 2 * c.kv_width), np.float32),
        "q": ((b, c.n_heads, c.head_dim), np.float32),
        "gate_up": ((ffn_rows, 2 * c.d_ffn), np.float32),
        "partials": ((products,), np.float32),  # of products split along K
        "arrivals": ((max(ARRIVALS, F16_ARRIVALS),), np.int32),
        "normed.scale": ((b,), np.float32),
        "attention_partials": ((max(1, partials),), np.float32),
        "attention_arrivals": ((max(1, arrivals),), np.int32),
    }
    for name, width in (("normed", d), ("mix", heads), ("neurons", c.d_ffn)):
        if s.float_rows:
            table[f"{name}.x"] = ((s.float_rows, width), np.float32)
        if s.q8_rows:
            table[f"{name}.qs"] = ((s.q8_rows, padded(width)), np.int8)
            table[f"{name}.ds"] = ((s.q8_rows, padded(width) // 32), np.uint64)
        if s.f16:
            table[f"{name}.h"] = ((b, padded(width)), np.float16)
            table[f"{name}.hs"] = ((b,), np.float32)
    table |= {  # the last rows of a prompt that others follow
        f"last.{name}": ((1, *shape[1:]), dtype)
        for name, (shape, dtype) in table.items()
        if name == "x" or name.startswith("mix.")
    }
    return table


def workspace_bytes(c: Qwen2Config, s: Sizes) -> int:
    """Of all buffers together."""
    return sum(
        math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in shapes(c, s).values()
    )


class Workspace:
    """The buffers of `shapes`, by name. Counters start at zero and every launch leaves them so."""

    def __init__(self, device: Device, c: Qwen2Config, s: Sizes):
        self._sizes = s
        self._arrays: dict[str, DeviceArray] = {
            name: (device.zeros if "arrivals" in name else device.empty)(shape, dtype)
            for name, (shape, dtype) in shapes(c, s).items()
        }

        # the parts of one row count: a slice takes microseconds to make, and a step needs hundreds
        self._parts: dict[str, DeviceArray] = {}
        self._rows = 0

    def __getitem__(self, name: str) -> DeviceArray:
        return self._arrays[name]

    def rows(self, name: str, rows: int) -> DeviceArray:
        """The first `rows` rows of a buffer."""
        if rows != self._rows:
            self._parts, self._rows = {}, rows
        found = self._parts.get(name)
        if found is None:
            found = self._parts[name] = self._arrays[name][:rows]
        return found

    def activations(self, name: str, rows: int) -> Activations:
        """The first `rows` rows of an activation buffer, in the forms that products of so
        many rows read."""

        def part(form: str, read: bool) -> DeviceArray | None:
            whole = f"{name}.{form}"
            return self.rows(whole, rows) if read and whole in self._arrays else None

        s = self._sizes
        q8, f16 = rows <= s.q8_rows, rows >= s.f16_rows
        return Activations(
            part("x", rows <= s.float_rows), part("qs", q8), part("ds", q8),
            part("h", f16), part("hs", f16), part("scale", q8),
        )  # fmt: skip
