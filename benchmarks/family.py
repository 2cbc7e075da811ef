"""The Qwen2.5 checkpoints: shapes, and the tensor types that llama.cpp's quantiser gives them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """Shapes of one checkpoint; letters of ARCHITECTURE.md."""

    layers: int  # L
    d: int  # D
    ffn: int  # F
    heads: int  # H
    kv_heads: int  # G
    vocab: int  # V

    @property
    def head_dim(self) -> int:
        return self.d // self.heads

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim


SIZES = {
    "0.5b": Size(24, 896, 4864, 14, 2, 151936),
    "1.5b": Size(28, 1536, 8960, 12, 2, 151936),
    "3b": Size(36, 2048, 11008, 16, 2, 151936),
    "7b": Size(28, 3584, 18944, 28, 4, 152064),
    "14b": Size(48, 5120, 13824, 40, 8, 152064),
    "32b": Size(64, 5120, 27648, 40, 8, 152064),
    "72b": Size(80, 8192, 29568, 64, 8, 152064),
}
NO_F16 = ("14b", "32b", "72b")
# name -> (type of most matrices, general.file_type)
FTYPES = {
    "f16": ("F16", 1),
    "q4_0": ("Q4_0", 2),
    "q8_0": ("Q8_0", 7),
    "q4_k_m": ("Q4_K", 15),
    "q5_k_m": ("Q5_K", 17),
    "q6_k": ("Q6_K", 18),
}
# what llama.cpp takes where a row is no whole number of 256-value blocks
FALLBACK = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


def more_bits(position: int, n: int) -> bool:
    """Whether the mixes give attn_v and ffn_down more bits: the first and the last eighth of the
    layers, and every third one between."""
    eighth = n // 8
    return position < eighth or position >= 7 * n // 8 or (position - eighth) % 3 == 2


def layers_with_more_bits(n: int) -> set[int]:
    """`position` counts layers in the order of their names (0, 1, 10, 11, ..., 2, 20, ...), which
    is how the published files were quantised."""
    return {layer for i, layer in enumerate(sorted(range(n), key=str)) if more_bits(i, n)}


def matrix_shapes(size: Size) -> dict[str, tuple[int, int]]:
    """Name -> (N, K) of every matrix, in the order of the published files."""
    block = {
        "ffn_down": (size.d, size.ffn),
        "ffn_gate": (size.ffn, size.d),
        "ffn_up": (size.ffn, size.d),
        "attn_k": (size.kv_width, size.d),
        "attn_output": (size.d, size.d),
        "attn_q": (size.d, size.d),
        "attn_v": (size.kv_width, size.d),
    }
    shapes = {"output.weight": (size.vocab, size.d), "token_embd.weight": (size.vocab, size.d)}
    for i in range(size.layers):
        shapes |= {f"blk.{i}.{role}.weight": shape for role, shape in block.items()}
    return shapes


def matrix_types(size: Size, ftype: str) -> dict[str, str]:
    """Name -> tensor type of every matrix: the mix that llama.cpp's quantiser chooses."""
    base, _ = FTYPES[ftype]
    better = layers_with_more_bits(size.layers) if ftype in ("q4_k_m", "q5_k_m") else set()
    types = {}
    for name, (_, k) in matrix_shapes(size).items():
        parts = name.split(".")
        kind = base
        if name == "output.weight" and base not in ("F16", "Q8_0"):
            kind = "Q6_K"
        elif parts[0] == "blk" and parts[2] in ("attn_v", "ffn_down") and int(parts[1]) in better:
            kind = "Q6_K"
        elif parts[-2] == "attn_v" and kind == "Q4_K" and size.layers == 80:
            kind = "Q5_K"  # few rows for many query heads
        types[name] = FALLBACK[kind] if kind in FALLBACK and k % 256 else kind
    return types


def vector_shapes(size: Size) -> dict[str, int]:
    """Norm weights and biases: name -> length."""
    shapes = {}
    for i in range(size.layers):
        shapes |= {f"blk.{i}.{name}.weight": size.d for name in ("attn_norm", "ffn_norm")}
        shapes |= {
            f"blk.{i}.attn_q.bias": size.d,
            f"blk.{i}.attn_k.bias": size.kv_width,
            f"blk.{i}.attn_v.bias": size.kv_width,
        }
    return shapes | {"output_norm.weight": size.d}
