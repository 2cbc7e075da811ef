"""Write a GGUF of random weights with the exact shapes and tensor types of a Qwen2.5 checkpoint.

    python benchmarks/synthetic.py 7b q4_k_m /dev/shm/qwen2.5-7b-q4_k_m.gguf

Speed depends on shapes and types, not on what the weights say, so benchmarks of models that are not
at hand use these. A path under /dev/shm keeps the file in memory. Values have the deviations of a
fresh initialisation (1/sqrt(K)), so activations and logits stay finite and near 1; blocks come from
a pool of random ones that is written round and round, which takes seconds, not the minutes that
quantising takes. The vocabulary has the right length, the byte tokens, the special tokens at their
ids, and made-up words with their merges.
"""

from __future__ import annotations

import argparse
import itertools
import string
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from minfer_cuda.quants import by_name
from minfer_cuda.tokenizer import CONTROL, UNUSED, byte_characters

N_CTX_TRAIN = 32768
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FIRST_SPECIAL = 151643
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


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


# Where a block has its scale d, and its minimum with the multiple of d that centres the values.
_SCALES = {
    "Q4_0": (0, None, 0.0), "Q5_0": (0, None, 0.0), "Q8_0": (0, None, 0.0), "Q5_1": (0, 2, -15.5),
    "Q4_1": (0, 2, -7.5), "Q4_K": (0, 2, 7.5), "Q5_K": (0, 2, 15.5), "Q6_K": (208, None, 0.0),
    "Q2_K": (80, 82, 1.5), "Q3_K": (108, None, 0.0), "IQ4_NL": (0, None, 0.0),
    "IQ4_XS": (0, None, 0.0),
}  # fmt: skip
# Primes: rows that start one after the other in a pool of so many blocks repeat only after so many
# rows, and no matrix has that many.
POOL_BLOCKS = 262139
POOL_VALUES = 16777213


class Pools:
    """Random blocks by type and deviation, made once each."""

    def __init__(self, seed: int, blocks: int = POOL_BLOCKS, values: int = POOL_VALUES):
        self.rng = np.random.default_rng(seed)
        self._blocks = blocks
        self._values = values
        self._made: dict[tuple[str, float], np.ndarray] = {}

    def pool(self, type_name: str, deviation: float) -> np.ndarray:
        """uint8 (whole blocks): values around 0 of that standard deviation."""
        key = (type_name, deviation)
        if key not in self._made:
            make = self._quantised if type_name in _SCALES else self._floats
            self._made[key] = make(type_name, deviation)
        return self._made[key]

    def _floats(self, type_name: str, deviation: float) -> np.ndarray:
        values = self.rng.standard_normal(self._values, np.float32) * np.float32(deviation)
        if type_name == "BF16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return values.astype(np.float16 if type_name == "F16" else np.float32).view(np.uint8)

    def _quantised(self, type_name: str, deviation: float) -> np.ndarray:
        quant = by_name(type_name)
        at_d, at_minimum, ratio = _SCALES[type_name]
        words = self.rng.integers(0, 2**64, -(-self._blocks * quant.block_bytes // 8), np.uint64)
        blocks = words.view(np.uint8)[: self._blocks * quant.block_bytes]
        blocks = blocks.reshape(self._blocks, quant.block_bytes)

        def write_scale(d: np.ndarray) -> None:
            blocks[:, at_d : at_d + 2] = d.astype("<f2").reshape(-1, 1).view(np.uint8)
            if at_minimum is not None:
                minimum = (d * ratio).astype("<f2").reshape(-1, 1).view(np.uint8)
                blocks[:, at_minimum : at_minimum + 2] = minimum

        write_scale(np.ones(self._blocks))
        unit = quant.dequantize(blocks[:256].reshape(-1)).std()
        spread = self.rng.uniform(0.75, 1.25, self._blocks)
        write_scale(deviation / unit * spread)
        return blocks.reshape(-1)

    def matrix(
        self, type_name: str, shape: tuple[int, int], deviation: float
    ) -> Iterator[memoryview]:
        """The bytes of a matrix (N, K), in pieces, from a random block of the pool on."""
        quant = by_name(type_name)
        pool = memoryview(self.pool(type_name, deviation))
        left = shape[0] * shape[1] // quant.block_size * quant.block_bytes
        at = int(self.rng.integers(len(pool) // quant.block_bytes)) * quant.block_bytes
        while left:
            piece = pool[at : at + left]
            yield piece
            left -= len(piece)
            at = 0


def standard_deviation(name: str, k: int) -> float:
    """Standard deviation of a matrix's values: embeddings of 1, logits of about 2."""
    if name == "token_embd.weight":
        return 1.0
    return (2.0 if name == "output.weight" else 1.0) * k**-0.5


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


def vocabulary(size: int) -> tuple[list[str], list[int], list[str]]:
    """Tokens, token types and merges: bytes, words that grow letter by letter so that each merge
    is of a word and a letter, Qwen2's special tokens at their ids, padding."""
    lengths = itertools.count(1)
    letters = itertools.chain.from_iterable(
        itertools.product(string.ascii_lowercase, repeat=n) for n in lengths
    )
    n_words = min(FIRST_SPECIAL, size - len(SPECIALS)) - 256
    words = ["Ġ" + "".join(next(letters)) for _ in range(n_words)]
    tokens = [*byte_characters(), *words, *SPECIALS]
    types = [1] * (len(tokens) - len(SPECIALS)) + [CONTROL] * len(SPECIALS)
    n_padding = size - len(tokens)
    tokens += [f"[PAD{len(tokens) + i}]" for i in range(n_padding)]
    return tokens, types + [UNUSED] * n_padding, [f"{word[:-1]} {word[-1]}" for word in words]


def write_synthetic(
    path: str | Path, size: str | Size, ftype: str, seed: int = 0, pools: Pools | None = None
) -> None:
    """Write the file: metadata, vocabulary and tensor table by the `gguf` package, then the data.

    size   a key of SIZES, or shapes of one's own
    ftype  a key of FTYPES
    Raises ValueError for a pair that is not offered (f16 above 7B).
    """
    if size in NO_F16 and ftype == "f16":
        raise ValueError(f"f16 is offered up to 7b, not for {size}")
    shape = SIZES[size] if isinstance(size, str) else size
    pools = pools or Pools(seed)
    matrices, types, vectors = (
        matrix_shapes(shape),
        matrix_types(shape, ftype),
        vector_shapes(shape),
    )
    label = f"{size.upper() if isinstance(size, str) else 'custom'} {ftype.upper()}"
    alignment = _write_header(Path(path), shape, ftype, label, matrices, types, vectors)
    with open(path, "ab") as file:
        file.write(bytes(-file.tell() % alignment))
        for name, (n, k) in matrices.items():
            for piece in pools.matrix(types[name], (n, k), standard_deviation(name, k)):
                file.write(piece)
            file.write(bytes(-file.tell() % alignment))
        for name, n in vectors.items():
            values = 0.1 * pools.rng.standard_normal(n, np.float32)
            file.write((values + ("norm" in name)).astype(np.float32).tobytes())
            file.write(bytes(-file.tell() % alignment))


def _write_header(
    path: Path,
    size: Size,
    ftype: str,
    label: str,
    matrices: dict[str, tuple[int, int]],
    types: dict[str, str],
    vectors: dict[str, int],
) -> int:
    """Everything up to the data; returns the alignment of the data."""
    import gguf

    tokens, token_types, merges = vocabulary(size.vocab)
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_name(f"Qwen2.5 {label} of random weights")
    writer.add_block_count(size.layers)
    writer.add_context_length(N_CTX_TRAIN)
    writer.add_embedding_length(size.d)
    writer.add_feed_forward_length(size.ffn)
    writer.add_head_count(size.heads)
    writer.add_head_count_kv(size.kv_heads)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_file_type(FTYPES[ftype][1])
    writer.add_quantization_version(2)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(token_types)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML)
    f32 = np.dtype(np.float32)
    for name, (n, k) in matrices.items():
        quant = by_name(types[name])
        n_bytes = n * k // quant.block_size * quant.block_bytes
        kind = gguf.GGMLQuantizationType(quant.type_id)
        writer.add_tensor_info(name, (n, k), f32, n_bytes, kind)
    for name, n in vectors.items():
        writer.add_tensor_info(name, (n,), f32, 4 * n)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    alignment: int = writer.data_alignment
    writer.close()
    return alignment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("ftype", choices=FTYPES)
    parser.add_argument("out", type=Path, metavar="OUT", help="the .gguf file to write")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start = time.perf_counter()
    try:
        write_synthetic(options.out, options.size, options.ftype, options.seed)
    except ValueError as error:
        parser.error(str(error))
    seconds, n_bytes = time.perf_counter() - start, options.out.stat().st_size
    print(f"{options.out}: {n_bytes / 1e9:.2f} GB in {seconds:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
