"""The input line of a chat on a terminal. Imports prompt_toolkit: only for those who type."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from platformdirs import user_state_path
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.shortcuts import CompleteStyle
from prompt_toolkit.styles import Style

from .app import notice, say
from .entries import Entry, as_entry, is_open
from .terminal import has_colours

PROMPT, CONTINUATION = "> ", ". "


class CommandCompleter(Completer):
    """Completes the names of commands, and their first arguments."""

    def __init__(self, commands: Mapping[str, Sequence[str] | str]):
        """`commands`: for each name the words that may follow it, or `commands.FILES`."""
        self._commands = commands
        self._paths = PathCompleter(expanduser=True)

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterable[Completion]:
        text = document.text_before_cursor
        if not text.startswith("/"):
            return
        name, space, rest = text.partition(" ")
        words = self._commands.get(name, ()) if space else tuple(self._commands)
        if isinstance(words, str):
            yield from self._paths.get_completions(Document(rest), complete_event)
            return
        begun = rest if space else name
        for word in words:
            if word.startswith(begun):
                yield Completion(word, -len(begun))


def keys() -> KeyBindings:
    """Enter sends, but not from within a block; Alt-Enter begins a new line."""
    bindings = KeyBindings()
    typing = has_focus(DEFAULT_BUFFER)

    @bindings.add("enter", filter=typing)
    def _(event: KeyPressEvent) -> None:
        if is_open(event.current_buffer.text):
            event.current_buffer.newline(copy_margin=False)
        else:
            event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter", filter=typing)
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    @bindings.add("c-c", filter=typing)
    @bindings.add("<sigint>", filter=typing)
    def _(event: KeyPressEvent) -> None:
        interrupt = KeyboardInterrupt(event.current_buffer.text)
        event.app.exit(exception=interrupt, style="class:aborting")

    return bindings


class ChatHistory(FileHistory):
    """Messages in a file; those that the disk does not take are kept for this chat only."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.path = path
        self._told = False

    def store_string(self, string: str) -> None:
        try:
            super().store_string(string)
        except OSError as e:
            if not self._told:
                notice(f"the history is kept for this chat only: {self.path}: {e.strerror}")
            self._told = True


def history() -> History:
    """The messages of earlier chats too, where a file for them can be written."""
    path = user_state_path("minfer") / "chat-history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.open("ab").close()
    except OSError as e:
        notice(f"the history is kept for this chat only: {path}: {e.strerror}")
        return InMemoryHistory()
    return ChatHistory(path)


def typed_entries(commands: Mapping[str, Sequence[str] | str]) -> Iterator[Entry]:
    """What is entered at a prompt, until Ctrl-D.

    Ctrl-C clears what was typed; a second one in a row at an empty prompt raises
    KeyboardInterrupt. `commands`: see `CommandCompleter`.
    """
    # Of a terminal that does not say where its cursor is, prompt_toolkit awaits the answer for a
    # second after each line, deaf to Ctrl-C. Only menus and toolbars need it: there are none here.
    os.environ["PROMPT_TOOLKIT_NO_CPR"] = "1"
    session: PromptSession[str] = PromptSession(
        [("class:prompt", PROMPT)],
        multiline=True,
        prompt_continuation=CONTINUATION,
        completer=CommandCompleter(commands),
        complete_style=CompleteStyle.READLINE_LIKE,
        history=history(),
        key_bindings=keys(),
        style=Style.from_dict({"prompt": "bold ansigreen"} if has_colours(sys.stdout) else {}),
    )
    interrupted = False
    while True:
        try:
            text = session.prompt()
        except EOFError:
            return
        except KeyboardInterrupt as e:
            cleared = bool(e.args and e.args[0])
            if interrupted and not cleared:
                raise
            interrupted = not cleared
            if interrupted:
                say("(Ctrl-C again, Ctrl-D or /exit leaves)")
            continue
        interrupted = False
        yield as_entry(text)
