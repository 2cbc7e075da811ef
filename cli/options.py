"""The options that commands share, each declared once.

A sampling option that is not given stays None: the model file's own default, then the library's,
applies. The defaults shown in the help are the library's; a test holds them to `SamplingParams`.
"""

from __future__ import annotations

import math
import re
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from .store import complete_model

N_CTX = 4096


class KVType(str, Enum):
    """What the KV cache holds."""

    F16 = "f16"
    F32 = "f32"


def finite(value: float | None) -> float | None:
    """Refuse nan and inf, which pass range checks."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


def device_name(value: str) -> str:
    """Refuse what is not a device before anything is loaded."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
        raise typer.BadParameter(f"{value!r} is not one of auto, cuda, cuda:N, cpu")
    return value


def template_source(value: str | None) -> str | None:
    """Refuse a template file that is not there before anything is loaded."""
    if value is not None and value != "chatml" and not Path(value).is_file():
        raise typer.BadParameter(f"{value!r} is neither a file nor chatml")
    return value


def not_empty(values: list[str] | None) -> list[str] | None:
    """Refuse an empty stop string, which would stop before the first character."""
    if "" in (values or ()):
        raise typer.BadParameter("a stop string is empty")
    return values


def existing_file(*flags: str, help: str) -> Any:
    """An option that takes the path of a file which is there."""
    return typer.Option(*flags, metavar="FILE", exists=True, dir_okay=False, help=help)


def _number(name: str, text: str, default: str, metavar: str = "X", **limits: Any) -> Any:
    return typer.Option(
        name, metavar=metavar, help=text, show_default=default, callback=finite, **limits
    )


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        autocompletion=complete_model,
        help="A .gguf file (part 1 of a split), a name of `minfer list` or its beginning, "
        "hf:OWNER/REPO[:QUANT|FILE] or ollama:NAME[:TAG].",
    ),
]
NCtx = Annotated[
    int,
    typer.Option(
        "--n-ctx", "-c", metavar="N", min=0, help="Context in tokens. 0: the model's own."
    ),
]
Device = Annotated[
    str,
    typer.Option(
        "--device", metavar="DEVICE", callback=device_name, help="auto, cuda, cuda:N or cpu."
    ),
]
KV = Annotated[
    KVType | None,
    typer.Option(
        "--kv-type",
        metavar="TYPE",
        help="KV cache in f16 or f32.",
        show_default="f16, on the CPU f32",
    ),
]
ChatTemplate = Annotated[
    str | None,
    typer.Option(
        "--chat-template",
        metavar="FILE|chatml",
        callback=template_source,
        help="Use this Jinja template, or ChatML, in place of the model's own.",
    ),
]
RopeBase = Annotated[
    float | None,
    _number("--rope-freq-base", "Override the model's RoPE base.", "the model's", min=1.0),
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Also say what is loaded and how long it takes.")
]
System = Annotated[
    str | None,
    typer.Option(
        "--system",
        metavar="TEXT",
        help="System message.",
        show_default="what the model's template decides",
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        "-n",
        metavar="N",
        min=1,
        help="Most tokens of an answer.",
        show_default="the room that is left",
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        "--stop", metavar="TEXT", callback=not_empty, help="Stop before this text. Repeatable."
    ),
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Never end the answer with an end token.")
]
PromptFile = Annotated[
    Path | None,
    existing_file(
        "--prompt-file",
        help="Read the prompt (of a chat: the first message) from this UTF-8 file.",
    ),
]
HideThinking = Annotated[
    bool,
    typer.Option("--hide-thinking", help="Do not show what stands between <think> and </think>."),
]
Temperature = Annotated[
    float | None, _number("--temp", "Temperature. 0: the most likely token.", "0.8", min=0.0)
]
TopK = Annotated[
    int | None, _number("--top-k", "Keep the K most likely tokens. 0: off.", "40", "K", min=0)
]
TopP = Annotated[
    float | None,
    _number("--top-p", "Keep the fewest tokens of this joint probability. 1: off.", "0.95", min=0),
]
MinP = Annotated[
    float | None,
    _number(
        "--min-p",
        "Drop tokens less likely than this times the first. 0: off.",
        "0.05",
        min=0,
        max=1,
    ),
]
RepeatPenalty = Annotated[
    float | None,
    _number("--repeat-penalty", "Penalise the last 64 tokens by a factor. 1: off.", "1.0", min=0.0),
]
FrequencyPenalty = Annotated[
    float | None,
    _number("--frequency-penalty", "Subtract per occurrence in the last 64 tokens.", "0.0"),
]
PresencePenalty = Annotated[
    float | None, _number("--presence-penalty", "Subtract once from the last 64 tokens.", "0.0")
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed",
        metavar="N",
        min=0,
        max=2**64 - 1,
        help="Seed of the random numbers.",
        show_default="random, and printed",
    ),
]
