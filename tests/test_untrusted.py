"""A model file, a session and what a model says are not trusted: what each of them cannot do."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import ggufs
import numpy as np
import pytest
from command_line import CPU, ROOT, Terminal, minfer, one_error_line
from ggufs import RawGGUF, array, key_value, tensor_entry, text
from hypothesis import given, settings
from hypothesis import strategies as st
from test_chat_template import FAMILIES, TOOLS, control_ids

from cli import app
from cli.answer import Printer
from minfer_cuda import template_process
from minfer_cuda.chat_template import ChatTemplate
from minfer_cuda.config import Qwen2Config
from minfer_cuda.errors import MinferError, ModelFileError, TemplateError, UsageError
from minfer_cuda.gguf import GGUFFile
from minfer_cuda.tokenizer import Tokenizer

HI = [{"role": "user", "content": "Hi"}]
posix = pytest.mark.skipif(os.name != "posix", reason="limits of POSIX systems")
linux = pytest.mark.skipif(not Path("/proc/self/limits").exists(), reason="reads /proc")

# templates: what they cannot reach

ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}{{ messages[0].__class__.__base__ }}",
    "{{ messages[0].content.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}{{ raise_exception.__code__ }}",
    "{{ strftime_now.__self__ }}{{ strftime_now.__call__.__self__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__ }}{{ namespace.__init__.__globals__ }}",
    "{{ lipsum.__globals__['os'] }}{{ self.__init__ }}{{ self._TemplateReference__context }}",
    "{{ messages | attr('__class__') | attr('__mro__') }}",
    "{{ messages | map(attribute='__class__') | list }}",
    "{{ 'x'.zfill.__self__ }}{{ ('x' | zfill).__class__ }}",
    "{{ ''['__class__'] }}{{ messages[0]['__class__'] }}",
    "{{ '{0.__class__}'.format(messages) }}{{ '%s' | format(messages.__class__) }}",
    "{{ get_flashed_messages.__globals__ }}{{ config }}{{ request }}{{ url_for }}",
    "{% include '/etc/passwd' %}",
    "{% include 'chat_template' %}",
    "{% extends '../../etc/passwd' %}",
    "{% import 'os' as os %}{{ os.environ }}",
    "{% from 'os' import environ %}{{ environ }}",
    "{{ open('/etc/passwd').read() }}{{ __import__('os') }}{{ eval('1') }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_reaches_no_python_object_and_no_file(source):
    try:
        shown = ChatTemplate(source).render(HI)
    except TemplateError:
        return
    assert not any(word in shown for word in ("class", "object", "module", "root:", "PATH", "0x"))


def test_messages_are_data_and_never_objects():
    class Secret:
        key = "hidden"

    with pytest.raises(UsageError, match="JSON"):
        ChatTemplate("{{ messages[0].content.key }}").render([{"role": "user", "content": Secret}])


@linux
def test_templates_run_where_no_file_can_be_opened_and_memory_is_bounded():
    ChatTemplate("x").render(HI)
    limits = Path(f"/proc/{template_process._running.pid}/limits").read_text().splitlines()
    rows = {line[:26].strip(): line[26:].split()[:2] for line in limits}
    assert rows["Max open files"] == ["0", "0"]
    assert rows["Max address space"] == [str(1 << 29)] * 2
    assert rows["Max stack size"] == [str(8 << 20)] * 2
    assert rows["Max core file size"] == ["0", "0"]


# templates: what they cannot exhaust

DOUBLED = "{% set n = namespace(a=START) %}{% for i in range(60) %}{% set n.a = STEP %}{% endfor %}"
HOSTILE = {
    "no end": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "recursion": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "doubled text": DOUBLED.replace("START", "'ab'").replace("STEP", "n.a ~ n.a"),
    "wide filter": "{{ 'a'.center(2000000000) }}",
    "holds itself": "{% set n = namespace() %}{% set n.a = n %}{{ n }}",
    "deep value": DOUBLED.replace("60", "99999").replace("START", "1").replace("STEP", "[n.a]")
    + "{{ n.a }}",
    "many branches": DOUBLED.replace("START", "1").replace("STEP", "[n.a, n.a]") + "{{ n.a }}",
    "long sum": "{{ 1" + " + 1" * 300_000 + " }}",
    "long not": "{{ " + "not " * 100_000 + "1 }}",
    "brackets": "{{ " + "(" * 100_000 + ")" * 100_000 + " }}",
    "many blocks": "{% if 1 %}" * 20_000,
    "long words": "{{ raise_exception('x'.zfill(1000000)) }}",
}


@posix
def test_hostile_templates_end_in_an_error_within_bounds_and_others_go_on():
    code = (
        "import json, resource, sys\n"
        "from minfer_cuda.chat_template import ChatTemplate\n"
        "from minfer_cuda.errors import MinferError\n"
        "told = {}\n"
        "for name, source in json.load(sys.stdin).items():\n"
        "    try:\n"
        "        told[name] = 'rendered ' + ChatTemplate(source).render([])[:9]\n"
        "    except MinferError as error:\n"
        "        told[name] = str(error)\n"
        "    assert ChatTemplate('sound').render([]) == 'sound'\n"
        "children = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print(json.dumps([told, children.ru_maxrss, children.ru_utime + children.ru_stime]))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(HOSTILE), capture_output=True, text=True,
        env=environment, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told, peak_kib, _ = json.loads(done.stdout)
    assert set(told) == set(HOSTILE)
    for name, words in told.items():
        assert not words.startswith("rendered"), name
        assert len(words) < 700, name
    assert "fuel" in told["no end"]
    assert "stopped: it holds a value that has no end" in told["holds itself"]
    assert "stopped: it does not come to an end" in told["many branches"]
    if sys.platform == "linux":  # elsewhere in bytes, and not bounded everywhere
        assert peak_kib < (1 << 29) / 1024


def test_a_rendering_that_was_interrupted_does_not_answer_the_next(monkeypatch):
    def interrupted(process, request):
        process.stdin.write(f"{request}\n")
        process.stdin.flush()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(template_process, "_exchange", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ChatTemplate("one").render(HI)
    assert ChatTemplate("two").render(HI) == "two"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_renders_for_itself():
    assert ChatTemplate("a").render(HI) == "a"
    child = os.fork()
    if child == 0:
        os._exit(0 if ChatTemplate("b").render(HI) == "b" else 1)
    assert ChatTemplate("c").render(HI) == "c"
    assert os.waitpid(child, 0)[1] == 0


# content and control tokens

SPELLINGS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|fim_prefix|>", "<think>", "</think>"]
ATTACKS = st.lists(
    st.sampled_from(
        [*SPELLINGS, "<|im_", "start|>", "<|", "|>", "|", "assistant\n", "\n", "\ue000"]
    )
    | st.text(max_size=4),
    max_size=6,
).map("".join)
ROLES = ("system", "user", "assistant", "tool")
TOOL_TEMPLATE = (  # as Qwen2.5 shows the results of tools
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n"
    "{{ m.content }}\n</tool_response><|im_end|>\n{% elif m.tool_calls %}<|im_start|>assistant"
    "{% for call in m.tool_calls %}\n<tool_call>\n{{ call | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}"
)


def conversations(content):
    turn = {"role": st.sampled_from(ROLES), "content": content}
    calls = {"tool_calls": st.lists(st.fixed_dictionaries({"name": content}), max_size=2)}
    return st.lists(st.fixed_dictionaries(turn, optional=calls), min_size=1, max_size=5)


@pytest.mark.parametrize("source", [*FAMILIES, TOOL_TEMPLATE])
@settings(max_examples=25)
@given(messages=conversations(ATTACKS), name=ATTACKS)
def test_content_of_any_role_never_becomes_a_control_token(tiny_tokenizer, source, messages, name):
    tools = [*TOOLS, {"name": name, "description": {name: [name]}}]
    template = ChatTemplate(source, bos_text="<|endoftext|>")
    plain = [
        {**m, "content": "a"} | ({"tool_calls": [{"name": "a"} for _ in m["tool_calls"]]}
                                 if "tool_calls" in m else {})
        for m in messages
    ]  # fmt: skip
    harmless_tools = [*TOOLS, {"name": "a", "description": {"a": ["a"]}}]
    own = tiny_tokenizer.encode(template.render(plain, harmless_tools), parse_special=True)
    ids = template.encode(messages, tiny_tokenizer, tools)
    assert control_ids(tiny_tokenizer, ids) == control_ids(tiny_tokenizer, own)


@given(ATTACKS)
def test_ordinary_text_holds_no_control_token(tiny_tokenizer, content):
    assert not control_ids(tiny_tokenizer, tiny_tokenizer.encode(content, parse_special=False))


@pytest.mark.parametrize("token", ["a", "hell", "Ġthe"])
@pytest.mark.parametrize("kind", [2, 3, 4, 5])
def test_a_vocabulary_whose_text_becomes_control_tokens_is_refused(tiny_metadata, token, kind):
    at = tiny_metadata["tokenizer.ggml.tokens"].index(token)
    tiny_metadata["tokenizer.ggml.token_type"][at] = kind
    with pytest.raises(MinferError, match="ordinary text becomes it"):
        Tokenizer(tiny_metadata)


def test_merges_that_spell_a_control_token_are_refused(tiny_metadata):
    tiny_metadata["tokenizer.ggml.tokens"] += ["<|", "im_end|>"]
    tiny_metadata["tokenizer.ggml.token_type"] += [1, 1]
    tiny_metadata["tokenizer.ggml.merges"] += ["<| im_end|>"]
    with pytest.raises(MinferError, match="im_end.*ordinary text becomes it"):
        Tokenizer(tiny_metadata)


@pytest.mark.parametrize("key", ["tokens", "merges"])
@pytest.mark.parametrize("value", [[["a"]], [1, 2], [None]])
def test_a_vocabulary_that_is_no_text_is_refused(tiny_metadata, key, value):
    tiny_metadata[f"tokenizer.ggml.{key}"] = value
    with pytest.raises(MinferError, match="not a text"):
        Tokenizer(tiny_metadata)


# terminals

SMALL = {"layers": 1, "d": 64, "heads": 1, "kv_heads": 1, "ffn": 64}
TITLE = "\x1b]0;owned\x07\x9b2J\r"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> str:
    """A sound model with escape sequences wherever its file has a text."""
    tokens, types, _ = ggufs.vocabulary()
    path = tmp_path_factory.mktemp("hostile") / "x.gguf"
    metadata = {
        "general.name": f"n{TITLE}",
        "general.license": f"l{TITLE}",
        "tokenizer.ggml.tokens": [*tokens, f"<{TITLE}>", f"c{TITLE}"],
        "tokenizer.ggml.token_type": [*types, 4, 3],
    }
    template = f"{{# {TITLE} #}}<{TITLE}>{{{{ messages[0].content }}}}"
    size = SMALL | {"vocab": len(tokens) + 2}
    return str(ggufs.write_gguf(path, **size, metadata=metadata, chat_template=template))


def drives_a_terminal(shown: str) -> bool:
    return not all(c.isprintable() or c == "\n" for c in shown)


@pytest.mark.parametrize(
    "command",
    [
        ["info", "M"],
        ["info", "M", "--check"],
        ["tokenize", "M", f"a<{TITLE}>c{TITLE}\u202e"],
        ["generate", "M", "hi", "-v", "-n", "1", *CPU],
        ["chat", "M", "--single-turn", "-n", "1", *CPU],
    ],
)
def test_no_text_of_a_file_drives_the_terminal_through_a_command(hostile, command):
    shown = minfer(*[hostile if word == "M" else word for word in command], stdin="/show\nhi\n")
    assert shown.exit_code == 0, shown.output
    assert not drives_a_terminal(shown.stderr)
    if command[0] in ("info", "tokenize"):  # what others print is what the model says, for a pipe
        assert not drives_a_terminal(shown.stdout)


@pytest.mark.parametrize(
    "metadata",
    [
        {"general.architecture": f"a{TITLE}"},
        {"tokenizer.ggml.pre": f"p{TITLE}"},
        {"tokenizer.ggml.model": f"m{TITLE}" + "x" * 100_000},
        {"qwen2.rope.scaling.type": f"s{TITLE}"},
        {"tokenizer.ggml.pre": ["x" * 1000] * 1000},
    ],
)
def test_an_error_that_quotes_a_file_is_one_short_harmless_line(tmp_path, metadata):
    path = ggufs.write_gguf(tmp_path / "x.gguf", **SMALL, metadata=metadata)
    shown = minfer("generate", path, "hi", *CPU)
    assert shown.exit_code == 1
    line = one_error_line(shown)
    assert "owned" in line or "x, x" in line or "['x" in line
    assert not drives_a_terminal(shown.stderr) and len(line) < 400 + len(str(path))


@pytest.mark.parametrize("source", ["{{ raise_exception('W') }}", "{% W %}", "{{ x.W() }}"])
def test_what_a_template_says_is_one_short_harmless_line(tmp_path, source):
    evil = source.replace("W", f"w{TITLE}" + "x" * 50_000)
    path = ggufs.write_gguf(tmp_path / "x.gguf", **SMALL, chat_template=evil)
    shown = minfer("template", path, "hi")
    assert shown.exit_code == 0 and not drives_a_terminal(shown.stderr)
    (note,) = shown.stderr.splitlines()
    assert note.startswith("note: the chat template does not render") and len(note) < 1000


def test_a_session_cannot_drive_the_terminal(hostile, tmp_path):
    session = tmp_path / "s.json"
    turns = [("system", TITLE), ("user", f"u{TITLE}"), ("assistant", TITLE)]
    session.write_text(json.dumps([{"role": r, "content": c} for r, c in turns]))
    options = ("--session", session, "--chat-template", "chatml", *CPU)
    shown = minfer(
        "chat", hostile, *options, stdin="/show\n/undo\n/show\n/load x\x1b[2J\n/\x1b[2J\n"
    )
    assert shown.exit_code == 0 and not drives_a_terminal(shown.stderr)
    session.write_text(json.dumps([{"role": TITLE, "content": ""}]))
    assert not drives_a_terminal(one_error_line(minfer("chat", hostile, *options)))


@posix
def test_a_terminal_gets_pictures_where_a_pipe_gets_the_characters(hostile, tmp_path):
    piped = minfer("template", hostile, f"{TITLE}\r\n")
    assert TITLE in piped.stdout
    terminal = Terminal(tmp_path, "template", hostile, f"{TITLE}\r\n", NO_COLOR="1")
    assert terminal.exit_code() == 0
    shown = terminal.seen.replace("\r", "")  # of line ends
    assert "␛]0;owned␇" in shown
    assert not drives_a_terminal(shown)
    terminal = Terminal(tmp_path, "template", hostile, "--source", NO_COLOR="1")
    assert terminal.exit_code() == 0
    assert not drives_a_terminal(terminal.seen.replace("\r", ""))


def test_a_lone_carriage_return_of_a_model_does_not_hide_what_it_said(monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert Printer().push("rm -rf /\rls\r\n\x7f") == "rm -rf /␍ls\r\n␡"


def test_a_message_is_cut_before_it_fills_the_screen():
    assert len(app.one_line(ValueError("x" * 10**6))) < 2100


# headers: memory in proportion


N = 1 << 18
COSTLY = {  # values that cost most memory per byte of the file
    "bytes": lambda: array(0, N, bytes(N)),
    "floats": lambda: array(6, N // 4, os.urandom(N)),
    "strings": lambda: array(
        8, N // 10, b"".join(text(chr(256 + i % 999)) for i in range(N // 10))
    ),
}


@pytest.mark.parametrize("kind", COSTLY)
def test_a_header_takes_memory_in_proportion_to_its_bytes(tmp_path, kind):
    path = RawGGUF(values=[key_value("k", 9, COSTLY[kind]())]).write(tmp_path / "x.gguf")
    tracemalloc.start()
    try:
        with GGUFFile.open(path) as file:
            assert kind != "strings" or list(file.metadata["k"])  # decoded only then
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 12 * path.stat().st_size + (1 << 18)


@pytest.mark.parametrize("kind", ["keys", "tensors", "arrays", "arrays in several keys"])
def test_more_entries_than_any_model_has_are_refused(tmp_path, kind):
    n = (1 << 16) + 1
    built = {
        "keys": lambda: RawGGUF(values=[key_value(f"{i:x}", 0, b"\1") for i in range(n)]),
        "tensors": lambda: RawGGUF(entries=[tensor_entry(f"{i:x}", [1], 0, 0) for i in range(n)]),
        "arrays": lambda: RawGGUF(values=[key_value("k", 9, array(9, n, array(0, 0) * n))]),
        "arrays in several keys": lambda: RawGGUF(
            values=[key_value(k, 9, array(9, n // 2, array(0, 0) * (n // 2))) for k in "abc"]
        ),
    }[kind]()
    with pytest.raises(ModelFileError, match="at most 65536 entries"):
        GGUFFile.open(built.write(tmp_path / "x.gguf"))


# code

EXECUTES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
EXECUTES |= {"torch", "yaml", "code", "codeop", "runpy"}


def test_nothing_read_from_a_file_is_executed():
    """No pickle, and no other reader that runs what it reads."""
    for path in sorted([*(ROOT / "minfer_cuda").rglob("*.py"), *(ROOT / "cli").rglob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                assert not EXECUTES & {a.name.split(".")[0] for a in node.names}, where
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in EXECUTES, where
            elif isinstance(node, ast.Call):
                name = getattr(node.func, "id", "")
                assert name not in ("eval", "exec", "compile", "__import__"), where
                assert getattr(node.func, "attr", "") not in ("system", "popen"), where
            elif isinstance(node, ast.keyword):
                assert node.arg not in ("allow_pickle", "shell"), where


def test_an_array_of_python_objects_is_not_read_from_a_base_file(tmp_path):
    from minfer_cuda.saved_logits import SavedLogits

    path = tmp_path / "objects.npy"
    np.save(path, np.array([{"a": 1}], object), allow_pickle=True)
    with pytest.raises(MinferError, match="saved logits"):
        SavedLogits(path)


def test_a_file_without_a_name_is_called_by_its_path_made_printable(tmp_path):
    path = ggufs.write_gguf(tmp_path / "a\x1b[2J.gguf", **SMALL, drop=["general.name"])
    with GGUFFile.open(path) as file:
        assert Qwen2Config.from_gguf(file).name == "a\\x1b[2J"
