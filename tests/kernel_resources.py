"""Registers, shared and local memory of every kernel on every architecture: kernel-resources.json.

`make resources` compiles what has changed and rewrites the file; test_compile.py holds it to the
sources. Compiling everything takes long (a large tile of matmul 13 s), so entries are trusted while
the code of their file, comments aside, and NVRTC's options are the same.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from minfer_cuda.kernels.compiler import (
    compile_cubin,
    compile_options,
    expand_source,
    nvrtc_version,
    source_folder,
)
from minfer_cuda.quants import QUANT_TYPES

TABLE = Path(__file__).parent / "kernel-resources.json"
FULL = (75, 80, 90, 120)  # every instance
FAMILIES = (86, 87, 89, 100)  # one type of each family of formats
FAMILY_TYPES = ("Q4_0", "Q4_K", "IQ4_XS", "F16")
ALL_TYPES = tuple(t.cuda_name for t in QUANT_TYPES.values() if t.cuda_name)

Row = list[int]  # registers, static shared bytes, spilled bytes, bytes of stack


def stems() -> list[str]:
    return sorted(path.stem for path in source_folder().glob("*.cu"))


def instances(stem: str, arch: int) -> list[str]:
    """What has to compile for an architecture."""
    launcher = importlib.import_module(f"minfer_cuda.kernels.{stem}")
    return launcher.instances(ALL_TYPES if arch in FULL else FAMILY_TYPES)


def jobs(stem: str) -> list[tuple[str, int]]:
    return [(name, arch) for arch in (*FULL, *FAMILIES) for name in instances(stem, arch)]


def code_hash(stem: str) -> str:
    """Changes with what NVRTC sees of cuda/<stem>.cu, not with comments or host meanings."""
    source = expand_source(stem)
    noise = r"//[^\n]*|/\*.*?\*/|#line[^\n]*|#ifdef MINFER_SIMT.*?(?=#el|#endif)"
    code = re.sub(noise, "", source, flags=re.DOTALL)
    words = [code.split(), compile_options(source, FULL[0])]
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:16]


def measure(stem: str, name: str, arch: int) -> Row:
    cubin = compile_cubin(stem, name, arch)
    # The log has a part for each kernel of the file that is no template, and one for the instance.
    parts = cubin.log.split("Compiling entry function ")
    (log,) = (part for part in parts if part.startswith(f"'{cubin.lowered_name}'"))

    def number(pattern: str) -> int:
        found = re.search(pattern, log)
        return int(found[1]) if found else 0

    spilled = number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads")
    # A stack without spills is an array in local memory, as where a function was not inlined.
    stack = number(r"(\d+) bytes stack frame")
    return [number(r"Used (\d+) registers"), number(r"(\d+) bytes smem"), spilled, stack]


def load() -> dict[str, Any]:
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


def save(table: dict[str, Any], path: Path) -> None:
    """One line an instance, so that a change shows as such."""
    parts = []
    for stem in sorted(table):
        rows = ",\n".join(
            f"   {json.dumps(name)}: {json.dumps(dict(sorted(rows.items(), key=_arch)))}"
            for name, rows in sorted(table[stem]["instances"].items())
        )
        head = json.dumps({key: table[stem][key] for key in ("code", "nvrtc")})
        parts.append(f' {json.dumps(stem)}: {head[:-1]}, "instances": {{\n{rows}\n }}}}')
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def _arch(row: tuple[str, Row]) -> int:
    return int(row[0])


def stale(stem: str, table: dict[str, Any]) -> list[tuple[str, int]]:
    """The instances that the table does not have, or has from other code."""
    entry = table.get(stem, {"code": None, "instances": {}})
    current = entry["code"] == code_hash(stem)
    return [
        (name, arch)
        for name, arch in jobs(stem)
        if not (current and str(arch) in entry["instances"].get(name, {}))
    ]


def begin(stem: str, table: dict[str, Any]) -> list[tuple[str, str, int]]:
    """What is to compile of a file; its entry keeps the rows that still hold."""
    todo, wanted = stale(stem, table), jobs(stem)
    old = table[stem]["instances"] if stem in table and len(todo) < len(wanted) else {}
    kept: dict[str, dict[str, Row]] = {}
    for name, arch in wanted:
        if str(arch) in old.get(name, {}):
            kept.setdefault(name, {})[str(arch)] = old[name][str(arch)]
    version = "{}.{}".format(*nvrtc_version())
    table[stem] = {"code": code_hash(stem), "nvrtc": version, "instances": kept}
    return [(stem, name, arch) for name, arch in todo]


def update(wanted: list[str], into: Path) -> None:
    """Compile what is stale of some files, on threads, and write the table, also where it is
    interrupted: a second run goes on from there."""
    table = {stem: entry for stem, entry in load().items() if stem in stems()}
    todo = [job for stem in wanted for job in begin(stem, table)]
    todo.reverse()  # instances are listed by rising tile: long compilations first
    pool = ThreadPoolExecutor(os.cpu_count())
    running = {pool.submit(measure, *job): job for job in todo}
    try:
        for done, future in enumerate(as_completed(running), 1):
            stem, name, arch = running[future]
            table[stem]["instances"].setdefault(name, {})[str(arch)] = future.result()
            print(f"{done} of {len(todo)}: {name} sm_{arch}", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)
        save(table, into)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stems", nargs="*", help="files of cuda/, all by default")
    parser.add_argument("--into", type=Path, default=TABLE, help="where the table is written")
    arguments = parser.parse_args()
    update(arguments.stems or stems(), arguments.into)
