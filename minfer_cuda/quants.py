"""Every GGML tensor type in one table: block layout, the kernels' name for it, NumPy dequantise.

The layouts are facts of the GGML format; `gguf.quants.dequantize` is the oracle and the results
are equal to it bit for bit: each product and difference is rounded to float32 in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from minfer_cuda.errors import UnsupportedModelError

Unpack = Callable[[np.ndarray, np.ndarray], None]

CHUNK_VALUES = 1 << 15  # values dequantised at once: 128 KiB of float32 stays in a core's L2
IQ4_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)


@dataclass(frozen=True)
class QuantType:
    """One GGML type. A row of K values is K / block_size blocks of block_bytes bytes."""

    name: str
    type_id: int
    block_size: int
    block_bytes: int
    cuda_name: str | None  # template argument in cuda/quants.cuh; None: no kernels for it
    unpack: Unpack | None  # blocks uint8 (n, block_bytes) -> out float32 (n, block_size), in place

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.block_bytes / self.block_size

    def dequantize(self, data: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Whole blocks uint8 (..., blocks * block_bytes) to float32 (..., blocks * block_size).

        `out` is a C-contiguous float32 array of that shape, so that threads can each take a range
        of rows. Raises UnsupportedModelError for a type that has no values (Q8_K, I32, ...) and
        ValueError for shapes that do not fit.
        """
        if self.unpack is None:
            raise UnsupportedModelError(f"{self.name} cannot be dequantised: not a weight type")
        blocks_per_row, rest = divmod(data.shape[-1], self.block_bytes)
        if data.dtype != np.uint8 or rest:
            raise ValueError(
                f"{self.name}: data is {data.shape} {data.dtype}, expected uint8 rows of whole "
                f"{self.block_bytes}-byte blocks"
            )
        shape = (*data.shape[:-1], blocks_per_row * self.block_size)
        if out is None:
            out = np.empty(shape, np.float32)
        elif out.shape != shape or out.dtype != np.float32 or not out.flags.c_contiguous:
            raise ValueError(
                f"{self.name}: out is {out.shape} {out.dtype}, expected contiguous float32 {shape}"
            )
        blocks = data.reshape(-1, self.block_bytes)
        flat = out.reshape(-1, self.block_size)
        step = max(1, CHUNK_VALUES // self.block_size)
        with np.errstate(all="ignore"):  # NaN and Inf scales give NaN and Inf values
            for i in range(0, len(blocks), step):
                self.unpack(blocks[i : i + step], flat[i : i + step])
        return out


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """The fp16 at byte `at` of each block, as float32 (n, 1)."""
    d: np.ndarray = blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)
    return d


def _shifted(values: np.ndarray, step: int, count: int, mask: int) -> np.ndarray:
    """(n, a, w) -> (n, a, count, w): bit fields of `mask` at 0, step, 2 * step, ..."""
    shifts = np.arange(0, step * count, step, dtype=values.dtype).reshape(1, 1, count, 1)
    fields: np.ndarray = values[:, :, None, :] >> shifts
    fields &= values.dtype.type(mask)
    return fields


def _f32(blocks: np.ndarray, out: np.ndarray) -> None:
    out[:] = np.ascontiguousarray(blocks).view(np.float32)


def _f16(blocks: np.ndarray, out: np.ndarray) -> None:
    out[:] = np.ascontiguousarray(blocks).view(np.float16)


def _bf16(blocks: np.ndarray, out: np.ndarray) -> None:
    bits = np.ascontiguousarray(blocks).view(np.uint16)
    np.left_shift(bits, 16, out=out.view(np.uint32), dtype=np.uint32)


def _nibbles(qs: np.ndarray, out: np.ndarray) -> None:
    """16 bytes a block: low nibbles are values 0-15, high nibbles 16-31."""
    out[:, :16] = qs & 15
    out[:, 16:] = qs >> 4


def _q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """d, 16 bytes of nibbles: d * (q - 8)."""
    _nibbles(blocks[:, 2:], out)
    out -= 8
    out *= _half(blocks, 0)


def _q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    """d, m, 16 bytes of nibbles: d * q + m."""
    _nibbles(blocks[:, 4:], out)
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _five_bits(qh: np.ndarray, qs: np.ndarray, out: np.ndarray) -> None:
    """Bit i of the 4 bytes qh is bit 4 of value i; nibbles as in Q4_0."""
    q = np.unpackbits(qh, axis=1, bitorder="little") << 4
    q[:, :16] |= qs & 15
    q[:, 16:] |= qs >> 4
    out[:] = q


def _q5_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """d, qh[4], 16 bytes of nibbles: d * (q - 16)."""
    _five_bits(blocks[:, 2:6], blocks[:, 6:], out)
    out -= 16
    out *= _half(blocks, 0)


def _q5_1(blocks: np.ndarray, out: np.ndarray) -> None:
    """d, m, qh[4], 16 bytes of nibbles: d * q + m."""
    _five_bits(blocks[:, 4:8], blocks[:, 8:], out)
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """d, 32 int8: d * q."""
    out[:] = blocks[:, 2:].view(np.int8)
    out *= _half(blocks, 0)


def _scale_and_min(out: np.ndarray, groups: int, d: np.ndarray, m: np.ndarray) -> None:
    """out * d - m with d and m (n, groups), each for 256 / groups values."""
    grouped = out.reshape(len(out), groups, -1)
    grouped *= d[:, :, None]
    grouped -= m[:, :, None]


def _q2_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """16 bytes scale | min << 4, 64 bytes of 2-bit values, d, dmin: d * sc * q - dmin * mn."""
    n = len(blocks)
    scales = blocks[:, :16]
    out.reshape(n, 2, 4, 32)[:] = _shifted(blocks[:, 16:80].reshape(n, 2, 32), 2, 4, 3)
    _scale_and_min(out, 16, _half(blocks, 80) * (scales & 15), _half(blocks, 82) * (scales >> 4))


def _q3_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """32 bytes of high bits, 64 of 2-bit values, 12 of 6-bit scales, d: d * (sc - 32) * q, where
    q is the 2-bit value, less 4 where the high bit is clear."""
    n = len(blocks)
    q = _shifted(blocks[:, 32:96].reshape(n, 2, 32), 2, 4, 3).reshape(n, 8, 32).view(np.int8)
    high = _shifted(blocks[:, :32].reshape(n, 1, 32), 1, 8, 1).reshape(n, 8, 32)
    q -= ((high ^ 1) << 2).view(np.int8)
    low = _shifted(blocks[:, 96:104].reshape(n, 1, 8), 4, 2, 15).reshape(n, 16)
    top = _shifted(blocks[:, 104:108].reshape(n, 1, 4), 2, 4, 3).reshape(n, 16)
    scales = (low | top << 4).view(np.int8) - 32
    out.reshape(n, 8, 32)[:] = q
    grouped = out.reshape(n, 16, 16)
    grouped *= (_half(blocks, 108) * scales)[:, :, None]


def _k_scales(s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 12 bytes of Q4_K and Q5_K as eight 6-bit scales and eight 6-bit mins, uint8 (n, 8)."""
    a, b, c = s[:, 0:4], s[:, 4:8], s[:, 8:12]
    scales = np.concatenate([a & 63, (c & 15) | (a >> 6) << 4], axis=1)
    mins = np.concatenate([b & 63, (c >> 4) | (b >> 6) << 4], axis=1)
    return scales, mins


def _q4_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """d, dmin, 12 bytes of scales, 128 of nibbles: d * sc * q - dmin * mn."""
    n = len(blocks)
    scales, mins = _k_scales(blocks[:, 4:16])
    out.reshape(n, 4, 2, 32)[:] = _shifted(blocks[:, 16:].reshape(n, 4, 32), 4, 2, 15)
    _scale_and_min(out, 8, _half(blocks, 0) * scales, _half(blocks, 2) * mins)


def _q5_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """d, dmin, 12 bytes of scales, 32 of high bits (bit j: sub-block j), 128 of nibbles."""
    n = len(blocks)
    scales, mins = _k_scales(blocks[:, 4:16])
    q = _shifted(blocks[:, 48:].reshape(n, 4, 32), 4, 2, 15).reshape(n, 8, 32)
    q |= _shifted(blocks[:, 16:48].reshape(n, 1, 32), 1, 8, 1).reshape(n, 8, 32) << 4
    out.reshape(n, 8, 32)[:] = q
    _scale_and_min(out, 8, _half(blocks, 0) * scales, _half(blocks, 2) * mins)


def _q6_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """128 bytes of low nibbles, 64 of high pairs, 16 int8 scales, d: d * sc * (q - 32).
    In each half of 128 values, quarter g has nibble g >> 1 of bytes 32 * (g & 1) ..."""
    n = len(blocks)
    q = _shifted(blocks[:, :128].reshape(n, 2, 64), 4, 2, 15).reshape(n, 2, 4, 32)
    q |= _shifted(blocks[:, 128:192].reshape(n, 2, 32), 2, 4, 3) << 4
    out.reshape(n, 2, 4, 32)[:] = q
    out -= 32
    scales = blocks[:, 192:208].view(np.int8)
    grouped = out.reshape(n, 16, 16)
    grouped *= (_half(blocks, 208) * scales)[:, :, None]


def _iq4_nl(blocks: np.ndarray, out: np.ndarray) -> None:
    """As Q4_0 through a table: d * IQ4_VALUES[q]."""
    qs = blocks[:, 2:]
    out[:, :16] = IQ4_VALUES[qs & 15]
    out[:, 16:] = IQ4_VALUES[qs >> 4]
    out *= _half(blocks, 0)


def _iq4_xs(blocks: np.ndarray, out: np.ndarray) -> None:
    """d, 16 bits and 4 bytes of 6-bit scales, 128 of nibbles: d * (sc - 32) * IQ4_VALUES[q]."""
    n = len(blocks)
    low = _shifted(blocks[:, 4:8].reshape(n, 4, 1), 4, 2, 15).reshape(n, 8)
    top = _shifted(blocks[:, 2:4].reshape(n, 2, 1), 2, 4, 3).reshape(n, 8)
    scales = (low | top << 4).view(np.int8) - 32
    q = _shifted(blocks[:, 8:].reshape(n, 8, 16), 4, 2, 15)
    grouped = out.reshape(n, 8, 32)
    grouped[:] = IQ4_VALUES[q].reshape(n, 8, 32)
    grouped *= (_half(blocks, 0) * scales)[:, :, None]


HALVES = ("F16", "BF16")  # float types whose prompts f16 tensor cores multiply

QUANT_TYPES: dict[int, QuantType] = {
    row.type_id: row
    for row in (
        QuantType("F32", 0, 1, 4, "F32", _f32),
        QuantType("F16", 1, 1, 2, "F16", _f16),
        QuantType("BF16", 30, 1, 2, "BF16", _bf16),
        QuantType("Q4_0", 2, 32, 18, "Q4_0", _q4_0),
        QuantType("Q4_1", 3, 32, 20, "Q4_1", _q4_1),
        QuantType("Q5_0", 6, 32, 22, "Q5_0", _q5_0),
        QuantType("Q5_1", 7, 32, 24, "Q5_1", _q5_1),
        QuantType("Q8_0", 8, 32, 34, "Q8_0", _q8_0),
        QuantType("Q2_K", 10, 256, 84, "Q2_K", _q2_k),
        QuantType("Q3_K", 11, 256, 110, "Q3_K", _q3_k),
        QuantType("Q4_K", 12, 256, 144, "Q4_K", _q4_k),
        QuantType("Q5_K", 13, 256, 176, "Q5_K", _q5_k),
        QuantType("Q6_K", 14, 256, 210, "Q6_K", _q6_k),
        QuantType("IQ4_NL", 20, 32, 18, "IQ4_NL", _iq4_nl),
        QuantType("IQ4_XS", 23, 256, 136, "IQ4_XS", _iq4_xs),
    )
}

# ids that the format once had and gave up, named so that an old file is explained
REMOVED = {
    4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8",
    36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8",
}  # fmt: skip


def by_name(name: str) -> QuantType:
    """The table's row of that name. KeyError for a name that it does not have."""
    return {q.name: q for q in QUANT_TYPES.values()}[name]


def quant_type(type_id: int, tensor_name: str) -> QuantType:
    """The type with that id: of the table, else of the `gguf` package (CPU only).

    Raises UnsupportedModelError naming tensor and type for an id that neither knows.
    """
    known = QUANT_TYPES.get(type_id) or _gguf_type(type_id)
    if known is not None:
        return known
    name = f"type {type_id}"
    if type_id in REMOVED:
        name = f"{REMOVED[type_id]} (type {type_id}, removed from the format)"
    raise UnsupportedModelError(
        f"tensor {tensor_name} has {name}, which minfer does not know: quantise the model again, "
        f"for example as Q4_K_M or Q8_0"
    )


def _gguf_type(type_id: int) -> QuantType | None:
    """A type that only the `gguf` package knows; imported late: it costs 0.12 s."""
    import gguf

    try:
        known = gguf.GGMLQuantizationType(type_id)
    except ValueError:
        return None
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[known]

    def unpack(blocks: np.ndarray, out: np.ndarray) -> None:
        out[:] = gguf.quants.dequantize(np.ascontiguousarray(blocks), known)

    try:
        gguf.quants.dequantize(np.zeros((1, block_bytes), np.uint8), known)
    except NotImplementedError:
        return QuantType(known.name, type_id, block_size, block_bytes, None, None)
    return QuantType(known.name, type_id, block_size, block_bytes, None, unpack)


def dequantize(type_id: int, data: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """A whole tensor's bytes as float32 of `shape`, on the CPU."""
    quant = quant_type(type_id, "")
    return quant.dequantize(data.reshape(-1)).reshape(shape)


def supported_table() -> str:
    """The README's table of types, in Markdown."""
    lines = [
        "| Type | Id | Values / block | Bytes / block | Bits / weight | CPU | CUDA |",
        "|---|---|---|---|---|---|---|",
    ]
    for q in QUANT_TYPES.values():
        lines.append(
            f"| {q.name} | {q.type_id} | {q.block_size} | {q.block_bytes} "
            f"| {q.bits_per_weight:g} | yes | {'yes' if q.cuda_name else 'no'} |"
        )
    return "\n".join(lines)
