"""The / commands of a chat. Their errors are said and leave everything as it was."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from minfer_cuda.errors import UsageError

from .app import counted, say

if TYPE_CHECKING:
    from minfer_cuda.sampling import SamplingParams

    from .repl import Repl

SHORT = {"temp": "temperature"}  # what /set takes beside the fields of SamplingParams
FILES = "a file"  # what completes an argument: file names


@dataclass(frozen=True)
class Command:
    """One command: `argument` as the help shows it, `run` gets what was typed for it."""

    names: tuple[str, ...]
    argument: str
    help: str
    run: Callable[[Repl, str], None]


def run(repl: Repl, line: str) -> None:
    """Run the command that `line` holds; an unknown one is not sent to the model."""
    name, *rest = line.strip().split(maxsplit=1)
    command = next((c for c in COMMANDS if name in c.names), None)
    if command is None:
        say(f"{name} is not a command and was not sent; /help lists the commands")
        return
    command.run(repl, rest[0] if rest else "")


def _help(repl: Repl, rest: str) -> None:
    _list([(", ".join(c.names) + f" {c.argument}".rstrip(), c.help) for c in COMMANDS])
    say(KEYS)


def _list(rows: Sequence[tuple[str, object]]) -> None:
    width = max(len(left) for left, _ in rows)
    say("\n".join(f"{left:<{width}}  {right}" for left, right in rows), hanging=width + 2)


def _exit(repl: Repl, rest: str) -> None:
    repl.leaving = True


def _clear(repl: Repl, rest: str) -> None:
    repl.conversation.clear()
    repl.save()


def _regen(repl: Repl, rest: str) -> None:
    repl.reply(repl.conversation.regenerate())


def _undo(repl: Repl, rest: str) -> None:
    text = repl.conversation.undo()
    repl.save()
    repl.note(f"taken back: {_shortened(text)}")


def _system(repl: Repl, rest: str) -> None:
    repl.conversation.clear()
    repl.conversation.set_system(rest or None)
    repl.save()


def _set(repl: Repl, rest: str) -> None:
    if not rest:
        _list(list(_settings(repl).items()))
        return
    name, *values = rest.split()
    name = name.replace("-", "_")
    name = SHORT.get(name, name)
    if len(values) != 1:
        raise UsageError(f"/set {name} takes one value, as in /set temp 0.2")
    (value,) = values
    if name == "max_tokens":
        repl.choices.max_tokens = _max_tokens(value)
    elif name in sampling_options():
        repl.choices.params = _changed(repl, name, value)
        repl.n_seeds = 0
    else:
        known = ", ".join(setting_names())
        raise UsageError(f"{name} is not an option; there are {known}")
    repl.note(f"{name} is {value}")


def _max_tokens(value: str) -> int | None:
    if value == "none":
        return None
    if not value.isdecimal() or int(value) < 1:
        raise UsageError(f"max_tokens is {value}: must be a number >= 1, or none")
    return int(value)


def _changed(repl: Repl, name: str, value: str) -> SamplingParams:
    """The parameters with one of them changed."""
    params = repl.choices.params
    default = sampling_options()[name]
    kind = int if default is None or isinstance(default, int) else float
    number: float | None = None
    if not (name == "seed" and value == "random"):
        try:
            number = kind(value)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise UsageError(f"{name} is {value}: must be {what}") from None
    changes: dict[str, Any] = {name: number}
    changed = replace(params, **changes)
    changed.validate(repl.llm.config.n_vocab)
    return changed


def sampling_options() -> dict[str, Any]:
    """What /set may change, with the library's defaults."""
    from minfer_cuda.sampling import SamplingParams

    return {f.name: f.default for f in fields(SamplingParams) if f.name != "logit_bias"}


def setting_names() -> list[str]:
    """All that /set takes."""
    return [*SHORT, *sampling_options(), "max_tokens"]


def _settings(repl: Repl) -> dict[str, Any]:
    values = {name: getattr(repl.choices.params, name) for name in sampling_options()}
    values["seed"] = "random" if values["seed"] is None else values["seed"]
    values["max_tokens"] = repl.choices.max_tokens or "none"
    return values


def _show(repl: Repl, rest: str) -> None:
    llm, conversation = repl.llm, repl.conversation
    used = len(conversation.prompt_ids(add_generation_prompt=False)) if conversation.turns else 0
    system = conversation.system
    rows = [
        ("model", f"{llm.config.name} ({llm.file.path.name})"),
        ("runs on", llm.engine.runner.describe()),
        ("sampling", ", ".join(f"{name} {value}" for name, value in _settings(repl).items())),
        ("system", "the template's" if system is None else _shortened(system)),
        ("context", f"{used} / {llm.n_ctx} tokens, {counted(len(conversation.turns), 'message')}"),
        ("last answer", repl.last or "none yet"),
    ]
    _list(rows)


def _stats(repl: Repl, rest: str) -> None:
    totals = repl.totals
    prefill = totals.new_tokens / totals.prefill_seconds if totals.prefill_seconds else 0.0
    decoded = totals.generated_tokens - totals.answers  # the first of each belongs to the prefill
    decode = max(decoded, 0) / totals.decode_seconds if totals.decode_seconds else 0.0
    say(
        f"{counted(totals.answers, 'answer')}: {totals.new_tokens} prompt tokens computed "
        f"({prefill:.1f} tok/s), {totals.kept_tokens} kept, {totals.generated_tokens} generated "
        f"({decode:.1f} tok/s), {totals.prefill_seconds + totals.decode_seconds:.1f} s"
    )


def _file(rest: str, command: str) -> str:
    if not rest:
        raise UsageError(f"{command} needs the name of a file")
    return os.path.expanduser(rest)


def _save(repl: Repl, rest: str) -> None:
    path = _file(rest, "/save")
    repl.conversation.save(path)
    repl.note(f"{counted(len(repl.conversation.turns), 'message')} saved to {path}")


def _load(repl: Repl, rest: str) -> None:
    repl.conversation.load(_file(rest, "/load"))
    held = counted(len(repl.conversation.turns), "message")
    repl.note(f"{held} read; the next answer goes on from there")
    repl.save()


def _tokens(repl: Repl, rest: str) -> None:
    if not rest:
        raise UsageError("/tokens needs a text")
    from .tokens import table

    ids = repl.llm.tokenizer.encode(rest, parse_special=False)
    say(f"{table(ids, repl.llm.tokenizer)}\n{counted(len(ids), 'token')}")


def _shortened(text: str, width: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 3] + "..."


COMMANDS: Sequence[Command] = (
    Command(("/help", "/?"), "", "this list", _help),
    Command(
        ("/exit", "/quit", "/bye"), "", "leave (also Ctrl-D, or Ctrl-C twice at the prompt)", _exit
    ),
    Command(("/clear",), "", "forget the conversation; the system message stays", _clear),
    Command(("/regen",), "", "answer the last message anew", _regen),
    Command(("/undo",), "", "take the last message and its answer back", _undo),
    Command(
        ("/system",),
        "TEXT",
        "set the system message and start afresh; without TEXT: none",
        _system,
    ),
    Command(
        ("/set",), "OPTION VALUE", "change a sampling option or max_tokens; alone: list them", _set
    ),
    Command(("/show",), "", "the model, sampling, context, the last answer's timings", _show),
    Command(("/stats",), "", "sums over the answers of this chat", _stats),
    Command(("/save",), "FILE", "write the conversation to a JSON file", _save),
    Command(("/load",), "FILE", "go on from a saved conversation", _load),
    Command(("/tokens",), "TEXT", "the token ids of a text", _tokens),
)
KEYS = '''Several lines are one message between """ and """, with Alt-Enter, or when pasted.
Ctrl-R searches earlier messages, Tab completes commands.
Ctrl-C stops an answer and keeps what was said.'''


def completions() -> dict[str, Sequence[str] | str]:
    """For each command the words that may follow it, or FILES."""
    found: dict[str, Sequence[str] | str] = {n: () for c in COMMANDS for n in c.names}
    return found | {"/set": setting_names(), "/save": FILES, "/load": FILES}
