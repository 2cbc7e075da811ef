"""minfer bench: how fast a model runs here."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from . import options
from .model import Settings, open_model

MARGIN = 16  # tokens of context beside what the largest test needs


class Format(str, Enum):
    """How the result is printed."""

    MD = "md"
    CSV = "csv"
    JSON = "json"


def sizes(text: str) -> list[int]:
    """`512,2048` as numbers; typer.BadParameter for anything else."""
    try:
        values = [int(word) for word in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number or a list like 512,2048") from None
    if min(values) < 0:
        raise typer.BadParameter(f"{min(values)} tokens cannot be measured")
    return values


def bench(
    model: options.Model,
    prompt: Annotated[
        str, typer.Option("-p", "--n-prompt", metavar="P[,P]", help="Prefill sizes. 0: none.")
    ] = "512",
    generate: Annotated[
        str, typer.Option("-n", "--n-gen", metavar="N[,N]", help="Decode lengths. 0: none.")
    ] = "128",
    repetitions: Annotated[
        int,
        typer.Option(
            "-r", "--repetitions", metavar="R", min=1, help="Timed repetitions of each test."
        ),
    ] = 5,
    device: options.Device = "auto",
    kv_type: options.KV = options.KVType.F16,
    n_ctx: Annotated[
        int | None,
        typer.Option(
            "--n-ctx",
            "-c",
            metavar="N",
            min=1,
            help="Context in tokens.",
            show_default="what the tests need",
        ),
    ] = None,
    md: Annotated[bool, typer.Option("--md", help="Print a Markdown table (the default).")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure prefill and decode speed.

    Both include sampling (what a user gets), neither includes tokenising and printing. An untimed
    warm-up comes first. Nothing is reported when logits are not finite or when a fixed greedy run
    does not repeat itself.

    Example: minfer bench model.gguf -p 512,2048 -n 128 -r 5 --json
    """
    form = chosen_format(md, csv, as_json)
    n_prompt, n_generate = sizes(prompt), sizes(generate)
    needed = max(*n_prompt, *(n + 1 for n in n_generate))
    if needed == 1:
        raise typer.BadParameter("-p 0 and -n 0 leave nothing to measure")
    settings = Settings(n_ctx or needed + MARGIN, device, kv_type.value)
    with open_model(model, settings) as llm:
        from minfer_cuda import bench as measure

        result = measure.report(llm, kv_type.value, n_prompt, n_generate, repetitions)
    printers = {
        Format.MD: measure.as_markdown,
        Format.CSV: measure.as_csv,
        Format.JSON: measure.as_json,
    }
    print(printers[form](result))


def chosen_format(md: bool, csv: bool, as_json: bool) -> Format:
    """The one format asked for. Raises BadParameter for several."""
    wanted = [f for f, on in ((Format.MD, md), (Format.CSV, csv), (Format.JSON, as_json)) if on]
    if len(wanted) > 1:
        raise typer.BadParameter("--md, --csv and --json exclude each other")
    return wanted[0] if wanted else Format.MD
