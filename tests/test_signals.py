"""Signals at any moment, and streams that are closed, full or gone: `minfer` ends in one line with
a documented exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import (
    GREEDY,
    MAIN,
    PATIENCE_S,
    PROMPT,
    ROOT,
    Terminal,
    unfinished,
)
from hub import DATA

pytest.importorskip("resource")  # a POSIX system
ENDINGS = {signal.SIGINT: (130, "interrupted"), signal.SIGTERM: (143, "terminated")}
BY_SIGNAL = pytest.mark.parametrize("number", ENDINGS, ids=lambda number: number.name)


# ---- signals

HERE = """
import os, sys, time
def here(*_, **__):
    os.write(2, b"HERE\\n")
    time.sleep(600)
"""
RUNNER = "from minfer_cuda.runners.numpy_runner import NumpyRunner as runner\n"
MOMENTS = {
    "import": """
class Finder:
    def find_spec(self, name, *_):
        if name == "typer":
            here()
sys.meta_path.insert(0, Finder())
""",
    "load": "import minfer_cuda.weights as weights\nweights._readable = here\n",
    "prefill": RUNNER + "runner.forward = here\n",
    "stream": RUNNER
    + """
read, n = runner.read, 0
def slow(self):
    global n
    n += 1
    return here() if n > 3 else read(self)
runner.read = slow
""",
    "finaliser": RUNNER
    + """
read, n = runner.read, 0
class Dropping:
    def __del__(self):
        here()
def dropping(self):
    global n
    n += 1
    if n > 3:
        Dropping()
        time.sleep(600)
    return read(self)
runner.read = dropping
""",
    "save": "os.fsync = here\n",
    "pull": "import minfer_cuda.download as download\ndownload._read = here\n",
}


def interrupted(number: int, code: str, *arguments, **options) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a process that gets a signal where it says that it is."""
    command = [sys.executable, "-c", HERE + code, *map(str, arguments)]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    running = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": paths} | options.pop("env", {}),
        **{"stdin": subprocess.DEVNULL, **options},
    )  # fmt: skip
    with running:
        before = []
        while (line := running.stderr.readline()) != "HERE\n":
            assert line, "".join(before)
            before.append(line)
        running.send_signal(number)
        try:
            out, err = running.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            running.kill()
            raise
    return running.returncode, out, err


@BY_SIGNAL
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_at_any_moment_ends_in_one_line_and_leaves_nothing_half_written(
    moment, number, model, tmp_path, request
):
    """In a finaliser too, where Python drops its exception."""
    session = tmp_path / "chat.json"
    session.write_text("[]\n")
    arguments = ["generate", model, "hello", *GREEDY, "--ignore-eos"]
    options = {}
    if moment == "save":
        (tmp_path / "message").write_text("hello\n")
        arguments = ["chat", model, *GREEDY, "--session", session]
        options["stdin"] = (tmp_path / "message").open()
    elif moment == "pull":
        request.getfixturevalue("hub").publish("a/b", m=DATA)
        arguments = ["pull", "hf:a/b"]
    code, out, err = interrupted(number, MOMENTS[moment] + MAIN, *arguments, **options)
    wanted, word = ENDINGS[number]
    assert (code, err.splitlines()[-1]) == (wanted, word)
    assert "Traceback" not in err and "ignored" not in err
    assert out.endswith("\n") if moment in ("stream", "finaliser", "save") else not out
    assert session.read_text() == "[]\n"
    left = unfinished(tmp_path)
    assert len(left) == (moment == "pull") and all("/hf/a/b/m.gguf." in n for n in left)  # resumed


COMPILE = """
import itertools
import kernel_fakes as t
from cli.process import run
from minfer_cuda.kernels import compiler, module
module._import_cupy = t.FakeCupy
module.nvrtc_version = compiler.nvrtc_version = lambda: (12, 9)
compiled = itertools.count()
compiler._compile = lambda *_: time.sleep(600) if next(compiled) else here()  # said once
run(lambda: t.device_on(t.FakeDriver()).compile([("norm", "rms_norm"), ("read", "read_xor")]))
"""


@BY_SIGNAL
def test_a_signal_does_not_wait_for_the_compiler(number, tmp_path):
    env = {"MINFER_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    code, _, err = interrupted(number, COMPILE, env=env)
    assert (code, err.splitlines()[-1]) == ENDINGS[number]
    assert unfinished(tmp_path) == []


STUCK = """
import threading, types
driver = types.SimpleNamespace(cuInit=lambda flags: threading.Event().wait())
sys.modules["cuda.bindings"] = types.SimpleNamespace(driver=driver)
"""


@BY_SIGNAL
def test_a_signal_does_not_wait_for_the_driver_that_starts(number, model):
    code = STUCK + "from minfer_cuda.gguf import GGUFFile\nGGUFFile.open = here\n" + MAIN
    code, _, err = interrupted(number, code, "generate", model, "hello")
    assert (code, err.splitlines()[-1]) == ENDINGS[number]


def test_an_error_does_not_wait_for_the_driver_that_starts(tmp_path):
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGML")
    done = subprocess.run(
        [sys.executable, "-c", "import sys\n" + STUCK + MAIN, "generate", bad, "hello"],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert (done.returncode, "not a GGUF file" in done.stderr) == (1, True)


def test_a_chat_that_is_terminated_gives_the_terminal_back(model, tmp_path):
    termios = pytest.importorskip("termios")
    terminal = Terminal(tmp_path, "chat", model, *GREEDY)
    before = termios.tcgetattr(terminal.controller)
    terminal.wait_for(PROMPT)
    assert termios.tcgetattr(terminal.controller) != before  # it reads keys
    terminal.process.send_signal(signal.SIGTERM)
    terminal.wait_for("terminated")
    assert termios.tcgetattr(terminal.controller) == before
    assert terminal.exit_code() == 143
    assert "Traceback" not in terminal.seen


# ---- the end

DONE = """
import atexit, sys, threading
from cli.process import run
def command():
    from minfer_cuda import template_process
    template_process.start()
    print(template_process._running.pid, file=sys.stderr, end="")
    print("answer, ", end="")
    atexit.register(print, "and what was registered")
    threading.Thread(target=threading.Event().wait).start()
run(command)
"""


def test_a_process_that_is_done_flushes_runs_what_is_registered_and_waits_for_no_thread():
    done = subprocess.run(
        [sys.executable, "-c", DONE], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "answer, and what was registered\n")
    with pytest.raises(ProcessLookupError):  # the templates' process has ended too
        os.kill(int(done.stderr), 0)


# ---- streams

GENERATE = ("generate", "{model}", "hello", *GREEDY, "--ignore-eos")
FULL = "error: cannot write to stdout: No space left on device"
STREAMS = {  # shell redirection -> arguments, exit code, the last line on stderr or None
    "> /dev/full": (GENERATE, 1, FULL),
    "--json > /dev/full": (GENERATE, 1, FULL),
    ">&-": (GENERATE, 0, "stopped: length limit"),
    "2>&-": (GENERATE, 0, None),
    "2> /dev/full": (GENERATE, 0, None),
    "<&- >&- 2>&-": (GENERATE, 0, None),
    "| true": (GENERATE, 0, "stopped:"),
    "<&-": (("generate", "{model}", *GREEDY), 2, "error: the prompt is empty"),
    " <&-": (("chat", "{model}", *GREEDY), 0, ""),
    " > /dev/full": (("--help",), 1, FULL),
    " | true": (("--help",), 0, ""),
    " 2> /dev/full": (("generate", "--no-such-option"), 2, None),
}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
@pytest.mark.parametrize(
    ("streams", "unbuffered"),
    [*((streams, "") for streams in STREAMS), ("> /dev/full", "1"), ("2> /dev/full", "1")],
)
def test_streams_that_are_closed_full_or_gone_end_as_documented(streams, unbuffered, model):
    arguments, code, last = STREAMS[streams]
    words = " ".join(f"'{word.format(model=model)}'" for word in arguments)
    script = f"{sys.executable} -m cli {words} {streams.strip()}\nexit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr and "ignored" not in done.stderr
    lines = done.stderr.splitlines()
    if last is None:
        assert not lines
        if ">&- " not in streams and code == 0:
            assert done.stdout.strip()  # the answer goes on without notices
    else:
        assert last in (lines or [""])[-1]
        assert sum(line.startswith("error") for line in lines) == int(code != 0)


def test_a_closed_stream_is_never_the_place_of_another_file(model, tmp_path):
    """With stderr closed, the session file would be opened as number 2 and get the notices."""
    session = tmp_path / "chat.json"
    script = f"{sys.executable} -m cli chat {model} {' '.join(GREEDY)} --session {session} 2>&-"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, input="hello\n", text=True,
                          capture_output=True)  # fmt: skip
    assert done.returncode == 0
    assert [m["role"] for m in json.loads(session.read_text())] == ["user", "assistant"]
