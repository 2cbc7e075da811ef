"""What only a terminal gets: colours and a spinner. Pipes, files and dumb terminals see neither."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import TextIO

STYLES = {"dim": "2", "bold": "1", "red": "31", "green": "32", "yellow": "33"}
INTERVAL_S = 0.1  # of the spinner
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)")  # all but tab, line ends


@contextmanager
def remembered_interrupt() -> Iterator[Callable[[], None]]:
    """Inside, Ctrl-C raises KeyboardInterrupt where it finds the program, as ever, and the function
    that is given raises it again: where that is a finaliser or a weak reference's callback, Python
    drops the exception with a report on stderr, and the answer would go on."""
    pressed = False

    def press(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        raise KeyboardInterrupt

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    def report(dropped: sys.UnraisableHookArgs) -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            told(dropped)

    before, told = signal.signal(signal.SIGINT, press), sys.unraisablehook
    sys.unraisablehook = report
    try:
        yield check
    finally:
        sys.unraisablehook = told
        signal.signal(signal.SIGINT, before)


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

    def __init__(self, text: str = ""):
        self._text = text
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Spinner:
        if is_smart(sys.stderr) and is_smart(sys.stdout):
            self._thread = threading.Thread(target=self._turn, args=(sys.stderr,), daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Erase it; what is printed next stands in its place."""
        if self._thread is not None:
            self._done.set()
            self._thread.join()
            self._thread = None

    def _turn(self, stream: TextIO) -> None:
        pictures = frames(stream)
        n = 0
        while not self._done.is_set():
            print(f"\r{pictures[n % len(pictures)]} {self._text}", end="", file=stream, flush=True)
            n += 1
            self._done.wait(INTERVAL_S)
        print("\r\x1b[K", end="", file=stream, flush=True)
