"""`minfer info`: what is in a file, in text that no file can turn against the terminal."""

import re
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from ggufs import RawGGUF, tensor_entry, write_gguf

from minfer_cuda.config import Qwen2Config
from minfer_cuda.gguf import GGUFFile
from minfer_cuda.info import check, describe, size
from minfer_cuda.prefill import CARDS, most_float32_rows, most_int8_rows, services
from minfer_cuda.printable import printable
from minfer_cuda.quants import QUANT_TYPES, quant_type


def described(path: Path, n_ctx: int = 4096, **options: Any) -> str:
    with GGUFFile.open(write_gguf(path / "x.gguf", **options)) as file:
        return describe(file, Qwen2Config.from_gguf(file), n_ctx)


def test_metadata_tensors_and_sizes_are_shown(tmp_path: Path) -> None:
    shown = described(tmp_path, types={"attn_q": "Q4_K", "default": "Q8_0"})
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert "general.architecture qwen2" in lines
    assert "qwen2.rope.freq_base 1000000" in lines
    assert "tokenizer.ggml.token_type [1, 1, 1, 1, 1, 1, ... (287 values)]" in lines
    assert "heads 4 of 64, 2 for keys" in lines
    assert "Q4_K 2 72.0 KiB" in lines  # 2 x 256 x 256 weights of 4.5 bits
    assert "KV cache 1.0 KiB per position in f16, 2.0 KiB in f32" in lines


def test_the_memory_sum_follows_n_ctx(tmp_path: Path) -> None:
    with GGUFFile.open(write_gguf(tmp_path / "x.gguf")) as file:
        weights = sum(t.nbytes for t in file.tensors.values())
        config = Qwen2Config.from_gguf(file)
        kv = 2 * 2 * 128 * 2  # layers, K and V, kv width, bytes
        for n_ctx, positions in ((100, 100), (0, config.n_ctx_train)):
            want = f"= {size(weights + positions * kv)}"
            assert f"n_ctx {positions}" in describe(file, config, n_ctx)
            assert want in describe(file, config, n_ctx)


def test_what_serves_a_decode_step_and_a_prompt_is_told_by_type_and_card(tmp_path: Path) -> None:
    types = {"attn_q": "Q4_K", "ffn_up": "BF16", "default": "Q8_0", "token_embd": "F16"}
    shown = described(tmp_path, types=types).partition("Products on a GPU")[2]
    assert "MINFER_PREFILL=int8 or f16 forces one" in shown.splitlines()[0]
    head, *lines = [re.split(r"  +", line.strip()) for line in shown.splitlines()[1:]]
    assert head == ["type", "tokens", "sm_75", "sm_86, 89, 120", "sm_80, 90, 100"]
    dots, s8, f16 = "int8 dot products", "int8 tensor cores", "f16 tensor cores"
    assert lines[0] == ["BF16", "1", "float32", "float32", "float32"]
    assert lines[1] == ["2-", "float32", f16, f16]
    assert lines[2] == ["Q4_K, Q8_0", "1", dots, dots, dots]
    assert lines[-1] == [f"{(most_int8_rows(90) or 0) + 1}-", s8, s8, f16]
    assert "F16" not in [line[0] for line in lines]  # a table that only gives rows


def test_cards_of_a_class_are_served_alike_and_the_table_says_what_the_engine_does() -> None:
    for quant in (q for q in QUANT_TYPES.values() if q.cuda_name is not None):
        for cards in CARDS:
            (served,) = {tuple(services(quant, arch)) for arch in cards}
            f16 = [first for first, by in served if by.startswith("f16")]
            float32 = quant.block_size == 1
            most = most_float32_rows(cards[0], quant) if float32 else most_int8_rows(cards[0])
            assert f16 == ([] if most is None else [most + 1])
            assert [first for first, _ in served] == sorted({first for first, _ in served})


def test_more_int8_rows_are_a_line_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minfer_cuda.prefill.INT8_ROWS", 16)
    shown = described(tmp_path, types="Q8_0")
    counts = [line.split()[0] for line in shown.splitlines() if "int8 tensor cores" in line]
    assert counts == ["2-16", "17-"]


def test_long_values_are_cut_and_counted(tmp_path: Path) -> None:
    shown = described(tmp_path, metadata={"general.description": "x" * 5000})
    assert "... (5000 characters)" in shown and "(28 values)" in shown
    assert max(len(line) for line in shown.splitlines()) < 400


def test_notices_are_shown(tmp_path: Path) -> None:
    assert "note: the file has no qwen2.rope.freq_base" in described(
        tmp_path, drop=["qwen2.rope.freq_base"]
    )


@pytest.mark.parametrize(
    "bad", ["\x1b[2J", "\x1b]0;title\x07", "\x9b31m", "a\rb", "\b\b", "\u202eabc", "\x00", "\n"]
)
def test_control_characters_are_shown_and_not_sent(tmp_path: Path, bad: str) -> None:
    metadata = {"general.name": bad, "general.tags": ["ok", bad]}
    shown = described(tmp_path, metadata=metadata, chat_template=bad)
    assert all(c.isprintable() or c == "\n" for c in shown)
    assert shown.count(printable(bad)) >= 4  # name twice, tag, template
    assert "\n" not in printable(bad)


def test_a_file_of_another_architecture_is_still_described(tmp_path: Path) -> None:
    with GGUFFile.open(write_gguf(tmp_path / "x.gguf", arch="llama")) as file:
        shown = describe(file, None)
    assert "llama" in shown and "Model" not in shown


def test_sizes_have_units() -> None:
    got = [size(n) for n in (0, 1023, 1536, 5 << 20, 3 << 30)]
    assert got == ["0 bytes", "1023 bytes", "1.5 KiB", "5.0 MiB", "3.00 GiB"]


# --check


def test_a_sound_file_passes_the_check(tmp_path: Path) -> None:
    with GGUFFile.open(write_gguf(tmp_path / "x.gguf", types="Q4_K", output_bias=True)) as file:
        assert check(file) == []


@pytest.mark.parametrize(
    ("kind", "at", "n_bad"), [("Q8_0", 0, 32), ("Q4_K", 2, 256), ("Q6_K", 208, 256), ("F16", 0, 1)]
)
def test_the_check_names_tensors_with_bad_scales(
    tmp_path: Path, kind: str, at: int, n_bad: int
) -> None:
    path = write_gguf(tmp_path / "x.gguf", types=kind)
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    with GGUFFile.open(path) as file:
        info = file.tensors["blk.1.ffn_up.weight"]
    raw = bytearray(path.read_bytes())
    start = info.offset + 3 * info.row_bytes + at  # first block of row 3
    raw[start : start + 2] = np.float16(np.nan).tobytes()
    path.write_bytes(raw)
    with GGUFFile.open(path) as file:
        (found,) = check(file)
    assert f"blk.1.ffn_up.weight ({kind}): {n_bad} values" in found
    assert "row 3, column 0" in found


def test_the_check_names_bad_norms_and_biases(tmp_path: Path) -> None:
    bias = np.zeros(256, np.float32)
    bias[7] = np.inf
    path = write_gguf(tmp_path / "x.gguf", tensors={"blk.0.attn_q.bias": bias})
    with GGUFFile.open(path) as file:
        (found,) = check(file)
    assert "blk.0.attn_q.bias (F32): 1 values" in found and "column 7" in found


BY_HALF = {  # type: byte of a block at which a half NaN makes values NaN
    "F16": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,), "IQ1_S": (0,),
    "IQ4_NL": (0,), "IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,),
}  # fmt: skip
NAN_BLOCKS = [
    (kind, {at: byte for at, byte in enumerate(struct.pack("<e", value), at)})
    for kind, places in BY_HALF.items()
    for at in places
    for value in (float("nan"), float("inf"))
] + [
    ("F32", {2: 0xC0, 3: 0x7F}),
    ("BF16", {0: 0xC0, 1: 0x7F}),
    ("IQ1_M", {49: 0, 51: 0, 53: 0xE0, 55: 0x70}),  # a half in the high nibbles of four words
]
FINITE = ("MXFP4", "NVFP4")  # whose scales have no NaN and no Inf as `gguf` reads them
WHOLE_NUMBERS = ("I8", "I16", "I32", "I64")


def one_tensor(path: Path, kind: str, block: bytes) -> Path:
    """A file of one tensor, two rows of one block each, the second as given."""
    quant = quant_type(int(gguf.GGMLQuantizationType[kind]), "")
    sound = bytes(np.ones(quant.block_bytes, np.uint8))
    entry = tensor_entry("w", [quant.block_size, 2], quant.type_id, 0)
    return RawGGUF(entries=[entry], data=sound + block).write(path)


@pytest.mark.parametrize(("kind", "edits"), NAN_BLOCKS)
def test_the_check_names_a_tensor_with_a_nan_or_inf_scale(tmp_path, kind, edits):
    block = bytearray(
        np.ones(quant_type(int(gguf.GGMLQuantizationType[kind]), "").block_bytes, "u1")
    )
    with GGUFFile.open(one_tensor(tmp_path / "sound", kind, bytes(block))) as file:
        assert check(file) == []
    for at, byte in edits.items():
        block[at] = byte
    with GGUFFile.open(one_tensor(tmp_path / "bad", kind, bytes(block))) as file:
        (found,) = check(file)
    assert found.startswith(f"tensor w ({kind}): ") and "first in row 1" in found


@pytest.mark.parametrize("kind", FINITE)
def test_a_type_whose_scales_cannot_be_nan_is_finite_whatever_byte_is_where(kind):
    quant = quant_type(int(gguf.GGMLQuantizationType[kind]), "")
    blocks = np.ones((256 * quant.block_bytes, quant.block_bytes), np.uint8)
    rows = np.arange(len(blocks))
    blocks[rows, rows // 256] = rows % 256
    assert np.isfinite(quant.dequantize(blocks)).all()


OTHERS = {kind.name for kind in gguf.GGMLQuantizationType} - {*dict(NAN_BLOCKS), *FINITE}


@pytest.mark.parametrize("kind", sorted(OTHERS))
def test_every_other_type_has_no_nan_or_is_said_to_be_unknown(tmp_path, kind):
    quant = quant_type(int(gguf.GGMLQuantizationType[kind]), "")
    with GGUFFile.open(one_tensor(tmp_path / "x", kind, bytes(quant.block_bytes))) as file:
        told = check(file)
    assert told == (
        [] if kind in WHOLE_NUMBERS else [f"tensor w ({kind}): its values are not known"]
    )
