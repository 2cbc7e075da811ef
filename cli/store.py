"""minfer pull, list and rm: the models that are kept on this machine."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from minfer_cuda.errors import StoreError, UsageError
from minfer_cuda.printable import printable

from .app import notice, say
from .terminal import bar, harmless, is_smart, redraw

REDRAW_S = 0.1  # at most this often


def pull(
    reference: Annotated[
        str, typer.Argument(metavar="NAME", help="hf:OWNER/REPO[:QUANT|FILE] or ollama:NAME[:TAG].")
    ],
) -> None:
    """Fetch a model.

    An interrupted download is resumed, size and SHA-256 are verified. HF_ENDPOINT, HF_TOKEN,
    HF_HUB_OFFLINE and the proxies of the environment are honoured. stdout has the model's path.

    Example: minfer pull hf:Qwen/Qwen2.5-0.5B-Instruct-GGUF:q4_k_m
    """
    from minfer_cuda import hubs, store

    if not store.is_remote(reference):
        raise UsageError(
            f"{reference!r} is not hf:OWNER/REPO[:QUANT|FILE] or ollama:NAME[:TAG]; a file that is "
            f"here already is used as it is"
        )
    with progress() as show:
        model = hubs.pull(reference, show)
    say(f"{model.name}: {size_text(model.size)}")
    print(harmless(str(model.paths[0]), sys.stdout))


def list_models(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """List the fetched models.

    Example: minfer list
    """
    from minfer_cuda import store
    from minfer_cuda.files import size_of

    models = store.models()
    for model in models if as_json else ():
        paths = [str(path) for path in model.paths]
        row = {"name": model.name, "source": model.source, "size": model.size, "paths": paths}
        print(json.dumps(row))
    if not as_json and models:
        rows = [("NAME", "SIZE", "SOURCE")]
        rows += [(printable(m.name), size_text(m.size), printable(m.source)) for m in models]
        width = max(len(name) for name, _, _ in rows)
        print("\n".join(f"{name:<{width}}  {size:>9}  {source}" for name, size, source in rows))
    if not models:
        say(f"no models in {store.folder()}: `minfer pull -h` shows how to fetch one")
    if partial := store.unfinished():
        size = size_text(sum(map(size_of, partial)))
        notice(f"{len(partial)} unfinished downloads ({size}): minfer rm --unfinished")


def rm(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Names, or unambiguous beginnings of names."),
    ] = None,
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="Remove what interrupted downloads have left.")
    ] = False,
) -> None:
    """Remove fetched models.

    Example: minfer rm qwen2.5-0.5b-instruct-q4_k_m
    """
    from minfer_cuda import store

    if not names and not unfinished:
        raise UsageError("nothing to remove: give a name (see `minfer list`), or --unfinished")
    paths: dict[Path, None] = {}
    for name in names or ():
        model = store.find(name)
        if model is None:
            raise StoreError(f"there is no model {name!r}: see `minfer list`")
        paths |= dict.fromkeys(model.paths)
    if unfinished:
        paths |= dict.fromkeys(store.unfinished())
    say(f"{len(paths)} files removed, {size_text(store.remove(paths))} freed")


def local_path(reference: str) -> Path:
    """The file of a model that a command was given; fetched if it is a hub's and not here."""
    from minfer_cuda import store

    with progress() as show:
        return store.resolve(reference, show)


def complete_model(incomplete: str) -> list[str]:
    """The names that the shell may complete."""
    from minfer_cuda import store

    return [m.name for m in store.models() if m.name.startswith(incomplete)]


class Progress:
    """A download's line on stderr: it overwrites itself on a terminal, elsewhere there is one line
    at the beginning of each file."""

    def __init__(self) -> None:
        self._name = ""
        self._start = self._drawn = 0.0
        self._first = 0

    def __call__(self, name: str, done: int, size: int) -> None:
        """`done` of `size` bytes of the file are here."""
        now = time.monotonic()
        smart = is_smart(sys.stderr)
        if name != self._name:
            self._name, self._start, self._first, self._drawn = name, now, done, 0.0
            if not smart:
                say(f"fetching {name}, {size_text(size)}")
        if not smart or (now - self._drawn < REDRAW_S and done < size):
            return
        self._drawn = now
        rate = (done - self._first) / max(now - self._start, 1e-3)
        speed = f", {size_text(int(rate))}/s" if rate else ""
        left = f", {(size - done) / rate:.0f} s left" if rate and done < size else ""
        line = f"{bar(done, size)} {size_text(done)} of {size_text(size)}{speed}{left}"
        redraw(line if done < size else f"{line}\n")

    def clear(self) -> None:
        """Erase a line that was not finished."""
        if self._drawn:
            redraw("")


@contextmanager
def progress() -> Iterator[Progress]:
    """The progress of what is fetched within; nothing is left of it after an error."""
    shown = Progress()
    try:
        yield shown
    except BaseException:
        shown.clear()
        raise


def size_text(n_bytes: int) -> str:
    """In decimal units, as disks and networks are sold."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= size:
            return f"{n_bytes / size:.2f} {unit}"
    return f"{n_bytes} bytes"
