"""What the user enters in a chat: lines, and blocks between triple quotes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

QUOTES = '"""'


@dataclass(frozen=True)
class Entry:
    """One message or command. `literal`: it came as a block or a file, and is never a command."""

    text: str
    literal: bool = False


def is_open(text: str) -> bool:
    """Whether `text` begins a block that is not closed yet."""
    text = text.strip()
    closed = text.endswith(QUOTES) and len(text) >= 2 * len(QUOTES)
    return text.startswith(QUOTES) and not closed


def as_entry(text: str) -> Entry:
    """`text` as it was entered, without the quotes of a block."""
    block = text.strip()
    if not block.startswith(QUOTES):
        return Entry(text)
    inner = block.removeprefix(QUOTES).removesuffix(QUOTES)
    return Entry(inner.strip("\r\n"), literal=True)


def piped_entries() -> Iterator[Entry]:
    """The lines and blocks of stdin; bytes that are not UTF-8 become U+FFFD. A block that the end
    of input leaves open ends there."""
    block: list[str] = []
    for raw in sys.stdin.buffer:
        line = raw.decode("utf-8", "replace").rstrip("\r\n")
        closes = line.rstrip().endswith(QUOTES)
        opens = is_open(line) if not block else not closes
        block.append(line)
        if not opens:
            yield as_entry("\n".join(block))
            block = []
    if block:
        yield as_entry("\n".join(block))
