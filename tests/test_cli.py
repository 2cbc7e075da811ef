"""The command line: what is refused and how, what goes to stdout, what ends with which code."""

import csv
import io
import json
import re
import signal
import subprocess
import sys
from dataclasses import fields

import ggufs
import pytest
from command_line import (
    CPU,
    GREEDY,
    ROOT,
    minfer,
    one_error_line,
    process,
)

from cli import main, options
from cli.app import one_line
from cli.main import app
from cli.model import show_progress
from minfer_cuda import __version__
from minfer_cuda.runners.numpy_runner import NumpyRunner
from minfer_cuda.sampling import SamplingParams

COMMANDS = ("generate", "chat", "info", "tokenize", "template", "bench", "perplexity")
REST = {"generate": ["hi"], "tokenize": ["hi"], "perplexity": ["-f", __file__]}  # beside a model

# help and version


def test_the_version_is_the_packages():
    result = minfer("--version")
    assert (result.exit_code, result.stdout) == (0, f"minfer {__version__}\n")


@pytest.mark.parametrize("command", main.COMMANDS)
def test_every_option_has_help_and_every_command_an_example(command):
    result = minfer(command, "-h")
    assert result.exit_code == 0
    assert f"Example: minfer {command} " in " ".join(result.stdout.split())
    from typer.main import get_command

    for parameter in get_command(app).commands[command].params:
        assert parameter.help, parameter.name


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from typer.testing import CliRunner; from cli.main import app; "
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0; "
        "print(*{name.split('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    heavy = {"numpy", "cupy", "tokenizers", "minijinja", "prompt_toolkit", "gguf", "llguidance"}
    heavy |= {"huggingface_hub", "rich"}
    assert done.returncode == 0, done.stderr
    assert heavy & set(done.stdout.split()) == set()


def test_info_imports_nothing_that_reads_tensors_or_text(model):
    code = "import sys; from cli.main import app; app(sys.argv[1:], standalone_mode=False); "
    code += "print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code, "info", model], cwd=ROOT,
                          capture_output=True, text=True)  # fmt: skip
    heavy = {"numpy", "cupy", "gguf", "tokenizers", "minijinja", "llguidance", "huggingface_hub"}
    assert done.returncode == 0, done.stderr
    assert "general.architecture" in done.stdout
    assert heavy & set(done.stdout.splitlines()[-1].split()) == set()


def test_the_defaults_in_the_help_are_the_librarys():
    names = {"temperature": "Temperature"}
    shown = 0
    for field in fields(SamplingParams):
        alias = names.get(field.name, "".join(w.capitalize() for w in field.name.split("_")))
        option = getattr(options, alias, None)
        if option is None or field.default is None:
            continue
        assert option.__metadata__[0].show_default == str(field.default), field.name
        shown += 1
    assert shown == 7


# usage errors: exit code 2, nothing loaded


@pytest.mark.parametrize(
    "arguments",
    [
        ("--temp", "-1"),
        ("--temp", "nan"),
        ("--temp", "inf"),
        ("--temp", "warm"),
        ("--top-p", "-0.1"),
        ("--top-p", "nan"),
        ("--top-k", "-1"),
        ("--top-k", "1.5"),
        ("--min-p", "1.1"),
        ("--repeat-penalty", "0"),
        ("--repeat-penalty", "nan"),
        ("--frequency-penalty", "nan"),
        ("--presence-penalty", "inf"),
        ("--seed", "-1"),
        ("--seed", str(2**64)),
        ("--max-tokens", "0"),
        ("--n-ctx", "-1"),
        ("--kv-type", "q4_0"),
        ("--device", "tpu"),
        ("--device", "cuda:x"),
        ("--rope-freq-base", "0"),
        ("--stop", ""),
        ("--chat-template", "/no/such/template"),
        ("--no-such-option",),
    ],
    ids=" ".join,
)
def test_a_bad_value_ends_with_2_before_the_model_is_opened(arguments):
    result = minfer("generate", "/no/such/model.gguf", "hi", *arguments)
    assert result.exit_code == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert "no/such/model" not in result.stderr
    assert result.stdout == ""


def test_raw_and_chat_exclude_each_other(model):
    result = minfer("chat", model, "--raw")
    assert result.exit_code == 2
    assert "--raw" in one_error_line(result)
    assert "generate" in one_error_line(result)


def test_raw_and_a_system_message_exclude_each_other(model):
    result = minfer("generate", model, "hi", "--raw", "--system", "x")
    assert result.exit_code == 2
    assert "--system" in one_error_line(result)


def test_a_command_without_its_model_is_a_usage_error():
    for command in COMMANDS:
        assert minfer(command).exit_code == 2


def test_an_empty_prompt_is_a_usage_error(model):
    for arguments in (("",), ("-",), ()):
        result = minfer("generate", model, *arguments, stdin="")
        assert result.exit_code == 2
        assert "prompt" in one_error_line(result)


# bad files: exit code 1, one line


@pytest.mark.parametrize("command", COMMANDS)
def test_a_path_that_is_not_there_ends_in_one_line(command):
    result = minfer(command, "/no/such/model.gguf", *REST.get(command, []))
    assert result.exit_code == 1
    assert "/no/such/model.gguf" in one_error_line(result)
    assert result.stdout == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_files_that_are_no_model_end_in_one_line(command, tmp_path):
    other = tmp_path / "notes.txt"
    other.write_text("not a model at all, only words")
    empty = tmp_path / "empty.gguf"
    empty.touch()
    for path in (tmp_path, other, empty):
        result = minfer(command, path, *REST.get(command, []))
        assert result.exit_code == 1, result.stderr
        assert path.name in one_error_line(result)
        assert result.stdout == ""


def test_another_architecture_is_refused_by_name(tmp_path):
    path = ggufs.write_gguf(tmp_path / "other.gguf", layers=1, d=64, heads=1, kv_heads=1, ffn=64,
                            arch="mamba")  # fmt: skip
    result = minfer("generate", path, "hi", *CPU)
    assert result.exit_code == 1
    assert "mamba" in one_error_line(result)
    shown = minfer("info", path)
    assert shown.exit_code == 1
    assert "general.architecture" in shown.stdout
    assert "mamba" in one_error_line(shown)


def test_an_error_is_one_line_that_cannot_drive_the_terminal():
    assert one_line(ValueError("a\nb\x1b[31mc\x07")) == "a b\\x1b[31mc\\x07"


def test_an_unexpected_failure_is_one_line_and_a_traceback_on_request(model, monkeypatch):
    import minfer_cuda.info

    def fail(*_):
        raise ZeroDivisionError("of\nours")

    monkeypatch.setattr(minfer_cuda.info, "describe", fail)
    result = minfer("info", model)
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("internal error: ZeroDivisionError: of ours")
    assert "MINFER_TRACEBACK=1" in line
    monkeypatch.setenv("MINFER_TRACEBACK", "1")
    assert isinstance(minfer("info", model).exception, ZeroDivisionError)


# info


def test_info_shows_the_model_without_opening_a_device(model):
    result = minfer("info", model, "--n-ctx", "1024", "--check")
    assert result.exit_code == 0
    for text in ("qwen2.block_count", "F32", "n_ctx 1024", "all tensors are finite"):
        assert text in result.stdout
    assert result.stderr == ""


def test_info_check_names_damaged_tensors(tmp_path):
    import numpy as np

    bad = np.ones(64, np.float32)
    bad[3] = np.nan
    path = ggufs.write_gguf(tmp_path / "bad.gguf", layers=1, d=64, heads=1, kv_heads=1, ffn=64,
                            tensors={"output_norm.weight": bad})  # fmt: skip
    result = minfer("info", path, "--check")
    assert result.exit_code == 1
    assert "output_norm.weight" in result.stdout
    one_error_line(result)


# generate


def test_stdout_has_the_answer_and_nothing_else(model):
    result = minfer("generate", model, "hello world", *GREEDY)
    assert result.exit_code == 0, result.stderr
    again = minfer("generate", model, "hello world", *GREEDY, "-v")
    assert result.stdout == again.stdout
    assert result.stdout.endswith("\n")
    closing = result.stderr.splitlines()[-1]
    for text in ("prompt", "generated", "tok/s"):
        assert text in closing


def test_the_closing_line_says_why_it_stopped(model):
    result = minfer("generate", model, "hello", *GREEDY, "--ignore-eos")
    assert "6 generated" in result.stderr
    assert "length" in result.stderr.splitlines()[-1]


def test_the_prompt_comes_from_stdin_as_well(model):
    given = minfer("generate", model, "hello world", *GREEDY)
    for arguments in ((), ("-",)):
        piped = minfer("generate", model, *arguments, *GREEDY, stdin="hello world\n")
        assert piped.stdout == given.stdout
        assert piped.exit_code == 0


def test_bytes_on_stdin_that_are_not_utf8_become_replacement_characters(model):
    given = minfer("generate", model, "a\ufffdb", *GREEDY)
    piped = minfer("generate", model, *GREEDY, stdin=b"a\xe6b")
    assert (piped.exit_code, piped.stdout) == (0, given.stdout)


@pytest.mark.parametrize("text", ["hello\n", "hello\r\n", "\ufeffhello", "\ufeffhello\r\n"])
def test_a_byte_order_mark_and_the_last_line_end_are_no_part_of_a_prompt(model, tmp_path, text):
    file = tmp_path / "prompt.txt"
    file.write_bytes(text.encode())
    for arguments in (("--prompt-file", file), ()):
        result = minfer("generate", model, *arguments, *GREEDY, "--json", "--echo", stdin=text)
        assert json.loads(result.stdout.splitlines()[0])["text"] == "hello"


def test_bytes_in_an_argument_that_are_not_utf8_become_replacement_characters(model):
    given = minfer("generate", model, "a\ufffdb", *GREEDY)
    escaped = minfer("generate", model, "a\udce6b", *GREEDY)
    assert (escaped.exit_code, escaped.stdout) == (0, given.stdout)
    echoed = minfer("generate", model, "a\udce6b", *GREEDY, "--echo", "--json")
    assert json.loads(echoed.stdout.splitlines()[0])["text"] == "a\ufffdb"


def test_a_random_seed_is_printed_and_gives_the_same_answer_again(model):
    first = minfer("generate", model, "hello", *CPU, "-n", "8", "--temp", "5")
    seed = first.stderr.split("seed ")[1].split()[0].strip(",;)")
    assert len(seed) <= 10  # short enough to be typed again
    again = minfer("generate", model, "hello", *CPU, "-n", "8", "--temp", "5", "--seed", seed)
    assert again.stdout == first.stdout
    other = minfer("generate", model, "hello", *CPU, "-n", "8", "--temp", "5", "--seed", "1")
    assert other.stdout != first.stdout


def test_a_stop_string_is_not_printed(model):
    whole = minfer("generate", model, "hello", *GREEDY, "--ignore-eos").stdout.rstrip("\n")
    stop = whole[2:4]
    cut = minfer("generate", model, "hello", *GREEDY, "--ignore-eos", "--stop", stop)
    assert cut.stdout.rstrip("\n") == whole[: whole.index(stop)]
    assert "stop" in cut.stderr.splitlines()[-1]


def test_raw_feeds_the_prompt_without_a_template(model):
    raw = minfer("generate", model, "hello", *GREEDY, "--raw")
    chat = minfer("generate", model, "hello", *GREEDY)
    assert raw.exit_code == 0
    count = [int(r.stderr.splitlines()[-1].split(" prompt")[0].split()[-1]) for r in (raw, chat)]
    assert count[0] == 1
    assert count[1] > 1


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(model):
    result = minfer("generate", model, "hello " * 40, "--device", "cpu", "--n-ctx", "16")
    assert result.exit_code == 1
    assert "n_ctx is 16" in one_error_line(result)
    assert result.stdout == ""


def test_a_closed_pipe_ends_quietly(model):
    with process("generate", model, "hello", *CPU, "--ignore-eos") as running:
        running.stdout.close()
        stderr = running.stderr.read().decode()
    assert running.returncode == 0
    assert "Traceback" not in stderr
    assert "error" not in stderr.lower()


def test_ctrl_c_ends_with_130_and_a_closing_line(model):
    with process("generate", model, "hello", "--device", "cpu", "-n", "100000", "--n-ctx", "100000",
                 "--ignore-eos") as running:  # fmt: skip
        running.stdout.read(1)
        running.send_signal(signal.SIGINT)
        stderr = running.stderr.read().decode()
    assert running.returncode == 130
    assert "Traceback" not in stderr
    assert "interrupted" in stderr


def test_characters_that_the_terminal_lacks_do_not_raise(model):
    ascii_only = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    with process("generate", model, "hello", *GREEDY, "--ignore-eos", env=ascii_only) as running:
        out, err = running.communicate()
    assert running.returncode == 0, err
    out.decode("ascii")


# bench


def test_bench_json_is_one_object_on_the_last_line_with_what_makes_it_repeatable(model):
    result = minfer("bench", model, "-p", "4,8", "-n", "3", "-r", "2", "--device", "cpu", "--json")
    assert result.exit_code == 0, result.stderr
    (line,) = result.stdout.splitlines()
    report = json.loads(line)
    assert [row["name"] for row in report["results"]] == ["pp4", "pp8", "tg3"]
    assert all(len(row["seconds"]) == 2 for row in report["results"])
    for key in ("model", "types", "device", "n_ctx", "minfer", "commit", "date", "sampling"):
        assert key in report


def test_bench_prints_markdown_and_csv(model):
    small = ("-p", "4", "-n", "2", "-r", "2", "--device", "cpu")
    table = minfer("bench", model, *small).stdout
    assert "| pp4 |" in table
    rows = list(csv.DictReader(io.StringIO(minfer("bench", model, *small, "--csv").stdout)))
    assert [row["name"] for row in rows] == ["pp4", "tg2"]


@pytest.mark.parametrize(
    "arguments",
    [("-p", "x"), ("-p", "-1"), ("-r", "0"), ("--json", "--csv"), ("-p", "0", "-n", "0")],
)
def test_bench_refuses_what_it_cannot_measure(arguments):
    result = minfer("bench", "/no/such/model.gguf", *arguments)
    assert result.exit_code == 2
    assert "no/such" not in result.stderr


def test_bench_measures_a_prompt_of_one_token_alone(model):
    result = minfer("bench", model, "-p", "1", "-n", "0", "-r", "1", "--device", "cpu", "--csv")
    assert [row["name"] for row in csv.DictReader(io.StringIO(result.stdout))] == ["pp1"]


def test_verbose_says_how_long_each_part_of_loading_took(model):
    told = minfer("generate", model, "hi", "-n", "1", "-v", "--device", "cpu").stderr
    parts = re.search(r"loaded in ([\d.]+) s \((.*)\)$", told, re.MULTILINE)
    assert parts is not None
    seconds = {name: float(s) for name, s in (part.split() for part in parts[2].split(", "))}
    assert list(seconds) == ["import", "file", "tokenizer", "device", "upload", "buffers"]
    assert sum(seconds.values()) == pytest.approx(float(parts[1]), abs=0.005 * 7)  # rounded


def test_progress_is_a_line_that_is_erased_at_the_end(capsys):
    for doing, done, total in (
        ("compiling kernels", 3, 9),
        ("loading", 50, 200),
        ("loading", 2, 2),
    ):
        show_progress(doing, done, total)
    shown = capsys.readouterr().err.split("\r\x1b[K")
    assert shown == ["", "compiling kernels 3 of 9", "loading 25 %", ""]


def test_verbose_says_what_capturing_took(model, monkeypatch):
    arguments = ("generate", model, "hi", "-n", "1", "--device", "cpu")
    assert "captured" not in minfer(*arguments, "-v").stderr  # there are no graphs
    monkeypatch.setattr(NumpyRunner, "capture_seconds", 0.25)
    assert "graphs captured in 0.250 s" in minfer(*arguments, "-v").stderr.splitlines()
    assert "captured" not in minfer(*arguments).stderr


def test_bench_refuses_a_context_that_its_tests_do_not_fit(model):
    result = minfer("bench", model, "-p", "64", "--n-ctx", "32", "--device", "cpu")
    assert result.exit_code == 1
    assert "n_ctx is 32" in one_error_line(result)
