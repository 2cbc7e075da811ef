"""minfer info: what is in a model file."""

from __future__ import annotations

from typing import Annotated

import typer

from minfer_cuda.errors import MinferError

from . import options
from .app import complain
from .store import local_path


def info(
    model: options.Model,
    n_ctx: options.NCtx = options.N_CTX,
    check: Annotated[
        bool, typer.Option("--check", help="Also read every tensor and name those with NaN or Inf.")
    ] = False,
) -> None:
    """Show a model file: metadata, tensors, sizes, memory.

    Needs no GPU.

    Example: minfer info model.gguf --n-ctx 32768
    """
    from minfer_cuda.config import Qwen2Config
    from minfer_cuda.gguf import GGUFFile
    from minfer_cuda.info import check as find_damage
    from minfer_cuda.info import describe

    with GGUFFile.open(local_path(model)) as file:
        try:
            config = Qwen2Config.from_gguf(file)
        except MinferError:
            print(describe(file, None, n_ctx), end="", flush=True)
            raise
        print(describe(file, config, n_ctx), end="", flush=True)
        if not check:
            return
        damage = find_damage(file)
    for sentence in damage:
        print(sentence)
    if damage:
        complain(f"{len(damage)} of the tensors are unusable: fetch the file again")
        raise typer.Exit(1)
    print("all tensors are finite")
