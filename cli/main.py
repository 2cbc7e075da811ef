"""minfer: run a GGUF Qwen2-family model from the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from minfer_cuda import __version__

from .app import Boundary
from .bench import bench
from .chat import chat
from .generate import generate
from .info import info
from .perplexity import perplexity
from .store import list_models, pull, rm
from .tokens import template, tokenize

app = typer.Typer(
    name="minfer",
    cls=Boundary,
    help="Run GGUF models of the Qwen2 family on an NVIDIA GPU, or on the CPU.",
    epilog="Example: minfer generate model.gguf 'Why is the sky blue?' \n\n"
    "Exit codes: 0 done, 1 the model file, the data or the device, 2 usage, 130 interrupted, "
    "143 terminated.\n\n"
    "Environment: MINFER_MODEL_DIR and MINFER_CACHE_DIR say where models and compiled kernels are "
    "kept; the README lists the others.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,  # importing rich would double the time that --help takes
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"minfer {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", help="Print the version.", callback=_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Of `minfer` itself; each acts as soon as it is read."""


COMMANDS: dict[str, Callable[..., None]] = {
    "generate": generate,
    "chat": chat,
    "pull": pull,
    "list": list_models,
    "rm": rm,
    "info": info,
    "tokenize": tokenize,
    "template": template,
    "bench": bench,
    "perplexity": perplexity,
}
for name, command in COMMANDS.items():
    app.command(name)(command)
