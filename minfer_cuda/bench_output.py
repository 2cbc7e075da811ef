"""The result of `minfer bench` as text."""

from __future__ import annotations

import csv
import io
import json
from typing import Any


def as_json(result: dict[str, Any]) -> str:
    """One line."""
    return json.dumps(result, ensure_ascii=False)


def as_csv(result: dict[str, Any]) -> str:
    """A header and one line per row, each with the model, the device and the commit."""
    common = {key: result[key] for key in ("model", "device", "n_ctx", "kv_type", "commit", "date")}
    rows = [{k: v for k, v in row.items() if k != "seconds"} | common for row in result["results"]]
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().removesuffix("\n")


def as_markdown(result: dict[str, Any]) -> str:
    """A table, and under it what it was measured on."""
    types = ", ".join(f"{count} {name}" for name, count in result["types"].items())
    named = ("minfer", "commit", "driver", "cupy", "nvrtc", "python")
    versions = ", ".join(f"{key} {result[key]}" for key in named if result.get(key))
    lines = [ceiling_words(result), ""] if result["read_gb_s"] else []
    lines += ["| test | tok/s | spread | reached |", "|---|---|---|---|"]
    lines += [
        f"| {row['name']} | {row['tokens_per_s']:g} | ± {row['spread']:g} | {reached(row)} |"
        for row in result["results"]
    ]
    lines += [
        "",
        f"{result['model']} ({result['file']}, tensors: {types})",
        f"{result['device']}; {result['runs_on']}",
        f"n_ctx {result['n_ctx']}, KV {result['kv_type']}, sampling {result['sampling']}",
        f"{versions}, {result['date']}",
        f"greedy run repeats: sha256 {result['greedy_sha256'][:16]}",
    ]
    return "\n".join(lines)


def ceiling_words(result: dict[str, Any]) -> str:
    """How fast decode could be: what was read in a second over what a token must read."""
    read, weights = 1e9 * result["read_gb_s"], result["weight_bytes_per_token"]
    return (
        f"ceiling: {read / 1e9:,.0f} GB/s read here, {weights / 1e9:.3f} GB of weights a token and "
        f"{result['kv_bytes_per_position'] / 1024:g} KiB for each position behind it: "
        f"{read / weights:,.0f} tok/s"
    )


def reached(row: dict[str, Any]) -> str:
    """The share of the read ceiling of a decode row, the operations of a prefill row."""
    if row["mbu"] is not None:
        return f"{row['mbu']:.1%} of the ceiling"
    return f"{row['tops']:.3g} TOP/s" if row["tops"] is not None else ""
