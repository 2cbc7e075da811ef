"""Write the generated parts of documents: help texts, tensor types, tables of measured speed.

    python scripts/docs.py            rewrite README.md, benchmarks/NOTES.md and the plots
    python scripts/docs.py --check    exit 1 when one is not current

A generated part stands between `<!-- begin NAME -->` and `<!-- end NAME -->`.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import plots, render

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
NOTES = ROOT / "benchmarks" / "NOTES.md"
PART = re.compile(r"(<!-- begin (?P<name>[\w -]+) -->\n).*?(<!-- end (?P=name) -->)", re.DOTALL)


def help_text(command: str) -> str:
    """What `minfer COMMAND --help` prints 100 columns wide, as a code block."""
    environment = os.environ | {"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "cli", command, "--help"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line.rstrip() for line in done.stdout.strip("\n").splitlines()]
    return "\n".join(["```", *lines, "```"])


def chat_commands() -> str:
    """The table of the commands of a chat."""
    from cli.commands import COMMANDS

    rows = [
        (", ".join(f"`{f'{name} {c.argument}'.strip()}`" for name in c.names), c.help)
        for c in COMMANDS
    ]
    lines = ["| Command | What it does |", "|---|---|"]
    return "\n".join([*lines, *(f"| {names} | {text} |" for names, text in rows)])


def part(name: str) -> str:
    """The text of one generated part."""
    if name == "types":
        from minfer_cuda.quants import supported_table

        return supported_table()
    if name == "chat commands":
        return chat_commands()
    if name in render.PARTS:
        return render.PARTS[name](render.load())
    return help_text(name.removeprefix("help "))


def generated() -> dict[Path, str]:
    """Every document and plot, its generated parts written anew."""
    texts = {path: with_parts(path.read_text(encoding="utf-8")) for path in (README, NOTES)}
    results = render.load()
    return texts | {render.RESULTS / name: plot(results) for name, plot in plots.PLOTS.items()}


def with_parts(text: str) -> str:
    """The document with every generated part written anew."""
    return PART.sub(lambda m: f"{m[1]}{part(m['name'])}\n{m[3]}", text)


def main() -> None:
    """Rewrite or check."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    for path, text in generated().items():
        old = path.read_text(encoding="utf-8") if path.exists() else None
        if check and text != old:
            sys.exit(f"error: {path.relative_to(ROOT)} is not current: run `make docs`")
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
