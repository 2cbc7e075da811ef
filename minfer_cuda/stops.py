"""Pieces of output to text: UTF-8 across tokens, and stop strings across pieces."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from minfer_cuda.errors import UsageError


class TokenBytes(Protocol):
    """What `TextStream` needs of a tokenizer."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes that `token` adds to the output."""


class StopMatcher:
    """Cuts a stream of text at the first stop string.

    The result does not depend on how the text is cut into pieces: the match that starts first
    wins, the longest at that start. Text that may still become a match is held back.
    """

    def __init__(self, stops: Sequence[str]):
        """Raises UsageError for an empty stop string."""
        if not all(stops):
            raise UsageError("a stop string is empty: it would stop before the first character")
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._held = ""
        self.stopped: str | None = None  # the stop string that was found

    def push(self, piece: str) -> str:
        """The text that is now certain to stand before any stop string; "" once stopped."""
        if self.stopped is not None:
            return ""
        self._held += piece
        return self._release(final=False)

    def finish(self) -> str:
        """The end of the text: what was held back, cut at a stop string if one is complete."""
        return "" if self.stopped is not None else self._release(final=True)

    def _release(self, final: bool) -> str:
        text = self._held
        for start in range(len(text)) if self._stops else ():
            whole = next((s for s in self._stops if text.startswith(s, start)), None)
            tail = text[start : start + len(self._stops[0])]
            open_ended = not final and any(len(s) > len(tail) and s.startswith(tail)
                                           for s in self._stops)  # fmt: skip
            if open_ended:  # a longer match may begin here: wait for more text
                self._held = text[start:]
                return text[:start]
            if whole is not None:
                self.stopped = whole
                self._held = ""
                return text[:start]
        self._held = ""
        return text


class TextStream:
    """Token ids in, printable text out, ended by stop strings. `stopped` is the one found.

    A character is given out once its last byte is there; bytes that cannot be UTF-8 become U+FFFD.
    Without a stop the pieces make `bytes.decode("utf-8", "replace")` of all tokens' bytes.
    """

    def __init__(self, tokenizer: TokenBytes, stops: Sequence[str] = ()):
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._matcher = StopMatcher(stops)

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._matcher.stopped

    def push(self, token: int) -> str:
        """The text that `token` makes certain; may be empty."""
        return self._matcher.push(self._utf8.decode(self._tokenizer.token_bytes(token)))

    def finish(self) -> str:
        """The rest, after the last token. Check `stopped` again: it may be set here."""
        return self._matcher.push(self._utf8.decode(b"", final=True)) + self._matcher.finish()
