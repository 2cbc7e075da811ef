"""Dequantisation has the bits of `gguf.quants`, for every block and every scale."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as T

from minfer_cuda.errors import UnsupportedModelError
from minfer_cuda.quants import (
    QUANT_TYPES,
    QuantType,
    by_name,
    dequantize,
    quant_type,
    supported_table,
)

ALL = list(QUANT_TYPES.values())
# where each type keeps its fp16 scales (and mins)
HALVES = {
    "F16": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
SCALE_BYTES = {"Q3_K": (96, 12), "Q4_K": (4, 12), "Q5_K": (4, 12), "IQ4_XS": (2, 6)}


def names(q: QuantType) -> str:
    return q.name


def random_blocks(q: QuantType, n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, q.block_bytes), np.uint8)


def assert_same_bits(q: QuantType, blocks: np.ndarray) -> None:
    got = q.dequantize(blocks)
    with np.errstate(all="ignore"):
        want = np.ascontiguousarray(gguf.quants.dequantize(blocks, T[q.name]), np.float32)
    assert got.dtype == np.float32 and got.shape == want.shape
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(got.view(np.uint32)[~nan], want.view(np.uint32)[~nan])


@pytest.mark.parametrize("q", ALL, ids=names)
def test_random_blocks_have_the_oracles_bits(q: QuantType) -> None:
    assert_same_bits(q, random_blocks(q, 10_000 if q.block_size <= 32 else 1_500))


@pytest.mark.parametrize("q", ALL, ids=names)
@pytest.mark.parametrize("fill", [0x00, 0x7F, 0x80, 0xFF])
def test_extreme_blocks_have_the_oracles_bits(q: QuantType, fill: int) -> None:
    blocks = np.full((4, q.block_bytes), fill, np.uint8)
    for at in HALVES.get(q.name, ()) if q.block_size > 1 else ():
        blocks[:, at : at + 2] = (
            np.array([1, -0.0, 65504, 6e-8], "<f2").view(np.uint8).reshape(4, 2)
        )
    assert_same_bits(q, blocks)


@pytest.mark.parametrize("name", HALVES)
def test_every_half_pattern_converts_right_as_a_scale(name: str) -> None:
    q = by_name(name)
    patterns = np.arange(1 << 16, dtype="<u2").view(np.uint8).reshape(-1, 2)
    if q.block_size == 256:  # 65,536 blocks of 256 values would take a second each
        special = [0, 1, 0x3FF, 0x400, 0x7BFF, 0x7C00, 0x7C01, 0x7E00, 0x8000, 0xFC00, 0xFFFF]
        patterns = np.concatenate([patterns[::61], patterns[special]])
    blocks = np.repeat(random_blocks(q, 1), len(patterns), axis=0)
    for i, at in enumerate(HALVES[name]):
        blocks[:, at : at + 2] = np.roll(patterns, 977 * i, axis=0)
    assert_same_bits(q, blocks)


@pytest.mark.parametrize("name", SCALE_BYTES)
def test_packed_scales_unpack_right_whatever_their_bytes(name: str) -> None:
    q = by_name(name)
    at, width = SCALE_BYTES[name]
    rng = np.random.default_rng(1)
    fields = rng.integers(0, 256, (600, width), np.uint8)
    fields[:200] = rng.choice(np.array([0x00, 0xFF, 0x3F, 0xC0], np.uint8), (200, width))
    for i in range(width):  # each byte alone, all bits of it
        fields[200 + i] = 0
        fields[200 + i, i] = 0xFF
    blocks = random_blocks(q, len(fields), seed=2)
    blocks[:, at : at + width] = fields
    for half in HALVES[name]:
        blocks[:, half : half + 2] = np.array([1.5], "<f2").view(np.uint8)
    assert_same_bits(q, blocks)


def test_every_bf16_pattern_converts_right() -> None:
    patterns = np.arange(1 << 16, dtype="<u2").view(np.uint8).reshape(-1, 2)
    assert_same_bits(by_name("BF16"), patterns)


@pytest.mark.parametrize("q", ALL, ids=names)
def test_row_ranges_written_apart_equal_the_whole(q: QuantType) -> None:
    rows = random_blocks(q, 7 * 3).reshape(7, -1)
    whole = q.dequantize(rows)
    out = np.full_like(whole, np.nan)
    q.dequantize(rows[:4], out[:4])
    q.dequantize(rows[4:], out[4:])
    np.testing.assert_array_equal(out.view(np.uint32), whole.view(np.uint32))


def test_more_values_than_one_chunk_are_all_written() -> None:
    q = by_name("Q8_0")
    assert_same_bits(q, random_blocks(q, 3_001).reshape(1, -1))


def test_shapes_that_do_not_fit_are_refused() -> None:
    q = by_name("Q4_0")
    rows = random_blocks(q, 8).reshape(2, -1)
    with pytest.raises(ValueError, match="18-byte blocks"):
        q.dequantize(rows[:, :-1])
    with pytest.raises(ValueError, match="expected contiguous float32"):
        q.dequantize(rows, np.empty((2, 64), np.float32))
    with pytest.raises(ValueError, match="expected contiguous float32"):
        q.dequantize(rows, np.empty((2, 256), np.float32)[:, :128])


def test_the_table_agrees_with_the_gguf_package() -> None:
    for q in ALL:
        assert (q.block_size, q.block_bytes) == gguf.GGML_QUANT_SIZES[T(q.type_id)]
        assert T(q.type_id).name == q.name == q.cuda_name
    assert len(ALL) == 15


@pytest.mark.parametrize("type_id", range(48))
def test_each_type_id_is_known_or_refused_by_name(type_id: int) -> None:
    known = {int(t): t.name for t in T}
    if type_id in known:
        q = quant_type(type_id, "blk.0.ffn_up.weight")
        assert (q.name, q.type_id) == (known[type_id], type_id)
        assert (q.cuda_name is not None) == (type_id in QUANT_TYPES)
        return
    with pytest.raises(UnsupportedModelError, match=rf"blk\.0\.ffn_up\.weight.*{type_id}"):
        quant_type(type_id, "blk.0.ffn_up.weight")


def test_a_removed_type_is_explained() -> None:
    with pytest.raises(UnsupportedModelError, match="Q4_0_4_4.*removed"):
        quant_type(31, "output.weight")


@pytest.mark.parametrize("kind", [T.IQ2_XXS, T.IQ3_S, T.TQ1_0, T.MXFP4])
def test_types_that_only_the_gguf_package_knows_run_on_the_cpu(kind: T) -> None:
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(0).integers(0, 256, (3, 2 * block_bytes), np.uint8)
    with np.errstate(all="ignore"):
        want = gguf.quants.dequantize(data, kind)
    np.testing.assert_array_equal(dequantize(int(kind), data, (3, 2 * block_size)), want)


@pytest.mark.parametrize("kind", [T.Q8_K, T.I32])
def test_a_type_without_values_is_not_dequantised(kind: T) -> None:
    q = quant_type(int(kind), "x")
    with pytest.raises(UnsupportedModelError, match=kind.name):
        q.dequantize(np.zeros(q.block_bytes, np.uint8))


def test_the_readmes_table_has_a_line_for_each_type() -> None:
    lines = supported_table().splitlines()
    assert len(lines) == 2 + len(ALL)
    assert "| Q4_K | 12 | 256 | 144 | 4.5 | yes | yes |" in lines
