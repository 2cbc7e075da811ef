"""Tables from the raw results in benchmarks/results; their plots are in plots.py.

    python benchmarks/render.py [FOLDER]    print the tables of a folder of results
    make docs                               write them into README.md and NOTES.md, and the plots

No figure is written by hand: what has no raw result is not printed.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
NOTHING = "Nothing has been measured yet."
BASE_TYPE, TYPE_BAR = "Q4_K", 0.7  # what other types are set beside, and the least they may reach
STEP_DOWN = 0.05  # of the rate of a shorter prompt: less is noise, or attention's growing share
STAGES = ("import", "file", "tokenizer", "device", "kernels", "upload", "buffers", "first token")
MIB = 1 << 20
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
        rows = [row for result in found for row in rows_of(result, test)]
        rows.sort(key=lambda row: (row["depth"], row["n_tokens"]))
        names = list(dict.fromkeys(row["name"] for row in rows))
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
    """Each case of kernels.py: those of a decode step, then those of prompts."""
    parts = []
    for result in of_kind(results, "kernels"):
        step = [_step_row(row) for row in result["rows"] if row["rows"] == 1]
        prompt = [_prompt_row(row) for row in result["rows"] if row["rows"] > 1]
        if step:
            parts.append(table(["one row", "model", "what", "type", "us", "GB/s", "of read"], step))
        if prompt:
            head = ["prompts", "model", "what", "type", "T", "us", "TOP/s", "of mma", "GB/s"]
            parts.append(table(head, prompt))
        if result["left_out"]:
            parts.append(f"{result['left_out']} more cases were left out: time was up.")
        parts.append(f"{_mma_words(result)}{measured_on(result)}")
    return "\n\n".join(parts) or NOTHING


def _step_row(row: Result) -> list[str]:
    names = [row["kernel"], row["size"], row["what"], row["type"]]
    if "error" in row:
        return [*names, "failed", "", ""]
    share = f"{row['share']:.0%}" if "share" in row else ""
    return [*names, f"{row['us']:,.2f}", f"{row['gb_s']:,.0f}", share]


def _prompt_row(row: Result) -> list[str]:
    names = [row["kernel"], row["size"], row["what"], row["type"], f"{row['rows']:,}"]
    if "error" in row:
        return [*names, "failed", "", "", ""]
    tops = f"{row['tops']:,.1f}" if "tops" in row else ""
    of_mma = f"{row['of_mma']:.0%}" if "of_mma" in row else ""
    return [*names, f"{row['us']:,.2f}", tops, of_mma, f"{row['gb_s']:,.0f}"]


def _mma_words(result: Result) -> str:
    """The rates that shares are of; nothing where the card's are not known."""
    rates = [f"{kind} {rate:,.0f} TOP/s" for kind, rate in result["mma_tops"].items()]
    return f"mma alone: {', '.join(rates)}. " if rates else ""


def types(results: list[Result]) -> str:
    """How fast the products of prompts are with each tensor type, beside Q4_K: of each number of
    rows the operations of all its products over their time."""
    parts = []
    for result in of_kind(results, "types"):
        rates, failed = _rates(result["rows"])
        counts = sorted({rows for _, rows in rates})
        names = sorted({name for name, _ in rates}, key=lambda n: -rates.get((n, counts[-1]), 0))
        head = ["type"]
        for rows in counts:
            head += [f"{rows:,} rows, TOP/s", "of mma", f"of {BASE_TYPE}"]
        lines = [[name, *_type_cells(result, rates, name, counts)] for name in names]
        parts.append(f"{table(head, lines)}\n\n{_mma_words(result)}{measured_on(result)}")
        slow = [
            f"{name} at {rows:,} rows: {rate / rates[BASE_TYPE, rows]:.0%}"
            for (name, rows), rate in rates.items()
            if (BASE_TYPE, rows) in rates and rate < TYPE_BAR * rates[BASE_TYPE, rows]
        ]
        bar = f"Below {TYPE_BAR:.0%} of {BASE_TYPE}: {'; '.join(slow) or 'none'}."
        parts.append(f"{bar} Failed: {', '.join(failed)}." if failed else bar)
    return "\n\n".join(parts) or NOTHING


def _rates(rows: list[Result]) -> tuple[dict[tuple[str, int], float], list[str]]:
    """(type, rows) -> TOP/s over the products that all types have; and the types that failed."""
    ops: dict[tuple[str, int], float] = {}
    us: dict[tuple[str, int], float] = {}
    failed = {row["type"] for row in rows if "error" in row}
    sound = [row for row in rows if row["type"] not in failed]
    n_types = len({row["type"] for row in sound})
    products = Counter((row["what"], row["rows"]) for row in sound)
    for row in sound:
        if products[row["what"], row["rows"]] == n_types:  # one that time was up for is no measure
            key = (row["type"], row["rows"])
            ops[key] = ops.get(key, 0.0) + row["tops"] * row["us"]
            us[key] = us.get(key, 0.0) + row["us"]
    return {key: ops[key] / us[key] for key in ops}, sorted(failed)


def _type_cells(
    result: Result, rates: dict[tuple[str, int], float], name: str, counts: list[int]
) -> list[str]:
    cells = []
    product = next(row["product"] for row in result["rows"] if "product" in row)
    mma = result["mma_tops"].get(product)
    for rows in counts:
        rate, base = rates.get((name, rows)), rates.get((BASE_TYPE, rows))
        cells += [
            f"{rate:,.0f}" if rate else "",
            f"{rate / mma:.0%}" if rate and mma else "",
            f"{rate / base:.0%}" if rate and base else "",
        ]
    return cells


def lengths(results: list[Result]) -> str:
    """Where a longer prompt is slower than a shorter one, for each model of the plot."""
    parts = []
    for result in prompts(results):
        points = rates_by_length(result)
        found = steps_down(points)
        told = [
            f"- {n:,} tokens: {rate:,.0f} tok/s, {1 - rate / best:.0%} below the {best:,.0f} of "
            f"{at:,} tokens"
            for n, rate, at, best in found
        ]
        lengths_words = f"{len(points)} lengths from {points[0][0]:,} to {points[-1][0]:,} tokens"
        what = f"slower by more than {STEP_DOWN:.0%} than a shorter one"
        number = f"{len(found)} {what}:" if found else f"none is {what}."
        parts.append("\n".join([f"{label(result)}, {lengths_words}: {number}", "", *told]).strip())
    parts += dict.fromkeys(measured_on(result) for result in prompts(results))
    return "\n\n".join(parts) or NOTHING


def prompts(results: list[Result]) -> list[Result]:
    """The results of models.py --what lengths, small models first."""
    found = of_kind(results, "lengths")
    return sorted(found, key=lambda r: (r["weight_bytes_per_token"], r["file"]))


def rates_by_length(result: Result) -> list[tuple[int, float]]:
    """(tokens, tok/s by the median of the repetitions), short prompts first."""
    rows = rows_of(result, "prefill")
    return sorted((r["n_tokens"], r["n_tokens"] / statistics.median(r["seconds"])) for r in rows)


def steps_down(points: list[tuple[int, float]]) -> list[tuple[int, float, int, float]]:
    """(tokens, tok/s, tokens and tok/s of the fastest shorter prompt) where a prompt is slower than
    that by more than STEP_DOWN."""
    found = []
    for i, (n, rate) in enumerate(points[1:], start=1):
        at, best = max(points[:i], key=lambda point: point[1])
        if rate < (1 - STEP_DOWN) * best:
            found.append((n, rate, at, best))
    return found


def processes(results: list[Result]) -> str:
    """What a whole process costs, of process.py."""
    found = of_kind(results, "process")
    if not found:
        return NOTHING
    found.sort(key=lambda r: (r["file_bytes"], r["file"]))
    lines = [[name, *(cell(result) for result in found)] for name, cell in PROCESS_ROWS.items()]
    parts = [table(["", *(label(result) for result in found)], lines)]
    parts += dict.fromkeys(measured_on(result) for result in found)
    return "\n\n".join(parts)


def _end_to_end(result: Result) -> str:
    told = result["generate"]
    bench = told["bench_tokens_per_s"]
    return f"{told['tokens_per_s']:,.0f} ({told['tokens_per_s'] / bench - 1:+.1%})"


def _beside_weights(result: Result) -> str:
    memory = result["memory"]
    if memory is None:
        return ""
    over = (memory["used"] - memory["weights"] - memory["KV cache"]) / MIB
    return f"{over:,.0f} (bar {memory['bar'] / MIB:,.0f})"


def _seconds(name: str) -> Callable[[Result], str]:
    return lambda result: f"{result['stages'][name]:.3f}" if name in result["stages"] else ""


PROCESS_ROWS: dict[str, Callable[[Result], str]] = {
    "a process of one token, s (median)": lambda r: f"{statistics.median(r['one_token_s']):.2f}",
    "its slowest and its fastest run": lambda r: (
        f"{max(r['one_token_s']):.2f}, {min(r['one_token_s']):.2f}"
    ),
    **{f"- {name}": _seconds(name) for name in STAGES},
    "first tokens after that, ms": lambda r: ", ".join(f"{t:.1f}" for t in r["token_ms"]),
    "the first start of all, which compiles, s": lambda r: f"{r['first_start_s']:.1f}",
    "`minfer generate`, tok/s (against the bench)": _end_to_end,
    "`minfer bench`, as many tokens": lambda r: f"{r['generate']['bench_tokens_per_s']:,.0f}",
    "`minfer bench`, tg128": lambda r: f"{r['generate']['tg128_tokens_per_s']:,.0f}",
    "device memory beside weights and KV, MiB": _beside_weights,
}


PARTS = {
    "speed": speed,
    "phases": phases,
    "kernels": kernels,
    "types of products": types,
    "lengths": lengths,
    "processes": processes,
}


def main() -> None:
    results = load(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS)
    print("\n\n".join(part(results) for part in PARTS.values()))


if __name__ == "__main__":
    main()
