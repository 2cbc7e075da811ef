"""Each tensor is checked before any is uploaded, and uploaded once, in file order."""

from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from ggufs import RawGGUF, text, write_gguf

from minfer_cuda.config import Qwen2Config
from minfer_cuda.errors import ModelFileError, UnsupportedModelError
from minfer_cuda.gguf import GGUFFile, TensorInfo
from minfer_cuda.ops import ModelWeights
from minfer_cuda.weights import Rows, load_weights

SMALL = {"layers": 2, "d": 256, "heads": 4, "kv_heads": 2, "ffn": 256}


def load(path: Path, **options: Any) -> tuple[ModelWeights, list[TensorInfo]]:
    """Weights of a tiny file as float32 arrays, and what was uploaded, in order."""
    keyword = {k: options.pop(k) for k in ("cuda", "progress", "notice") if k in options}
    uploaded: list[TensorInfo] = []

    def upload(info: TensorInfo, rows: Rows) -> np.ndarray:
        data = rows(0, info.n_rows)
        assert data.dtype == np.uint8 and data.nbytes == info.nbytes
        uploaded.append(info)
        return info.quant.dequantize(data).reshape(info.shape)

    with GGUFFile.open(write_gguf(path / "x.gguf", **(SMALL | options))) as file:
        return load_weights(file, Qwen2Config.from_gguf(file), upload, **keyword), uploaded


def test_every_weight_gets_its_place(tmp_path: Path) -> None:
    weights, _ = load(tmp_path, types="Q8_0", output_bias=True)
    reader = gguf.GGUFReader(tmp_path / "x.gguf")
    want = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    names = {
        "attn_norm": "attn_norm.weight", "q": "attn_q.weight", "k": "attn_k.weight",
        "v": "attn_v.weight", "q_bias": "attn_q.bias", "k_bias": "attn_k.bias",
        "v_bias": "attn_v.bias", "o": "attn_output.weight", "ffn_norm": "ffn_norm.weight",
        "gate": "ffn_gate.weight", "up": "ffn_up.weight", "down": "ffn_down.weight",
    }  # fmt: skip
    for i, layer in enumerate(weights.layers):
        for field, name in names.items():
            np.testing.assert_array_equal(getattr(layer, field), want[f"blk.{i}.{name}"])
    for field in ("token_embd", "output", "output_norm"):
        np.testing.assert_array_equal(getattr(weights, field), want[f"{field}.weight"])
    np.testing.assert_array_equal(weights.output_bias, want["output.bias"])


def test_tensors_are_uploaded_once_and_in_file_order(tmp_path: Path) -> None:
    _, uploaded = load(tmp_path)
    offsets = [info.offset for info in uploaded]
    assert offsets == sorted(set(offsets))
    assert len(uploaded) == len(gguf.GGUFReader(tmp_path / "x.gguf").tensors)


def test_a_tied_head_is_the_embedding_itself(tmp_path: Path) -> None:
    weights, uploaded = load(tmp_path, tied=True)
    assert weights.output is weights.token_embd
    assert [info.name for info in uploaded].count("token_embd.weight") == 1
    assert weights.output_bias is None


def test_types_may_be_mixed_at_will(tmp_path: Path) -> None:
    types = {
        "token_embd": "Q5_0", "output": "Q6_K", "attn_q": "Q4_0", "attn_k": "Q4_1",
        "attn_v": "IQ4_NL", "attn_output": "BF16", "ffn_gate": "Q2_K", "ffn_up": "Q3_K",
        "ffn_down": "IQ4_XS",
    }  # fmt: skip
    _, uploaded = load(tmp_path, types=types, cuda=True)
    kinds = {i.name.split(".")[-2]: i.type_name for i in uploaded if len(i.shape) == 2}
    assert kinds == types


def test_vectors_arrive_as_float32_whatever_their_type(tmp_path: Path) -> None:
    values = np.linspace(-2, 2, 256).astype(np.float16)
    with GGUFFile.open(_with_half_norm(tmp_path / "x.gguf", values)) as file:
        assert file.tensors["output_norm.weight"].type_name == "F16"
        weights = load_weights(file, Qwen2Config.from_gguf(file), lambda *given: given)
    info, rows = weights.output_norm
    assert (info.type_name, info.nbytes) == ("F32", 1024)
    np.testing.assert_array_equal(rows(0, 1)[0].view(np.float32), values.astype(np.float32))


def _with_half_norm(path: Path, values: np.ndarray) -> Path:
    """The tiny model with output_norm stored in F16 (which the writer's helper never does)."""
    source = gguf.GGUFReader(write_gguf(path.with_name("source.gguf"), **SMALL))
    writer = gguf.GGUFWriter(path, "qwen2")
    for key, field in source.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            sub_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type)
    for t in source.tensors:
        data = values if t.name == "output_norm.weight" else np.array(t.data)
        writer.add_tensor(t.name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    _, uploaded = load(tmp_path, progress=lambda done, total: seen.append((done, total)))
    total = sum(info.nbytes for info in uploaded)
    assert [t for _, t in seen] == [total] * (1 + len(uploaded))
    assert seen[0] == (0, total)
    assert seen[-1] == (total, total)
    assert [d for d, _ in seen] == sorted({d for d, _ in seen})


@pytest.mark.parametrize("name", ["attn_q", "attn_k", "attn_v"])
def test_a_missing_bias_is_an_error(tmp_path: Path, name: str) -> None:
    match = rf"tensor blk\.1\.{name}\.bias is missing: Qwen2 needs the biases"
    with pytest.raises(ModelFileError, match=match):
        load(tmp_path, drop=[f"blk.1.{name}.bias"])


@pytest.mark.parametrize("name", ["token_embd.weight", "output_norm.weight", "blk.0.ffn_up.weight"])
def test_a_missing_weight_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelFileError, match=f"tensor {name} is missing$"):
        load(tmp_path, drop=[name])


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("blk.0.attn_q.weight", (128, 256)),
        ("blk.1.ffn_down.weight", (256, 512)),
        ("blk.0.attn_norm.weight", (128,)),
        ("token_embd.weight", (100, 256)),
        ("output.bias", (7,)),
    ],
)
def test_a_wrong_shape_is_refused_with_both(
    tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    with pytest.raises(ModelFileError, match=rf"{name} has shape \({shape[0]},.*metadata says \("):
        load(tmp_path, tensors={name: np.ones(shape, np.float32)})


def test_nothing_is_uploaded_before_all_is_checked(tmp_path: Path) -> None:
    uploaded: list[str] = []
    with GGUFFile.open(write_gguf(tmp_path / "x.gguf", drop=["blk.1.ffn_down.weight"])) as file:
        with pytest.raises(ModelFileError, match="missing"):
            load_weights(file, Qwen2Config.from_gguf(file), lambda i, d: uploaded.append(i.name))
    assert uploaded == []


def test_a_type_without_kernels_is_refused_for_cuda_and_runs_on_the_cpu(tmp_path: Path) -> None:
    weights, _ = load(tmp_path, types={"ffn_up": "TQ2_0"})
    assert np.isfinite(weights.layers[0].up).all()
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.ffn_up\.weight has type TQ2_0.*cpu"):
        load(tmp_path, types={"ffn_up": "TQ2_0"}, cuda=True)


def test_a_type_that_is_no_weight_is_refused_everywhere(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", **SMALL)
    raw = path.read_bytes()
    before = text("blk.0.ffn_up.weight") + (2).to_bytes(4, "little")
    at = raw.index(before) + len(before) + 16
    assert raw[at : at + 4] == bytes(4)  # F32
    path.write_bytes(raw[:at] + (26).to_bytes(4, "little") + raw[at + 4 :])
    with GGUFFile.open(path) as file:
        with pytest.raises(UnsupportedModelError, match=r"blk\.0\.ffn_up\.weight has type I32"):
            load_weights(file, Qwen2Config.from_gguf(file), lambda info, data: info)


@pytest.mark.parametrize("name", ["blk.0.attn_output.bias", "blk.1.attn_q.scale", "output.scale"])
def test_a_tensor_that_would_change_the_result_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"tensor {name} is not part of Qwen2"):
        load(tmp_path, tensors={name: np.ones(256, np.float32)})


def test_other_unused_tensors_are_named(tmp_path: Path) -> None:
    notices: list[str] = []
    extra = {
        "rope_freqs.weight": np.ones(32, np.float32),
        "blk.0.attn_rot_embd.weight": np.ones(32, np.float32),
        "blk.2.ffn_up.weight": np.ones((256, 256), np.float32),
        "v.patch_embd.weight": np.ones(4, np.float32),
    }
    _, uploaded = load(tmp_path, tensors=extra, notice=notices.append)
    assert sorted(n.split()[1] for n in notices) == sorted(extra)
    assert not {info.name for info in uploaded} & set(extra)


def test_rope_factors_other_than_one_are_refused(tmp_path: Path) -> None:
    factors = np.ones(32, np.float32)
    factors[5] = 8
    with pytest.raises(UnsupportedModelError, match="rope_freqs.weight has factors other than 1"):
        load(tmp_path, tensors={"rope_freqs.weight": factors})


def test_an_empty_file_has_no_model(tmp_path: Path) -> None:
    with GGUFFile.open(RawGGUF().write(tmp_path / "x.gguf")) as file:
        with pytest.raises(UnsupportedModelError, match="architecture None"):
            Qwen2Config.from_gguf(file)


@pytest.mark.model
def test_the_real_05b_is_what_its_family_table_says(model_05b: Path) -> None:
    with GGUFFile.open(model_05b) as file:
        config = Qwen2Config.from_gguf(file)
        infos: dict[str, TensorInfo] = {}
        load_weights(file, config, lambda info, data: infos.setdefault(info.name, info), cuda=True)
        bias = file.data("blk.0.attn_k.bias").view("<f4")
    sizes = (config.n_layers, config.d_model, config.d_ffn, config.n_heads, config.n_kv_heads)
    assert sizes == (24, 896, 4864, 14, 2)
    assert (config.head_dim, config.n_vocab, config.rope_base) == (64, 151936, 1e6)
    assert config.notices == ()
    kinds = Counter(info.type_name for info in infos.values())
    assert kinds == {"Q5_0": 133, "F32": 121, "Q8_0": 13, "Q6_K": 12, "Q4_K": 12}
    assert np.abs(bias).max() > 50  # products of these overflow half-precision scores
