"""`minfer info`: what is in a file, in text that no file can turn against the terminal."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from ggufs import write_gguf

from minfer_cuda.config import Qwen2Config
from minfer_cuda.gguf import GGUFFile
from minfer_cuda.info import check, describe, size
from minfer_cuda.printable import printable


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


def test_sizes_have_units() -> None:
    got = [size(n) for n in (0, 1023, 1536, 5 << 20, 3 << 30)]
    assert got == ["0 bytes", "1023 bytes", "1.5 KiB", "5.0 MiB", "3.00 GiB"]
