"""Models by name: what is kept on this machine, and where the rest comes from.

A reference is a path, `hf:OWNER/REPO[:QUANT|FILE]`, `ollama:NAME[:TAG]`, or the name of a model
that was fetched before. Models lie in one folder, under `hf/OWNER/REPO/` and `ollama/OWNER/NAME/`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import platformdirs

from minfer_cuda.errors import StoreError, UsageError
from minfer_cuda.files import PART_SUFFIX, size_of

SPLIT = re.compile(r"(?P<base>.*)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf", re.IGNORECASE)
WORD = r"[A-Za-z0-9][\w.-]*"
HF = re.compile(rf"hf:(?P<repo>{WORD}/{WORD})(?::(?P<choice>.+))?")
OLLAMA = re.compile(rf"ollama:(?:(?P<owner>{WORD})/)?(?P<name>{WORD})(?::(?P<tag>{WORD}))?")

Progress = Callable[[str, int, int], None]  # file name, bytes done, bytes in all


@dataclass(frozen=True)
class Model:
    """A model that is on this machine: `paths` are its file, or its parts in order."""

    name: str
    source: str
    paths: tuple[Path, ...]

    @property
    def size(self) -> int:
        """Bytes of all parts."""
        return sum(map(size_of, self.paths))


def folder() -> Path:
    """Where models are kept."""
    chosen = os.environ.get("MINFER_MODEL_DIR")
    if chosen:
        return Path(chosen)
    return platformdirs.user_cache_path("minfer", appauthor=False) / "models"


def is_remote(reference: str) -> bool:
    """Whether a reference names a model of a hub."""
    return reference.startswith(("hf:", "ollama:"))


def models() -> list[Model]:
    """All models that are here, by name."""
    found = []
    root = folder()
    for base in (root / "hf", root / "ollama"):
        for place in sorted({path.parent for path in base.rglob("*.gguf")}):
            files = {path.name: path for path in place.glob("*.gguf") if path.is_file()}
            for parts in groups(files):
                paths = tuple(files[name] for name in parts)
                found.append(Model(title(parts), _source(place.relative_to(root), parts), paths))
    return sorted(found, key=lambda model: (model.name.lower(), model.source))


def unfinished() -> list[Path]:
    """What interrupted downloads have left."""
    return sorted(folder().rglob(f"*{PART_SUFFIX}"))


def resolve(reference: str, progress: Progress) -> Path:
    """The file that a reference means, part 1 of a split model; one of a hub that is not here is
    fetched. Raises StoreError and UsageError, the latter for a malformed reference."""
    if is_remote(reference):
        here = _cached(reference)
        if here is None:
            from minfer_cuda.hubs import pull

            here = pull(reference, progress)
        return here.paths[0]
    path = Path(reference).expanduser()
    if path.exists() or reference.startswith((".", "~")) or len(path.parts) > 1:
        return path
    model = find(reference)
    if model is None:
        raise StoreError(
            f"{reference} is neither a file nor a fetched model: see `minfer list` and "
            "`minfer pull -h`"
        )
    return model.paths[0]


def find(name: str) -> Model | None:
    """The model of this name: its reference, exactly its name, or the one that begins so. None
    where nothing does; StoreError where several do."""
    if is_remote(name):
        return _cached(name)
    wanted = name.lower().removesuffix(".gguf")
    here = models()
    exact = [m for m in here if wanted in (m.name.lower(), _stem(m.paths[0].name).lower())]
    return _only(exact or [m for m in here if m.name.lower().startswith(wanted)], name)


def remove(paths: Iterable[Path]) -> int:
    """Delete files, and the folders that become empty; returns their bytes."""
    freed = 0
    try:
        for path in paths:
            freed += path.stat().st_size
            path.unlink()
            for parent in path.parents:
                if parent == folder() or any(parent.iterdir()):
                    break
                parent.rmdir()
    except OSError as e:
        raise StoreError(f"cannot remove {e.filename}: {e.strerror}") from e
    return freed


def groups(names: Iterable[str]) -> list[list[str]]:
    """The complete models among file names: each a file, or all the parts of one in order."""
    found: dict[str, dict[int, str]] = {}
    for name in names:
        split = SPLIT.fullmatch(name)
        key = f"{split['base']} {split['parts']}" if split else name
        found.setdefault(key, {})[int(split["part"]) if split else 1] = name
    complete = []
    for parts in found.values():
        split = SPLIT.fullmatch(next(iter(parts.values())))
        n_parts = int(split["parts"]) if split else 1
        if sorted(parts) == list(range(1, n_parts + 1)):
            complete.append([parts[i] for i in sorted(parts)])
    return complete


def choose(names: Iterable[str], choice: str | None, what: str) -> list[str]:
    """The one model among file names that `choice` means: a file name, or the quantisation that
    the name ends with; None takes the only one. Raises StoreError with the list."""
    offered = groups(name for name in names if name.lower().endswith(".gguf"))
    fitting = offered
    if choice is not None:
        exact = [g for g in offered if any(choice in (n, PurePosixPath(n).name) for n in g)]
        fitting = exact or [g for g in offered if _ends_with(title(g), choice)]
    if len(fitting) == 1:
        return fitting[0]
    listing = ", ".join(title(g) for g in (fitting or offered)) or "none"
    if not fitting:
        raise StoreError(f"{what} has no such model; there are: {listing}")
    raise StoreError(f"{what} may mean several models, add :QUANT or :FILE; there are: {listing}")


def _ends_with(title: str, choice: str) -> bool:
    title, choice = title.lower(), choice.lower()
    return title == choice or title.endswith((f"-{choice}", f".{choice}"))


def title(parts: Sequence[str]) -> str:
    """A model's name: the file's, without folder, part number and ending."""
    return _stem(PurePosixPath(parts[0]).name)


def _stem(name: str) -> str:
    split = SPLIT.fullmatch(name)
    return split["base"] if split else name[: -len(".gguf")]


def _source(place: Path, parts: Sequence[str]) -> str:
    kind, owner, name, *_ = (*place.parts, "", "")
    if kind == "hf":
        return f"hf:{owner}/{name}:{parts[0]}"
    tag = title(parts).removeprefix(f"{name}-")
    return f"ollama:{name}:{tag}" if owner == "library" else f"ollama:{owner}/{name}:{tag}"


def _only(found: Sequence[Model], name: str) -> Model | None:
    if len(found) > 1:
        listing = ", ".join(model.source for model in found)
        raise StoreError(f"{name} is ambiguous: it may be {listing}")
    return found[0] if found else None


def _cached(reference: str) -> Model | None:
    """What is here of a hub's model; None where that is nothing."""
    if match := HF.fullmatch(reference):
        place = PurePosixPath("hf", match["repo"])
        here = [m for m in models() if m.source.startswith(f"hf:{match['repo']}:")]
        files = {path.name: m for m in here for path in m.paths}
        try:
            return files[choose(files, match["choice"], reference)[0]]
        except StoreError:
            return None  # another one may be wanted than those that are here
    place, name = ollama_file(reference)
    return next((m for m in models() if m.paths[0] == folder() / place / name), None)


def ollama_file(reference: str) -> tuple[PurePosixPath, str]:
    """Folder and file name here. Raises UsageError."""
    match = OLLAMA.fullmatch(reference)
    if match is None:
        form = "hf:OWNER/REPO[:QUANT|FILE] or ollama:NAME[:TAG]"
        raise UsageError(f"{reference!r} names no model: the form is {form}")
    owner, name, tag = match["owner"] or "library", match["name"], match["tag"] or "latest"
    return PurePosixPath("ollama", owner, name), f"{name}-{tag}.gguf"
