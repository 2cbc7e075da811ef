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
import errno
import itertools
import mmap
import os
import shutil
import string
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.family import (
    FTYPES,
    NO_F16,
    SIZES,
    Size,
    matrix_shapes,
    matrix_types,
    vector_shapes,
)
from minfer_cuda.quants import by_name
from minfer_cuda.tokenizer import CONTROL, UNUSED, byte_characters

N_CTX_TRAIN = 32768
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FIRST_SPECIAL = 151643
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


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
PIECE_BYTES = 16 << 20  # that a thread writes at once


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

    def start(self, type_name: str) -> int:
        """The byte of a random block in a pool of that type."""
        if type_name in _SCALES:
            return int(self.rng.integers(self._blocks)) * by_name(type_name).block_bytes
        return int(self.rng.integers(self._values)) * by_name(type_name).block_bytes


def standard_deviation(name: str, k: int) -> float:
    """Standard deviation of a matrix's values: embeddings of 1, logits of about 2."""
    if name == "token_embd.weight":
        return 1.0
    return (2.0 if name == "output.weight" else 1.0) * k**-0.5


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
    pieces: list[Piece] = []
    end = Path(path).stat().st_size
    for name, (n, k) in matrices.items():
        pool = pools.pool(types[name], standard_deviation(name, k))
        n_bytes = _matrix_bytes(types[name], n, k)
        at = aligned(end, alignment)
        pieces += cut(pool, pools.start(types[name]), at, n_bytes)
        end = at + n_bytes
    for name, n in vectors.items():
        values = ("norm" in name) + 0.1 * pools.rng.standard_normal(n, np.float32)
        at = aligned(end, alignment)
        pieces.append(Piece(at, 4 * n, values.astype(np.float32).view(np.uint8), 0))
        end = at + 4 * n
    fill(Path(path), aligned(end, alignment), pieces)


@dataclass(frozen=True)
class Piece:
    """Bytes of a file that repeat a pool, from its byte `start` on."""

    at: int
    n_bytes: int
    pool: np.ndarray
    start: int


def cut(pool: np.ndarray, start: int, at: int, n_bytes: int) -> list[Piece]:
    """A long stretch as pieces for threads."""
    return [
        Piece(at + i, min(PIECE_BYTES, n_bytes - i), pool, (start + i) % len(pool))
        for i in range(0, n_bytes, PIECE_BYTES)
    ]


def fill(path: Path, size: int, pieces: list[Piece]) -> None:
    """Make the file `size` bytes long and write the pieces on every core: what takes time is the
    system's getting of pages, and through a map the threads do not wait for each other."""

    free = shutil.disk_usage(path.parent).free
    if 0 < free < size - path.stat().st_size:  # a write through a map would kill the process
        raise OSError(errno.ENOSPC, f"{size:,} bytes needed, {free:,} free", str(path))
    with open(path, "r+b") as file:
        file.truncate(size)
        with mmap.mmap(file.fileno(), size) as view, ThreadPoolExecutor(os.cpu_count()) as threads:
            for _ in threads.map(partial(_write, view), pieces):
                pass


def _write(view: mmap.mmap, piece: Piece) -> None:
    target = np.frombuffer(view, np.uint8, piece.n_bytes, piece.at)
    at = piece.start
    while len(target):
        n = min(len(target), len(piece.pool) - at)
        target[:n] = piece.pool[at : at + n]
        target, at = target[n:], 0


def aligned(at: int, alignment: int) -> int:
    return -(-at // alignment) * alignment


def _matrix_bytes(type_name: str, n: int, k: int) -> int:
    quant = by_name(type_name)
    return n * k // quant.block_size * quant.block_bytes


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
        kind = gguf.GGMLQuantizationType(by_name(types[name]).type_id)
        writer.add_tensor_info(name, (n, k), f32, _matrix_bytes(types[name], n, k), kind)
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
    except OSError as error:
        sys.exit(f"error: {error}")
    seconds, n_bytes = time.perf_counter() - start, options.out.stat().st_size
    print(f"{options.out}: {n_bytes / 1e9:.2f} GB in {seconds:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
