"""What a reasoning model says to itself, told apart from its answer while both stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

OPEN, CLOSE = "<think>", "</think>"


class TokenText(Protocol):
    """What `begins_in_thought` needs of a tokenizer."""

    def token_text(self, token: int) -> str:
        """How `token` is spelt."""


@dataclass(frozen=True)
class Piece:
    """A run of output. `thought`: it stands within `<think>` and `</think>`, tags included."""

    text: str
    thought: bool = False


def begins_in_thought(prompt: Sequence[int], tokenizer: TokenText) -> bool:
    """Whether a prompt already ends with the tag that opens a thought, as some templates' do."""
    tail = "".join(map(tokenizer.token_text, prompt[-16:]))
    return tail.rstrip().endswith(OPEN)


class ThoughtSplitter:
    """Text in, pieces out. Only a tag at the very start opens a thought, so that an answer may
    speak of the tags; what may still become a tag is held back."""

    def __init__(self, in_thought: bool = False):
        """`in_thought`: the prompt has opened a thought already."""
        self._state = "thought" if in_thought else "start"
        self._held = ""

    def push(self, text: str) -> list[Piece]:
        """The pieces that `text` makes certain."""
        self._held += text
        pieces: list[Piece] = []
        if self._state == "start":
            self._start()
        if self._state == "thought":
            pieces += self._thought()
        if self._state == "answer" and self._held:
            pieces.append(Piece(self._held))
            self._held = ""
        return pieces

    def finish(self) -> list[Piece]:
        """What was held back, at the end of the text."""
        rest, self._held = self._held, ""
        return [Piece(rest, self._state == "thought")] if rest else []

    def _start(self) -> None:
        begun = self._held.lstrip()
        if begun.startswith(OPEN):
            self._state = "thought"
        elif not OPEN.startswith(begun):
            self._state = "answer"

    def _thought(self) -> list[Piece]:
        end = self._held.find(CLOSE)
        if end >= 0:
            end += len(CLOSE)
            self._state = "answer"
        else:
            end = len(self._held) - _overlap(self._held, CLOSE)
        piece, self._held = self._held[:end], self._held[end:]
        return [Piece(piece, True)] if piece else []


def _overlap(text: str, tag: str) -> int:
    """How many characters at the end of `text` begin `tag`."""
    return next((n for n in range(len(tag) - 1, 0, -1) if text.endswith(tag[:n])), 0)
