"""Registers, shared memory and spills of every kernel on every architecture: kernel-resources.json.

`make resources` compiles what has changed and rewrites the file; test_compile.py holds it to the
sources. Compiling everything takes long (a large tile of matmul 13 s), so entries are trusted while
the code of their file, comments aside, and NVRTC's options are the same.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import sys
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
FAMILY_TYPES = ("Q4_0", "Q8_0", "Q4_K", "IQ4_XS", "F16")
ALL_TYPES = tuple(t.cuda_name for t in QUANT_TYPES.values() if t.cuda_name)

Row = list[int]  # registers, static shared bytes, spilled bytes


def stems() -> list[str]:
    return sorted(path.stem for path in source_folder().glob("*.cu"))


def instances(stem: str, arch: int) -> list[str]:
    """What has to compile for an architecture."""
    launcher = importlib.import_module(f"minfer_cuda.kernels.{stem}")
    return launcher.instances(ALL_TYPES if arch in FULL else FAMILY_TYPES)


def jobs(stem: str) -> list[tuple[str, int]]:
    return [(name, arch) for arch in (*FULL, *FAMILIES) for name in instances(stem, arch)]


def code_hash(stem: str) -> str:
    """Changes with the code of cuda/<stem>.cu and what it includes, not with comments or blanks."""
    source = expand_source(stem)
    code = re.sub(r"//[^\n]*|/\*.*?\*/|#line[^\n]*", "", source, flags=re.DOTALL)
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
    return [number(r"Used (\d+) registers"), number(r"(\d+) bytes smem"), spilled]


def load() -> dict[str, Any]:
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


def save(table: dict[str, Any]) -> None:
    """One line an instance, so that a change shows as such."""
    lines = []
    for stem in sorted(table):
        rows = ",\n".join(
            f"   {json.dumps(name)}: {json.dumps(by_arch)}"
            for name, by_arch in sorted(table[stem]["instances"].items())
        )
        head = {key: value for key, value in table[stem].items() if key != "instances"}
        lines.append(
            f' {json.dumps(stem)}: {json.dumps(head)[:-1]}, "instances": {{\n{rows}\n }}}}'
        )
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def stale(stem: str, table: dict[str, Any]) -> list[tuple[str, int]]:
    """The instances that the table does not have, or has from other code."""
    entry = table.get(stem, {"code": None, "instances": {}})
    current = entry["code"] == code_hash(stem)
    return [
        (name, arch)
        for name, arch in jobs(stem)
        if not (current and str(arch) in entry["instances"].get(name, {}))
    ]


def update(wanted: list[str]) -> None:
    """Compile what is stale of some files, on threads, and rewrite the table."""
    table = load()
    for stem in set(table) - set(stems()):
        del table[stem]
    for stem in wanted:
        todo = stale(stem, table)
        old = table.get(stem, {}).get("instances", {}) if len(todo) < len(jobs(stem)) else {}
        there: dict[str, dict[str, Row]] = {}
        for name, arch in jobs(stem):
            if (row := old.get(name, {}).get(str(arch))) is not None:
                there.setdefault(name, {})[str(arch)] = row
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            running = {pool.submit(measure, stem, *job): job for job in todo}
            for done, future in enumerate(as_completed(running), 1):
                name, arch = running[future]
                there.setdefault(name, {})[str(arch)] = future.result()
                print(f"{stem}: {done} of {len(todo)}, {name} sm_{arch}", flush=True)
        version = "{}.{}".format(*nvrtc_version())
        ordered = {
            name: dict(sorted(rows.items(), key=lambda row: int(row[0])))
            for name, rows in there.items()
        }
        table[stem] = {"code": code_hash(stem), "nvrtc": version, "instances": ordered}
        save(table)


if __name__ == "__main__":
    update(sys.argv[1:] or stems())
