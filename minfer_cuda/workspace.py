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

FFN_ROWS = 512  # tokens whose gate and up lie side by side in float32 at a time

Shape = tuple[tuple[int, ...], type]


@dataclass(frozen=True)
class Sizes:
    """What the buffers' shapes follow from."""

    rows: int  # B: most tokens of a step
    context: int  # S
    floats: bool  # some matrices are float types and read float32 activations
    q8: bool  # some are quantised and read q8
    sm_count: int


def shapes(c: Qwen2Config, s: Sizes) -> dict[str, Shape]:
    """Name -> (shape, dtype). B rows, letters of ARCHITECTURE.md."""
    b, d, heads = s.rows, c.d_model, c.q_width
    partials, arrivals = attention_scratch(
        b, c.n_heads, c.n_kv_heads, c.head_dim, s.context, s.sm_count
    )
    table: dict[str, Shape] = {
        "tokens": ((b,), np.int32),
        "position": ((1,), np.int32),  # of the first token of a prefill
        "x": ((b, d), np.float32),  # the residual stream
        "qkv": ((b, heads + 2 * c.kv_width), np.float32),
        "q": ((b, c.n_heads, c.head_dim), np.float32),
        "gate_up": ((min(b, FFN_ROWS), 2 * c.d_ffn), np.float32),
        "partials": ((PARTIALS if b > 1 else 1,), np.float32),  # of products split along K
        "arrivals": ((ARRIVALS,), np.int32),
        "normed.scale": ((b,), np.float32),
        "attention_partials": ((max(1, partials),), np.float32),
        "attention_arrivals": ((max(1, arrivals),), np.int32),
    }
    for name, width in (("normed", d), ("mix", heads), ("neurons", c.d_ffn)):
        if s.floats:
            table[f"{name}.x"] = ((b, width), np.float32)
        if s.q8:
            table[f"{name}.qs"] = ((b, padded(width)), np.int8)
            table[f"{name}.ds"] = ((b, padded(width) // 32), np.uint64)
    return table


def workspace_bytes(c: Qwen2Config, s: Sizes) -> int:
    return sum(
        math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in shapes(c, s).values()
    )


class Workspace:
    """The buffers of `shapes`, by name. Counters start at zero and every launch leaves them so."""

    def __init__(self, device: Device, c: Qwen2Config, s: Sizes):
        self._arrays: dict[str, DeviceArray] = {
            name: (device.zeros if "arrivals" in name else device.empty)(shape, dtype)
            for name, (shape, dtype) in shapes(c, s).items()
        }

    def __getitem__(self, name: str) -> DeviceArray:
        return self._arrays[name]

    def activations(self, name: str, rows: int) -> Activations:
        """The first `rows` rows of an activation buffer, in the forms that the model reads."""

        def part(form: str) -> DeviceArray | None:
            array = self._arrays.get(f"{name}.{form}")
            return None if array is None else array[:rows]

        return Activations(part("x"), part("qs"), part("ds"), scale=part("scale"))
