"""`minfer generate`, `tokenize` and `template`: events, prompts from files, filling in, echo."""

import io
import json
import signal

import ggufs
import numpy as np
import pytest
from command_line import (
    CPU,
    GREEDY,
    minfer,
    one_error_line,
    process,
)

from cli.answer import Printer
from cli.terminal import frames
from cli.thinking import Piece, ThoughtSplitter, begins_in_thought


def events(result):
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_events_name_every_token_and_their_texts_make_the_answer(model):
    plain = minfer("generate", model, "hello", *GREEDY, "--ignore-eos").stdout
    *tokens, end = events(minfer("generate", model, "hello", *GREEDY, "--ignore-eos", "--json"))
    assert [e["event"] for e in tokens if e["event"] != "text"] == ["token"] * 6
    assert "".join(e["text"] for e in tokens) == end["text"] == plain.removesuffix("\n")
    assert (end["event"], end["finish_reason"]) == ("end", "length")
    assert (end["generated_tokens"], end["reused_tokens"]) == (6, 0)
    assert all("logprob" not in e for e in tokens)


def test_a_greedy_token_is_the_most_likely_of_its_logprobs(model):
    found = events(
        minfer("generate", model, "hello", *GREEDY, "--ignore-eos", "--json", "--logprobs", "3")
    )
    tokens = [e for e in found if e["event"] == "token"]
    assert len(tokens) == 6
    for token in tokens:
        assert [t["logprob"] for t in token["top"]] == sorted(
            (t["logprob"] for t in token["top"]), reverse=True
        )
        assert len(token["top"]) == 3
        assert token["top"][0]["logprob"] >= token["logprob"]


def test_text_held_back_for_a_stop_string_comes_at_the_end(model):
    whole = minfer("generate", model, "hello", *GREEDY, "--ignore-eos").stdout.removesuffix("\n")
    never = whole[-1] + "\0"
    found = events(
        minfer("generate", model, "hello", *GREEDY, "--ignore-eos", "--json", "--stop", never)
    )
    assert "".join(e["text"] for e in found[:-1]) == whole


def test_an_interrupted_answer_ends_with_its_end_event(model):
    with process("generate", model, "hello", "--device", "cpu", "-n", "100000", "--n-ctx", "100000",
                 "--ignore-eos", "--json") as running:  # fmt: skip
        running.stdout.readline()
        running.send_signal(signal.SIGINT)
        *_, last = running.communicate()[0].splitlines()
    assert running.returncode == 130
    assert json.loads(last)["finish_reason"] == "interrupted"


def test_the_prompt_comes_from_a_file_as_well(model, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("hello world\n")
    given = minfer("generate", model, "hello world", *GREEDY)
    assert minfer("generate", model, "--prompt-file", file, *GREEDY).stdout == given.stdout
    both = minfer("generate", model, "hi", "--prompt-file", file, *GREEDY)
    assert both.exit_code == 2
    file.write_bytes(b"a\xff")
    assert "byte 1" in one_error_line(minfer("generate", model, "--prompt-file", file, *GREEDY))


def test_echo_prints_the_prompt_before_the_answer(model):
    plain = minfer("generate", model, "hello", *GREEDY).stdout
    assert minfer("generate", model, "hello", *GREEDY, "--echo").stdout == "hello\n" + plain
    raw = minfer("generate", model, "hello", *GREEDY, "--raw").stdout
    assert minfer("generate", model, "hello", *GREEDY, "--raw", "--echo").stdout == "hello" + raw
    first = events(minfer("generate", model, "hello", *GREEDY, "--raw", "--echo", "--json"))[0]
    assert (first["event"], first["text"], len(first["ids"])) == ("prompt", "hello", 1)


def test_filling_in_puts_the_text_between_the_models_own_tokens(tmp_path):
    marks = {"fim_pre": 1, "fim_suf": 2, "fim_mid": 3}
    keys = {f"tokenizer.ggml.{name}_token_id": i for name, i in marks.items()}
    path = ggufs.write_gguf(tmp_path / "fim.gguf", **ggufs.ONE_LAYER, metadata=keys)
    prompt = events(
        minfer("generate", path, "hello", "--suffix", "<|im_end|>", *GREEDY, "--echo", "--json")
    )[0]["ids"]
    assert prompt[0] == 1 and prompt[-1] == 3
    before, after = prompt[1 : prompt.index(2)], prompt[prompt.index(2) + 1 : -1]
    ordinary = json.loads(minfer("tokenize", path, "<|im_end|>", "--no-special", "--ids").stdout)
    assert before == json.loads(minfer("tokenize", path, "hello", "--ids").stdout)
    assert after == ordinary


def test_filling_in_is_refused_by_name_where_the_vocabulary_has_no_tokens_for_it(model):
    result = minfer("generate", model, "a", "--suffix", "b", *CPU)
    assert result.exit_code == 1
    assert "<|fim_prefix|>" in one_error_line(result)


@pytest.mark.parametrize(
    "arguments",
    [("--logprobs", "2"), ("--suffix", "b", "--raw"), ("--suffix", "b", "--system", "c"),
     ("--json", "--logprobs", "0"), ("--prompt-file", "/no/such/prompt")],
    ids=" ".join,
)  # fmt: skip
def test_options_that_do_not_go_together_end_with_2_before_the_model_is_opened(arguments):
    result = minfer("generate", "/no/such/model.gguf", "hi", *arguments)
    assert result.exit_code == 2
    assert "such/model" not in result.stderr


def test_tokenize_shows_each_id_with_its_text(model):
    lines = minfer("tokenize", model, "hello é<|im_end|>\n").stdout.splitlines()
    assert [line.split(maxsplit=1)[1] for line in lines] == [
        '"hello"', '" "', '"é"', "<|im_end|> (control)", '"\\n"',
    ]  # fmt: skip
    ids = json.loads(minfer("tokenize", model, "--ids", stdin="hello é<|im_end|>\n\n").stdout)
    assert ids == [int(line.split()[0]) for line in lines]


def test_tokenize_shows_bytes_of_an_unfinished_character(model):
    lines = minfer("tokenize", model, "😀").stdout.splitlines()
    assert [line.split(maxsplit=1)[1] for line in lines] == [
        f"bytes {byte:02x}" for byte in "😀".encode()
    ]


def test_template_shows_the_prompt_that_generate_uses(model, tmp_path):
    shown = minfer("template", model, "hello", "--system", "the")
    text, tokens = shown.stdout.rstrip("\n").rsplit("\n\n", 1)
    assert text == (
        "<|im_start|>system\nthe<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = json.loads(minfer("template", model, "hello", "--system", "the", "--ids").stdout)
    assert ids == [int(line.split()[0]) for line in tokens.splitlines()]
    used = minfer("generate", model, "hello", "--system", "the", *GREEDY, "--echo", "--json")
    assert events(used)[0]["ids"] == ids
    session = tmp_path / "chat.json"
    session.write_text('[{"role": "user", "content": "hello"}]')
    again = minfer("template", model, "--session", session, "--system", "the", "--ids")
    assert json.loads(again.stdout) == ids
    assert minfer("template", model, "--source").stdout == ggufs.CHATML + "\n"


# thoughts


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("text", "inside", "thought"),
    [
        ("<think>a<b</think>\n\nc", False, "<think>a<b</think>"),
        ("\n<think>a", False, "\n<think>a"),
        ("a</think>b<think>", True, "a</think>"),
        ("use <think>x</think>", False, ""),
        ("<thin", False, ""),
        ("<think>a</thi", False, "<think>a</thi"),
        ("", True, ""),
    ],
)
def test_a_thought_is_told_from_the_answer_however_the_text_is_cut(text, inside, thought, size):
    splitter = ThoughtSplitter(inside)
    pieces = [p for i in range(0, len(text), size) for p in splitter.push(text[i : i + size])]
    pieces += splitter.finish()
    assert "".join(p.text for p in pieces) == text
    assert "".join(p.text for p in pieces if p.thought) == thought
    assert Piece("") not in pieces and Piece("", True) not in pieces


@pytest.mark.parametrize("size", [1, 4, 100])
def test_a_hidden_thought_leaves_the_answer_alone(size):
    text = "<think>why\n</think>\n\nbecause"
    for hide in (True, False):
        printer = Printer(hide_thinking=hide)
        shown = [printer.push(text[i : i + size]) for i in range(0, len(text), size)]
        assert "".join([*shown, printer.finish()]) == ("because\n" if hide else f"{text}\n")


def test_a_thought_is_dimmed_on_a_terminal_that_has_colours(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert Printer().push("<think>a</think>b") == "\x1b[2m<think>a</think>\x1b[0mb"
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        monkeypatch.setenv(name, value)
        assert Printer().push("<think>a</think>b") == "<think>a</think>b"
        monkeypatch.delenv(name)
        monkeypatch.setenv("TERM", "xterm")


def test_an_answer_does_not_drive_the_terminal(monkeypatch):
    evil = "a\x1b]0;title\x07\u009b2J\tb\n"
    assert Printer().push(evil) == evil  # a pipe or a file gets what the model said
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert Printer().push(evil) == "a\u241b]0;title\u2407\ufffd2J\tb\n"


def test_the_spinner_is_of_characters_that_the_terminal_has():
    for encoding in ("ascii", "cp1252", "utf-8"):
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        frames(stream).encode(encoding)


def test_a_prompt_that_opens_a_thought_is_recognised(tiny_tokenizer):
    for text, expected in (("a<think>\n", True), ("a<think>\nb", False), ("", False)):
        assert begins_in_thought(tiny_tokenizer.encode(text, True), tiny_tokenizer) is expected


# ---- answers that follow a grammar

SCHEMA = '{"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": false}'  # noqa: E501


@pytest.mark.parametrize("as_file", [False, True], ids=["text", "file"])
def test_an_answer_in_json_follows_the_schema_of_a_text_or_a_file(model, tmp_path, as_file):
    given = SCHEMA
    if as_file:
        given = tmp_path / "schema.json"
        given.write_text(SCHEMA)
    result = minfer("generate", model, "hello", *CPU, "--json-schema", given)
    assert result.exit_code == 0
    assert type(json.loads(result.stdout)["ok"]) is bool
    assert "stopped: grammar complete" in result.stderr


def test_events_of_a_constrained_answer_say_how_it_ended(model):
    arguments = ("generate", model, "hello", *CPU, "--json", "--regex", "(ab){3}")
    *tokens, end = events(minfer(*arguments, "--logprobs", "1"))
    assert (end["text"], end["finish_reason"]) == ("ababab", "grammar")
    assert "".join(token["text"] for token in tokens) == "ababab"
    assert all(token["logprob"] <= token["top"][0]["logprob"] for token in tokens)
    cut = events(minfer(*arguments, "-n", "2"))[-1]
    assert (cut["text"], cut["finish_reason"]) == ("ab", "length")


def test_a_grammar_file_is_lark_or_gbnf(model, tmp_path):
    for text in ('start: "x" "y"', 'root ::= "x" "y"\n'):
        (tmp_path / "grammar").write_text(text)
        result = minfer("generate", model, "hello", *CPU, "--grammar", tmp_path / "grammar")
        assert result.stdout == "xy\n", result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--json-schema", '{"not": {}}'), "not"),
        (("--json-schema", "{oops"), "JSON schema cannot be read"),
        (("--json-schema", "no-such-file.json"), "neither a file nor a schema"),
        (("--grammar", "no-such-file"), "no-such-file"),
        (("--regex", "("), "unclosed"),
        (("--regex", "a", "--json-schema", "{}"), "exclude each other"),
        (("--regex", "a+", "--ignore-eos"), "--ignore-eos"),
    ],
    ids=" ".join,
)
def test_a_bad_grammar_ends_with_2_before_the_model_is_opened(arguments, said):
    result = minfer("generate", "/no/such/model.gguf", "hi", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert "such/model" not in result.stderr


def test_a_grammar_that_is_no_text_is_an_error_of_the_data(tmp_path):
    (tmp_path / "grammar").write_bytes(b"\xff\xfe")
    result = minfer("generate", "/no/such.gguf", "hi", "--grammar", tmp_path / "grammar")
    assert result.exit_code == 1
    assert "not UTF-8" in one_error_line(result)


def test_an_answer_by_a_grammar_is_no_thought(tmp_path):
    """The template has opened one: shown as such, or hidden, the answer would be lost."""
    opening = ggufs.CHATML.replace("assistant\n", "assistant\n<think>\n")
    path = ggufs.write_gguf(tmp_path / "x.gguf", **ggufs.ONE_LAYER, chat_template=opening)
    arguments = ("generate", path, "hello", *CPU, "--hide-thinking")
    assert minfer(*arguments, "-n", "5", "--ignore-eos").stdout.strip() == ""
    assert minfer(*arguments, "--regex", "yes").stdout == "yes\n"


# ---- where filling in ends


def test_filling_in_ends_where_the_next_file_would_begin(tmp_path):
    """The head draws <|file_sep|>, or any id that ends a middle, whatever it is given."""
    tokens = ggufs.vocabulary()[0]
    marks = {"fim_pre": 1, "fim_suf": 2, "fim_mid": 3}
    for name, end in (("fim_pad", 5), ("fim_rep", 6), ("fim_sep", 7)):
        bias = np.where(np.arange(len(tokens)) == end, 1e6, 0).astype(np.float32)
        keys = {f"tokenizer.ggml.{key}_token_id": i for key, i in (marks | {name: end}).items()}
        path = ggufs.write_gguf(
            tmp_path / f"{name}.gguf", **ggufs.ONE_LAYER,
            metadata=keys, output_bias=True, tensors={"output.bias": bias},
        )  # fmt: skip
        filled = events(minfer("generate", path, "a", "--suffix", "b", *GREEDY, "--json"))[-1]
        assert (filled["finish_reason"], filled["generated_tokens"]) == ("stop", 1)
        # elsewhere they are tokens like others, and --ignore-eos never draws them
        other = events(minfer("generate", path, "a", "--raw", *GREEDY, "--json"))
        assert other[-1]["finish_reason"] == "length"
        assert {e["id"] for e in other if e["event"] == "token"} == {end}
        never = events(
            minfer("generate", path, "a", "--suffix", "b", *GREEDY, "--json", "--ignore-eos")
        )
        assert end not in {e["id"] for e in never if e["event"] == "token"}
