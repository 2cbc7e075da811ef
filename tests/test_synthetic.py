"""Models of random weights have the shapes and types of the published ones."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from benchmarks import synthetic
from benchmarks.family import FTYPES, SIZES, Size, matrix_shapes, matrix_types, vector_shapes
from benchmarks.synthetic import Pools, write_synthetic
from minfer_cuda.gguf import GGUFFile
from minfer_cuda.llm import LLM
from minfer_cuda.quants import QUANT_TYPES, by_name
from minfer_cuda.weights import model_tensors

TINY = Size(layers=2, d=256, ffn=512, heads=4, kv_heads=2, vocab=600)
# Tensor types of the published Qwen2.5-Coder-Instruct q4_k_m files; "better" holds the layers whose
# attn_v and ffn_down have the second type.
PUBLISHED = {
    "0.5b": {
        "output": "Q8_0", "token_embd": "Q5_0", "attn_q": "Q5_0", "attn_k": "Q5_0",
        "attn_output": "Q5_0", "ffn_gate": "Q5_0", "ffn_up": "Q5_0",
        "attn_v": ("Q5_0", "Q8_0"), "ffn_down": ("Q4_K", "Q6_K"),
        "better": {0, 1, 3, 6, 7, 8, 9, 10, 13, 16, 19, 21},
    },
    "1.5b": {
        "output": "Q6_K", "token_embd": "Q4_K", "attn_q": "Q4_K", "attn_k": "Q4_K",
        "attn_output": "Q4_K", "ffn_gate": "Q4_K", "ffn_up": "Q4_K",
        "attn_v": ("Q4_K", "Q6_K"), "ffn_down": ("Q4_K", "Q6_K"),
        "better": {0, 1, 5, 6, 7, 8, 9, 10, 13, 16, 19, 21, 24, 27},
    },
}  # fmt: skip


def write_tiny(path, size, ftype):
    write_synthetic(path, size, ftype, pools=Pools(0, blocks=1009))


@pytest.mark.parametrize("size", PUBLISHED)
def test_the_mix_is_that_of_the_published_files(size):
    table = PUBLISHED[size]
    for name, found in matrix_types(SIZES[size], "q4_k_m").items():
        *layer, role, _ = name.split(".")
        wanted = table[role]
        if isinstance(wanted, tuple):
            wanted = wanted[int(layer[1]) in table["better"]]
        assert found == wanted, name


@pytest.mark.model
@pytest.mark.parametrize("size, fixture", [("0.5b", "model_05b"), ("1.5b", "model_15b")])
def test_names_shapes_and_types_are_those_of_the_real_file(size, fixture, request):
    with GGUFFile.open(request.getfixturevalue(fixture)) as file:
        real = {name: (t.type_name, t.shape) for name, t in file.tensors.items()}
    types = matrix_types(SIZES[size], "q4_k_m")
    ours = {name: (types[name], s) for name, s in matrix_shapes(SIZES[size]).items()}
    ours |= {name: ("F32", (n,)) for name, n in vector_shapes(SIZES[size]).items()}
    assert ours == real


def test_rows_that_are_no_whole_256_blocks_fall_back():
    assert set(matrix_types(SIZES["0.5b"], "q6_k").values()) == {"Q8_0", "Q6_K"}
    assert matrix_types(SIZES["0.5b"], "q5_k_m")["blk.0.attn_q.weight"] == "Q5_1"
    down = {n: t for n, t in matrix_types(SIZES["72b"], "q4_k_m").items() if "ffn_down" in n}
    assert Counter(down.values()) == {"Q5_0": 40, "Q8_0": 40}  # 29568 is 115.5 x 256


def test_the_72b_has_more_bits_in_every_attn_v():
    types = matrix_types(SIZES["72b"], "q4_k_m")
    assert Counter(t for n, t in types.items() if "attn_v" in n) == {"Q5_K": 40, "Q6_K": 40}


@pytest.mark.parametrize("ftype, output", [("f16", "F16"), ("q8_0", "Q8_0"), ("q4_0", "Q6_K")])
def test_plain_types_keep_one_type_but_for_the_head(ftype, output):
    types = matrix_types(SIZES["7b"], ftype)
    assert types.pop("output.weight") == output
    assert set(types.values()) == {FTYPES[ftype][0]}


@pytest.mark.parametrize("size", SIZES)
def test_the_blocks_of_the_pool_never_repeat_a_row_of_a_matrix(size):
    for ftype in FTYPES:
        types = matrix_types(SIZES[size], ftype)
        for name, (n, k) in matrix_shapes(SIZES[size]).items():
            block = by_name(types[name]).block_size
            pool = synthetic.POOL_VALUES if block == 1 else synthetic.POOL_BLOCKS
            assert n < pool and (k // block) % pool, (ftype, name)


@pytest.mark.parametrize("name", [q.name for q in QUANT_TYPES.values()])
def test_pools_have_the_deviation_asked_for_and_no_offset(name):
    quant = by_name(name)
    values = quant.dequantize(Pools(1, blocks=2003, values=50021).pool(name, 0.02))
    assert values.std() == pytest.approx(0.02, rel=0.15)
    # of 2003 blocks with a random offset each, or 50021 values: five standard errors
    assert abs(values.mean()) < 5 * 0.02 / 2003**0.5


@pytest.mark.parametrize("ftype", FTYPES)
def test_a_synthetic_model_loads_and_its_logits_are_near_two(tmp_path, ftype):
    path = tmp_path / "tiny.gguf"
    write_synthetic(path, TINY, ftype, pools=Pools(0, blocks=2003, values=50021))
    with LLM(path, n_ctx=32, device="cpu") as llm:
        assert llm.notices == []
        assert set(llm.file.tensors) == set(model_tensors(llm.config, llm.file))
        logits = llm.engine.logits(llm.encode("aab"))
        assert 1 < logits.std() < 4
        assert "".join(llm.generate("aab", max_tokens=4, temperature=0.0))


def test_a_seed_gives_the_same_file(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        pools = Pools(seed, blocks=2003, values=50021)
        write_synthetic(tmp_path / name, TINY, "q4_0", pools=pools)
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b != c


def test_a_file_that_does_not_fit_is_refused_before_it_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(OSError, match="bytes needed, 1,000 free"):
        write_tiny(tmp_path / "x.gguf", TINY, "q4_0")


def test_f16_above_7b_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not for 14b"):
        write_synthetic(tmp_path / "x.gguf", "14b", "f16")


@pytest.mark.parametrize("size", [151936, 152064])
def test_the_vocabulary_has_special_tokens_at_their_ids(size):
    tokens, types, merges = synthetic.vocabulary(size)
    assert len(tokens) == len(types) == len(set(tokens)) == size
    assert tokens[151643:151646] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert len(merges) == 151387
    known = set(tokens)
    for merge in merges[:: len(merges) // 100]:
        left, right = merge.split(" ")
        assert {left, right, left + right} <= known
