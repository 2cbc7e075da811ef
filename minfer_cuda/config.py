"""Every hyper-parameter of a Qwen2-family model, read once and checked once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minfer_cuda.errors import ModelFileError, UnsupportedModelError, UsageError
from minfer_cuda.gguf_header import ARRAYS
from minfer_cuda.printable import printable, shown

if TYPE_CHECKING:
    from minfer_cuda.gguf import GGUFFile

ARCHITECTURES = ("qwen2",)
HEAD_DIMS = (64, 128)  # what the attention kernels are compiled for
MAX_SIZE = (1 << 31) - 1  # rows, columns and positions are int32 on the device
MAX_LOGPROBS = 32  # most likely tokens that a draw can name: DrawResult of cuda/state.cuh

# rope.scaling.* keys that are understood; `finetuned` only says how the model was trained
_SCALING_KEYS = (
    "type", "factor", "original_context_length", "attn_factor", "yarn_beta_fast",
    "yarn_beta_slow", "finetuned",
)  # fmt: skip


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

    name: str  # every character of it printable
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

    @property
    def q_width(self) -> int:
        """H * E, which is D in every published checkpoint."""
        return self.n_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.n_kv_heads * self.head_dim

    def kv_bytes_per_position(self, element_bytes: int) -> int:
        """K and V of all layers; element_bytes is 2 for f16, 4 for f32."""
        return self.n_layers * 2 * self.kv_width * element_bytes

    @classmethod
    def from_gguf(cls, file: GGUFFile, *, rope_base: float | None = None) -> Qwen2Config:
        """Read `qwen2.*`, else `llama.*`, else the documented default with a notice.

        `rope_base` overrides the file's base. Raises UnsupportedModelError for a sound file of
        another kind (architecture, head size, RoPE scaling), ModelFileError for missing, wrongly
        typed or contradictory values, UsageError for an impossible `rope_base`.
        """
        keys = _Keys(file)
        architecture = file.metadata.get("general.architecture")
        if architecture not in ARCHITECTURES:
            raise UnsupportedModelError(
                f"{file.path}: architecture {shown(architecture)} is not supported "
                f"(supported: {', '.join(ARCHITECTURES)})"
            )
        d_model = keys.size("embedding_length")
        n_heads = keys.size("attention.head_count")
        n_kv_heads = keys.size("attention.head_count_kv", n_heads)
        if n_heads % n_kv_heads:
            raise keys.wrong(f"{n_heads} heads are not a multiple of {n_kv_heads} kv heads")
        name = file.metadata.get("general.name")
        config = cls(
            name=printable(name if isinstance(name, str) and name else file.path.stem),
            n_layers=keys.size("block_count"),
            d_model=d_model,
            d_ffn=keys.size("feed_forward_length"),
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=_head_dim(keys, d_model, n_heads),
            n_vocab=_vocabulary_size(keys),
            n_ctx_train=keys.size("context_length", 32768),
            rms_eps=keys.positive("attention.layer_norm_rms_epsilon", 1e-6),
            rope_base=_rope_base(keys, rope_base),
            rope_scaling=_rope_scaling(keys),
            tied_embeddings="output.weight" not in file.tensors,
            notices=tuple(keys.notices),
        )
        _check(config, keys)
        return config


class _Keys:
    """Hyper-parameters by their short name, each of the right kind and range."""

    def __init__(self, file: GGUFFile):
        self.file = file
        self.notices: list[str] = []

    def wrong(self, message: str) -> ModelFileError:
        return ModelFileError(f"{self.file.path}: {message}")

    def find(self, key: str) -> Any:
        """The value, or None where neither prefix has it."""
        for prefix in ("qwen2", "llama"):
            value = self.file.metadata.get(f"{prefix}.{key}")
            if value is not None:
                return value
        return None

    def _or_default(self, key: str, default: Any) -> Any:
        value = self.find(key)
        if value is not None:
            return value
        if default is None:
            raise self.wrong(f"qwen2.{key} is missing")
        self.notices.append(f"the file has no qwen2.{key}: {default} is taken")
        return default

    def size(self, key: str, default: int | None = None) -> int:
        """A count of 1 to 2^31 - 1."""
        value = self._or_default(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_SIZE:
            raise self.wrong(f"qwen2.{key} is {shown(value)}, expected 1 to {MAX_SIZE}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0, stored as an integer or a float of any width."""
        value = self._or_default(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(f"qwen2.{key} is {shown(value)}, expected a number")
        if not math.isfinite(value) or value <= 0:
            raise self.wrong(f"qwen2.{key} is {shown(value)}, expected a number above 0")
        return float(value)


def _head_dim(keys: _Keys, d_model: int, n_heads: int) -> int:
    if keys.find("attention.key_length") is not None:
        head_dim = keys.size("attention.key_length")
    elif d_model % n_heads:
        raise keys.wrong(
            f"qwen2.embedding_length {d_model} is not a multiple of {n_heads} heads, "
            f"and there is no qwen2.attention.key_length"
        )
    else:
        head_dim = d_model // n_heads
    if head_dim % 2:
        raise keys.wrong(f"the head size {head_dim} is odd: rotary positions need pairs")
    if head_dim not in HEAD_DIMS:
        raise UnsupportedModelError(
            f"{keys.file.path}: head size {head_dim} is not supported (supported: 64, 128)"
        )
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.find(key) is not None and keys.size(key) != head_dim:
            raise UnsupportedModelError(
                f"{keys.file.path}: qwen2.{key} is {keys.size(key)}, the head size is {head_dim}: "
                f"other sizes are not supported"
            )
    return head_dim


def _vocabulary_size(keys: _Keys) -> int:
    tokens = keys.file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, ARRAYS) or not tokens:
        raise keys.wrong("tokenizer.ggml.tokens is missing or empty: the file has no vocabulary")
    return len(tokens)


def _rope_base(keys: _Keys, override: float | None) -> float:
    if override is not None:
        if not math.isfinite(override) or override <= 1:
            raise UsageError(f"--rope-freq-base is {override}, expected a number above 1")
        return float(override)
    if keys.find("rope.freq_base") is None:
        keys.notices.append(
            "the file has no qwen2.rope.freq_base: 10000 is taken. If the text turns to nonsense "
            "after some hundred tokens, give the model's own with --rope-freq-base (Qwen1.5, Qwen2 "
            "and Qwen2.5: 1000000)"
        )
        return 10000.0
    base = keys.positive("rope.freq_base")
    if base <= 1:
        raise keys.wrong(f"qwen2.rope.freq_base is {base}, expected a number above 1")
    return base


def _rope_scaling(keys: _Keys) -> RopeScaling | None:
    kind = keys.find("rope.scaling.type")
    linear = keys.find("rope.scale_linear")
    if linear is not None and linear != 1:
        kind = "linear"
    if kind is None or kind == "none":
        return None
    if kind != "yarn":
        raise UnsupportedModelError(
            f"{keys.file.path}: RoPE scaling {shown(kind)} is not supported (supported: yarn)"
        )
    _check_scaling_keys(keys)
    attention_factor = None
    if keys.find("rope.scaling.attn_factor") is not None:
        attention_factor = keys.positive("rope.scaling.attn_factor")
    betas = {
        name: keys.positive(f"rope.scaling.yarn_{name}")
        for name in ("beta_fast", "beta_slow")
        if keys.find(f"rope.scaling.yarn_{name}") is not None
    }
    original = keys.find("context_length") or 32768
    return RopeScaling(
        factor=keys.positive("rope.scaling.factor"),
        original_context=keys.size("rope.scaling.original_context_length", original),
        attention_factor=attention_factor,
        **betas,
    )


def _check_scaling_keys(keys: _Keys) -> None:
    """A setting that would change the angles and is not applied is refused, not ignored."""
    for key in keys.file.metadata:
        prefix, _, name = key.partition(".rope.scaling.")
        if prefix in ("qwen2", "llama") and name and name not in _SCALING_KEYS:
            raise UnsupportedModelError(f"{keys.file.path}: {key} is not supported")


def _check(config: Qwen2Config, keys: _Keys) -> None:
    """Against the tensors: they are what a wrong value would run into."""
    tensors = keys.file.tensors
    if config.n_layers > len(tensors):
        raise keys.wrong(
            f"qwen2.block_count is {config.n_layers}, the file has only {len(tensors)} tensors"
        )
    attn_k = tensors.get("blk.0.attn_k.weight")
    if attn_k is not None and attn_k.shape[0] != config.kv_width:
        raise keys.wrong(
            f"blk.0.attn_k.weight has {attn_k.shape[0]} rows, {config.n_kv_heads} kv heads of "
            f"{config.head_dim} need {config.kv_width}"
        )
