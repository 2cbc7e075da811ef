"""Renders templates of model files in a process of their own, which they may bring down.

One process serves all templates; it is started at the first, ended with this one, and started anew
after a template that it did not survive. No shell, no pickle: JSON lines over its pipes.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from minfer_cuda.errors import TemplateError, UsageError

MAX_MESSAGE = 500  # characters of an error that a template has worded
_SERVE = (
    "import sys; sys.path[:] = sys.argv[1:]; from minfer_cuda.template_engine import serve; serve()"
)
_ROOT = Path(__file__).resolve().parent.parent  # an editable install is not on `sys.path`
_ENDS = {
    "SIGXCPU": "it does not come to an end",
    "SIGKILL": "it took too much memory or time",
    "SIGSEGV": "it holds a value that has no end, or nests too deep",
    "SIGABRT": "it takes too much memory",
}

_lock = threading.Lock()
_running: subprocess.Popen[str] | None = None
_owner = 0  # process id: a fork must not speak through our pipes


class Refusal(TemplateError):
    """The template itself rejected the messages, by `raise_exception`."""


def start() -> None:
    """Start the process, if it is not there, and return at once: its 50 ms pass meanwhile."""
    with _lock:
        _process()


def render(source: str, values: Mapping[str, Any], now: datetime) -> str:
    """The text that the Jinja `source` makes of `values`, which must be what JSON can hold. `now`
    is what `strftime_now` reads. Raises TemplateError and, of it, Refusal."""
    try:
        request = json.dumps({"source": source, "values": values, "now": now.isoformat()})
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"messages and tools must be what JSON can hold: {error}") from error
    with _lock:
        process = _process()
        try:
            answer = _exchange(process, request)
        except BaseException:  # an interrupt too: the answer would be taken for the next one's
            process.kill()
            _end()
            raise
        if answer is None:
            code = _end()
            raise TemplateError(f"the template was stopped: {_why(code)}")
    if "text" in answer:
        return str(answer["text"])
    kind = Refusal if "refusal" in answer else TemplateError
    message = str(answer.get("refusal", answer.get("error")))
    raise kind(message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}...")


def _exchange(process: subprocess.Popen[str], request: str) -> dict[str, Any] | None:
    """The answer, or None where the process has died."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(f"{request}\n")
        process.stdin.flush()
    except OSError:
        return None
    line = process.stdout.readline()
    return json.loads(line) if line.endswith("\n") else None


def _process() -> subprocess.Popen[str]:
    global _running, _owner
    if _running is None or _owner != os.getpid():
        _running = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _SERVE, *sys.path, str(_ROOT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="ascii",
            start_new_session=True,  # a Ctrl-C at the terminal does not reach it
        )
        _owner = os.getpid()
    return _running


def _end() -> int:
    """End the process; its exit code, which is negative for a signal that it died of."""
    global _running
    process, _running = _running, None
    if process is None or _owner != os.getpid():
        return 0
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        try:
            pipe.close()
        except OSError:  # what was not written yet has no reader any more
            continue
    try:
        return process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _why(code: int) -> str:
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"exit code {code}"
    return f"{_ENDS.get(name, 'it ended its process')} ({name})"


def _stop() -> None:
    """End the process without waiting until it has put itself in order."""
    if _running is not None and _owner == os.getpid():
        _running.kill()
    _end()


atexit.register(_stop)
