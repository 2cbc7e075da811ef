"""What a model costs at least: bytes that a decode step must read, operations of a prefill."""

from __future__ import annotations

import math
from dataclasses import dataclass

from minfer_cuda.config import Qwen2Config
from minfer_cuda.gguf import GGUFFile
from minfer_cuda.kv_cache import kv_dtype
from minfer_cuda.weights import model_tensors


@dataclass(frozen=True)
class Roofline:
    """The least work of one model with one type of KV cache."""

    weight_bytes: int  # read for every token: all tensors, but one row of an embedding table
    kv_bytes: int  # of one position, read for every token that comes after it
    layer_weights: int  # multiply-adds of a token in the layers
    head_weights: int  # and in the head, which only the last token of a prompt needs
    attention_width: int  # L * H * E: multiply-adds of a token with one position, twice

    @classmethod
    def of(cls, file: GGUFFile, config: Qwen2Config, kv_type: str) -> Roofline:
        """Sizes as the file has them; f16 or f32 cache."""
        shapes = model_tensors(config, file)
        if not config.tied_embeddings:
            del shapes["token_embd.weight"]
        matrices = {name: math.prod(shape) for name, shape in shapes.items() if len(shape) == 2}
        layers = sum(n for name, n in matrices.items() if name.startswith("blk."))
        element_bytes = kv_dtype(kv_type)().itemsize
        return cls(
            weight_bytes=sum(file.tensors[name].nbytes for name in shapes),
            kv_bytes=config.kv_bytes_per_position(element_bytes),
            layer_weights=layers,
            head_weights=sum(matrices.values()) - layers,
            attention_width=config.n_layers * config.q_width,
        )

    def decode_bytes(self, depth: float) -> float:
        """Bytes that a decode step reads when it sees `depth` positions, its own among them."""
        return self.weight_bytes + self.kv_bytes * depth

    def prefill_operations(self, n: int, depth: int = 0) -> int:
        """Operations (two a multiply-add) of n prompt tokens behind `depth` others, and of one
        row of logits; token i sees depth + i + 1 positions."""
        seen = n * depth + n * (n + 1) // 2
        products = n * self.layer_weights + self.head_weights
        return 2 * (products + 2 * seen * self.attention_width)
