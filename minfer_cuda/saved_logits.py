"""The file of llama-perplexity that keeps a model's predictions over a text, read and written.

    8 bytes `_logits_`, int32 n_ctx, n_vocab, n_chunk, int32 tokens[n_chunk * n_ctx], then for each
    chunk n_ctx - 1 - n_ctx/2 rows of uint16: float32 scale, float32 lowest, q[n_vocab], and one
    more where n_vocab is odd. log p = scale * q + lowest; what is 16 nats or more below the row's
    best lies at q = 0.

All little-endian. 304 KB a row for Qwen2's vocabulary: 78 MB for a chunk of 512 tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from minfer_cuda.errors import MinferError
from minfer_cuda.files import replacing

MAGIC = b"_logits_"
HEADER = len(MAGIC) + 3 * 4
MIN_CONTEXT = 8  # tokens of a chunk: three are scored, and the error of their mean means something
RANGE = 16.0  # nats that are kept below the best
STEPS = 65535  # largest q


def rows_per_chunk(n_ctx: int) -> int:
    """Positions scored of a chunk: all of its second half that have a next token."""
    return n_ctx - 1 - n_ctx // 2


def row_width(n_vocab: int) -> int:
    """uint16 of a row."""
    return 2 * ((n_vocab + 1) // 2) + 4


def pack(log_probs: np.ndarray) -> np.ndarray:
    """A row of the file, uint16 (row_width,), of natural-log probabilities float32 (V,)."""
    best = log_probs.max()
    lowest = np.maximum(log_probs.min(), best - np.float32(RANGE))
    scale = (best - lowest) / np.float32(STEPS)
    row = np.zeros(row_width(len(log_probs)), "<u2")
    row[:4] = np.array([scale, lowest], "<f4").view("<u2")
    if scale > 0:
        steps = np.rint((log_probs - lowest) / scale)
        row[4 : 4 + len(log_probs)] = np.clip(steps, 0, STEPS)
    return row


def unpack(row: np.ndarray, n_vocab: int) -> np.ndarray:
    """log p of a row of the file, float32 (V,)."""
    scale, lowest = row[:4].view("<f4")
    log_probs: np.ndarray = scale * row[4 : 4 + n_vocab].astype(np.float32) + lowest
    return log_probs


@contextmanager
def saving_logits(
    path: str | os.PathLike[str], chunks: np.ndarray, n_vocab: int
) -> Iterator[Callable[[np.ndarray], None]]:
    """Write such a file, which is there when the block ends with all of its rows, or not at all.

    chunks  int32 (C, n_ctx), the tokens of all chunks

    Gives the function that takes the next row, float32 (V,), chunk by chunk. Raises MinferError
    where the disk does not take it, or where rows are missing at the end.
    """
    n_rows = len(chunks) * rows_per_chunk(chunks.shape[1])
    sizes = np.array([chunks.shape[1], n_vocab, len(chunks)], "<i4")
    missing = n_rows
    try:
        with replacing(path, mode=0o666) as file:
            file.write(MAGIC + sizes.tobytes() + chunks.astype("<i4").tobytes())

            def add(log_probs: np.ndarray) -> None:
                nonlocal missing
                file.write(pack(log_probs).tobytes())
                missing -= 1

            yield add
            if missing:
                raise MinferError(f"{path} is not written: {missing} of {n_rows} rows are missing")
    except OSError as e:
        raise MinferError(f"cannot write {path}: {e.strerror}") from None


class SavedLogits:
    """Such a file, open: `chunks` int32 (C, n_ctx) and, read when asked for, the rows of each.

    Raises MinferError for a file that is none, or is cut short, or has ids outside its vocabulary.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        try:
            self._file = self.path.open("rb")
            n_bytes = os.fstat(self._file.fileno()).st_size
        except OSError as e:
            raise self._wrong(e.strerror or str(e)) from None
        if n_bytes == 0:
            raise self._wrong("it is empty")
        if n_bytes < HEADER or self._read(0, len(MAGIC), "u1").tobytes() != MAGIC:
            raise self._wrong("it does not begin with _logits_ and three sizes")
        n_ctx, self.n_vocab, n_chunks = map(int, self._read(len(MAGIC), 3, "<i4"))
        if n_ctx < MIN_CONTEXT or self.n_vocab < 1 or n_chunks < 1:
            sizes = f"{n_chunks} chunks of {n_ctx} tokens, {self.n_vocab} ids"
            raise self._wrong(f"its sizes mean nothing: {sizes}")
        self._rows_at = HEADER + 4 * n_chunks * n_ctx
        self._shape = rows_per_chunk(n_ctx), row_width(self.n_vocab)
        expected = self._rows_at + 2 * n_chunks * self._shape[0] * self._shape[1]
        if n_bytes != expected:
            raise self._wrong(f"it has {n_bytes} bytes, its header means {expected}")
        self.chunks = self._read(HEADER, n_chunks * n_ctx, "<i4").reshape(n_chunks, n_ctx)
        if self.chunks.min() < 0 or self.chunks.max() >= self.n_vocab:
            raise self._wrong(f"a token id is not in 0..{self.n_vocab - 1}")

    def rows(self, chunk: int) -> Iterator[np.ndarray]:
        """log p of each scored position of a chunk, float32 (V,)."""
        n_rows, width = self._shape
        at = self._rows_at + 2 * chunk * n_rows * width
        for row in range(n_rows):
            yield unpack(self._read(at + 2 * row * width, width, "<u2"), self.n_vocab)

    def _read(self, at: int, count: int, kind: str) -> np.ndarray:
        """Values of the file, not mapped: a page that someone has cut off would end the process."""
        try:
            self._file.seek(at)
            values = np.fromfile(self._file, kind, count)
        except OSError as e:
            raise self._wrong(e.strerror or str(e)) from None
        if len(values) < count:
            raise self._wrong("it was cut while it was read")
        return values

    def _wrong(self, what: str) -> MinferError:
        return MinferError(f"{self.path} cannot be used as saved logits: {what}")
