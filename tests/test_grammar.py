"""Answers that follow a schema, a grammar or a regular expression."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from ggufs import ONE_LAYER, write_gguf
from hypothesis import given
from hypothesis import strategies as st

from minfer_cuda import LLM, Grammar
from minfer_cuda import grammar as grammar_module
from minfer_cuda.errors import GrammarError, UsageError
from minfer_cuda.gguf import GGUFFile
from minfer_cuda.grammar import GrammarVocabulary
from minfer_cuda.sampling import SamplingParams, allowed, mask_words, sample
from minfer_cuda.tokenizer import Tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mood": {"enum": ["süß", "你好", 'a "b"\n']},
        "marks": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        "home": {"type": ["string", "null"], "pattern": "^[A-Z]{2}[0-9]{3}$"},
    },
    "required": ["name", "age", "mood", "marks"],
    "additionalProperties": False,
}
HOT = SamplingParams(temperature=3.0, top_k=0, top_p=1.0, min_p=0.0, seed=5)  # anything comes


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = tmp_path_factory.mktemp("grammar") / "tiny.gguf"
    write_gguf(path, **ONE_LAYER, vocab=301)
    with LLM(path, n_ctx=512, device="cpu") as llm:
        yield llm


def ends(llm):
    return sorted(llm.tokenizer.end_ids)


def answer(llm, grammar, **options):
    completion = llm.generate("hello", grammar=grammar, **options)
    pieces = list(completion)
    assert "".join(pieces) == completion.text
    return completion


def fits_person(value) -> bool:
    home = value.get("home", "AA000")
    return (
        set(PERSON["required"]) <= set(value) <= set(PERSON["properties"])
        and isinstance(value["name"], str)
        and len(value["name"]) <= 12
        and type(value["age"]) is int
        and 0 <= value["age"] <= 150
        and value["mood"] in PERSON["properties"]["mood"]["enum"]
        and len(value["marks"]) <= 3
        and all(type(mark) is bool for mark in value["marks"])
        and (home is None or (len(home) == 5 and home[:2].isupper() and home[2:].isdigit()))
    )


# ---- answers


@pytest.mark.parametrize("seed", range(6))
def test_even_random_weights_answer_in_json_that_the_schema_allows(llm, seed):
    params = replace(HOT, seed=seed)
    completion = answer(llm, Grammar.json_schema(PERSON), params=params)
    assert completion.finish_reason == "grammar"
    assert fits_person(json.loads(completion.text)), completion.text
    assert not set(completion.ids) & llm.tokenizer.end_ids


def test_an_answer_that_the_limit_cuts_says_so_and_is_a_beginning(llm):
    grammar = Grammar.json_schema(PERSON)
    whole = answer(llm, grammar, temperature=0)
    cut = answer(llm, grammar, temperature=0, max_tokens=len(whole.ids) - 1)
    assert (cut.finish_reason, len(cut.ids)) == ("length", len(whole.ids) - 1)
    assert whole.text.startswith(cut.text)
    last = answer(llm, grammar, temperature=0, max_tokens=len(whole.ids))
    assert (last.finish_reason, last.text) == ("grammar", whole.text)


def test_characters_of_many_tokens_come_out_whole(llm):
    completion = answer(llm, Grammar.regex("[é你好😀]{12}"), params=HOT)
    assert len(completion.text) == 12
    assert set(completion.text) <= set("é你好😀")
    assert len(completion.ids) > 12


def test_end_tokens_come_only_where_the_grammar_may_end(llm):
    """They are the likeliest at every step, and are drawn as soon as they may be."""
    wanted = dict.fromkeys(ends(llm), 1e6)
    early = answer(llm, Grammar.regex("a{3}b*"), temperature=0, logit_bias=wanted)
    assert (early.text, early.finish_reason) == ("aaa", "stop")
    assert early.ids[-1] in llm.tokenizer.end_ids
    never = dict.fromkeys(ends(llm), -math.inf)
    late = answer(llm, Grammar.regex("a{3}b{0,4}"), temperature=0, logit_bias=never)
    assert (late.text, late.finish_reason) == ("aaabbbb", "grammar")


def test_a_stop_string_cuts_a_grammars_answer_too(llm):
    completion = answer(llm, Grammar.regex("one two three"), stop=" tw", temperature=0)
    assert (completion.text, completion.finish_reason) == ("one", "stop string")


def test_grammars_of_lark_and_of_gbnf_are_read(llm):
    for text in (
        'start: item{2}\nitem: "- " /[a-z]{3}/ "\\n"',
        'root ::= item item\nitem ::= "- " [a-z] [a-z] [a-z] "\\n"',
    ):
        lines = answer(llm, Grammar.lark(text), params=HOT).text.splitlines()
        assert len(lines) == 2
        assert all(len(x) == 5 and x.startswith("- ") and x[2:].islower() for x in lines)


def test_each_answer_begins_its_grammar_anew_and_keeps_the_cache(llm):
    grammar = Grammar.regex("(ab){2}")
    first = answer(llm, grammar, temperature=0)
    again = answer(llm, grammar, temperature=0)
    assert first.text == again.text == "abab"
    assert again.stats.reused_tokens == again.stats.prompt_tokens - 1
    ids = [*llm.encode("hello"), *again.ids]
    assert llm.engine.tokens == ids[:-1]
    assert answer(llm, None, temperature=0, max_tokens=3).finish_reason == "length"


def test_log_probabilities_are_the_models_own(llm):
    (token,) = answer(llm, Grammar.regex("z"), n_logprobs=2, temperature=0).tokens
    assert token.logprobs[0][1] > token.logprob
    assert token.id not in dict(token.logprobs)


# ---- what cannot be done


@pytest.mark.parametrize(
    ("make", "text", "message"),
    [
        (Grammar.json_schema, "{", "EOF"),
        (Grammar.json_schema, "[1]", "object"),
        (Grammar.json_schema, '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        (Grammar.json_schema, '{"$ref": "http://example.com/x"}', "does not fetch"),
        (Grammar.json_schema, '{"enum": []}', "Unsatisfiable"),
        (Grammar.lark, "start: nothing", "nothing"),
        (Grammar.lark, "root ::= (", "Expected"),
        (Grammar.regex, "(", "unclosed"),
        (Grammar.regex, "(?=a)", "look-ahead"),
    ],
)
def test_what_cannot_be_read_or_kept_is_refused_in_one_line(make, text, message):
    with pytest.raises(UsageError, match=message) as caught:
        make(text)
    assert "\n" not in str(caught.value)
    assert "1 |" not in str(caught.value)


def test_a_schema_that_json_cannot_hold_is_refused():
    ring: dict = {}
    ring["not"] = ring
    for schema in ({"const": {1}}, ring, b"{}"):
        with pytest.raises(UsageError, match="cannot be read"):
            Grammar.json_schema(schema)


def test_a_schema_in_place_of_a_grammar_is_refused_with_what_makes_one(llm):
    for schema in ('{"type": "object"}', {"type": "object"}):
        with pytest.raises(UsageError, match=r"Grammar\.json_schema"):
            llm.generate("a", grammar=schema)


def test_bytes_that_are_no_utf8_are_taken_as_everywhere(llm):
    """An argument's bytes come as lone surrogates; they stand for U+FFFD."""
    assert answer(llm, Grammar.regex("a\udc80"), temperature=0).text == "a\ufffd"


def test_a_token_that_the_model_lacks_is_refused_by_name(llm):
    with pytest.raises(UsageError, match="<nothere>"):
        llm.generate("a", grammar=Grammar.lark("start: <nothere>"))


def test_a_vocabulary_without_an_end_token_is_refused(tiny_metadata):
    tokens = [t.replace("<|im_end|>", "x1").replace("<|endoftext|>", "x2")
              for t in tiny_metadata["tokenizer.ggml.tokens"]]  # fmt: skip
    tiny_metadata |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": None}
    with pytest.raises(GrammarError, match="no end token"):
        GrammarVocabulary(Tokenizer(tiny_metadata), len(tokens))


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (Grammar.lark('start: start "a"'), "no token of the vocabulary fits"),
        (Grammar.regex("(a{1000}){1000}{1000}"), "too many expressions constructed$"),
    ],
    ids=["nothing", "complex"],
)
def test_a_grammar_that_cannot_go_on_says_why_and_leaves_no_cache(llm, grammar, why):
    answer(llm, None, max_tokens=1)
    with pytest.raises(GrammarError, match=f"cannot go on: .*{why}"):
        answer(llm, grammar, temperature=0)
    assert llm.engine.tokens == []


def test_an_interrupt_while_the_library_asks_for_tokens_is_an_interrupt(llm, monkeypatch):
    """The library would make it a failure of its own, and Ctrl-C an error of the grammar."""

    def interrupted(words, text):
        raise KeyboardInterrupt

    monkeypatch.setattr(grammar_module._Words, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        answer(llm, Grammar.regex("hello world"), temperature=0)
    assert llm.engine.stats.finish_reason == "interrupted"
    monkeypatch.undo()
    assert answer(llm, Grammar.regex("hello"), temperature=0).text == "hello"


# ---- masks


def test_the_mask_holds_exactly_the_tokens_whose_bytes_may_come_next(llm):
    tokenizer, n_vocab = llm.tokenizer, llm.config.n_vocab
    matcher = GrammarVocabulary(tokenizer, n_vocab).matcher(Grammar.regex("h(ello|e)?"))

    def told() -> set[bytes | int]:
        ids = np.flatnonzero(allowed(matcher.mask(), n_vocab)).tolist()
        return {tokenizer.token_bytes(i) or i for i in ids}

    assert matcher.mask().shape == (mask_words(n_vocab),)
    assert told() == {b"h", b"he", b"hell", b"hello"}
    matcher.accept(tokenizer.encode("h", False)[0])
    assert told() == {b"e", *ends(llm)}


@given(st.data())
def test_no_draw_is_of_a_token_that_the_mask_lacks(data):
    n_vocab = data.draw(st.integers(1, 70))
    bits = data.draw(st.lists(st.booleans(), min_size=n_vocab, max_size=n_vocab).filter(any))
    padded = np.zeros(mask_words(n_vocab) * 32, bool)
    padded[:n_vocab] = bits
    mask = np.packbits(padded, bitorder="little").view(np.uint32)
    assert allowed(mask, n_vocab).tolist() == bits
    logits = np.random.default_rng(n_vocab).standard_normal(n_vocab).astype(np.float32) * 20
    params = SamplingParams(
        temperature=data.draw(st.sampled_from([0.0, 0.5, 5.0])),
        top_k=data.draw(st.integers(0, 80)),
        top_p=data.draw(st.sampled_from([0.0, 0.7, 1.0])),
        min_p=data.draw(st.sampled_from([0.0, 0.3])),
        repeat_penalty=data.draw(st.sampled_from([1.0, 4.0])),
    )
    u = data.draw(st.floats(0, 1, exclude_max=True))
    assert bits[sample(logits, params, range(n_vocab), frozenset(), u, mask)]


# ---- the real vocabulary and model


@pytest.fixture(scope="module")
def real_vocabulary(model_05b):
    with GGUFFile.open(model_05b) as file:
        tokenizer = Tokenizer(file.metadata)
        n_vocab = file.tensors["token_embd.weight"].shape[0]
    return tokenizer, n_vocab, GrammarVocabulary(tokenizer, n_vocab)


@pytest.mark.model
@pytest.mark.parametrize(
    "value",
    [{"a": "Grüße, 你好 😀 \"x\"\n\t\\ <|im_end|> <tool_call>", "b": [1, -2.5, 3e10, None, True]},
     {"a": "   ", "b": []}],
)  # fmt: skip
@pytest.mark.parametrize("indent", [None, 2])
def test_json_as_the_real_tokenizer_cuts_it_is_allowed_and_then_complete(
    real_vocabulary, value, indent
):
    tokenizer, n_vocab, vocabulary = real_vocabulary
    types = {"a": {"type": "string"}, "b": {"type": "array"}}
    schema = {"type": "object", "properties": types, "required": ["a", "b"],
              "additionalProperties": False}  # fmt: skip
    matcher = vocabulary.matcher(Grammar.json_schema(schema))
    ids = tokenizer.encode(json.dumps(value, indent=indent, ensure_ascii=False), False)
    for token in ids:
        assert not matcher.complete
        may = allowed(matcher.mask(), n_vocab)
        assert may[token], tokenizer.token_text(token)
        assert not may[sorted(tokenizer.end_ids)].any()
        matcher.accept(token)
    assert matcher.complete


@pytest.mark.model
def test_a_real_model_answers_by_a_schema(model_05b):
    schema = {"type": "object", "properties": {"capital": {"enum": ["Berlin", "Paris", "Rome"]}},
              "required": ["capital"], "additionalProperties": False}  # fmt: skip
    with LLM(model_05b, n_ctx=128, device="cpu") as llm:
        grammar = Grammar.json_schema(schema)
        completion = llm.generate("The capital of France?", grammar=grammar, temperature=0)
        assert json.loads("".join(completion)) == {"capital": "Paris"}
        assert completion.finish_reason == "grammar"
