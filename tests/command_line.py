"""How tests run `minfer`: in this process, as a process of its own, and on a pseudo-terminal."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import ggufs
import pytest
from typer.testing import CliRunner

from cli.main import app

ROOT = Path(__file__).resolve().parent.parent
CPU = ("--device", "cpu", "--n-ctx", "256")
GREEDY = (*CPU, "--temp", "0", "-n", "6")
PROMPT = "\x1b[?2004h"  # bracketed paste on: the editor reads keys from here on


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("cli") / "tiny.gguf"
    return str(ggufs.write_gguf(path, layers=1, d=128, heads=2, kv_heads=1, ffn=128))


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


class Terminal:
    """`minfer chat` on a pseudo-terminal."""

    def __init__(self, model):
        pty = pytest.importorskip("pty")
        self.controller, user = pty.openpty()
        streams = {"stdin": user, "stdout": user, "stderr": user}
        environment = {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
        self.process = process("chat", model, *GREEDY, **streams, env=environment,
                               start_new_session=True)  # fmt: skip
        os.close(user)
        self.seen = ""

    def wait_for(self, text, count=1):
        """Read until `text` was printed `count` times."""
        while self.seen.count(text) < count:
            ready, _, _ = select.select([self.controller], [], [], 30)
            assert ready, f"{text!r} did not come: {self.seen!r}"
            self.seen += os.read(self.controller, 4096).decode(errors="replace")

    def type(self, keys):
        os.write(self.controller, keys)

    def exit_code(self):
        """Of the process, whose last output is read away."""
        while self.process.poll() is None:
            ready, _, _ = select.select([self.controller], [], [], 1)
            try:
                if ready:
                    os.read(self.controller, 4096)
            except OSError:  # the other end is closed
                self.process.wait(60)
        os.close(self.controller)
        return self.process.returncode
