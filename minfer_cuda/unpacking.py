"""Blocks of each GGML tensor type to float32, in NumPy.

`gguf.quants.dequantize` is the oracle and the results are equal to it bit for bit: each product and
difference is rounded to float32 in the same order.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Unpack = Callable[[np.ndarray, np.ndarray], None]

IQ4_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)


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


UNPACK: dict[str, Unpack] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}


def unpacker(name: str, block_bytes: int) -> Unpack | None:
    """What unpacks blocks of the type of that name, the `gguf` package where nothing here does;
    None where that cannot either."""
    return UNPACK.get(name) or _of_gguf(name, block_bytes)


def _of_gguf(name: str, block_bytes: int) -> Unpack | None:
    import gguf  # late: it costs 0.12 s

    kind = gguf.GGMLQuantizationType[name]

    def unpack(blocks: np.ndarray, out: np.ndarray) -> None:
        out[:] = gguf.quants.dequantize(np.ascontiguousarray(blocks), kind)

    try:
        gguf.quants.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except NotImplementedError:  # what `gguf` raises for a type that it cannot unpack
        return None
    return unpack
