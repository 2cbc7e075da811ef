"""Tiny GGUF files for tests: sound ones through `gguf.GGUFWriter`, damaged ones byte by byte."""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T
from gguf import GGUFValueType as V

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = (
    "Ġ t", "h e", "i n", "Ġ a", "r e", "o n", "Ġt he", "e r", "Ġ s", "Ġ w", "o r", "l l", "Ġ o",
    "n d", "Ġ c", "Ġa nd", "in g", "l o", "he ll", "hell o", "w or", "l d", "wor ld", "Ġw or",
    "Ġwor ld", "Ã ©", "Ġ Ġ", "ĠĠ ĠĠ",
)  # fmt: skip

# Where random blocks have their scale, and their min as a multiple of it that centres the values.
_RANDOM = {
    "Q2_K": (80, 82, 1.5), "Q3_K": (108, None, 0.0), "Q4_K": (0, 2, 7.5), "Q5_K": (0, 2, 15.5),
    "Q6_K": (208, None, 0.0), "IQ4_NL": (0, None, 0.0), "IQ4_XS": (0, None, 0.0),
}  # fmt: skip


ONE_LAYER = {"layers": 1, "d": 128, "heads": 2, "kv_heads": 1, "ffn": 128}  # answers at once


def byte_map() -> list[str]:
    """GPT-2's printable character for each of the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(spare)) for b in range(256)]


def vocabulary(size: int | None = None) -> tuple[list[str], list[int], list[str]]:
    """Tokens, token types and merges of a small byte-level BPE; unused rows are [PADn]."""
    tokens = byte_map() + [m.replace(" ", "") for m in MERGES]
    types = [1] * len(tokens) + [3] * len(SPECIAL)
    tokens += SPECIAL
    n_pad = max(0, (size or 0) - len(tokens))
    tokens += [f"[PAD{i}]" for i in range(n_pad)]
    types += [5] * n_pad
    return tokens, types, list(MERGES)


def quantize(values: np.ndarray, type_name: str, rng: np.random.Generator) -> np.ndarray:
    """float32 (N, K) in a type's bytes; for types that `gguf` cannot quantise, random blocks of
    about the same standard deviation."""
    kind = T[type_name]
    if type_name not in _RANDOM:
        return gguf.quants.quantize(values.astype(np.float32), kind)
    return random_blocks(type_name, values.shape, float(values.std()), rng)


def random_blocks(
    type_name: str, shape: tuple[int, ...], std: float, rng: np.random.Generator
) -> np.ndarray:
    """Random valid blocks (N, row bytes) of values (N, K) around 0 with that deviation; every
    block has a scale of its own."""
    kind = T[type_name]
    at_d, at_min, ratio = _RANDOM[type_name]
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    n_blocks = shape[0] * shape[1] // block_size
    blocks = rng.integers(0, 256, (n_blocks, block_bytes), np.uint8)

    def scale(d: np.ndarray) -> None:
        blocks[:, at_d : at_d + 2] = d.astype("<f2").reshape(-1, 1).view(np.uint8)
        if at_min is not None:
            minimum = (d * ratio).astype("<f2").reshape(-1, 1)
            blocks[:, at_min : at_min + 2] = minimum.view(np.uint8)

    scale(np.ones(n_blocks))
    unit = gguf.quants.dequantize(blocks[:64], kind).std()
    scale(std / unit * rng.uniform(0.5, 1.4, n_blocks))
    return blocks.reshape(shape[0], -1)


def write_gguf(
    path: str | Path,
    *,
    layers: int = 2,
    d: int = 256,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    ffn: int = 512,
    vocab: int | None = None,
    types: str | Mapping[str, str] = "F32",
    tied: bool = False,
    output_bias: bool = False,
    arch: str = "qwen2",
    chat_template: str | None = CHATML,
    metadata: Mapping[str, Any] | None = None,
    drop: Collection[str] = (),
    tensors: Mapping[str, np.ndarray] | None = None,
    split_max_tensors: int = 0,
    seed: int = 0,
) -> Path:
    """A Qwen2 model of random weights whose activations stay near 1. Returns its path (of part 1).

    types      one type, or per role: {"attn_q": "Q4_K", "output": "Q6_K", "default": "Q8_0"};
               roles are token_embd, output, attn_q/k/v/output, ffn_gate/up/down
    metadata   keys to set, also (GGUFValueType, value) or (ARRAY, value, element type)
    drop       keys and tensors to leave out
    tensors    float32 arrays to use instead of, or beside, the random ones
    split_max_tensors  > 0: written as PATH-0000i-of-0000N.gguf
    """
    path = Path(path)
    rng = np.random.default_rng(seed)
    hd = head_dim or d // heads
    tokens, token_types, merges = vocabulary(vocab)
    shapes = _shapes(layers, d, heads * hd, kv_heads * hd, ffn, len(tokens), tied, output_bias)
    values = {name: _random_tensor(name, shape, rng) for name, shape in shapes.items()}
    values.update(tensors or {})
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=split_max_tensors)
    keys: dict[str, Any] = {
        "general.name": "tiny",
        f"{arch}.block_count": layers,
        f"{arch}.context_length": 512,
        f"{arch}.embedding_length": d,
        f"{arch}.feed_forward_length": ffn,
        f"{arch}.attention.head_count": heads,
        f"{arch}.attention.head_count_kv": kv_heads,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{arch}.rope.freq_base": 1e6,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": token_types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.bos_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.ggml.add_bos_token": False,
    }
    if head_dim is not None:
        keys |= {f"{arch}.attention.key_length": hd, f"{arch}.attention.value_length": hd}
    if chat_template is not None:
        keys["tokenizer.chat_template"] = chat_template
    for key, value in (keys | dict(metadata or {})).items():
        if key not in drop:
            _add_key(writer, key, value)
    for name, value in values.items():
        if name not in drop:
            _add_tensor(writer, name, value, types, rng)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if split_max_tensors:
        return min(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))
    return path


def _shapes(
    layers: int, d: int, q: int, kv: int, ffn: int, n_vocab: int, tied: bool, output_bias: bool
) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (n_vocab, d)}
    for i in range(layers):
        block: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (d,),
            "attn_q.weight": (q, d), "attn_q.bias": (q,),
            "attn_k.weight": (kv, d), "attn_k.bias": (kv,),
            "attn_v.weight": (kv, d), "attn_v.bias": (kv,),
            "attn_output.weight": (d, q),
            "ffn_norm.weight": (d,),
            "ffn_gate.weight": (ffn, d), "ffn_up.weight": (ffn, d), "ffn_down.weight": (d, ffn),
        }  # fmt: skip
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    shapes["output_norm.weight"] = (d,)
    if not tied:
        shapes["output.weight"] = (n_vocab, d)
    if output_bias:
        shapes["output.bias"] = (n_vocab,)
    return shapes


def _random_tensor(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    values = rng.standard_normal(shape, np.float32)
    if name.endswith("norm.weight"):
        return 1 + 0.1 * values
    if name.endswith(".bias"):
        return values * 0.5
    return values if name == "token_embd.weight" else values / np.float32(shape[1] ** 0.5)


def _add_tensor(
    writer: gguf.GGUFWriter,
    name: str,
    values: np.ndarray,
    types: str | Mapping[str, str],
    rng: np.random.Generator,
) -> None:
    if values.ndim == 1:
        writer.add_tensor(name, values.astype(np.float32))
        return
    role = name.removesuffix(".weight").split(".")[-1]
    kind = types if isinstance(types, str) else types.get(role, types.get("default", "F32"))
    writer.add_tensor(name, quantize(values, kind, rng), raw_dtype=T[kind])


def _add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, tuple):
        kind, value, *element = value
        writer.add_key_value(key, value, kind, *element)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        kinds = {bool: V.BOOL, int: V.UINT32, float: V.FLOAT32, str: V.STRING}
        writer.add_key_value(key, value, kinds[type(value)])


def text(value: str | bytes) -> bytes:
    """A GGUF string."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key_value(key: str | bytes, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


def array(kind: int, count: int, payload: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + payload


def tensor_entry(name: str, dims: Collection[int], kind: int, offset: int) -> bytes:
    """dims in file order: the contiguous one first."""
    dims = list(dims)
    head = text(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return head + struct.pack("<IQ", kind, offset)


@dataclass
class RawGGUF:
    """A file built from bytes, with counts and alignment that may lie."""

    values: list[bytes] = field(default_factory=list)
    entries: list[bytes] = field(default_factory=list)
    data: bytes = b""
    magic: bytes = b"GGUF"
    version: int = 3
    n_values: int | None = None
    n_tensors: int | None = None
    alignment: int = 32

    def build(self) -> bytes:
        n_tensors = len(self.entries) if self.n_tensors is None else self.n_tensors
        n_values = len(self.values) if self.n_values is None else self.n_values
        head = self.magic + struct.pack("<IQQ", self.version, n_tensors, n_values)
        head += b"".join(self.values) + b"".join(self.entries)
        if self.entries:
            head += bytes(-len(head) % self.alignment)
        return head + self.data

    def write(self, path: Path) -> Path:
        path.write_bytes(self.build())
        return path
