"""minfer chat: a conversation that keeps its KV cache across turns."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from minfer_cuda.errors import UsageError

from . import options
from .app import counted, notice, say
from .entries import Entry, piped_entries
from .files import read_text, without_last_newline
from .model import Sampling, Settings, open_model

if TYPE_CHECKING:
    from minfer_cuda.conversation import Conversation
    from minfer_cuda.llm import LLM

RESERVED_SHARE = 4  # a quarter of the context is kept for the reply, if old turns can go for it

Session = Annotated[
    Path | None,
    typer.Option(
        "--session", metavar="FILE", help="Go on from this JSON file and keep it up to date."
    ),
]


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
    session: Session = None,
    prompt_file: options.PromptFile = None,
    single_turn: Annotated[
        bool, typer.Option("--single-turn", help="Answer one message, then leave.")
    ] = False,
    hide_thinking: options.HideThinking = False,
    raw: Annotated[bool, typer.Option("--raw", hidden=True, help="Not for chat.")] = False,
    device: options.Device = "auto",
    kv_type: options.KV = None,
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
    if session is not None and not session.parent.is_dir():
        raise UsageError(f"--session: there is no folder {session.parent}")
    if session is not None and session.exists():
        from minfer_cuda.conversation import read_messages

        read_messages(session)  # what is no conversation is said before the model is loaded
    first = []
    if prompt_file is not None:
        first.append(Entry(without_last_newline(read_text(prompt_file)), literal=True))
    settings = Settings(n_ctx, device, kv_type and kv_type.value, chat_template, rope_freq_base)
    with open_model(model, settings, verbose) as llm:
        from .repl import Choices, Repl

        conversation = begin(llm, max_tokens, session, system)
        params = sampling.params(llm, llm.tokenizer.end_ids if ignore_eos else ())
        choices = Choices(params, max_tokens, stop or [], hide_thinking)
        repl = Repl(llm, conversation, choices, session)
        typed = sys.stdin.isatty() and sys.stdout.isatty()
        if sys.stdin.isatty() and not single_turn:
            say(f"{llm.config.name}, context {llm.n_ctx}. /help lists the commands.")
            if not typed:
                notice("stdout is no terminal: one message a line, without a prompt")
        repl.run(chain(first, entries(typed)), single_turn, patient=typed)
        if repl.refused and not repl.totals.answers and not typed:
            raise typer.Exit(1)  # scripts see that nothing was answered


def begin(
    llm: LLM, max_tokens: int | None, session: Path | None, system: str | None
) -> Conversation:
    """A new conversation, or the one in the session file, with another system message if given."""
    from minfer_cuda.conversation import Conversation

    reserve = min(max_tokens or llm.n_ctx, llm.n_ctx // RESERVED_SHARE)
    conversation = Conversation(
        llm.template, llm.tokenizer, llm.n_ctx, system=system, reserve=max(reserve, 1)
    )
    if session is not None and session.exists():
        conversation.load(session)
        if system is not None:
            conversation.set_system(system)
        notice(f"going on from {counted(len(conversation.turns), 'message')} in {session}")
    return conversation


def entries(typed: bool) -> Iterable[Entry]:
    """What the user enters, at a prompt or through a pipe."""
    if not typed:
        return piped_entries()
    from .commands import completions
    from .editor import typed_entries

    return typed_entries(completions())
