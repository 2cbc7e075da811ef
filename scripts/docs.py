"""Write the README's generated parts: help texts and the table of tensor types.

    python scripts/docs.py            rewrite README.md
    python scripts/docs.py --check    exit 1 when it is not current

A generated part stands between `<!-- begin NAME -->` and `<!-- end NAME -->`.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
COMMANDS = ("generate", "chat", "info", "bench", "perplexity")
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


def part(name: str) -> str:
    """The text of one generated part."""
    if name == "types":
        sys.path.insert(0, str(ROOT))
        from minfer_cuda.quants import supported_table

        return supported_table()
    return help_text(name.removeprefix("help "))


def render(text: str) -> str:
    """The document with every generated part written anew."""
    return PART.sub(lambda m: f"{m[1]}{part(m['name'])}\n{m[3]}", text)


def main() -> None:
    """Rewrite or check README.md."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    old = README.read_text(encoding="utf-8")
    new = render(old)
    if check and new != old:
        sys.exit("error: README.md is not current: run `make docs`")
    README.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
