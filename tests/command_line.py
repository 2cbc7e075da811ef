"""How tests run `minfer`: in this process, as a process of its own, and on a pseudo-terminal."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from pathlib import Path

import ggufs
import pytest
from typer.testing import CliRunner

from cli.main import app
from minfer_cuda.files import PART_SUFFIX

ROOT = Path(__file__).resolve().parent.parent
CPU = ("--device", "cpu", "--n-ctx", "256")
GREEDY = (*CPU, "--temp", "0", "-n", "6")
PATIENCE_S = 60  # with a loaded machine
MAIN = "\nfrom cli.__main__ import main\nmain()\n"  # `minfer`, behind code that changes it
PROMPT = "\x1b[?2004h"  # bracketed paste on: the editor reads keys from here on


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("cli") / "tiny.gguf"
    return str(ggufs.write_gguf(path, **ggufs.ONE_LAYER))


def minfer(*arguments, stdin=None):
    """Run in this process; stdout and stderr apart."""
    return CliRunner().invoke(app, [*map(str, arguments)], input=stdin)


def process(*arguments, **options):
    """Start `minfer` as a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), **options.pop("env", {})}
    return subprocess.Popen(
        [sys.executable, "-m", "cli", *map(str, arguments)],
        cwd=ROOT,
        env=environment,
        **{
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            **options,
        },
    )


def one_error_line(result) -> str:
    """The last line on stderr, after checking that nothing else looks like a failure."""
    assert "Traceback" not in result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, result.stderr
    return lines[0]


def names(folder) -> list[str]:
    """All files below a folder."""
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def unfinished(folder) -> list[str]:
    """Those that are not whole, and locks."""
    return [n for n in names(folder) if n.endswith((PART_SUFFIX, ".lock")) or "/." in f"/{n}"]


def _own_terminal():
    """Make stdin the terminal whose Ctrl-C reaches this process, just begun."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """`minfer` on a pseudo-terminal, its history in `home`."""

    def __init__(self, home, *arguments, **environment):
        pty = pytest.importorskip("pty")
        self.controller, user = pty.openpty()
        environment = {"TERM": "xterm", "NO_COLOR": ""} | environment
        environment |= {"XDG_STATE_HOME": str(home)}
        self.process = process(*arguments, stdin=user, stdout=user, stderr=user, env=environment,
                               start_new_session=True, preexec_fn=_own_terminal)  # fmt: skip
        os.close(user)
        self.seen = ""
        self.mark = 0

    def wait_for(self, text):
        """Read until `text` comes, after what was waited for before; what came in between."""
        deadline = time.monotonic() + PATIENCE_S
        while (found := self.seen.find(text, self.mark)) < 0:
            left = deadline - time.monotonic()
            ready = left > 0 and select.select([self.controller], [], [], left)[0]
            assert ready, f"{text!r} did not come: {self.seen[self.mark :][-2000:]!r}"
            self.seen += os.read(self.controller, 4096).decode(errors="replace")
        between, self.mark = self.seen[self.mark : found], found + len(text)
        return between

    def type(self, keys):
        os.write(self.controller, keys.encode())

    def ask(self, text):
        """Type a line and wait for the next prompt; what came in between."""
        self.type(f"{text}\r")
        return self.wait_for(PROMPT)

    def leave(self):
        """Type Ctrl-D; the exit code."""
        self.type("\x04")
        return self.exit_code()

    def exit_code(self):
        """Of the process, whose last output is read."""
        deadline = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            if time.monotonic() > deadline:
                self.process.kill()
                pytest.fail(f"it does not end: {self.seen[-2000:]!r}")
            ready, _, _ = select.select([self.controller], [], [], 1)
            try:
                if ready:
                    self.seen += os.read(self.controller, 4096).decode(errors="replace")
            except OSError:  # the other end is closed
                self.process.wait(60)
        os.close(self.controller)
        return self.process.returncode
