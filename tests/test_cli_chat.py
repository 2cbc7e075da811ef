"""`minfer chat` through pipes: turns, commands, sessions, what is kept of the cache."""

import json
import re
import signal
import subprocess

import ggufs
import pytest
from command_line import CPU, GREEDY, minfer, one_error_line, process

from cli.commands import COMMANDS
from minfer_cuda.conversation import Conversation
from minfer_cuda.engine import Engine
from minfer_cuda.errors import DeviceError
from minfer_cuda.llm import LLM
from minfer_cuda.runners.numpy_runner import NumpyRunner


def chat(model, lines, *arguments):
    return minfer("chat", model, *GREEDY, *arguments, stdin="".join(f"{line}\n" for line in lines))


def turns(result):
    """The lines on stderr that report a turn."""
    return [line for line in result.stderr.splitlines() if "prompt tokens (" in line]


def counts(result):
    """Of each turn: (new, kept) prompt tokens."""
    found = (re.search(r"\((\d+) new, (\d+) kept", line) for line in turns(result))
    return [(int(match[1]), int(match[2])) for match in found]


def test_each_piped_line_is_a_turn_and_the_end_of_input_leaves(model):
    result = chat(model, ["hello", "world"])
    assert result.exit_code == 0, result.stderr
    assert len(turns(result)) == 2


def test_the_first_turn_answers_as_generate_does(model):
    assert chat(model, ["hello"]).stdout == minfer("generate", model, "hello", *GREEDY).stdout


def test_a_later_turn_prefills_only_what_is_new(model):
    result = chat(model, ["hello", "world", "hello"], "--ignore-eos")
    new, kept = zip(*counts(result), strict=True)
    assert kept[0] == 0
    assert kept[2] > kept[1] > new[0]
    assert new[2] == new[1]


def test_empty_lines_and_unknown_commands_call_no_model(model):
    result = chat(model, ["", "   ", "/nonsense", "/", "/help"])
    assert result.exit_code == 0
    assert turns(result) == []
    assert "/nonsense" in result.stderr
    assert result.stdout == ""
    for command in COMMANDS:
        assert all(name in result.stderr for name in command.names)


@pytest.mark.parametrize("leave", ["/exit", "/quit"])
def test_exit_leaves_at_once(model, leave):
    result = chat(model, ["hello", leave, "world"])
    assert (result.exit_code, len(turns(result))) == (0, 1)


def test_regen_answers_the_last_message_anew_and_undo_takes_it_back(model, tmp_path):
    session = tmp_path / "chat.json"
    result = chat(model, ["hello", "/regen", "world", "/undo"], "--session", session)
    assert result.exit_code == 0
    assert len(turns(result)) == 3
    roles = [(m["role"], m["content"]) for m in json.loads(session.read_text())]
    assert [role for role, _ in roles] == ["user", "assistant"]
    assert roles[0] == ("user", "hello")


def test_regen_and_undo_with_nothing_there_say_so_and_go_on(model):
    result = chat(model, ["/regen", "/undo", "hello"])
    assert result.exit_code == 0
    assert len(turns(result)) == 1
    assert result.stderr.count("nothing to") == 2


def test_clear_forgets_the_conversation_and_keeps_the_system_message(model, tmp_path):
    session = tmp_path / "chat.json"
    chat(model, ["hello", "/clear"], "--system", "be brief", "--session", session)
    assert json.loads(session.read_text()) == [{"role": "system", "content": "be brief"}]


def test_the_system_message_can_be_changed(model, tmp_path):
    session = tmp_path / "chat.json"
    chat(model, ["hello", "/system be kind"], "--session", session)
    assert json.loads(session.read_text()) == [{"role": "system", "content": "be kind"}]


def test_a_session_goes_on_where_it_ended(model, tmp_path):
    session = tmp_path / "chat.json"
    first = chat(model, ["hello"], "--session", session)
    before = json.loads(session.read_text())
    second = chat(model, ["world"], "--session", session)
    after = json.loads(session.read_text())
    assert after[:2] == before
    assert [m["role"] for m in after[2:]] == ["user", "assistant"]
    counts = [int(turns(r)[0].split(" prompt")[0].split()[-1]) for r in (first, second)]
    assert counts[1] > 2 * counts[0]


def test_a_session_that_cannot_be_read_is_reported_and_left_alone(model, tmp_path):
    session = tmp_path / "chat.json"
    session.write_text("[{")
    result = chat(model, ["hello"], "--session", session)
    assert result.exit_code == 1
    assert "chat.json" in one_error_line(result)
    assert session.read_text() == "[{"
    unread = chat("/no/such/model.gguf", ["hello"], "--session", session)
    assert one_error_line(unread) == one_error_line(result)  # the model was not looked for


def test_a_single_turn_answers_one_line(model):
    result = chat(model, ["", "hello", "world"], "--single-turn")
    assert (result.exit_code, len(turns(result))) == (0, 1)


def test_a_message_that_cannot_fit_is_refused_and_the_chat_goes_on(model):
    result = minfer("chat", model, *GREEDY, "--n-ctx", "48", stdin="hello " * 60 + "\nhello\n")
    assert "n_ctx is 48" in one_error_line(result)
    assert len(turns(result)) == 1


def test_the_user_is_told_how_many_turns_were_dropped(model):
    result = minfer("chat", model, *GREEDY, "--n-ctx", "64", "--ignore-eos", stdin="hello\n" * 8)
    assert result.exit_code == 0
    assert "dropped" in result.stderr


def test_ctrl_c_stops_a_reply_keeps_it_and_the_next_turn_goes_on(model, tmp_path):
    session = tmp_path / "chat.json"
    with process("chat", model, "--device", "cpu", "--n-ctx", "100000", "--ignore-eos",
                 "--session", session, stdin=subprocess.PIPE) as running:  # fmt: skip
        running.stdin.write(b"hello\n")
        running.stdin.flush()
        running.stdout.read(1)
        running.send_signal(signal.SIGINT)
        running.stdin.write(b"/exit\n")
        stderr = running.communicate()[1].decode()
    assert running.returncode == 0, stderr
    assert "interrupted" in stderr
    reply = json.loads(session.read_text())[1]
    assert reply["role"] == "assistant"
    assert reply["content"]


@pytest.mark.parametrize("again", [["/undo", "world"], ["/regen"], ["/save SAVED", "/load SAVED"]])
def test_undo_regen_and_load_keep_what_the_cache_has_of_the_conversation(model, tmp_path, again):
    again = [line.replace("SAVED", str(tmp_path / "saved.json")) for line in again]
    result = chat(model, ["hello", "world", *again, "world"], "--ignore-eos", "-n", "1")
    assert result.exit_code == 0, result.stderr
    first, second, *_, last = counts(result)
    assert first[1] == 0
    assert last[1] == sum(second)  # the one token of an answer is sampled, not forwarded


def test_the_status_line_says_how_much_of_the_context_is_used(model):
    result = chat(model, ["hello"], "--ignore-eos")
    (line,) = turns(result)
    used = sum(counts(result)[0]) + 6
    assert line.endswith(f"context {used} / 256")


def test_a_block_is_one_message_and_never_a_command(model, tmp_path):
    session = tmp_path / "chat.json"
    lines = ['"""hello', "", "/exit", 'world"""', '"""/help"""', '"""', "open"]
    result = chat(model, lines, "--session", session)
    assert len(turns(result)) == 3
    said = [m["content"] for m in json.loads(session.read_text()) if m["role"] == "user"]
    assert said == ["hello\n\n/exit\nworld", "/help", "open"]


def test_a_file_is_the_first_message(model, tmp_path):
    file = tmp_path / "first.txt"
    file.write_text("hello\nworld\n")
    session = tmp_path / "chat.json"
    chat(model, ["the"], "--prompt-file", file, "--session", session)
    said = [m["content"] for m in json.loads(session.read_text()) if m["role"] == "user"]
    assert said == ["hello\nworld", "the"]
    only = chat(model, ["the"], "--prompt-file", file, "--single-turn")
    assert len(turns(only)) == 1


def test_set_changes_sampling_from_the_next_answer_on(model):
    given = chat(model, ["hello"], "--ignore-eos", "-n", "3")
    lines = ["/set temp 0", "/set max-tokens 3", "hello", "/set"]
    result = minfer("chat", model, *CPU, "--ignore-eos", stdin="".join(f"{x}\n" for x in lines))
    assert result.stdout == given.stdout
    listed = dict(line.split() for line in result.stderr.splitlines() if len(line.split()) == 2)
    assert (listed["temperature"], listed["top_k"], listed["max_tokens"]) == ("0.0", "40", "3")


@pytest.mark.parametrize(
    "setting",
    ["temp", "temp hot", "temp -1", "temp nan", "top_k 1.5", "top_p 0.5 0.6", "seed -1",
     "max_tokens 0", "max_tokens many", "nonsense 1", "logit_bias 3"],
)  # fmt: skip
def test_a_setting_that_means_nothing_is_refused_and_changes_nothing(model, setting):
    result = chat(model, ["/set", f"/set {setting}", "/set"])
    assert result.exit_code == 0
    one_error_line(result)
    lines = [line for line in result.stderr.splitlines() if not line.startswith(("note", "error"))]
    assert len(lines) > 10
    assert lines[: len(lines) // 2] == lines[len(lines) // 2 :]


def test_a_chosen_seed_gives_the_same_answers_again(model):
    lines = ["/set temp 5", "/set seed 7", "hello", "/clear", "/set seed 7", "hello"]
    result = chat(model, lines, "--ignore-eos")
    half = len(result.stdout) // 2
    assert result.stdout[:half] == result.stdout[half:]
    assert "seed" not in turns(result)[0]


def test_show_stats_and_tokens_say_what_is_going_on(model):
    result = chat(model, ["hello", "/show", "/stats", "/tokens hello<|im_end|>"], "--ignore-eos")
    for text in ("tiny (tiny.gguf)", "temperature 0.0", " / 256 tokens, 2 messages", "CPU",
                 "1 answer: ", "6 generated", "tokens\n"):  # fmt: skip
        assert text in result.stderr
    assert '"hello"' in result.stderr
    assert "(control)" not in result.stderr


def test_a_conversation_is_saved_and_loaded(model, tmp_path):
    file = tmp_path / "saved.json"
    result = chat(model, ["hello", f"/save {file}", "/clear", f"/load {file}", "world"])
    assert result.exit_code == 0
    assert len(json.loads(file.read_text())) == 2
    assert counts(result)[1][1] >= sum(counts(result)[0])


@pytest.mark.parametrize(
    ("line", "why"),
    [("/save", "file"), ("/load", "file"), ("/tokens", "text"),
     ("/load /no/such", "in /no/such: No such file or directory")],
)  # fmt: skip
def test_a_command_that_fails_says_so_and_the_chat_goes_on(model, line, why):
    result = chat(model, ["hello", line, "world"])
    assert one_error_line(result).endswith(why)
    assert (result.exit_code, len(turns(result))) == (0, 2)


def test_loading_what_is_no_conversation_changes_neither_it_nor_the_file(model, tmp_path):
    file = tmp_path / "saved.json"
    file.write_text("{}")
    session = tmp_path / "chat.json"
    result = chat(model, ["hello", f"/load {file}", "world"], "--session", session)
    assert "saved.json" in one_error_line(result)
    assert file.read_text() == "{}"
    assert len(json.loads(session.read_text())) == 4


def test_a_session_that_cannot_be_written_is_said_each_time_and_ends_with_1(model, tmp_path):
    session = tmp_path / ("x" * 250)  # the file that takes its place would have too long a name
    result = chat(model, ["hello", "world"], "--session", session)
    assert len(turns(result)) == 2
    assert result.exit_code == 1
    assert result.stderr.count("error: cannot save") == 3
    assert result.stderr.endswith("File name too long\n")


def test_a_session_in_no_folder_is_refused_before_the_model_is_opened(tmp_path):
    session = tmp_path / "missing" / "chat.json"
    result = minfer("chat", "/no/such/model.gguf", "--session", session)
    assert result.exit_code == 2
    assert f"no folder {session.parent}" in one_error_line(result)


def test_a_message_that_cannot_fit_is_said_in_a_chat_and_is_the_end_of_a_single_turn(
    model, tmp_path
):
    file = tmp_path / "long.txt"
    file.write_text("hello " * 300)
    result = chat(model, ["world"], "--prompt-file", file)
    assert (result.exit_code, len(turns(result))) == (0, 1)
    assert "n_ctx is 256" in one_error_line(result)
    result = chat(model, ["world"], "--prompt-file", file, "--single-turn")
    assert (result.exit_code, turns(result), result.stdout) == (1, [], "")
    assert "n_ctx is 256" in one_error_line(result)


def test_a_piped_chat_that_answers_nothing_because_its_messages_are_refused_ends_with_1(model):
    long = "hello " * 300
    result = chat(model, [long, "/help", long])
    assert (result.exit_code, turns(result), result.stdout) == (1, [], "")
    assert result.stderr.count("n_ctx is 256") == 2
    assert chat(model, [long, "hello"]).exit_code == 0
    assert chat(model, ["/help"]).exit_code == 0


def test_one_is_counted_as_one(model, tmp_path):
    session = tmp_path / "chat.json"
    session.write_text('[{"role": "user", "content": "hello"}]')
    result = chat(model, ["/tokens a", "/show", "/stats"], "--session", session)
    for text in ("from 1 message in", " / 256 tokens, 1 message\n", "\n1 token\n", "0 answers: "):
        assert text in result.stderr


@pytest.mark.parametrize("leave", ["/exit", "/quit", "/bye"])
def test_those_who_come_from_elsewhere_find_help_and_the_way_out(model, leave):
    result = chat(model, ["/?", leave, "hello"])
    assert "/regen" in result.stderr
    assert (result.exit_code, turns(result)) == (0, [])


def test_a_resumed_greedy_chat_answers_as_an_uninterrupted_one(model, tmp_path):
    whole, parts = tmp_path / "whole.json", tmp_path / "parts.json"
    options = ("--ignore-eos", "-n", "1")
    chat(model, ["hello", "world", "the"], *options, "--session", whole)
    for line in ("hello", "world", "the"):
        chat(model, [line], *options, "--session", parts)
    assert json.loads(parts.read_text()) == json.loads(whole.read_text())


@pytest.mark.model
def test_a_real_model_resumed_answers_as_an_uninterrupted_one(model_05b, tmp_path):
    session = tmp_path / "chat.json"
    questions = ["What is 2 + 3?", "And twice that?"]
    with LLM(model_05b, n_ctx=512, device="cpu") as llm:

        def ask(conversation, question):
            completion = llm.complete(
                conversation.begin_turn(question), max_tokens=8, temperature=0
            )
            text = "".join(completion)
            conversation.end_turn(completion.ids, text, completion.finish_reason)

        whole = Conversation(llm.template, llm.tokenizer, llm.n_ctx)
        for question in questions:
            ask(whole, question)
        llm.engine.rollback(0)
        for question in questions:
            part = Conversation(llm.template, llm.tokenizer, llm.n_ctx)
            if session.exists():
                part.load(session)
            ask(part, question)
            part.save(session)
    assert part.messages == whole.messages


def test_a_failing_device_ends_the_chat_after_regen_too(model, monkeypatch):
    forward, calls = NumpyRunner.prefill, []

    def failing(self, *arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise DeviceError("it is gone")
        forward(self, *arguments)

    monkeypatch.setattr(NumpyRunner, "prefill", failing)
    result = chat(model, ["hello", "/regen", "world"])
    assert result.exit_code == 1
    assert "it is gone" in one_error_line(result)


def test_an_interrupt_while_the_prompt_is_read_takes_the_message_back(model, tmp_path, monkeypatch):
    forward, calls = NumpyRunner.prefill, []

    def interrupted(self, *arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        forward(self, *arguments)

    monkeypatch.setattr(NumpyRunner, "prefill", interrupted)
    session = tmp_path / "chat.json"
    result = chat(model, ["hello", "world", "the"], "--ignore-eos", "--session", session)
    assert result.exit_code == 0
    assert "taken back" in result.stderr
    said = [m["content"] for m in json.loads(session.read_text()) if m["role"] == "user"]
    assert said == ["hello", "the"]
    assert counts(result)[1][1] > sum(counts(result)[0])


def test_an_interrupted_answer_is_answered_anew_on_demand(model, tmp_path, monkeypatch):
    following, calls = Engine._next, []

    def interrupted(self, position):
        calls.append(position)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return following(self, position)

    monkeypatch.setattr(Engine, "_next", interrupted)
    session = tmp_path / "chat.json"
    result = chat(model, ["hello", "/regen"], "--ignore-eos", "--session", session)
    assert result.exit_code == 0
    assert "3 generated" in turns(result)[0]
    assert "interrupted" in turns(result)[0]
    assert "6 generated" in turns(result)[1]
    fresh = minfer("generate", model, "hello", *GREEDY, "--ignore-eos").stdout
    assert json.loads(session.read_text())[1]["content"] == fresh.removesuffix("\n")


def test_a_thought_is_hidden_on_demand_and_kept_in_the_session(tmp_path):
    template = ggufs.CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")
    path = ggufs.write_gguf(tmp_path / "r1.gguf", **ggufs.ONE_LAYER, chat_template=template)
    session = tmp_path / "chat.json"
    shown = chat(path, ["hello"], "--ignore-eos")
    hidden = chat(path, ["hello"], "--ignore-eos", "--hide-thinking", "--session", session)
    assert hidden.stdout == ""
    assert json.loads(session.read_text())[1]["content"] == shown.stdout.removesuffix("\n")
