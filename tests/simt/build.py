"""Compiles the runtime and kernel instances to shared libraries, kept by content in build/simt."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from minfer_cuda.errors import KernelError

FOLDER = Path(__file__).resolve().parent
CACHE = FOLDER.parents[1] / "build" / "simt"
_HEADERS = ("simt.h", "simt_vectors.h", "simt_half.h", "simt_arithmetic.h", "entry.h")
_RUNTIME = ("fibres.cpp", "collectives.cpp", "arrivals.cpp", "memory.cpp", "hooks.cpp")

# Frame pointers name a fault's place; unique symbols would bind a library to another's variables.
_COMMON = ("-std=c++17", "-fPIC", "-gdwarf-4", "-w", "-fno-omit-frame-pointer", "-fno-gnu-unique")
# As on the device: no contraction (bits are promised), wrapping integers, punned pointers.
_KERNEL = ("-DMINFER_SIMT", "-ffp-contract=off", "-fwrapv", "-fno-strict-aliasing",
           "-fno-exceptions", "-fvisibility=hidden")  # fmt: skip
_CHECKED = ("-O1", "-fsanitize=thread", "--param=tsan-distinguish-volatile=1",
            "--param=tsan-instrument-func-entry-exit=0", "-fsanitize=alignment,bounds")  # fmt: skip


@functools.cache
def compiler() -> str | None:
    """The system's C++ compiler, or None."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


@functools.cache
def _compiler_version() -> str:
    return _run([_compiler(), "--version"], "the C++ compiler")


def _compiler() -> str:
    found = compiler()
    if found is None:
        raise KernelError("no C++ compiler (g++ or clang++) to run kernels on the CPU")
    return found


def _run(command: list[str], what: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr]
        raise KernelError(f"{what} does not compile for the CPU: " + "\n".join(errors[:3]))
    return done.stdout


def _kept(parts: list[str], stem: str) -> Path:
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    return CACHE / f"{stem}-{digest}.so"


@functools.cache
def _texts(names: tuple[str, ...]) -> str:
    return "\0".join((FOLDER / name).read_text() for name in names)


@functools.cache
def runtime() -> Path:
    """The library of fibres and access checks."""
    flags = [*_COMMON, "-O2"]
    path = _kept([_compiler_version(), *flags, _texts((*_RUNTIME, "runtime.h"))], "runtime")
    if not path.exists():
        sources = [str(FOLDER / name) for name in _RUNTIME]
        command = [_compiler(), *flags, "-shared", *sources, "-o"]
        _publish(path, lambda out: _run([*command, out], "tests/simt"))
    return path


def kernel(stem: str, name: str, source: str, checked: bool) -> Path:
    """The instance `name` of the expanded text `source` of cuda/<stem>.cu. Raises KernelError."""
    entry = f'#line 1 "entry"\n#include "entry.h"\nSIMT_ENTRY({name})\n'
    text = f'#include "simt.h"\n{source}\n{entry}'
    flags = [*_COMMON, *_KERNEL, *(_checked_flags() if checked else ("-O2",))]
    key = [_compiler_version(), *flags, _texts(_HEADERS), str(runtime()), text]
    path = _kept(key, stem)
    if not path.exists():
        _publish(path, lambda out: _compile(f"{name} of cuda/{stem}.cu", text, flags, out))
    return path


def _checked_flags() -> tuple[str, ...]:
    if "clang" in _compiler_version():
        return tuple(flag for flag in _CHECKED if not flag.startswith("--param"))
    return _CHECKED


def _compile(what: str, text: str, flags: list[str], out: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, unit = Path(folder, "kernel.cpp"), Path(folder, "kernel.o")
        source.write_text(text)
        _run([_compiler(), *flags, f"-I{FOLDER}", "-c", str(source), "-o", str(unit)], what)
        wraps = [f"-Wl,--wrap={name}" for name in ("memcpy", "memset")]
        # Linked without -fsanitize: the runtime's hooks stand in for the sanitizer's library.
        libraries = [str(runtime()), f"-Wl,-rpath,{CACHE}", "-lm"]
        _run([_compiler(), "-shared", str(unit), *wraps, *libraries, "-o", out], what)


def _publish(path: Path, make: Callable[[str], object]) -> None:
    """Atomic: another process sees the whole library or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        out = Path(folder, path.name)
        make(str(out))
        os.replace(out, path)


def places(library: Path, addresses: list[int]) -> list[str]:
    """Source places of addresses within a library, inlined calls included, innermost first:
    `matvec.cu:88`. Files of the shim itself are left out."""
    tool = shutil.which("addr2line")
    if tool is None or not addresses:
        return []
    command = [tool, "-e", str(library), "-i", *(hex(address) for address in addresses)]
    found = []
    for line in _run(command, "addr2line").splitlines():
        place = line.split(" (")[0].rsplit("/", 1)[-1]
        if not place.startswith(("simt", "entry", "??", "kernel.cpp")):
            found.append(place)
    return found
