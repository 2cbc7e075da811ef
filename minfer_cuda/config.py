"""Every hyper-parameter of a Qwen2-family model, read once and checked once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minfer_cuda.gguf import GGUFFile


@dataclass(frozen=True)
class RopeScaling:
    """YaRN (arXiv 2309.00071), the one scaling that Qwen2 files use."""

    factor: float
    original_context: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True)
class Qwen2Config:
    """Sizes in elements. The letters are those of ARCHITECTURE.md."""

    name: str
    n_layers: int  # L
    d_model: int  # D
    d_ffn: int  # F
    n_heads: int  # H
    n_kv_heads: int  # G
    head_dim: int  # E
    n_vocab: int  # V
    n_ctx_train: int
    rms_eps: float
    rope_base: float
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False
    notices: tuple[str, ...] = ()  # defaults taken that the user should hear about

    @classmethod
    def from_gguf(cls, file: GGUFFile, *, rope_base: float | None = None) -> Qwen2Config:
        raise NotImplementedError
