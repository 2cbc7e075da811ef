from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from minfer_cuda.errors import TokenizerError
from minfer_cuda.tokenizer import QWEN2_SPLIT, Tokenizer, byte_characters, well_formed

KEY = "tokenizer.ggml."


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer):
    return tiny_tokenizer


def pieces(text):
    split = pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated")
    return [piece for piece, _ in split.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    "expected",
    [
        ["ह", "िन", "्द", "ी"],
        ["e", "\u0301"],
        ["I", "'M", " THEY", "'RE"],
        ["x", "'ſ"],
        ["  \n\n", " ", " x"],
        ["a", "\r\n\r\n", " ", " b"],
        ["foo", "_bar", "  \n"],
        ["\t", "\tif"],
        ["1", "2", "3"],
        ["(x", "):\n"],
        ["a", " ", " b", "  ", " c"],
        ["end", " "],
    ],
)
def test_text_is_split_as_qwen2_splits_it(expected):
    assert pieces("".join(expected)) == expected


@given(st.text())
@example("\ufeff\u00a0\u3000 \x00\x7f")
@example("<|im_start|>[PAD0]<think>")
def test_ordinary_text_survives_the_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == text


@given(st.lists(st.sampled_from(["<|im_end|>", "<think>", "<", "think>x", " ", "a"])))
def test_special_spellings_are_one_token_exactly_where_they_are_parsed(tokenizer, parts):
    text = "".join(parts)
    special = set(tokenizer.specials.values())
    assert special.isdisjoint(tokenizer.encode(text, parse_special=False))
    ids = tokenizer.encode(text, parse_special=True)
    assert "".join(map(tokenizer.token_text, ids)) == text
    assert sum(i in special for i in ids) == sum(
        text.count(spelling) for spelling in ("<|im_end|>", "<think>")
    )


def test_the_longest_special_spelling_wins(tokenizer):
    ids = tokenizer.encode("<think>x<think>y", parse_special=True)
    assert [tokenizer.token_text(i) for i in ids] == ["<think>x", "<think>", "y"]


def test_no_bos_is_added_whatever_the_file_says(tiny_metadata, tokenizer):
    tiny_metadata[KEY + "add_bos_token"] = True
    assert Tokenizer(tiny_metadata).encode("hello", True) == tokenizer.encode("hello", True)
    del tiny_metadata[KEY + "bos_token_id"]
    without = Tokenizer(tiny_metadata)
    assert without.encode("hello", True) == tokenizer.encode("hello", True)
    assert (tokenizer.bos_text, without.bos_text) == ("<|endoftext|>", None)


def test_lone_surrogates_become_replacement_characters_and_pairs_are_joined(tokenizer):
    assert well_formed("a\udce6\ud83d\ude00") == "a\ufffd😀"
    assert tokenizer.decode(tokenizer.encode("a\ud83d", parse_special=True)) == "a\ufffd"


@pytest.mark.parametrize("text", ["a" * 100_000, "-" * 32_000, "的" * 20_000, " \n" * 30_000])
def test_long_runs_are_encoded(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, parse_special=True)) == text


def test_only_text_is_printed(tokenizer):
    shown = {"<think>": b"<think>", "<|im_end|>": b"", "[PAD0]": b"", "Ġthe": b" the"}
    for text, data in shown.items():
        assert tokenizer.token_bytes(tokenizer.id_of(text)) == data
    assert tokenizer.token_bytes(tokenizer.n_vocab) == tokenizer.token_bytes(-1) == b""
    assert [tokenizer.token_bytes(tokenizer.id_of(c))[0] for c in byte_characters()] == [
        *range(256)
    ]
    assert tokenizer.token_text(tokenizer.id_of("<|im_end|>")) == "<|im_end|>"


def test_a_plain_token_outside_the_byte_alphabet_shows_its_spelling(tiny_metadata):
    tiny_metadata[KEY + "tokens"].append("a b")
    tiny_metadata[KEY + "token_type"].append(1)
    tokenizer = Tokenizer(tiny_metadata)
    assert tokenizer.token_bytes(tokenizer.n_vocab - 1) == b"a b"


@pytest.mark.parametrize("eos", ["<|im_end|>", "<|endoftext|>", "<|fim_middle|>", None])
def test_end_tokens_are_eos_eot_and_the_two_known_spellings(tiny_metadata, eos):
    tokens = tiny_metadata[KEY + "tokens"]
    del tiny_metadata[KEY + "eos_token_id"]
    if eos is not None:
        tiny_metadata[KEY + "eos_token_id"] = tokens.index(eos)
    tiny_metadata[KEY + "eot_token_id"] = tokens.index("<|fim_suffix|>")
    tokenizer = Tokenizer(tiny_metadata)
    ends = {eos or "<|im_end|>", "<|im_end|>", "<|endoftext|>", "<|fim_suffix|>"}
    assert {tokens[i] for i in tokenizer.end_ids} == ends
    assert tokenizer.eos_text == eos


def test_fill_in_the_middle_tokens_come_from_the_keys_then_by_spelling(tiny_metadata):
    tokens = tiny_metadata[KEY + "tokens"]
    tokenizer = Tokenizer(tiny_metadata)
    assert tokens[tokenizer.fim_prefix] == "<|fim_prefix|>"
    assert tokens[tokenizer.fim_suffix] == "<|fim_suffix|>"
    assert tokens[tokenizer.fim_middle] == "<|fim_middle|>"
    tiny_metadata[KEY + "fim_pre_token_id"] = 7
    tokens[tokens.index("<|fim_suffix|>")] = "<|other|>"
    changed = Tokenizer(tiny_metadata)
    assert (changed.fim_prefix, changed.fim_suffix) == (7, None)


def test_defaults_are_said_aloud(tiny_metadata):
    assert Tokenizer(tiny_metadata).notices == ()
    del tiny_metadata[KEY + "pre"], tiny_metadata[KEY + "token_type"]
    tiny_metadata[KEY + "eos_token_id"] = 2**32 - 1
    notices = "\n".join(Tokenizer(tiny_metadata).notices)
    assert "pre is missing: taken as qwen2" in notices
    assert "token_type is missing" in notices
    assert "eos_token_id is 4294967295" in notices


def test_r1_distills_take_the_same_split(tiny_metadata, tokenizer):
    tiny_metadata[KEY + "pre"] = "deepseek-r1-qwen"
    assert Tokenizer(tiny_metadata).encode("a  12\n", False) == tokenizer.encode("a  12\n", False)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model", "llama", "model is 'llama'"),
        ("model", None, "model is None"),
        ("pre", "llama-bpe", "pre is 'llama-bpe'"),
        ("merges", [], "merges is missing or empty"),
        ("merges", None, "merges is missing or empty"),
        ("merges", ["ab"], "merges do not fit"),
        ("merges", ["h q"], "merges do not fit"),
        ("tokens", None, "tokens is missing or empty"),
        ("token_type", [1, 2], "token_type has 2 entries"),
        ("token_type", 7, "token_type has 7 entries"),
    ],
)
def test_an_unusable_vocabulary_is_refused_by_name(tiny_metadata, key, value, message):
    tiny_metadata[KEY + key] = value
    with pytest.raises(TokenizerError, match=message):
        Tokenizer(tiny_metadata)


def test_a_missing_byte_token_is_refused(tiny_metadata):
    tiny_metadata[KEY + "tokens"][byte_characters().index("ĉ")] = "replaced"
    with pytest.raises(TokenizerError, match="byte 0x09"):
        Tokenizer(tiny_metadata)
