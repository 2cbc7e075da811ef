"""What `minfer info` prints: plain text from the file alone, safe for any terminal."""

from __future__ import annotations

from collections import Counter
from typing import Any

from minfer_cuda.config import Qwen2Config
from minfer_cuda.gguf import GGUFFile, TensorInfo
from minfer_cuda.gguf_header import ARRAYS
from minfer_cuda.prefill import CARDS, VARIABLE, services
from minfer_cuda.printable import printable
from minfer_cuda.quants import QuantType

SHOWN_TEXT = 200  # characters of a metadata string
SHOWN_VALUES = 6  # values of a metadata array
INTEGERS = ("I8", "I16", "I32", "I64")  # types that have neither NaN nor Inf
CHECK_BYTES = 1 << 24  # of a tensor's quantised rows, dequantised at once by `check`


def size(n_bytes: int) -> str:
    """1536 -> '1.5 KiB'."""
    value = float(n_bytes)
    for unit in ("bytes", "KiB", "MiB"):
        if value < 1024:
            return f"{value:g} bytes" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def describe(file: GGUFFile, config: Qwen2Config | None, n_ctx: int = 4096) -> str:
    """Metadata, tensors by type, the model's sizes, the device memory it takes at `n_ctx`
    positions (0: the model's own) and what multiplies its matrices. `config` is None for a file
    that is not a Qwen2 model."""
    parts = f" in {file.n_parts} parts" if file.n_parts > 1 else ""
    sections = [
        f"{printable(str(file.path))}: {size(file.size_bytes)}{parts}",
        "Metadata\n" + _rows([(key, _shown(value)) for key, value in file.metadata.items()]),
        "Tensors\n" + _types(file),
    ]
    if config is not None:
        sections.append("Model\n" + _model(config))
        sections.append(_memory(file, config, n_ctx or config.n_ctx_train))
        sections.append(_services(file, config))
        sections.extend(f"note: {printable(notice)}" for notice in config.notices)
    return "\n\n".join(sections) + "\n"


def _rows(rows: list[tuple[str, str]]) -> str:
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def _shown(value: Any) -> str:
    if isinstance(value, str):
        more = f"... ({len(value)} characters)" if len(value) > SHOWN_TEXT else ""
        return printable(value[:SHOWN_TEXT]) + more
    if isinstance(value, ARRAYS):
        first = ", ".join(_shown(v) for v in value[:SHOWN_VALUES])
        more = f", ... ({len(value)} values)" if len(value) > SHOWN_VALUES else ""
        return f"[{first}{more}]"
    return f"{value:.7g}" if isinstance(value, float) else str(value)  # a float32's digits


def _types(file: GGUFFile) -> str:
    tensors: Counter[str] = Counter()
    n_bytes: Counter[str] = Counter()
    for info in file.tensors.values():
        tensors[info.type_name] += 1
        n_bytes[info.type_name] += info.nbytes
    rows = [(name, f"{tensors[name]:>5}  {size(n):>11}") for name, n in n_bytes.most_common()]
    rows.append(("all", f"{len(file.tensors):>5}  {size(sum(n_bytes.values())):>11}"))
    return _rows(rows)


def _model(config: Qwen2Config) -> str:
    scaling = config.rope_scaling
    yarn = f", YaRN x{scaling.factor:g} of {scaling.original_context}" if scaling else ""
    return _rows(
        [
            ("name", config.name),
            ("layers", str(config.n_layers)),
            ("hidden, ffn", f"{config.d_model}, {config.d_ffn}"),
            ("heads", f"{config.n_heads} of {config.head_dim}, {config.n_kv_heads} for keys"),
            ("vocabulary", f"{config.n_vocab}{', tied head' if config.tied_embeddings else ''}"),
            ("context", f"{config.n_ctx_train} trained"),
            ("RoPE", f"base {config.rope_base:.7g}{yarn}"),
            ("RMS epsilon", f"{config.rms_eps:g}"),
            (
                "KV cache",
                f"{size(config.kv_bytes_per_position(2))} per position in f16, "
                f"{size(config.kv_bytes_per_position(4))} in f32",
            ),
        ]
    )


def _memory(file: GGUFFile, config: Qwen2Config, n_ctx: int) -> str:
    weights = sum(info.nbytes for info in file.tensors.values())
    rows = []
    for name, element_bytes in (("f16", 2), ("f32", 4)):
        cache = n_ctx * config.kv_bytes_per_position(element_bytes)
        total = f"{size(weights)} weights + {size(cache)} KV = {size(weights + cache)}"
        rows.append((name, total))
    return f"Device memory at n_ctx {n_ctx}, workspace apart\n" + _rows(rows)


def _services(file: GGUFFile, config: Qwen2Config) -> str:
    """For each type of matrix and number of tokens, what serves it on each class of cards."""
    products = {
        info.quant
        for name, info in file.tensors.items()
        if len(info.shape) == 2 and (name != "token_embd.weight" or config.tied_embeddings)
    }
    alike: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for quant in sorted(products, key=lambda quant: quant.name):
        if quant.cuda_name is not None:
            alike.setdefault(tuple(_lines(quant)), []).append(quant.name)
    rows = [("type", "tokens", *(f"sm_{', '.join(map(str, cards))}" for cards in CARDS))]
    for lines, names in alike.items():
        for i, line in enumerate(lines):
            rows.append(("" if i else ", ".join(names), *line))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    shown = ("  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)) for row in rows)
    title = (
        f"Products on a GPU (1 token: a decode step; {VARIABLE}=int8 or f16 forces one for more)"
    )
    return "\n".join([title, *(f"  {line}".rstrip() for line in shown)])


def _lines(quant: QuantType) -> list[tuple[str, ...]]:
    """(tokens of a call, what serves them on each class of cards) of a type."""
    found = [services(quant, cards[0]) for cards in CARDS]
    first = sorted({rows for served in found for rows, _ in served})
    lines = []
    for start, after in zip(first, [*first[1:], None], strict=True):
        last = "" if after is None else f"{after - 1}"
        rows = last if last == str(start) else f"{start}-{last}"
        by = (next(by for n, by in reversed(served) if n <= start) for served in found)
        lines.append((rows, *by))
    return lines


def check(file: GGUFFile) -> list[str]:
    """A sentence for each tensor that holds NaN or Inf (a quantised value is one where its block's
    scale is), or whose values cannot be told: empty for a sound file. Reads and dequantises
    everything."""
    return [
        found for info in file.tensors.values() if (found := _not_finite(file, info)) is not None
    ]


def _not_finite(file: GGUFFile, info: TensorInfo) -> str | None:
    import numpy as np

    if info.quant.unpack is None:
        if info.type_name in INTEGERS:
            return None
        return f"tensor {info.name} ({info.type_name}): its values are not known"
    step = max(1, CHECK_BYTES // info.row_bytes)
    bad, first = 0, None
    for start in range(0, info.n_rows, step):
        stop = min(start + step, info.n_rows)
        values = info.quant.dequantize(file.rows(info.name, start, stop))
        finite = np.isfinite(values)
        if finite.all():
            continue
        bad += finite.size - int(np.count_nonzero(finite))
        if first is None:
            row, column = np.unravel_index(int(np.argmin(finite)), finite.shape)
            first = f"row {start + int(row)}, column {int(column)}"
    if first is None:
        return None
    return f"tensor {info.name} ({info.type_name}): {bad} values are NaN or Inf, first in {first}"
