"""What a file holds, made fit for a message or a terminal."""

from __future__ import annotations

from collections.abc import Sequence

SHOWN = 40  # characters of a value in a message


def printable(text: str) -> str:
    """`text` with every character that is not printable written as its escape, so that nothing in
    a file can move a terminal's cursor, colour it or set its title."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def shown(value: object) -> str:
    """A metadata value for a message: as Python writes it, cut where it is long."""
    if isinstance(value, Sequence):
        value = value[: SHOWN + 1]  # writing all of it out would take long for nothing
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
