"""The turns of a chat, and the prompt ids that they make.

Replies keep the ids that the model generated, so that the next prompt begins with exactly what the
KV cache holds. The engine reuses the longest common prefix of ids; nothing here knows an engine.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minfer_cuda.chat_template import ChatTemplate
from minfer_cuda.errors import ContextFullError, SessionError, UsageError
from minfer_cuda.files import replacing
from minfer_cuda.tokenizer import Tokenizer, well_formed

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Turn:
    """One message. `ids`: what the model generated for `content`, without the end token; empty for
    all that was not generated here. `finish_reason`: how a reply ended, "" for others."""

    role: str
    content: str
    ids: tuple[int, ...] = ()
    finish_reason: str = ""


class Conversation:
    """A chat within `n_ctx` positions.

    `begin_turn` or `regenerate` gives the ids to prefill; after generating, `end_turn` takes the
    reply, or `rollback` leaves everything as it was before. `dropped`: user turns, with what
    followed each, that the last of these calls removed to make room.
    """

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        n_ctx: int,
        *,
        system: str | None = None,
        reserve: int = 1,
    ):
        """`system`: None leaves it to the template, "" is an empty message. `reserve`: positions
        kept free for the reply, if old turns can be dropped for it."""
        self._template = template
        self._tokenizer = tokenizer
        self.n_ctx = n_ctx
        self.reserve = reserve
        self.turns: tuple[Turn, ...] = ()
        self.dropped = 0
        self._before: tuple[Turn, ...] | None = None  # to roll back to, while a reply is awaited
        self.set_system(system)

    @property
    def messages(self) -> list[dict[str, str]]:
        """The turns as `role` and `content`."""
        return [{"role": turn.role, "content": turn.content} for turn in self.turns]

    @property
    def system(self) -> str | None:
        """The system message, or None."""
        return next((turn.content for turn in self.turns if turn.role == "system"), None)

    def prompt_ids(self, add_generation_prompt: bool = True) -> list[int]:
        """The ids of all turns."""
        return self._ids(self.turns, add_generation_prompt)

    def begin_turn(self, user_text: str) -> list[int]:
        """Add a user message and return the prompt for its reply. The oldest turns are dropped when
        they leave no room; ContextFullError, and no change, when that does not suffice."""
        return self._await_reply((*self.turns, Turn("user", well_formed(user_text))))

    def regenerate(self) -> list[int]:
        """Take the last reply back and return the prompt for a new one. UsageError, and no change,
        when there is none."""
        last = self._last_user("nothing to regenerate: there is no message yet")
        return self._await_reply(self.turns[: last + 1])

    def end_turn(self, ids: Sequence[int], text: str, finish_reason: str) -> None:
        """Add the reply: the generated `ids`, with or without the end token, and the `text` that
        was printed. Ids past the end of `text` (a stop string cut it) are not kept."""
        if self._before is None:
            raise UsageError("no turn is open: begin_turn comes first")
        text = well_formed(text)
        kept = self._ids_of(ids, text)
        self.turns += (Turn("assistant", text, kept, finish_reason),)
        self._before = None

    def rollback(self) -> None:
        """Forget the open turn, dropped ones come back. Does nothing when no turn is open."""
        if self._before is not None:
            self.turns, self._before, self.dropped = self._before, None, 0

    def undo(self) -> str:
        """Remove the last user message and what followed; return its text. UsageError, and no
        change, when there is none."""
        last = self._last_user("nothing to undo: there is no message yet")
        text = self.turns[last].content
        self.turns, self._before = self.turns[:last], None
        return text

    def clear(self) -> None:
        """Remove all turns but the system message."""
        self.turns, self._before = self.turns[: self._n_system()], None

    def set_system(self, text: str | None) -> None:
        """Replace the system message; None removes it (templates may have a default)."""
        system = () if text is None else (Turn("system", well_formed(text)),)
        self.turns, self._before = (*system, *self.turns[self._n_system() :]), None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the turns as a JSON list of `role` and `content`. The file is replaced at once or,
        with SessionError, not at all."""
        text = json.dumps(self.messages, ensure_ascii=False, indent=1) + "\n"
        try:
            with replacing(path) as file:
                file.write(text.encode("utf-8"))
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            why = getattr(error, "strerror", None) or error
            raise SessionError(f"cannot save the conversation to {path}: {why}") from error

    def load(self, path: str | os.PathLike[str]) -> None:
        """Take the turns from a file that `save` wrote. SessionError, and no change to the turns
        or the file, when it is not such a file."""
        self.turns = _read_turns(path)
        self._before, self.dropped = None, 0

    def _await_reply(self, turns: tuple[Turn, ...]) -> list[int]:
        if self._before is not None:
            raise UsageError("a turn is open: end_turn or rollback comes first")
        n_system = self._n_system()
        users = [i for i, turn in enumerate(turns) if turn.role == "user" and i >= n_system]

        def without(n_dropped: int) -> tuple[Turn, ...]:
            return turns if n_dropped == 0 else turns[:n_system] + turns[users[n_dropped] :]

        def fits(n_dropped: int) -> bool:
            return len(self._ids(without(n_dropped))) + self.reserve <= self.n_ctx

        most = len(users) - 1
        n_dropped = bisect_left(range(most), True, key=fits) if not fits(0) else 0
        ids = self._ids(without(n_dropped))
        if len(ids) >= self.n_ctx:
            hint = "raise --n-ctx or shorten the message"
            raise ContextFullError(len(ids) + 1, self.n_ctx, hint)
        self._before, self.turns, self.dropped = self.turns, without(n_dropped), n_dropped
        return ids

    def _ids(self, turns: Sequence[Turn], add_generation_prompt: bool = True) -> list[int]:
        return self._template.encode(
            [{"role": turn.role, "content": turn.content} for turn in turns],
            self._tokenizer,
            add_generation_prompt=add_generation_prompt,
            generated={i: turn.ids for i, turn in enumerate(turns) if turn.ids},
        )

    def _ids_of(self, ids: Sequence[int], text: str) -> tuple[int, ...]:
        """Ids for `text`: the generated ones as far as they print a prefix of it, then, where it
        was cut inside a token, those of what is left."""
        end = len(ids)
        while end and ids[end - 1] in self._tokenizer.end_ids:
            end -= 1
        if self._tokenizer.decode(ids[:end]) == text:
            return tuple(ids[:end])
        wanted = text.encode("utf-8")
        size = 0
        n_kept, kept_size = 0, 0
        for n, token in enumerate(ids[:end], 1):
            piece = self._tokenizer.token_bytes(token)
            if not wanted.startswith(piece, size):
                break
            size += len(piece)
            if wanted[size : size + 1] < b"\x80" or wanted[size : size + 1] > b"\xbf":
                n_kept, kept_size = n, size  # what follows begins a character
        rest = wanted[kept_size:].decode("utf-8")
        return (*ids[:n_kept], *self._tokenizer.encode(rest, parse_special=False))

    def _n_system(self) -> int:
        """How many turns at the start are system messages."""
        others = (i for i, turn in enumerate(self.turns) if turn.role != "system")
        return next(others, len(self.turns))

    def _last_user(self, problem: str) -> int:
        users = [i for i, turn in enumerate(self.turns) if turn.role == "user"]
        if not users:
            raise UsageError(problem)
        return users[-1]


def read_messages(path: str | os.PathLike[str]) -> list[dict[str, str]]:
    """The messages of a file that `Conversation.save` wrote. Raises SessionError for others."""
    return [{"role": turn.role, "content": turn.content} for turn in _read_turns(path)]


def _read_turns(path: str | os.PathLike[str]) -> tuple[Turn, ...]:
    try:
        messages = json.loads(Path(path).read_text("utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or error
        raise SessionError(f"cannot read the conversation in {path}: {why}") from error
    if not isinstance(messages, list):
        raise SessionError(f"{path} is not a conversation: a list of messages is expected")
    return tuple(_turn(message, i, path) for i, message in enumerate(messages, 1))


def _turn(message: Any, number: int, path: str | os.PathLike[str]) -> Turn:
    if not isinstance(message, dict) or set(message) != {"role", "content"}:
        raise SessionError(f"{path}: message {number} does not have exactly `role` and `content`")
    role, content = message["role"], message["content"]
    if not isinstance(role, str) or not isinstance(content, str):
        raise SessionError(f"{path}: `role` and `content` of message {number} must be texts")
    if role not in ROLES:
        raise SessionError(f"{path}: message {number} has the role {role!r}, not one of {ROLES}")
    return Turn(role, well_formed(content))
