"""`minfer chat` on a terminal: keys, paste, interrupts, history, colours, spinner, resize."""

import json
import os
import re
import signal
import struct

import pytest
from command_line import GREEDY, PROMPT, Terminal, process

from cli.terminal import fitted

fcntl = pytest.importorskip("fcntl")  # where there is none, there are no pseudo-terminals
termios = pytest.importorskip("termios")
ANSI = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
ENDLESS = ("--device", "cpu", "--n-ctx", "100000", "--ignore-eos")


@pytest.fixture
def chat(model, tmp_path):
    """Starts chats that are ended when the test is over, and waits for their first prompt."""
    started = []

    def start(*arguments, **environment):
        terminal = Terminal(tmp_path, "chat", model, *(arguments or GREEDY), **environment)
        started.append(terminal)
        terminal.wait_for(PROMPT)
        return terminal

    yield start
    for terminal in started:
        if terminal.process.poll() is None:
            terminal.process.kill()
        terminal.process.wait()


def said(session):
    return [m["content"] for m in json.loads(session.read_text()) if m["role"] == "user"]


def test_ctrl_c_twice_at_an_empty_prompt_leaves_with_130(chat):
    terminal = chat()
    answer = terminal.ask("hello")
    assert "context " in answer
    terminal.type("words\x03")  # only cleared
    terminal.wait_for(PROMPT)
    assert "again" not in terminal.seen
    terminal.type("\x03")
    terminal.wait_for("again")
    terminal.wait_for(PROMPT)
    terminal.type("\x03")
    assert terminal.exit_code() == 130
    assert "Traceback" not in terminal.seen


def test_ctrl_d_leaves_with_0_and_several_lines_are_one_message(chat, tmp_path):
    session = tmp_path / "chat.json"
    terminal = chat(*GREEDY, "--session", session)
    terminal.ask("\x1b[200~hello\nworld\x1b[201~")  # pasted
    terminal.ask("a\x1b\rb")  # Alt-Enter
    terminal.ask('"""the\r\rend"""')  # Enter within a block
    assert terminal.leave() == 0
    assert said(session) == ["hello\nworld", "a\nb", "the\n\nend"]


def test_earlier_chats_are_found_again_and_commands_are_completed(chat, tmp_path):
    first = chat()
    first.ask("hello world")
    first.ask("the end")
    assert first.leave() == 0
    session = tmp_path / "chat.json"
    second = chat(*GREEDY, "--session", session)
    second.ask("\x1b[A")  # up
    second.ask("\x12llo w\r")  # Ctrl-R
    assert said(session) == ["the end", "hello world"]
    assert "2 answers" in second.ask("/stat\t")
    assert "temperature is 0.5" in second.ask("/set tempe\t 0.5")
    assert oct((tmp_path / "minfer" / "chat-history").stat().st_mode & 0o777) == "0o600"


def test_file_names_are_completed_where_a_command_takes_a_file(chat, tmp_path):
    terminal = chat()
    terminal.ask("hello")
    told = terminal.ask(f"/save {tmp_path}/talk.json")
    assert "2 messages saved" in told
    assert "2 messages read" in terminal.ask(f"/load {tmp_path}/ta\t")


def test_ctrl_c_stops_an_answer_and_the_chat_goes_on(chat, tmp_path):
    session = tmp_path / "chat.json"
    terminal = chat(*ENDLESS, "--temp", "0", "--session", session, PYTHONUTF8="1")
    terminal.type("hello\r")
    terminal.wait_for("\u280b")
    terminal.wait_for("\x1b[K")  # the spinner is gone: the first token is there
    terminal.type("\x03")
    terminal.wait_for("interrupted")
    terminal.wait_for(PROMPT)
    terminal.ask("/set max_tokens 2")
    again = terminal.ask("/regen")
    assert "2 generated" in again
    assert "Traceback" not in terminal.seen
    terminal.ask("world")
    assert said(session) == ["hello", "world"]


def test_ctrl_c_at_any_moment_leads_back_to_the_prompt(chat):
    terminal = chat(*ENDLESS, PYTHONUTF8="1")
    for moment in ("\u280b", "\x1b[K", "l"):  # the spinner, the first token, in mid-answer
        terminal.type("hello " * 50 + "\r")
        terminal.wait_for("\u280b")
        if moment != "\u280b":
            terminal.wait_for(moment)
        terminal.type("\x03")
        terminal.wait_for("interrupted")
        terminal.wait_for(PROMPT)
    assert terminal.leave() == 0
    assert "Traceback" not in terminal.seen


def test_the_terminal_is_asked_nothing(chat):
    """The editor would wait a second for an answer after each line, and take a Ctrl-C for a key of
    the next."""
    terminal = chat(PROMPT_TOOLKIT_NO_CPR="")
    terminal.ask("/stats")
    assert terminal.leave() == 0
    assert "\x1b[6n" not in terminal.seen  # "where is the cursor?"


@pytest.mark.parametrize(
    ("environment", "coloured", "spins"),
    [({}, True, True), ({"NO_COLOR": "1"}, False, True), ({"TERM": "dumb"}, False, False)],
    ids=str,
)
def test_colours_and_spinner_are_for_terminals_that_have_them(
    model, tmp_path, environment, coloured, spins
):
    terminal = Terminal(tmp_path, "chat", model, *GREEDY, "--ignore-eos", **environment)
    terminal.wait_for(">")
    terminal.type("hello\r")
    terminal.wait_for("generated")
    terminal.wait_for(">")
    terminal.type("/exit\r")
    assert terminal.exit_code() == 0
    assert ("\x1b[2m" in terminal.seen) == coloured
    assert ("\r\x1b[K" in terminal.seen) == spins


def test_a_terminal_may_change_its_size(chat):
    terminal = chat()
    terminal.type("hello")
    for columns in (20, 7, 120):
        size = struct.pack("HHHH", 24, columns, 0, 0)
        fcntl.ioctl(terminal.controller, termios.TIOCSWINSZ, size)
        os.kill(terminal.process.pid, signal.SIGWINCH)
    terminal.type(" world\r")
    terminal.wait_for("generated")
    terminal.wait_for(PROMPT)
    assert terminal.leave() == 0


def test_notices_are_broken_between_words_where_the_terminal_is_narrow(chat):
    row = "/exit, /quit, /bye  leave (also Ctrl-D, or Ctrl-C twice at the prompt)"
    indents = [len(line) - len(line.lstrip()) for line in fitted(row, 44, 20).splitlines()]
    assert indents == [0, 20, 20]
    assert fitted(row, 0) == fitted(row, len(row)) == row
    terminal = chat()
    size = struct.pack("HHHH", 24, 44, 0, 0)
    fcntl.ioctl(terminal.controller, termios.TIOCSWINSZ, size)
    for typed, last in (("/help", "said.\r\n"), ("hello", "256")):
        terminal.type(f"{typed}\r")
        told = ANSI.sub("", terminal.wait_for(last) + last)
        terminal.wait_for(PROMPT)
        assert all(len(line) <= 44 for line in told.splitlines())
        assert any(
            words in " ".join(told.split()) for words in (row.split("  ")[1], "length limit,")
        )
    assert terminal.leave() == 0


def test_generate_has_no_spinner_in_what_is_piped(model):
    with process("generate", model, "hello", *GREEDY) as running:
        out, err = running.communicate()
    assert b"\x1b" not in out + err


def test_a_chat_that_is_typed_into_but_not_shown_says_how_it_reads(model):
    """As in `minfer chat MODEL | tee log`."""
    pty = pytest.importorskip("pty")
    controller, user = pty.openpty()
    with process("chat", model, *GREEDY, stdin=user) as running:
        os.close(user)
        os.write(controller, b"hello\n\x04")
        out, err = running.communicate(timeout=60)
    os.close(controller)
    assert running.returncode == 0
    assert b"one message a line" in err
    assert b"6 generated" in err
    assert len(out.splitlines()) >= 1
