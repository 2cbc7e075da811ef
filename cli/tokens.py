"""minfer tokenize and minfer template: what exactly the model is given."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minfer_cuda.printable import printable

from . import options
from .app import notice
from .files import read_prompt
from .store import local_path
from .terminal import harmless

if TYPE_CHECKING:
    from minfer_cuda.tokenizer import Tokenizer

SAMPLE = "Hello!"  # the message of a template that is shown without one
Ids = Annotated[bool, typer.Option("--ids", help="Print the ids only, as a JSON list.")]


def tokenize(
    model: options.Model,
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="The text; without it, or as -, stdin.")
    ] = None,
    prompt_file: options.PromptFile = None,
    no_special: Annotated[
        bool, typer.Option("--no-special", help="Take <|im_end|> and the like as ordinary text.")
    ] = False,
    ids_only: Ids = False,
) -> None:
    """Show the token ids of a text.

    One a line, with what it stands for. Needs no GPU.

    Example: minfer tokenize model.gguf "Why is the sky blue?"
    """
    from minfer_cuda.gguf import GGUFFile
    from minfer_cuda.tokenizer import Tokenizer

    words = read_prompt(text, prompt_file)
    with GGUFFile.open(local_path(model)) as file:
        tokenizer = Tokenizer(file.metadata)
    ids = tokenizer.encode(words, parse_special=not no_special)
    print(json.dumps(ids) if ids_only else table(ids, tokenizer))


def template(
    model: options.Model,
    prompt: Annotated[
        str,
        typer.Argument(metavar="PROMPT", help="The user's message."),
    ] = SAMPLE,
    system: options.System = None,
    session: Annotated[
        Path | None,
        options.existing_file(
            "--session", help="Show the conversation of this file in place of PROMPT."
        ),
    ] = None,
    chat_template: options.ChatTemplate = None,
    source: Annotated[
        bool, typer.Option("--source", help="Print the template itself, in Jinja.")
    ] = False,
    ids_only: Ids = False,
) -> None:
    """Show the prompt that the chat template makes.

    Its text, then its token ids. Needs no GPU.

    Example: minfer template model.gguf "Why is the sky blue?" --system "Be brief."
    """
    from minfer_cuda.chat_template import ChatTemplate
    from minfer_cuda.conversation import read_messages
    from minfer_cuda.gguf import GGUFFile
    from minfer_cuda.tokenizer import Tokenizer

    with GGUFFile.open(local_path(model)) as file:
        tokenizer = Tokenizer(file.metadata)
        rendering = ChatTemplate.from_metadata(file.metadata, chat_template)
    for sentence in rendering.notices:
        notice(sentence)
    if source:
        print(harmless(rendering.source, sys.stdout))
        return
    messages: Sequence[dict[str, Any]] = [{"role": "user", "content": prompt}]
    if session is not None:
        messages = read_messages(session)
    if system is not None:
        messages = [{"role": "system", "content": system}, *messages]
    ids = rendering.encode(messages, tokenizer)
    if ids_only:
        print(json.dumps(ids))
    else:
        text = harmless(rendering.render(messages), sys.stdout)
        print(text, table(ids, tokenizer), sep="\n\n")


def table(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """One token a line: its id and its text, quoted as in JSON, what is not printable as its
    escape; bytes of an unfinished character in hexadecimal."""
    return "\n".join(f"{token:>7}  {spelling(token, tokenizer)}" for token in ids)


def spelling(token: int, tokenizer: Tokenizer) -> str:
    """A token's text in quotes, with a mark where it is a control token."""
    if tokenizer.is_control(token):
        return f"{printable(tokenizer.token_text(token))} (control)"
    data = tokenizer.token_bytes(token)
    try:
        return printable(json.dumps(data.decode("utf-8"), ensure_ascii=False))
    except UnicodeDecodeError:
        return f"bytes {data.hex(' ')}"
