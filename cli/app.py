"""The one error boundary of all commands, and the words they print on stderr."""

from __future__ import annotations

import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from minfer_cuda.errors import MinferError
from minfer_cuda.printable import printable

from .terminal import styled

INTERRUPTED = 130  # 128 + SIGINT
LONGEST = 2000  # characters of an error


class Boundary(TyperGroup):
    """Turns every exception of a command into one line on stderr and an exit code.

    Usage errors (2) are typer's own. MINFER_TRACEBACK=1 lets tracebacks through.
    """

    def invoke(self, ctx: Any) -> Any:  # typer's Context or click's, by typer's version
        """Run the command."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except (typer.Exit, typer.Abort):
            raise
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            hush_stdout()
            raise typer.Exit(0) from None
        except MinferError as e:
            if tracebacks_wanted():
                raise
            complain(f"error: {one_line(e)}")
            raise typer.Exit(e.exit_code) from None
        except Exception as e:
            if is_usage_error(e) or tracebacks_wanted():
                raise
            complain(
                f"internal error: {type(e).__name__}: {one_line(e)} "
                "(please report; MINFER_TRACEBACK=1 shows where)"
            )
            raise typer.Exit(1) from None


def is_usage_error(e: Exception) -> bool:
    """Whether typer prints this itself: its exceptions know how to show themselves."""
    return hasattr(e, "show") and hasattr(e, "exit_code")


def tracebacks_wanted() -> bool:
    """Whether MINFER_TRACEBACK is set to anything but nothing or 0."""
    return os.environ.get("MINFER_TRACEBACK", "") not in ("", "0")


def one_line(e: BaseException | str) -> str:
    """The message in one line, without what drives a terminal or fills it."""
    text = printable(" ".join(str(e).split()))
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def say(text: str, style: str = "") -> None:
    """Print a notice on stderr: stdout has the answer and nothing else. What is not printable is
    shown as its escape; `style` is one of the terminal's."""
    shown = "\n".join(map(printable, text.split("\n")))
    print(styled(shown, style, sys.stderr) if style else shown, file=sys.stderr, flush=True)


def complain(text: str) -> None:
    """Print an error on stderr, red where there are colours."""
    say(text, "red")


def hush_stdout() -> None:
    """Point stdout at nothing, after its reader has gone, so that no later flush complains."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)


def utf8_streams() -> None:
    """What the terminal's encoding lacks is printed as `?`, never raised."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
