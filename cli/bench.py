"""minfer bench: how fast a model runs here."""

from __future__ import annotations

import sys
from enum import Enum
from typing import Annotated

import typer

from . import options
from .model import Settings, open_model
from .terminal import bar, is_smart, redraw

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
    depth: Annotated[
        str,
        typer.Option("-d", "--depth", metavar="D[,D]", help="Tokens already in the context."),
    ] = "0",
    repetitions: Annotated[
        int,
        typer.Option(
            "-r", "--repetitions", metavar="R", min=1, help="Timed repetitions of each test."
        ),
    ] = 5,
    device: options.Device = "auto",
    kv_type: options.KV = None,
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

    Both include sampling (what a user gets), neither includes tokenising and printing. Untimed
    warm-ups come first. On a GPU the rate at which it reads memory is measured too: what that
    allows a decode step is the ceiling. Nothing is reported when logits are not finite or when a
    fixed greedy run does not repeat itself, with and without graphs.

    Example: minfer bench model.gguf -p 512,2048 -n 128 -d 0,4096 -r 5 --json
    """
    form = chosen_format(md, csv, as_json)
    n_prompt, n_generate, depths = sizes(prompt), sizes(generate), sizes(depth)
    if not any([*n_prompt, *n_generate]):
        raise typer.BadParameter("-p 0 and -n 0 leave nothing to measure")
    needed = max(depths) + max(*n_prompt, *(n + 1 for n in n_generate))
    settings = Settings(n_ctx or needed + MARGIN, device, kv_type and kv_type.value)
    with open_model(model, settings) as llm:
        from minfer_cuda import bench_output
        from minfer_cuda.bench import report

        progress = _show_progress if is_smart(sys.stderr) else None
        sizes_of_tests = (n_prompt, n_generate, repetitions, depths)
        result = report(llm, *sizes_of_tests, progress)
    printers = {
        Format.MD: bench_output.as_markdown,
        Format.CSV: bench_output.as_csv,
        Format.JSON: bench_output.as_json,
    }
    print(printers[form](result))


def _show_progress(name: str, done: int, total: int) -> None:
    redraw(f"{bar(done, total)} {done + 1} of {total}: {name}" if done < total else "")


def chosen_format(md: bool, csv: bool, as_json: bool) -> Format:
    """The one format asked for. Raises BadParameter for several."""
    wanted = [f for f, on in ((Format.MD, md), (Format.CSV, csv), (Format.JSON, as_json)) if on]
    if len(wanted) > 1:
        raise typer.BadParameter("--md, --csv and --json exclude each other")
    return wanted[0] if wanted else Format.MD
