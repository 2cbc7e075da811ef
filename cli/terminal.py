"""What only a terminal gets: colours, breaks at its width, a line that is redrawn, a spinner.

Pipes and files see none of it, dumb terminals only the breaks.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
import threading
from itertools import cycle
from typing import TextIO

STYLES = {"dim": "2", "bold": "1", "red": "31", "green": "32", "yellow": "33"}
INTERVAL_S = 0.1  # of the spinner
BAR = 20  # characters
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)")  # all but tab, line ends


def is_smart(stream: TextIO) -> bool:
    """Whether `stream` is a terminal that obeys escape sequences."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")


def has_colours(stream: TextIO) -> bool:
    """Whether text on `stream` may be coloured: NO_COLOR, when not empty, forbids it."""
    return is_smart(stream) and not os.environ.get("NO_COLOR")


def styled(text: str, style: str, stream: TextIO) -> str:
    """`text` in one of `STYLES`, where `stream` has colours."""
    return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if text and has_colours(stream) else text


def harmless(text: str, stream: TextIO) -> str:
    """`text` with pictures of the characters that would drive a terminal, if `stream` is one:
    models and their files may say anything. A pipe gets it as it is."""
    return CONTROL.sub(lambda match: picture(match[0]), text) if stream.isatty() else text


def picture(control: str) -> str:
    """Unicode's picture of a control character; it has none of those above 0x7F."""
    code = ord(control)
    return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else "\ufffd"


def columns_of(stream: TextIO) -> int:
    """The width of the terminal that `stream` is; 0 for anything else."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return 0


def fitted(line: str, columns: int, hanging: int = 0) -> str:
    """`line` broken between words where it is longer than `columns` (0: never); what follows the
    first goes `hanging` columns in."""
    if not columns or len(line) <= columns:
        return line
    indent = " " * (hanging if hanging <= columns // 2 else 2)
    return textwrap.fill(
        line, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def redraw(text: str) -> None:
    """Put `text` in the place of the line that stderr, a smart terminal, shows; "" erases it."""
    print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def bar(done: int, total: int) -> str:
    """How much of something is done, as in `[#####...............]`."""
    return f"[{'#' * (BAR * done // max(total, 1)):.<{BAR}}]"


def frames(stream: TextIO) -> str:
    """The spinner's pictures, as far as the encoding has them."""
    try:
        "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏".encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return "|/-\\"
    return "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


class Spinner:
    """Turns on stderr until `stop`, where both stdout and stderr are terminals. A context manager;
    stopping again does nothing."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Spinner:
        if is_smart(sys.stderr) and is_smart(sys.stdout):
            self._thread = threading.Thread(target=self._turn, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Erase it; what is printed next stands in its place."""
        if self._thread is not None:
            self._done.set()
            self._thread.join()
            self._thread = None

    def _turn(self) -> None:
        for picture in cycle(frames(sys.stderr)):
            print(f"\r{picture} ", end="", file=sys.stderr, flush=True)
            if self._done.wait(INTERVAL_S):
                break
        redraw("")
