"""Hyper-parameters: read at any width, defaulted aloud, and refused where they cannot be right."""

from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFValueType as V
from ggufs import vocabulary, write_gguf

from minfer_cuda.config import Qwen2Config, RopeScaling
from minfer_cuda.errors import ModelFileError, UnsupportedModelError, UsageError
from minfer_cuda.gguf import GGUFFile


def config(path: Path, *, rope_base: float | None = None, **options: Any) -> Qwen2Config:
    """Of a one-layer file written with these options."""
    options = {"layers": 1, "d": 128, "heads": 2, "kv_heads": 1, "ffn": 64} | options
    with GGUFFile.open(write_gguf(path / "x.gguf", **options)) as file:
        return Qwen2Config.from_gguf(file, rope_base=rope_base)


def refused(path: Path, key: str, value: Any, match: str) -> None:
    with pytest.raises(ModelFileError, match=match):
        config(path, metadata={f"qwen2.{key}": value})


def test_every_value_is_read(tmp_path: Path) -> None:
    got = config(tmp_path, layers=2, d=256, heads=4, kv_heads=2, ffn=96, vocab=300)
    assert got == Qwen2Config(
        name="tiny",
        n_layers=2,
        d_model=256,
        d_ffn=96,
        n_heads=4,
        n_kv_heads=2,
        head_dim=64,
        n_vocab=300,
        n_ctx_train=512,
        rms_eps=pytest.approx(1e-6),
        rope_base=1e6,
    )
    assert (got.q_width, got.kv_width) == (256, 128)
    assert got.kv_bytes_per_position(2) == 2 * 2 * 128 * 2


@pytest.mark.parametrize(
    "kind", [V.UINT8, V.INT8, V.UINT16, V.INT16, V.UINT32, V.INT32, V.UINT64, V.INT64]
)
def test_counts_of_any_integer_width_are_read(tmp_path: Path, kind: V) -> None:
    assert config(tmp_path, metadata={"qwen2.context_length": (kind, 99)}).n_ctx_train == 99


@pytest.mark.parametrize("kind", [V.FLOAT32, V.FLOAT64, V.UINT16, V.INT64])
def test_numbers_of_any_width_are_read(tmp_path: Path, kind: V) -> None:
    value = 20000 if kind in (V.UINT16, V.INT64) else 20000.0
    assert config(tmp_path, metadata={"qwen2.rope.freq_base": (kind, value)}).rope_base == 20000


def test_llama_keys_are_read_where_qwen2_has_none(tmp_path: Path) -> None:
    keys = ["block_count", "embedding_length", "attention.head_count_kv", "rope.freq_base"]
    values = {"block_count": 1, "embedding_length": 128, "attention.head_count_kv": 1}
    got = config(
        tmp_path,
        drop=[f"qwen2.{key}" for key in keys],
        metadata={f"llama.{key}": value for key, value in values.items()}
        | {"llama.rope.freq_base": 5e5, "llama.context_length": 7},
    )
    assert (got.n_layers, got.d_model, got.n_kv_heads, got.rope_base) == (1, 128, 1, 5e5)
    assert got.n_ctx_train == 512  # the file's qwen2 key goes first
    assert got.notices == ()


@pytest.mark.parametrize(
    ("key", "field", "default"),
    [
        ("context_length", "n_ctx_train", 32768),
        ("attention.head_count_kv", "n_kv_heads", 2),
        ("attention.layer_norm_rms_epsilon", "rms_eps", 1e-6),
    ],
)
def test_an_absent_value_is_defaulted_aloud(
    tmp_path: Path, key: str, field: str, default: float
) -> None:
    got = config(tmp_path, kv_heads=2, drop=[f"qwen2.{key}"])
    assert getattr(got, field) == default
    assert [f"qwen2.{key}" in notice and str(default) in notice for notice in got.notices] == [True]


def test_an_absent_rope_base_names_the_option_that_sets_it(tmp_path: Path) -> None:
    got = config(tmp_path, drop=["qwen2.rope.freq_base"])
    assert got.rope_base == 10000.0
    (notice,) = got.notices
    assert "10000" in notice and "--rope-freq-base" in notice
    got = config(tmp_path, drop=["qwen2.rope.freq_base"], rope_base=1e6)
    assert (got.rope_base, got.notices) == (1e6, ())


def test_the_rope_base_option_overrides_the_file(tmp_path: Path) -> None:
    assert config(tmp_path, rope_base=5e6).rope_base == 5e6
    for value in (0.0, 1.0, -5.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="--rope-freq-base"):
            config(tmp_path, rope_base=value)


@pytest.mark.parametrize("arch", ["llama", "qwen2moe", "qwen3", "Qwen2"])
def test_other_architectures_are_refused_by_name(tmp_path: Path, arch: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"'{arch}' is not supported.*qwen2\)"):
        config(tmp_path, arch=arch)


def test_an_architecture_cannot_drive_the_terminal(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        config(tmp_path, metadata={"general.architecture": "\x1b[31mqwen2"})
    assert "\x1b" not in str(error.value)


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "feed_forward_length"])
def test_a_missing_size_is_named(tmp_path: Path, key: str) -> None:
    with pytest.raises(ModelFileError, match=f"qwen2.{key} is missing"):
        config(tmp_path, drop=[f"qwen2.{key}"])


@pytest.mark.parametrize(
    "value",
    [0, (V.INT32, -1), (V.UINT32, 1 << 31), (V.UINT64, 1 << 63), 1.0, True, "1"],
    ids=str,
)
def test_sizes_that_cannot_be_are_refused(tmp_path: Path, value: Any) -> None:
    for key in ("block_count", "embedding_length", "context_length", "attention.head_count"):
        refused(tmp_path, key, value, f"qwen2.{key} is .*, expected 1 to 2147483647")


def test_sizes_per_layer_are_refused(tmp_path: Path) -> None:
    refused(tmp_path, "attention.head_count", [2, 2], r"head_count is \[2, 2\]")


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), "x", False])
def test_an_epsilon_or_base_that_cannot_be_is_refused(tmp_path: Path, value: Any) -> None:
    refused(tmp_path, "attention.layer_norm_rms_epsilon", value, "epsilon is .*, expected a number")
    refused(tmp_path, "rope.freq_base", value, "freq_base is .*, expected a number")


def test_more_layers_than_tensors_are_refused(tmp_path: Path) -> None:
    refused(tmp_path, "block_count", 1_000_000, "block_count is 1000000, the file has only 15")


def test_heads_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    refused(tmp_path, "attention.head_count_kv", 3, "2 heads are not a multiple of 3 kv heads")
    refused(tmp_path, "attention.head_count", 3, "3 heads are not a multiple|128 is not a multiple")
    refused(tmp_path, "embedding_length", 129, "129 is not a multiple of 2 heads")


def test_kv_rows_that_are_not_kv_heads_are_refused(tmp_path: Path) -> None:
    refused(
        tmp_path,
        "attention.head_count_kv",
        2,
        "attn_k.weight has 64 rows, 2 kv heads of 64 need 128",
    )


def test_a_head_size_of_its_own_is_read(tmp_path: Path) -> None:
    got = config(tmp_path, heads=2, head_dim=128, kv_heads=1)
    assert (got.head_dim, got.q_width, got.kv_width) == (128, 256, 128)


def test_head_sizes_without_kernels_are_refused_with_the_value(tmp_path: Path) -> None:
    for head_dim in (32, 80, 96, 256):
        with pytest.raises(UnsupportedModelError, match=f"head size {head_dim} is not supported"):
            config(tmp_path, metadata={"qwen2.attention.key_length": head_dim})
    refused(tmp_path, "attention.key_length", 63, "head size 63 is odd")


@pytest.mark.parametrize("key", ["attention.value_length", "rope.dimension_count"])
def test_other_value_or_rotary_sizes_are_refused(tmp_path: Path, key: str) -> None:
    assert config(tmp_path, metadata={f"qwen2.{key}": 64}).head_dim == 64
    with pytest.raises(UnsupportedModelError, match=f"qwen2.{key} is 32, the head size is 64"):
        config(tmp_path, metadata={f"qwen2.{key}": 32})


def test_yarn_is_read(tmp_path: Path) -> None:
    keys = {
        "type": "yarn", "factor": 4.0, "original_context_length": 128, "attn_factor": 0.5,
        "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0, "finetuned": True,
    }  # fmt: skip
    metadata = {f"qwen2.rope.scaling.{k}": v for k, v in keys.items()}
    got = config(tmp_path, metadata=metadata).rope_scaling
    assert got == RopeScaling(4.0, 128, 0.5, 16.0, 2.0)


def test_yarn_defaults_are_those_of_the_paper(tmp_path: Path) -> None:
    metadata = {"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0}
    got = config(tmp_path, metadata=metadata)
    assert got.rope_scaling == RopeScaling(4.0, 512, None, 32.0, 1.0)
    assert ["original_context_length" in notice for notice in got.notices] == [True]


def test_no_scaling_is_no_scaling(tmp_path: Path) -> None:
    metadata = {"qwen2.rope.scaling.type": "none", "qwen2.rope.scaling.factor": 4.0}
    assert config(tmp_path, metadata=metadata).rope_scaling is None
    assert config(tmp_path, metadata={"qwen2.rope.scale_linear": 1.0}).rope_scaling is None


@pytest.mark.parametrize(
    ("metadata", "match"),
    [
        ({"qwen2.rope.scaling.type": "linear"}, "'linear' is not supported"),
        ({"qwen2.rope.scaling.type": "longrope"}, "'longrope' is not supported"),
        ({"qwen2.rope.scaling.type": 3}, "scaling 3 is not supported"),
        ({"qwen2.rope.scale_linear": 2.0}, "'linear' is not supported"),
        (
            {
                "qwen2.rope.scaling.type": "yarn",
                "qwen2.rope.scaling.factor": 4.0,
                "qwen2.rope.scaling.yarn_log_multiplier": 0.1,
            },
            "yarn_log_multiplier is not supported",
        ),
    ],
)
def test_other_scalings_are_refused_by_name(
    tmp_path: Path, metadata: dict[str, Any], match: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=match):
        config(tmp_path, metadata=metadata)


def test_yarn_without_a_factor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="rope.scaling.factor is missing"):
        config(tmp_path, metadata={"qwen2.rope.scaling.type": "yarn"})


def test_the_head_is_tied_where_there_is_no_output_tensor(tmp_path: Path) -> None:
    assert config(tmp_path, tied=True).tied_embeddings
    assert not config(tmp_path).tied_embeddings


def test_the_vocabulary_is_the_token_list(tmp_path: Path) -> None:
    assert config(tmp_path).n_vocab == len(vocabulary()[0])
    with pytest.raises(ModelFileError, match="no vocabulary"):
        config(tmp_path, drop=["tokenizer.ggml.tokens"])


def test_a_file_without_a_name_is_called_by_its_own(tmp_path: Path) -> None:
    assert config(tmp_path, drop=["general.name"]).name == "x"
