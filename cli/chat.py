"""minfer chat: a conversation that keeps its KV cache across turns."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from minfer_cuda.errors import ContextFullError, UsageError

from . import options
from .answer import Printer, stream
from .app import say
from .model import Sampling, Settings, closing_line, draws_at_random, open_model

if TYPE_CHECKING:
    from minfer_cuda.conversation import Conversation
    from minfer_cuda.llm import LLM, Completion
    from minfer_cuda.sampling import SamplingParams

RESERVED_SHARE = 4  # a quarter of the context is kept for the reply, if old turns can go for it

HELP = """\
/help          this list
/exit, /quit   leave (also Ctrl-D, or Ctrl-C twice)
/clear         forget the conversation; the system message stays
/regen         answer the last message anew
/undo          take the last message and its answer back
/system TEXT   set the system message and start afresh; without TEXT: none
Ctrl-C stops an answer and keeps what was said."""


def chat(
    model: options.Model,
    n_ctx: options.NCtx = options.N_CTX,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repeat_penalty: options.RepeatPenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    system: options.System = None,
    session: Annotated[
        Path | None,
        typer.Option(
            "--session", metavar="FILE", help="Go on from this JSON file and keep it up to date."
        ),
    ] = None,
    single_turn: Annotated[
        bool, typer.Option("--single-turn", help="Answer one message, then leave.")
    ] = False,
    raw: Annotated[bool, typer.Option("--raw", hidden=True, help="Not for chat.")] = False,
    device: options.Device = "auto",
    kv_type: options.KV = options.KVType.F16,
    chat_template: options.ChatTemplate = None,
    rope_freq_base: options.RopeBase = None,
    verbose: options.Verbose = False,
) -> None:
    """Talk with a model; /help lists the commands. Piped input is one turn a line.

    Example: minfer chat model.gguf --system "You answer in one sentence."
    """
    if raw:
        raise UsageError("a chat needs a template: --raw is for `minfer generate`")
    sampling = Sampling(
        temperature, top_k, top_p, min_p, repeat_penalty, frequency_penalty, presence_penalty, seed
    )
    sampling.check()
    settings = Settings(n_ctx, device, kv_type.value, chat_template, rope_freq_base)
    with open_model(model, settings, verbose) as llm:
        from minfer_cuda.conversation import Conversation

        reserve = min(max_tokens or llm.n_ctx, llm.n_ctx // RESERVED_SHARE)
        conversation = Conversation(
            llm.template, llm.tokenizer, llm.n_ctx, system=system, reserve=max(reserve, 1)
        )
        if session is not None and session.exists():
            conversation.load(session)
            if system is not None:
                conversation.set_system(system)
        repl = Repl(
            llm, conversation, sampling.params(llm, ignore_eos), max_tokens, stop or [], session
        )
        typed = sys.stdin.isatty() and sys.stdout.isatty()
        repl.run(typed_lines() if typed else piped_lines(), single_turn, patient=typed)


class Repl:
    """The loop over input lines. Replies go to stdout, all else to stderr."""

    def __init__(
        self,
        llm: LLM,
        conversation: Conversation,
        params: SamplingParams,
        max_tokens: int | None,
        stop: list[str],
        session: Path | None,
    ):
        self.llm = llm
        self.conversation = conversation
        self.params = params
        self.max_tokens = max_tokens
        self.stop = stop
        self.session = session
        self.n_replies = 0

    def run(self, lines: Iterator[str], single_turn: bool = False, patient: bool = False) -> None:
        """Until the lines end or a command leaves; one message only when `single_turn`.

        `patient`: an interrupt that comes just after a reply has ended does not leave the chat.
        """
        for line in lines:
            try:
                go_on = self.handle(line, single_turn)
            except KeyboardInterrupt:
                if not patient:
                    raise
                go_on = True
            if not go_on:
                return

    def handle(self, line: str, single_turn: bool) -> bool:
        """Deal with one input line; False when it was the last."""
        if not line.strip():
            return True
        if line.startswith("/"):
            return self.command(line)
        self.turn(line)
        return not single_turn

    def turn(self, text: str) -> None:
        """Answer a message; one that cannot fit is refused, with nothing changed."""
        try:
            ids = self.conversation.begin_turn(text)
        except ContextFullError as e:
            say(f"error: {e}")
            return
        self.reply(ids)

    def reply(self, ids: list[int]) -> None:
        """Generate for a prompt, print, keep. An interrupt keeps what was said until then."""
        if dropped := self.conversation.dropped:
            say(f"note: the context is full: the {dropped} oldest messages and answers dropped")
        completion: Completion | None = None
        try:
            completion = self.llm.complete(
                ids, max_tokens=self.max_tokens, stop=self.stop, params=self._next_params()
            )
            stream(completion, Printer())
        except KeyboardInterrupt:
            if completion is None or not completion.text:
                self.conversation.rollback()
                say("interrupted before the first word: the message is taken back")
                return
        except BaseException:
            self.conversation.rollback()
            raise
        self.conversation.end_turn(completion.ids, completion.text, completion.finish_reason)
        say(closing_line(completion, draws_at_random(self.params)))
        self.save()

    def _next_params(self) -> SamplingParams:
        """A chosen seed counts on from reply to reply, so that /regen gives another answer."""
        self.n_replies += 1
        if self.params.seed is None:
            return self.params
        return replace(self.params, seed=(self.params.seed + self.n_replies - 1) % 2**64)

    def save(self) -> None:
        """Write the session, where there is one."""
        if self.session is not None:
            self.conversation.save(self.session)

    def command(self, line: str) -> bool:
        """Run a / command; False when it leaves."""
        name, _, rest = line.strip().partition(" ")
        if name in ("/exit", "/quit"):
            return False
        if name == "/help":
            say(HELP)
        elif name == "/clear":
            self.conversation.clear()
            self.save()
        elif name == "/system":
            self.conversation.clear()
            self.conversation.set_system(rest.strip() or None)
            self.save()
        elif name in ("/regen", "/undo"):
            self._again(name)
        else:
            say(f"{name} is not a command and was not sent; /help lists the commands")
        return True

    def _again(self, name: str) -> None:
        """/regen and /undo, which may find nothing to work on."""
        try:
            if name == "/regen":
                self.reply(self.conversation.regenerate())
            else:
                self.conversation.undo()
                self.save()
        except (ContextFullError, UsageError) as e:
            say(str(e))


def piped_lines() -> Iterator[str]:
    """The lines of stdin; bytes that are not UTF-8 become U+FFFD."""
    for line in sys.stdin.buffer:
        yield line.decode("utf-8", "replace").rstrip("\r\n")


def typed_lines() -> Iterator[str]:
    """Lines edited at a prompt, until Ctrl-D. Ctrl-C twice in a row raises KeyboardInterrupt."""
    from prompt_toolkit import PromptSession

    prompt: PromptSession[str] = PromptSession("> ")
    interrupted = False
    while True:
        try:
            line = prompt.prompt()
        except EOFError:
            return
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted = True
            say("(Ctrl-C again, Ctrl-D or /exit leaves)")
            continue
        interrupted = False
        yield line
