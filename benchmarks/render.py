"""Tables and a plot from the raw results in benchmarks/results.

    python benchmarks/render.py [FOLDER]    print the tables of a folder of results
    make docs                               write them into README.md and NOTES.md, and the plot

No figure is written by hand: what has no raw result is not printed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

RESULTS = Path(__file__).resolve().parent / "results"
NOTHING = "Nothing has been measured yet."
Result = dict[str, Any]


def load(folder: Path = RESULTS) -> list[Result]:
    """Every result, in the order of size and name."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]


def of_kind(results: Iterable[Result], kind: str) -> list[Result]:
    return [result for result in results if result.get("kind") == kind]


def table(head: list[str], rows: list[list[str]]) -> str:
    """Markdown; the first column to the left, figures to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def benches(results: list[Result]) -> list[Result]:
    """Those of `minfer bench`, small models first."""
    return sorted(of_kind(results, "bench"), key=lambda r: (r["weight_bytes_per_token"], r["file"]))


def label(result: Result) -> str:
    """The file's name; of synthetic models size and type."""
    stem = Path(result["file"]).stem
    return f"{stem.removeprefix('synthetic-')} (random weights)" if "synthetic" in stem else stem


def speed(results: list[Result]) -> str:
    """The README's part: decode and prefill of every model, and what they were measured on."""
    found = benches(results)
    if not found:
        return NOTHING
    parts = []
    for test, title in (("decode", "Decode"), ("prefill", "Prefill")):
        names = list(dict.fromkeys(row["name"] for r in found for row in rows_of(r, test)))
        if names:
            lines = [_line(result, test, names) for result in found if rows_of(result, test)]
            ceiling = ["ceiling"] if test == "decode" else []
            parts.append(table([f"{title}, tok/s", *ceiling, *names], lines))
    parts.append("\n".join(dict.fromkeys(measured_on(result) for result in found)))
    return "\n\n".join(parts)


def rows_of(result: Result, test: str) -> list[Result]:
    return [row for row in result["results"] if row["test"] == test]


def _line(result: Result, test: str, names: list[str]) -> list[str]:
    rows = {row["name"]: row for row in rows_of(result, test)}
    cells = [_cell(rows[name]) if name in rows else "" for name in names]
    if test == "decode":
        read = result["read_gb_s"]
        at_most = 1e9 * read / result["weight_bytes_per_token"] if read else None
        cells.insert(0, f"{at_most:,.0f}" if at_most else "")
    return [label(result), *cells]


def _cell(row: Result) -> str:
    """`2,345 (52 %)`, or `15,000 (196 TOP/s)`."""
    if row["mbu"] is not None:
        return f"{row['tokens_per_s']:,.0f} ({row['mbu']:.0%})"
    if row["tops"] is not None:
        return f"{row['tokens_per_s']:,.0f} ({row['tops']:,.0f} TOP/s)"
    return f"{row['tokens_per_s']:,.0f}"


def measured_on(result: Result) -> str:
    words = [result["device"]]
    words += [f"driver {result['driver']}"] if result.get("driver") else []
    words += [f"{result['read_gb_s']:,.0f} GB/s read"] if result.get("read_gb_s") else []
    words += [result["date"][:10], f"commit {result['commit']}"]
    return ", ".join(words) + "."


def phases(results: list[Result]) -> str:
    """Microseconds a phase of a decode step beside the time of its bytes, for each model."""
    found = of_kind(results, "phases")
    parts = []
    for result in sorted(found, key=lambda r: r["tables"][0]["floor_us"]):
        for at in result["tables"]:
            rows = [
                [row["phase"], f"{row['calls']}", f"{row['us']:,.1f}", f"{row['us_each']:.2f}",
                 f"{row['floor_us']:,.1f}", f"{row['us'] - row['floor_us']:,.1f}"]
                for row in at["phases"]
            ]  # fmt: skip
            over = f"{at['step_us'] - at['floor_us']:,.1f}"
            rows.append(["step", "", f"{at['step_us']:,.1f}", "", f"{at['floor_us']:,.1f}", over])
            head = ["phase", "calls", "us", "us each", "bytes, us", "above"]
            title = f"{label(result)}, depth {at['depth']}: {1e6 / at['step_us']:,.0f} steps/s"
            parts.append(f"{title}\n\n{table(head, rows)}\n\n{measured_on(result)}")
    return "\n\n".join(parts) or NOTHING


def kernels(results: list[Result]) -> str:
    """Each case of kernels.py."""
    parts = []
    for result in of_kind(results, "kernels"):
        rows = [_kernel_row(row) for row in result["rows"]]
        head = ["kernel", "model", "what", "type", "T", "us", "GB/s", "TOP/s", "share"]
        parts.append(f"{table(head, rows)}\n\n{measured_on(result)}")
    return "\n\n".join(parts) or NOTHING


def _kernel_row(row: Result) -> list[str]:
    names = [row["kernel"], row["size"], row["what"], row["type"], f"{row['rows']}"]
    if "error" in row:
        return [*names, "failed", "", "", ""]
    tops = f"{row['tops']:,.1f}" if "tops" in row else ""
    share = f"{row['share']:.0%} of {row['of']}" if "share" in row else ""
    return [*names, f"{row['us']:,.2f}", f"{row['gb_s']:,.0f}", tops, share]


PARTS = {"speed": speed, "phases": phases, "kernels": kernels}
_ROW, _LEFT, _WIDTH, _RIGHT = 22, 330, 420, 190  # pixels


def plot(results: list[Result]) -> str:
    """An SVG: how much of the read ceiling decode reaches, a bar for each model and depth."""
    bars = [
        (f"{label(result)}, {row['name']}", row["tokens_per_s"], row["mbu"])
        for result in benches(results)
        for row in rows_of(result, "decode")
        if row["mbu"]
    ]
    width, height = _LEFT + _WIDTH + _RIGHT, 58 + _ROW * max(len(bars), 1)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        '<text x="12" y="20" font-size="14">Decode: tokens per second, and the share of what '
        "reading the bytes alone would allow</text>",
    ]
    if not bars:
        lines.append(f'<text x="12" y="48">{NOTHING}</text>')
    for i, (name, rate, share) in enumerate(bars):
        top = 34 + _ROW * i
        text = top + 14
        lines += [
            f'<text x="{_LEFT - 8}" y="{text}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{_LEFT}" y="{top + 2}" width="{_WIDTH}" height="16" fill="#e3e8ee"/>',
            f'<rect x="{_LEFT}" y="{top + 2}" width="{_WIDTH * min(share, 1):.1f}" height="16" '
            'fill="#3b7dd8"/>',
            f'<text x="{_LEFT + _WIDTH + 8}" y="{text}">{rate:,.0f} of {rate / share:,.0f} '
            f"({share:.0%})</text>",
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> None:
    results = load(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS)
    print("\n\n".join(part(results) for part in PARTS.values()))


if __name__ == "__main__":
    main()
