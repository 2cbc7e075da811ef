"""The one error boundary of all commands, and the words they print on stderr."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from minfer_cuda.errors import MinferError
from minfer_cuda.printable import printable

from .process import SIGNALLED, Unwritable
from .terminal import columns_of, fitted, styled

LONGEST = 2000  # characters of an error


class Boundary(TyperGroup):
    """Turns every exception of a command into one line on stderr and an exit code.

    Usage errors (2) are typer's own. MINFER_TRACEBACK=1 lets tracebacks through.
    """

    def invoke(self, ctx: Any) -> Any:  # typer's Context or click's, by typer's version
        """Run the command."""
        with _boundary():
            return super().invoke(ctx)


@contextmanager
def _boundary() -> Iterator[None]:
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except KeyboardInterrupt:
        raise typer.Exit(SIGNALLED + signal.SIGINT) from None
    except Exception as e:
        if isinstance(e, Unwritable) or _is_usage_error(e) or _tracebacks_wanted():
            raise
        _tell(e)
        raise typer.Exit(e.exit_code if isinstance(e, MinferError) else 1) from None


def _tell(e: Exception) -> None:
    if isinstance(e, MinferError):
        complain(e)
    elif isinstance(e, MemoryError):
        complain(f"this machine has too little memory: {str(e) or 'none is left'}")
    else:
        words = f"{type(e).__name__}: {one_line(e)}"
        say(f"internal error: {words} (please report; MINFER_TRACEBACK=1 shows where)", "red")


def _is_usage_error(e: Exception) -> bool:
    """Whether typer prints this itself: its exceptions know how to show themselves."""
    return hasattr(e, "show") and hasattr(e, "exit_code")


def _tracebacks_wanted() -> bool:
    """Whether MINFER_TRACEBACK is set to anything but nothing or 0."""
    return os.environ.get("MINFER_TRACEBACK", "") not in ("", "0")


def one_line(e: BaseException | str) -> str:
    """A message in one line, without what drives a terminal or fills it."""
    text = printable(" ".join(str(e).split()))
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def say(text: str, style: str = "", hanging: int = 0) -> None:
    """Print a notice on stderr: stdout has the answer and nothing else. What is not printable is
    shown as its escape; `style` is one of the terminal's. A line that is too long for the terminal
    goes on `hanging` columns in."""
    columns = columns_of(sys.stderr)
    shown = "\n".join(fitted(printable(line), columns, hanging) for line in text.split("\n"))
    print(styled(shown, style, sys.stderr) if style else shown, file=sys.stderr, flush=True)


def notice(text: str) -> None:
    """Say something that the user should hear; it may quote the model file."""
    say(f"note: {one_line(text)}")


def complain(error: Exception | str) -> None:
    """Say what went wrong, red where there are colours."""
    say(f"error: {one_line(error)}", "red")


def counted(n: int, noun: str) -> str:
    """As in "1 message", "2 messages"."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
