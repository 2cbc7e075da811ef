"""The fuzzers' corpus once more, and inputs built to be nearly right.

What `make fuzz` finds comes to lie in tests/fuzz/corpus, so it fails here until it is mended.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import ROOT
from fuzz import targets
from ggufs import RawGGUF, array, key_value, tensor_entry, text
from hypothesis import given, settings
from hypothesis import strategies as st

from cli.main import COMMANDS as CLI_COMMANDS

CORPUS = Path(__file__).with_name("fuzz") / "corpus"
INPUTS = sorted(path.relative_to(CORPUS).as_posix() for path in CORPUS.glob("*/*"))


def test_every_target_has_a_corpus_and_the_corpus_is_small():
    assert {name.split("/")[0] for name in INPUTS} == set(targets.TARGETS)
    assert sum((CORPUS / name).stat().st_size for name in INPUTS) < 1 << 19


@pytest.mark.parametrize("name", INPUTS)
def test_the_corpus_keeps_every_promise(name):
    targets.TARGETS[name.split("/")[0]]((CORPUS / name).read_bytes())


@pytest.mark.skipif(os.name != "posix", reason="limits of POSIX systems")
def test_no_file_of_the_corpus_takes_more_than_bounded_time_and_memory():
    code = (
        "import resource, sys; from pathlib import Path; from fuzz import targets\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 20,) * 2)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2 << 30,) * 2)\n"
        "for name in ('gguf', 'metadata', 'saved_logits', 'session'):\n"
        "    for path in sorted((Path(sys.argv[1]) / name).iterdir()):\n"
        "        targets.TARGETS[name](path.read_bytes())\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code, CORPUS], capture_output=True, text=True,
                          env=environment)  # fmt: skip
    assert done.returncode == 0, done.stderr


# files

NAMES = st.sampled_from(["a", "b", "general.alignment", "general.architecture", "split.count"])
SMALL = st.integers(0, 5) | st.sampled_from([31, 32, 33, 64, 255, 2**31, 2**32, 2**63, 2**64 - 1])
SCALARS = {**dict(enumerate("BbHhIifB")), 10: "Q", 11: "q", 12: "d"}  # value type: struct code


def scalar(kind: int, number: int) -> bytes:
    code = f"<{SCALARS[kind]}"
    raw = struct.pack("<Q", number)
    return raw[: struct.calcsize(code)]


SCALAR = st.builds(lambda k, n: (k, scalar(k, n)), st.sampled_from(sorted(SCALARS)), SMALL)
STRING = st.builds(lambda t: (8, text(t)), st.text(max_size=4) | st.binary(max_size=4))
PLAIN = SCALAR | STRING
ARRAY = st.builds(
    lambda item, n, more: (9, array(item[0], n + more, item[1] * n)),
    PLAIN | st.builds(lambda item: (9, array(item[0], 1, item[1])), PLAIN),
    st.integers(0, 3),
    st.sampled_from([0, 0, 0, 1, 2**40]),
)
VALUES = st.lists(st.builds(lambda k, v: key_value(k, *v), NAMES, PLAIN | ARRAY), max_size=4)
DIMENSIONS = st.lists(st.sampled_from([1, 2, 32, 256]) | SMALL, min_size=0, max_size=5)
OFFSETS = st.integers(0, 12).map(lambda n: 32 * n) | SMALL
ENTRIES = st.lists(
    st.builds(tensor_entry, st.sampled_from("abcd"), DIMENSIONS, st.integers(0, 42), OFFSETS),
    max_size=4,
)
FILES = st.builds(
    RawGGUF,
    values=VALUES,
    entries=ENTRIES,
    data=st.integers(0, 600).map(bytes),
    n_values=st.none() | SMALL,
    n_tensors=st.none() | SMALL,
    version=st.sampled_from([2, 3, 3, 3]),
)


@settings(max_examples=300)
@given(FILES)
def test_built_files_are_refused_or_sound(file):
    targets.gguf(file.build())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@settings(max_examples=150)
@given(st.dictionaries(st.sampled_from(targets.KEYS), JSON, min_size=1, max_size=3))
def test_metadata_of_any_shape_is_refused_or_used(changes):
    targets.metadata(json.dumps(changes).encode())


@settings(max_examples=100)
@given(st.lists(st.sampled_from(["a b", "b a", "ab ab", "Ġ t", "h e", " a", "a ", "a b c", ""])))
def test_merges_of_any_kind_are_refused_or_used(merges):
    targets.metadata(json.dumps({"tokenizer.ggml.merges": merges}).encode())


@settings(max_examples=150)
@given(st.integers(0, 5), st.integers(0, 20), st.integers(0, 20), st.binary(max_size=90))
def test_built_base_files_are_refused_or_read(n_chunks, n_ctx, n_vocab, data):
    sizes = struct.pack("<iii", n_ctx, n_vocab, n_chunks)
    targets.saved_logits(b"_logits_" + sizes + data)
    width = 2 * ((n_vocab + 1) // 2) + 4
    rows = n_chunks * max(n_ctx - 1 - n_ctx // 2, 0)
    whole = bytes(4 * n_chunks * n_ctx + 2 * rows * width)
    targets.saved_logits(b"_logits_" + sizes + data[: len(whole)] + whole[len(data) :])


TURN = {
    "role": st.sampled_from(["user", "assistant", "system", "x"]),
    "content": st.text(max_size=5),
}


@settings(max_examples=100)
@given(JSON | st.lists(st.fixed_dictionaries(TURN) | JSON, max_size=4))
def test_built_sessions_are_refused_or_kept(value):
    targets.session(json.dumps(value).encode())


# text


@settings(max_examples=200)
@given(st.binary(max_size=60) | st.text(max_size=30).map(str.encode))
def test_any_text_and_any_bytes_go_through_tokens(data):
    targets.tokens(data)


@settings(max_examples=200)
@given(
    st.binary(max_size=12), st.lists(st.sampled_from(["a", "ab", "<think>", "</think>", "é", "😀"]))
)
def test_any_cut_of_any_text_gives_the_same_text_and_stop(head, words):
    targets.stops(head + "".join(words).encode())


@settings(max_examples=150)
@given(st.lists(st.sampled_from(targets.JINJA), max_size=14).map("".join))
def test_built_templates_render_or_are_refused(source):
    targets.template(source.encode())


# the command line

SOUND = {  # what each command needs; generated answers and measurements are cut short
    "generate": ["M", "hi", "--device", "cpu"],
    "chat": ["M", "--device", "cpu", "--single-turn"],
    "info": ["M"],
    "tokenize": ["M", "hi"],
    "template": ["M"],
    "bench": ["M", "--device", "cpu"],
    "perplexity": ["M", "-f", "F", "-c", "8", "--device", "cpu"],
    "list": [], "pull": ["ollama:x"], "rm": ["x"],
}  # fmt: skip
WORDS = [
    "M", "F", "", "-", "--", "0", "1", "-1", "8", "nan", "inf", "1e999", "x", "9" * 30, "f16",
    "cuda:0", "cpu", "chatml", "hf:a", "ollama:", "\udcff", "\x1b[2J", "{}", "[", "(a+)+", "1,2",
]  # fmt: skip


def argument_lists(command):
    """What the command needs, and up to three more: options, mostly with plausible values."""
    parameters = targets.command().commands[command].params
    options = [(o, p.is_flag) for p in parameters for o in p.opts if o.startswith("-")]
    values = st.sampled_from(["0", "1", "8", "F"]) | st.sampled_from(WORDS)
    given_one = [st.just((o,)) if is_flag else st.tuples(st.just(o), values)
                 for o, is_flag in options]  # fmt: skip
    more = st.lists(st.one_of(*given_one, st.tuples(st.sampled_from(["-h", *WORDS]))), max_size=3)
    return more.map(lambda more: [command, *SOUND[command], *(w for pair in more for w in pair)])


def test_every_command_is_fuzzed():
    assert set(SOUND) == set(CLI_COMMANDS)


@pytest.mark.parametrize("command", SOUND)
@settings(max_examples=30)
@given(st.data())
def test_any_arguments_end_with_a_code_and_no_traceback(command, data):
    arguments = data.draw(argument_lists(command))
    targets.options("\0".join(arguments).encode("utf-8", "surrogateescape"))


ARGUMENTS = ["", "temp 0", "temp nan", "seed 1", "top_k x", "max_tokens 0", "a", "\x1b[2J", "é"]
LINES = st.builds(
    "{} {}".format, st.sampled_from(sorted(targets.WORDS["chat"])), st.sampled_from(ARGUMENTS)
)


@settings(max_examples=60)
@given(st.lists(LINES | st.sampled_from(["hi", '"""', 'a """', "", "/", "\x00"]), max_size=5))
def test_any_lines_of_a_chat_are_answered_or_refused(lines):
    targets.chat("\n".join(lines).encode())
