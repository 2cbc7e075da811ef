"""What is fuzzed. A target takes any bytes and raises only where a promise is broken.

`run.py` feeds them under atheris, `tests/test_fuzz.py` feeds them the corpus and built inputs.
"""

from __future__ import annotations

import atexit
import functools
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ggufs
import typer
from conftest import tiny_vocabulary

from cli import commands
from cli.entries import piped_entries
from cli.files import read_prompt
from cli.main import app
from cli.repl import Choices, Repl
from cli.thinking import ThoughtSplitter
from minfer_cuda import bench
from minfer_cuda.chat_template import CHATML, ChatTemplate
from minfer_cuda.config import Qwen2Config
from minfer_cuda.conversation import Conversation, read_messages
from minfer_cuda.engine import Engine
from minfer_cuda.errors import MinferError, UsageError
from minfer_cuda.gguf import GGUFFile
from minfer_cuda.info import check, describe
from minfer_cuda.llm import LLM
from minfer_cuda.sampling import SamplingParams
from minfer_cuda.saved_logits import SavedLogits
from minfer_cuda.stops import StopMatcher, TextStream
from minfer_cuda.tokenizer import Tokenizer, well_formed

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "a <|im_end|>\n"},
    {"role": "assistant", "content": "<think>\nb\n</think>\n\nc"},
    {"role": "user", "content": "é\u4f60 </think>"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"x": [1, None, True]}}}]
MOST_TOKENS = 2  # that a command generates here, whatever its options say


class Bytes:
    """Numbers and texts out of a fuzzer's bytes; zeros follow after their end."""

    def __init__(self, data: bytes):
        self._data = data

    def number(self, limit: int) -> int:
        """0 to limit - 1, of one byte."""
        first, self._data = self._data[:1], self._data[1:]
        return (first[0] if first else 0) % limit

    def rest(self) -> bytes:
        return self._data


@functools.cache
def folder() -> Path:
    """Where targets write; removed at the end."""
    path = Path(tempfile.mkdtemp(prefix="minfer-fuzz-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def written(name: str, data: bytes) -> Path:
    path = folder() / name
    path.write_bytes(data)
    return path


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny_vocabulary())


@functools.cache
def model() -> Path:
    """A sound model, small enough to answer at once."""
    path = folder() / "tiny.gguf"
    return ggufs.write_gguf(path, layers=1, d=64, heads=1, kv_heads=1, ffn=64, types="Q8_0")


def gguf(data: bytes) -> None:
    """Any file is refused with one of our errors, or its tensors lie in it, aligned and apart, and
    what is made of its metadata is sound or refused too."""
    path = written("x.gguf", data)
    try:
        with GGUFFile.open(path) as file:
            check_layout(file)
            describe(file, None)
            check(file)
            _each(lambda: Qwen2Config.from_gguf(file), lambda: _read(file.metadata))
    except MinferError:
        pass


def check_layout(file: GGUFFile) -> None:
    """What an accepted file of one part promises of its tensors."""
    alignment = file.metadata.get("general.alignment", 32)
    end = 0
    for info in sorted(file.tensors.values(), key=lambda t: t.offset):
        assert info.offset >= end and info.offset % alignment == 0, info
        end = info.offset + info.nbytes
        assert len(file.data(info.name)) == info.nbytes
    assert end <= file.size_bytes, f"{end} > {file.size_bytes}"


def _each(*uses: Callable[[], object]) -> None:
    for use in uses:
        with suppress(MinferError):
            use()


def _read(metadata: dict[str, Any]) -> None:
    """What a file's values do to a sound text and sound messages."""
    _each(lambda: SamplingParams.from_metadata(metadata))
    found = Tokenizer(metadata)
    text = "Hello the  world é\U0001f600\n1234 <|im_end|>"
    for parse_special in (False, True):
        found.decode(found.encode(text, parse_special))
    assert found.decode(found.encode(text, False)) == text
    for token in (-1, 0, found.n_vocab - 1, found.n_vocab):
        found.token_text(token)
    ChatTemplate.from_metadata(metadata).encode(MESSAGES, found, TOOLS)


def metadata(data: bytes) -> None:
    """JSON of metadata values, put over those of a sound file."""
    try:
        changes = json.loads(data)
    except (ValueError, RecursionError):
        return
    if not isinstance(changes, dict):
        return
    values = tiny_vocabulary() | changes
    _each(lambda: _read(values))


def tokens(data: bytes) -> None:
    """Text goes through ids and back; bytes of a prompt and ids of any kind are text."""
    for file in (None, written("prompt.txt", data)):
        with streams(data), suppress(MinferError):
            read_prompt(None, file).encode()
    text = data.decode("utf-8", "surrogateescape")
    whole = well_formed(text)
    ids = tokenizer().encode(text, parse_special=False)
    assert tokenizer().decode(ids) == whole
    assert not any(map(tokenizer().is_control, ids))
    special = tokenizer().encode(text, parse_special=True)
    spelt = b"".join(
        tokenizer().token_text(i).encode()
        if tokenizer().is_control(i)
        else tokenizer().token_bytes(i)
        for i in special
    )
    assert spelt.decode() == whole
    any_ids = [2 * a + b for a, b in zip(data[::2], data[1::2], strict=False)]
    stream = TextStream(tokenizer())
    pieces = [stream.push(i) for i in any_ids]
    assert "".join(pieces) + stream.finish() == tokenizer().decode(any_ids)


class Pieces:
    """A tokenizer whose ids are the pieces of one text."""

    def __init__(self, pieces: list[bytes]):
        self.pieces = pieces

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token]


def stops(data: bytes) -> None:
    """However bytes are cut into pieces, text, stop string and thought are those of the whole."""
    source = Bytes(data)
    sizes = [1 + source.number(8) for _ in range(4)]
    words = [1 + source.number(4) for _ in range(1 + source.number(3))]
    raw = source.rest()
    wanted = []
    for size in words:
        wanted.append(raw[:size].decode("utf-8", "replace") or "x")
        raw = raw[size:]
    pieces, at = [], 0
    while at < len(raw):
        pieces.append(raw[at : at + sizes[len(pieces) % 4]])
        at += len(pieces[-1])
    whole = raw.decode("utf-8", "replace")
    found = [(whole.find(s), -len(s), s) for s in wanted if s in whole]
    end, _, stop = min(found, default=(len(whole), 0, None))
    stream = TextStream(Pieces(pieces), wanted)
    text = "".join(stream.push(i) for i in range(len(pieces))) + stream.finish()
    assert (text, stream.stopped) == (whole[:end], stop)
    matcher = StopMatcher(wanted)
    assert "".join(map(matcher.push, whole)) + matcher.finish() == text
    one, many = ThoughtSplitter(), ThoughtSplitter()
    at_once = one.push(whole) + one.finish()
    piecewise = [p for c in whole for p in many.push(c)] + many.finish()
    for thought in (True, False):
        assert "".join(p.text for p in at_once if p.thought is thought) == "".join(
            p.text for p in piecewise if p.thought is thought
        )


def template(data: bytes) -> None:
    """Any template renders or is refused, within bounds of time and memory."""
    try:
        source = ChatTemplate(data.decode("utf-8", "replace"), bos_text="<b>", eos_text="<e>")
        source.encode(MESSAGES, tokenizer(), TOOLS, generated={2: [65, 66]})
    except MinferError as error:
        assert len(str(error)) < 10_000, "a message that fills the screen"


def session(data: bytes) -> None:
    """A file given as `--session` is refused, or comes back from a save as it was."""
    path = written("session.json", data)
    conversation = Conversation(ChatTemplate(CHATML), tokenizer(), 512)
    try:
        conversation.load(path)
    except MinferError:
        return
    turns = conversation.turns
    conversation.save(path)
    conversation.load(path)
    assert conversation.turns == turns
    try:
        conversation.begin_turn("x")
    except MinferError:
        assert conversation.turns == turns
    read_messages(path)


def saved_logits(data: bytes) -> None:
    """A file given as `--kl-divergence` is refused or read within its bounds."""
    try:
        saved = SavedLogits(written("base.bin", data))
    except MinferError:
        return
    n_rows = sum(len(row) == saved.n_vocab for row in saved.rows(0))
    assert n_rows == saved.chunks.shape[1] - 1 - saved.chunks.shape[1] // 2


def options(data: bytes) -> None:
    """Arguments apart by zero bytes; M is a sound model, F a text file. What leaves the targets'
    folder, or speaks to a network, is left out."""
    arguments = [os.fsdecode(a) for a in data.split(b"\0")]
    if any(c in a for a in arguments for c in "/~\\") or ".." in "".join(arguments):
        return
    known = {"M": str(model()), "F": str(written("text.txt", b"Hello the world. " * 8))}
    minfer([known.get(a, a) for a in arguments])


def chat(data: bytes) -> None:
    """Any bytes piped into a chat are messages, commands, or refused by a line that drives no
    terminal; /save and /load would leave the targets' folder."""
    if b"/save" in data or b"/load" in data:
        return
    llm = loaded()
    conversation = Conversation(llm.template, llm.tokenizer, llm.n_ctx)
    choices = Choices(llm.sampling(temperature=0.0))
    with bounded(), streams(data) as told:
        Repl(llm, conversation, choices).run(piped_entries())
    check_told(told())


@contextmanager
def streams(stdin: bytes = b"") -> Iterator[Callable[[], str]]:
    """Standard streams of their own; gives what was said on stderr."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors="replace") for _ in range(2))
    before, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(stdin), "utf-8")

    def told() -> str:
        err.flush()
        return err.buffer.getvalue().decode()  # type: ignore[attr-defined]

    try:
        with redirect_stdout(out), redirect_stderr(err):
            yield told
    finally:
        sys.stdin = before


def check_told(text: str) -> None:
    """No failure that is a bug, and nothing that drives a terminal."""
    assert "internal error" not in text and "Traceback" not in text, text
    assert all(c.isprintable() or c == "\n" for c in text), repr(text)


def minfer(arguments: list[str]) -> None:
    """Run the command in this process: code 0, 1 or 2, no traceback, and one line for an error."""
    with bounded(), streams(b"hello\n") as told:
        try:
            command()(args=arguments, prog_name="minfer")
            code: object = 0
        except SystemExit as exit:
            code = exit.code or 0
    assert code in (0, 1, 2), (arguments, code, told())
    if code == 2:  # the user's own words are told back
        return
    check_told(told())
    errors = [line for line in told().splitlines() if line.startswith("error: ")]
    assert len(errors) == (code == 1), (arguments, code, told())


@functools.cache
def command() -> typer.core.TyperGroup:
    """The command line, made only once: that takes longer than most of what it does here."""
    return typer.main.get_command(app)


@functools.cache
def loaded() -> LLM:
    return LLM(model(), n_ctx=64, device="cpu")


@contextmanager
def bounded() -> Iterator[None]:
    """No network, no home, few tokens, no measuring, in the targets' folder; and all as before."""
    home = str(folder())
    environment = {"HOME": home, "XDG_CACHE_HOME": home, "MINFER_MODEL_DIR": home}
    environment |= {"HF_HUB_OFFLINE": "1", "MINFER_OLLAMA_REGISTRY": "http://127.0.0.1:9"}
    generate = Engine.generate
    before = os.getcwd()

    def few(self: Engine, ids: Any, params: Any, n: int | None = None, *rest: Any) -> Any:
        return generate(self, ids, params, min(n or MOST_TOKENS, MOST_TOKENS), *rest)

    def unmeasured(*_: object) -> None:
        raise UsageError("nothing is measured here")

    with (
        patch.dict(os.environ, environment),
        patch.object(Engine, "generate", few),
        patch.object(bench, "report", unmeasured),
    ):
        os.chdir(home)
        try:
            yield
        finally:
            os.chdir(before)


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target
    for target in (
        gguf, metadata, tokens, stops, template, session, saved_logits, options, chat
    )
}  # fmt: skip

JINJA = [
    "{{ ", " }}", "{% ", " %}", "{# ", " #}", "{%- ", " -%}", "for m in messages", "endfor", "else",
    "if m.content", "endif", "set a = ", "set n = namespace(a=[])", "set n.a = n", "n.a", "m.role",
    "messages", "tools", " | tojson", " | length", ".rsplit(", ".zfill(9)", "macro f(x)",
    "endmacro", "f(1)", "'a'", "1", " ~ ", " + ", "(", ")", "[", "]", "{", "}", ".", "|",
    "raise_exception('x')", "generation", "endgeneration", "bos_token", "<|im_end|>",
]  # fmt: skip
KEYS = [
    *tiny_vocabulary(), "tokenizer.chat_template", "tokenizer.chat_templates", "split.count",
    "tokenizer.ggml.eot_token_id", "tokenizer.ggml.fim_pre_token_id", "general.sampling.temp",
    "general.sampling.top_k", "general.sampling.min_p", "general.sampling.penalty_last_n",
]  # fmt: skip
WORDS: dict[str, list[str]] = {  # that inputs of a target are made of
    "template": JINJA,
    "gguf": ["GGUF", "general.alignment", *KEYS],
    "metadata": KEYS,
    "chat": [name for c in commands.COMMANDS for name in c.names],
    "options": sorted({o for c in command().commands.values() for p in c.params for o in p.opts}),
}
