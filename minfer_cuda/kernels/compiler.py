"""From cuda/<stem>.cu to a cubin: find, expand includes, compile with NVRTC, keep on disk.

NVRTC is called directly because CuPy's own cache forgets included headers in its key, drops the
last byte of a cubin and cannot ask for architecture-specific code (`sm_90a`). No GPU is needed.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from minfer_cuda.errors import KernelError
from minfer_cuda.files import PART_SUFFIX, replacing

_log = logging.getLogger("minfer_cuda")
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+\.cuh)"')
_ARCH_SPECIFIC = re.compile(r"^// arch-specific: sm_(\d+)a\s*$", re.MULTILINE)
_MAGIC = b"minfer cubin\n"
_STALE_S = 3600  # a file still unfinished after so long is of a process that was killed


@dataclass(frozen=True)
class Cubin:
    """One compiled kernel. `log` holds NVRTC's and ptxas' words: registers, spills, warnings."""

    data: bytes
    lowered_name: str
    log: str
    n_parameters: int


def source_folder() -> Path:
    """The folder of the .cu files: inside the package when installed, else the repository's."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "cuda", package.parent / "cuda"):
        if folder.is_dir():
            return folder
    raise KernelError(f"no kernel sources beside {package}: the installation is incomplete")


def expand_source(stem: str) -> str:
    """The text of cuda/<stem>.cu with each `#include "x.cuh"` replaced, once, by that file.

    `#line` markers keep file and line true in messages. Other includes are left to the compiler.
    Raises KernelError for a missing file.
    """
    return "\n".join(_expand(source_folder(), f"{stem}.cu", set())) + "\n"


def _expand(folder: Path, name: str, seen: set[str]) -> list[str]:
    seen.add(name)
    try:
        text = (folder / name).read_text(encoding="utf-8")
    except OSError as error:
        raise KernelError(f"cannot read kernel source {folder / name}: {error.strerror}") from error
    lines = [f'#line 1 "cuda/{name}"']
    for number, line in enumerate(text.splitlines(), start=1):
        include = _INCLUDE.match(line)
        if include is None:
            # NVRTC sees one file, where the pragma only warns; the line stays for the numbering.
            lines.append("" if line.strip() == "#pragma once" else line)
        elif include[1] in seen:
            lines.append("")
        else:
            lines += _expand(folder, include[1], seen)
            lines.append(f'#line {number + 1} "cuda/{name}"')
    return lines


def compile_options(source: str, arch: int) -> tuple[str, ...]:
    """NVRTC's options for an expanded source, but the folder of the CUDA headers."""
    specific = str(arch) in _ARCH_SPECIFIC.findall(source)
    return (
        "-std=c++17",
        f"--gpu-architecture=sm_{arch}{'a' * specific}",
        "--fmad=false",  # only the fused multiply-adds that the source writes: fused = unfused
        "--ptxas-options=-v",  # registers and spills in the log
    )


def parameter_count(source: str, stem: str, name: str) -> int:
    """How many parameters an instance takes, by its declaration in an expanded source."""
    bounds = r"(?:__launch_bounds__\([^()]*\)\s*)?"
    kernel = re.escape(name.partition("<")[0])
    found = re.search(rf"__global__\s+void\s+{bounds}{kernel}\s*\(([^()]*)\)", source)
    if found is None:
        raise KernelError(f"cuda/{stem}.cu declares no kernel {name}")
    return found[1].count(",") + 1 if found[1].strip() else 0


class Source:
    """cuda/<stem>.cu as NVRTC gets it for compute capability arch/10: read once for all instances.

    A source with the line `// arch-specific: sm_90a` is compiled for sm_90a when arch is 90.
    """

    def __init__(self, stem: str, arch: int):
        """Raises KernelError for a missing file."""
        self.stem = stem
        self.text = expand_source(stem)
        self.options = compile_options(self.text, arch)
        self.key = json.dumps([self.text, self.options, nvrtc_version()])


class Request:
    """The instance `name` (`matvec<Q4_K>`) of a source.

    It is in the disk cache where source, name, options and NVRTC are the same.
    """

    def __init__(self, source: Source, name: str):
        """Raises KernelError for a kernel that does not exist."""
        self._source = source
        self._name = name
        self._n_parameters = parameter_count(source.text, source.stem, name)
        key = hashlib.sha256(f"{name}\n{source.key}".encode()).hexdigest()
        self._entry = _cache_folder() / f"{key}.cubin"

    def cached(self) -> Cubin | None:
        """What the disk cache has; None where that is nothing, or nothing whole."""
        return _read_entry(self._entry, self._n_parameters)

    def compiled(self) -> Cubin:
        """By NVRTC, for up to seconds. Raises KernelError with the compiler's first errors."""
        source = self._source
        return _compile(source.stem, self._name, source.text, source.options)

    def keep(self, cubin: Cubin) -> None:
        """Into the disk cache; where that does not work, say so once."""
        _write_entry(self._entry, cubin)


def compile_cubin(stem: str, name: str, arch: int) -> Cubin:
    """See `Request`: cached, or compiled and kept. Raises KernelError."""
    request = Request(Source(stem, arch), name)
    cubin = request.cached()
    if cubin is None:
        cubin = request.compiled()
        request.keep(cubin)
    return cubin


# ---- NVRTC --------------------------------------------------------------------------------------


@functools.cache
def nvrtc_version() -> tuple[int, int]:
    """(major, minor) of the NVRTC library in use. Raises KernelError when there is none."""
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError, OSError) as error:
        raise KernelError(
            f"NVRTC is not usable ({str(error).splitlines()[0]}): "
            "pip install cuda-bindings nvidia-cuda-nvrtc-cu12"
        ) from error
    return major, minor


@functools.cache
def header_folder() -> Path:
    """Where cuda_fp16.h is: the nvidia-cuda-runtime wheel, conda, CUDA_PATH or a toolkit."""
    from cuda.pathfinder import find_nvidia_header_directory

    candidates = [os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    folders = [Path(root) / "include" for root in candidates if root]
    located = find_nvidia_header_directory("cudart")
    if located is not None:
        folders.insert(0, Path(located))
    for folder in folders:
        if (folder / "cuda_fp16.h").is_file():
            return folder
    looked = ", ".join(str(folder) for folder in folders)
    raise KernelError(
        f"CUDA headers (cuda_fp16.h) not found in {looked}: "
        "pip install nvidia-cuda-runtime-cu12, or set CUDA_PATH to a toolkit"
    )


def _compile(stem: str, name: str, source: str, options: tuple[str, ...]) -> Cubin:
    from cuda.bindings import nvrtc

    def check(result: tuple[Any, ...]) -> Any:
        if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise KernelError(f"{name} of cuda/{stem}.cu: NVRTC says {result[0].name}")
        return result[1] if len(result) > 1 else None

    version = ".".join(map(str, nvrtc_version()))
    flags = [*options, f"-I{header_folder()}"]
    program = check(
        nvrtc.nvrtcCreateProgram(source.encode(), f"cuda/{stem}.cu".encode(), 0, [], [])
    )
    try:
        check(nvrtc.nvrtcAddNameExpression(program, name.encode()))
        (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), [f.encode() for f in flags])
        log = bytearray(check(nvrtc.nvrtcGetProgramLogSize(program)))
        check(nvrtc.nvrtcGetProgramLog(program, log))
        words = log.rstrip(b"\0").decode(errors="replace")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise KernelError(
                f"{name} of cuda/{stem}.cu does not compile ({options[1]}, NVRTC {version}): "
                f"{_first_errors(words) or status.name}"
            )
        lowered = check(nvrtc.nvrtcGetLoweredName(program, name.encode()))
        data = bytearray(check(nvrtc.nvrtcGetCUBINSize(program)))
        check(nvrtc.nvrtcGetCUBIN(program, data))
        n_parameters = parameter_count(source, stem, name)
        return Cubin(bytes(data), lowered.decode(), words, n_parameters)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _first_errors(log: str, most: int = 3) -> str:
    lines = [line.strip() for line in log.splitlines() if " error:" in line]
    return "\n".join(lines[:most])


# ---- disk cache ---------------------------------------------------------------------------------


def _cache_folder() -> Path:
    chosen = os.environ.get("MINFER_CACHE_DIR")
    base = Path(chosen) if chosen else platformdirs.user_cache_path("minfer", appauthor=False)
    return base / "kernels"


def _read_entry(path: Path, n_parameters: int) -> Cubin | None:
    """The entry, or None where it is absent, damaged or unreadable."""
    try:
        blob = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        _notice_unusable(str(path.parent), error.strerror or str(error))
        return None
    digest_end = len(_MAGIC) + 32
    payload = blob[digest_end:]
    if blob[:digest_end] != _MAGIC + hashlib.sha256(payload).digest():
        _log.warning("kernel cache: damaged entry %s is compiled again", path)
        return None
    head, _, data = payload.partition(b"\n")
    lowered_name, log = json.loads(head)
    return Cubin(data, lowered_name, log, n_parameters)


def _write_entry(path: Path, cubin: Cubin) -> None:
    """Atomic: another process sees the whole entry or none; the last of two writers wins."""
    payload = json.dumps([cubin.lowered_name, cubin.log]).encode() + b"\n" + cubin.data
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path.parent)
        with replacing(path) as file:
            file.write(_MAGIC + hashlib.sha256(payload).digest() + payload)
    except OSError as error:
        _notice_unusable(str(path.parent), error.strerror or str(error))


@functools.cache  # once per process
def _sweep(folder: Path) -> None:
    """Remove what killed processes have left unfinished."""
    for part in folder.glob(f".*{PART_SUFFIX}"):
        with suppress(FileNotFoundError):  # another process sweeps too
            if part.stat().st_mtime < time.time() - _STALE_S:
                part.unlink()


@functools.cache  # once per folder and reason
def _notice_unusable(folder: str, reason: str) -> None:
    _log.warning(
        "kernel cache %s is not usable (%s): kernels are compiled again at each start; "
        "MINFER_CACHE_DIR names another folder",
        folder,
        reason,
    )
