"""What a process owes those that started it: streams, signals, a last line and an exit code.

Imports next to nothing, so that signals are in hand before the rest is imported.
"""

from __future__ import annotations

import atexit
import errno
import gc
import io
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import TextIO

SIGNALLED = 128  # an exit code above it is that and the signal's number
ENDS = ("SIGTERM", "SIGHUP")  # end the program as Ctrl-C does
WORDS = {int(signal.SIGINT): "interrupted", int(signal.SIGTERM): "terminated"}
AGAIN_S = 0.02  # until a signal is sent again
RARELY = 1_000_000  # objects between two looks for garbage: imports and a vocabulary make fewer


class Terminated(SystemExit):
    """SIGTERM or SIGHUP: whatever is being done is put in order on the way out."""

    def __init__(self, number: int):
        super().__init__(SIGNALLED + number)
        self.number = number


def run(command: Callable[[], None]) -> None:
    """Run `command`, which ends by SystemExit or returns, and leave the process.

    A process that was interrupted says so on its last line. Each ends once everything is in order:
    it waits neither for the compiler's threads nor for a device that may be lost, and the system
    frees at once what Python would free object by object, for a tenth of a second. A reader of
    stdout that has gone (`| head`) wants no more: that is no failure.
    """
    gc.set_threshold(RARELY)
    wrap_streams()
    catch_signals()
    try:
        try:
            command()
            code = 0
        except KeyboardInterrupt:
            code = SIGNALLED + signal.SIGINT
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is over
        if not code:
            atexit._run_exitfuncs()
        sys.stdout.flush()
    except Unwritable as failure:
        code = 0 if failure.reason.errno == errno.EPIPE else 1
        hush(sys.stdout)
        if code:
            print(f"error: {failure}", file=sys.stderr, flush=True)
    if code > SIGNALLED:
        last = WORDS.get(code - SIGNALLED, f"ended by signal {code - SIGNALLED}")
        print(last, file=sys.stderr, flush=True)
    sys.stderr.flush()
    os._exit(code)


# ---- signals ----


def catch_signals() -> None:
    """Make `ENDS` raise Terminated in the main thread, and see that no signal gets lost."""
    for name in ENDS:
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, _terminate)
    sys.unraisablehook = _dropped


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated(number)


def _dropped(dropped: sys.UnraisableHookArgs) -> None:
    """An exception in a finaliser or a weak reference's callback, which Python drops: where it is
    a signal's, send the signal again. CuPy's finalisers fail where the device is lost, which is the
    error that the user is told."""
    if issubclass(dropped.exc_type, KeyboardInterrupt):
        _send_soon(signal.SIGINT)
    elif isinstance(dropped.exc_value, Terminated):
        _send_soon(dropped.exc_value.number)
    elif not dropped.exc_type.__module__.startswith("cupy"):
        sys.__unraisablehook__(dropped)


def _send_soon(number: int) -> None:
    thread = threading.Timer(AGAIN_S, _send, [number])
    thread.daemon = True
    thread.start()


def _send(number: int) -> None:
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, number)
    else:
        signal.raise_signal(number)


# ---- streams ----


class Unwritable(Exception):
    """stdout takes no more. Not an OSError: nobody on the way may take it for another file's."""

    def __init__(self, reason: OSError):
        super().__init__(f"cannot write to stdout: {reason.strerror}")
        self.reason = reason


class Stdout(io.TextIOWrapper):
    """Raises Unwritable where it cannot write."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            raise Unwritable(error) from error

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            raise Unwritable(error) from error


class Stderr(io.TextIOWrapper):
    """Notices that nobody can read any more are left out; the program goes on."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError:
            hush(self)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError:
            hush(self)


def wrap_streams() -> None:
    """Give each standard stream that is closed the null device: else the next file to be opened, a
    model or a session, would take its place and get what is printed."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            _to_null(number)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = _wrapped(1, sys.stdout, Stdout)
    sys.stderr = _wrapped(2, sys.stderr, Stderr)


def _wrapped(number: int, before: TextIO | None, kind: type[io.TextIOWrapper]) -> io.TextIOWrapper:
    return kind(
        open(number, "wb", closefd=False),
        encoding=before.encoding if before else "utf-8",
        errors="replace",  # what the encoding lacks is printed as `?`
        line_buffering=os.isatty(number),
    )


def hush(stream: TextIO) -> None:
    """Point a stream at nothing, so that no later flush complains."""
    _to_null(stream.fileno())


def _to_null(number: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null != number:
        os.dup2(null, number)
        os.close(null)
    else:
        os.set_inheritable(null, True)
