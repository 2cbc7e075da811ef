"""Plots (SVG) of the raw results in benchmarks/results; `make docs` writes them there."""

from __future__ import annotations

import math
from collections.abc import Iterable
from xml.sax.saxutils import escape

from benchmarks.render import NOTHING, Result, benches, label, prompts, rates_by_length, rows_of

_ROW, _LEFT, _WIDTH, _RIGHT = 22, 330, 420, 190  # pixels


def decode(results: list[Result]) -> str:
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


_WIDE, _HIGH, _BOTTOM = 560, 380, 40  # pixels: the field of the plot of lengths, and under it
COLOURS = ("#3b7dd8", "#d8623b", "#3ba55d", "#8a4fc4", "#b8902a", "#4a5568")


def prefill(results: list[Result]) -> str:
    """An SVG: tokens per second against the length of a prompt, a line for each model."""
    lines = {label(result): rates_by_length(result) for result in prompts(results)}
    width, height, top, left = 70 + _WIDE + 300, 40 + _HIGH + _BOTTOM, 40, 70
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        '<text x="12" y="20" font-size="14">Prefill: tokens per second by the length of the '
        "prompt</text>",
    ]
    if not lines:
        return "\n".join([*parts, f'<text x="12" y="48">{NOTHING}</text>', "</svg>"]) + "\n"
    every = [point for points in lines.values() for point in points]
    xs = _ticks([n for n, _ in every], 2)
    ys = _ticks([rate for _, rate in every], 10)

    def x(n: float) -> float:
        return left + _WIDE * math.log(n / xs[0]) / math.log(xs[-1] / xs[0])

    def y(rate: float) -> float:
        return top + _HIGH * (1 - math.log(rate / ys[0]) / math.log(ys[-1] / ys[0]))

    for n in xs:
        parts += [
            f'<line x1="{x(n):.1f}" y1="{top}" x2="{x(n):.1f}" y2="{top + _HIGH}" '
            'stroke="#e3e8ee"/>',
            f'<text x="{x(n):.1f}" y="{top + _HIGH + 16}" text-anchor="middle">{n:,.0f}</text>',
        ]
    for rate in ys:
        parts += [
            f'<line x1="{left}" y1="{y(rate):.1f}" x2="{left + _WIDE}" y2="{y(rate):.1f}" '
            'stroke="#e3e8ee"/>',
            f'<text x="{left - 8}" y="{y(rate) + 4:.1f}" text-anchor="end">{rate:,.0f}</text>',
        ]
    for i, (name, points) in enumerate(lines.items()):
        colour = COLOURS[i % len(COLOURS)]
        path = " ".join(f"{x(n):.1f},{y(rate):.1f}" for n, rate in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{x(n):.1f}" cy="{y(rate):.1f}" r="2.5" fill="{colour}"/>'
            for n, rate in points
        ]
        at = top + 14 + 18 * i
        parts += [
            f'<rect x="{left + _WIDE + 16}" y="{at - 9}" width="10" height="10" fill="{colour}"/>',
            f'<text x="{left + _WIDE + 32}" y="{at}">{escape(name)}</text>',
        ]
    parts.append(
        f'<text x="{left + _WIDE // 2}" y="{height - 6}" text-anchor="middle">tokens of the '
        "prompt; both axes are logarithmic</text>"
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _ticks(values: Iterable[float], base: int) -> list[float]:
    """The powers of `base` from below all values to above them, two at least."""
    logs = [math.log(value, base) for value in values]
    first = math.floor(min(logs) + 1e-9)
    last = max(math.ceil(max(logs) - 1e-9), first + 1)
    return [float(base) ** power for power in range(first, last + 1)]


PLOTS = {"decode.svg": decode, "prefill.svg": prefill}
