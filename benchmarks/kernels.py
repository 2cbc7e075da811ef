"""Each kernel alone, over the shapes of the family: time, rate, share of what the card allows.

    python benchmarks/kernels.py --sizes 0.5b,7b --kernels matvec,gate_up,qkv
    python benchmarks/kernels.py --sizes 7b --kernels matmul --types Q4_K --rows 16,512
    python benchmarks/kernels.py --sizes 7b --kernels matmul_f16 --types all --rows 512,2048
    python benchmarks/kernels.py --phases 7b --depths 0,4096

Launches are captured in a graph, as a decode step is, and go round over copies of their weights or
caches that together exceed the L2 cache; medians of 20 replays. The read ceiling is measured first,
on the same card. `--types all` compares tensor types, `--phases` times the phases of a whole decode
step (phases.py). The result, with card, driver, commit and command, is the last line of stdout and
a file.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import cases, measure
from benchmarks.bed import Bed, DryBed
from benchmarks.family import FTYPES, SIZES
from minfer_cuda.errors import MinferError
from minfer_cuda.kernels.module import CudaDevice
from minfer_cuda.kernels.read import read_bandwidth
from minfer_cuda.quants import QUANT_TYPES, QuantType


@dataclass(frozen=True)
class Ceiling:
    """What the card allows: bytes a second, and operations a second by kind of tensor product."""

    read: float
    mma: dict[str, float]

    def share(self, case: cases.Case, seconds: float) -> tuple[float, str] | None:
        """The share of the tighter of the two, and which it is; None where the card's tensor rate
        is not known."""
        floors = {"read": case.n_bytes / self.read}
        if case.ops:
            if case.product not in self.mma:
                return None
            floors["mma"] = case.ops / self.mma[case.product]
        name = max(floors, key=lambda key: floors[key])
        return floors[name] / seconds, name


def measured(case: cases.Case, bed: Bed, timer: measure.Timer, ceiling: Ceiling) -> dict:
    """One row of the result. Raises ValueError where a result was not written or is not finite."""
    work = case.prepare(bed)
    seconds = measure.seconds_each(timer, work.launch, work.copies)
    for output in work.outputs:
        if not np.isfinite(bed.device.download(output)).all():
            raise ValueError("the output is not finite")
    median, low, high = measure.quantiles(seconds)
    row = case.words() | {
        "us": round(1e6 * median, 3),
        "us_low": round(1e6 * low, 3),
        "us_high": round(1e6 * high, 3),
        "gb_s": round(1e-9 * case.n_bytes / median, 1),
        "copies": work.copies,
    }
    if case.ops:
        row |= {"tops": round(1e-12 * case.ops / median, 2), "product": case.product}
        if case.product in ceiling.mma:
            row["of_mma"] = round(case.ops / ceiling.mma[case.product] / median, 3)
    if found := ceiling.share(case, median):
        row |= {"share": round(found[0], 3), "of": found[1]}
    return row


def run(
    chosen: Sequence[cases.Case],
    bed: Bed,
    timer: measure.Timer,
    ceiling: Ceiling,
    seconds: float,
) -> dict[str, Any]:
    """Rows of all cases, begun within `seconds`. A case that fails is a row with its error: the
    others are still worth their device time."""
    rows: list[dict[str, Any]] = []
    start = time.perf_counter()
    for i, case in enumerate(chosen):
        if time.perf_counter() - start > seconds:
            measure.say(f"{len(chosen) - i} of {len(chosen)} cases left out: time is up")
            break
        try:
            row = measured(case, bed, timer, ceiling)
        except Exception as error:
            row = case.words() | {"error": f"{type(error).__name__}: {error}"}
        rows.append(row)
        measure.say(told(row))
    return {"rows": rows, "left_out": len(chosen) - len(rows)}


def told(row: dict[str, Any]) -> str:
    """A row for the terminal."""
    head = f"{row['kernel']:<10} {row['size']:<5} {row['what']:<14} {row['type']:<12}"
    if "error" in row:
        return f"{head} T={row['rows']:<6} {row['error']}"
    share = f"{row['share']:7.1%} of {row['of']}" if "share" in row else ""
    tops = f"{row['tops']:9.2f} TOP/s" if "tops" in row else " " * 15
    return f"{head} T={row['rows']:<6} {row['us']:10.2f} us {row['gb_s']:8.1f} GB/s {tops} {share}"


def compile_all(device: CudaDevice, chosen: Sequence[cases.Case]) -> None:
    """Compile what the cases launch, on threads, before anything is timed."""
    dry = DryBed(device)
    for case in chosen:
        with suppress(MinferError):  # told when its turn comes
            case.prepare(dry).launch(0)
    names = sorted(dry.device.launched)
    start = time.perf_counter()
    try:
        device.compile(names)
    except MinferError as error:
        measure.say(f"compiling ahead failed, the cases go on: {error}")
    measure.say(f"{len(names)} kernels, {time.perf_counter() - start:.1f} s")


def is_product(quant: QuantType) -> bool:
    """Whether a type has matrices that tensor cores multiply: F32 keeps its precision."""
    return quant.cuda_name is not None and quant.name != "F32"


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add: Callable[..., Any] = parser.add_argument
    add("--sizes", type=measure.listed, default="0.5b,1.5b,7b,14b,32b", help=",".join(SIZES))
    add("--kernels", type=measure.listed, default=",".join(cases.KERNELS))
    add("--ftype", choices=FTYPES, default="q4_k_m", help="whose tensor types are taken")
    add(
        "--types",
        type=measure.listed,
        default="",
        help="these types instead, in every role; all: each but F32",
    )
    add("--rows", type=measure.numbers, default="2,16,64,128,512,2048", help="of matmul")
    add("--depths", type=measure.numbers, default="128,4096,16384", help="of decode attention")
    add("--prefill", type=measure.numbers, default="512,2048,16384", help="tokens of attention")
    add("--phases", metavar="SIZE|FILE", help="phases of a decode step instead, at --depths")
    add("--no-pdl", action="store_true", help="launch without programmatic dependence")
    add("--seconds", type=float, default=600, help="begin no case after that many")
    add("--device", type=int, default=0)
    add("--commit", help="of the source tree, where it cannot tell")
    add("--out", type=Path, help="default: kernels.json, types.json or phases-NAME.json of results")
    options = parser.parse_args(words)
    options.kind = "phases" if options.phases else "kernels"
    if options.types == ["all"]:
        options.kind = "types"
        options.types = [quant.name for quant in QUANT_TYPES.values() if is_product(quant)]
    for name, allowed in (("sizes", SIZES), ("kernels", cases.KERNELS)):
        if unknown := set(getattr(options, name)) - set(allowed):
            parser.error(f"--{name}: {', '.join(sorted(unknown))} not in {', '.join(allowed)}")
    return options


def main() -> None:
    options = arguments()
    device = CudaDevice(options.device)
    if options.no_pdl:
        device.pdl = False
    read = read_bandwidth(device)
    ceiling = Ceiling(read, measure.MMA.get(device.arch, {}))
    measure.say(f"{device.name}: read ceiling {read / 1e9:,.0f} GB/s")
    result: dict[str, Any] = {
        "kind": options.kind,
        **measure.about(options.device),
        "dependent_launch": device.pdl,
        "read_gb_s": round(read / 1e9, 1),
        "mma_tops": {kind: rate / 1e12 for kind, rate in ceiling.mma.items()},
    }
    timer = measure.GraphTimer(device)
    if options.phases:
        from benchmarks.phases import run_phases

        result |= run_phases(device, options.phases, options.ftype, options.depths, timer, read)
        name = f"phases-{Path(result['file']).stem}.json"
    else:
        chosen = cases.choose(options)
        compile_all(device, chosen)
        result |= run(chosen, Bed(device), timer, ceiling, options.seconds)
        name = f"{options.kind}.json"
    measure.finish(result, options.out or measure.RESULTS / name, options.commit)


if __name__ == "__main__":
    try:
        main()
    except MinferError as error:
        sys.exit(f"error: {error}")
