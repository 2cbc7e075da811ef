"""What the benchmarks share: times on a device, ceilings, and where results go."""

from __future__ import annotations

import json
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from minfer_cuda.bench import about_software
from minfer_cuda.kernels.about import about_gpu
from minfer_cuda.kernels.module import CudaDevice

RESULTS = Path(__file__).resolve().parent / "results"
REPETITIONS = 20
PROBES = 3
TARGET_S = 1e-3  # of work in one graph: starting it, about 5 us, is then half a percent

# Operations a second of mma.sync alone (eight independent accumulators a warp), by architecture,
# measured on an H200. With a scale every 32 values, as GGUF types have, s8 reaches 385e12.
MMA = {90: {"s8": 1223e12, "f16": 608e12}}


class Timer(Protocol):
    def __call__(self, work: Callable[[], None], repetitions: int = REPETITIONS) -> list[float]:
        """Run `work` some times; the seconds that the device took for each."""


class GraphTimer:
    """Captures the work in a CUDA graph, as decode steps are run, and times replays by events."""

    def __init__(self, device: CudaDevice):
        import cupy

        self._device = device
        self._cuda = cupy.cuda

    def __call__(self, work: Callable[[], None], repetitions: int = REPETITIONS) -> list[float]:
        device, cuda = self._device, self._cuda
        work()  # compiles and loads what it needs
        device.synchronize()
        with device.current():
            graph = self._capture(work)
            start, end = cuda.Event(), cuda.Event()
            seconds = []
            for i in range(1 + repetitions):
                start.record(device.stream)
                graph.launch(stream=device.stream)
                end.record(device.stream)
                end.synchronize()
                if i:  # the first uploads the graph
                    seconds.append(1e-3 * cuda.get_elapsed_time(start, end))
        device.synchronize()
        return seconds

    def _capture(self, work: Callable[[], None]) -> Any:
        stream = self._device.stream
        stream.begin_capture()
        try:
            work()
        except BaseException:
            with suppress(Exception):  # a broken capture ends with an error of its own
                stream.end_capture()
            raise
        return stream.end_capture()


def seconds_each(timer: Timer, launch: Callable[[int], None], copies: int) -> list[float]:
    """Seconds of one launch, of each repetition. launch(i) works on copy i of its data; every copy
    is used in turn, so that none comes from the cache."""

    def rounds(n: int) -> Callable[[], None]:
        def work() -> None:
            for _ in range(n):
                for i in range(copies):
                    launch(i)

        return work

    once = statistics.median(timer(rounds(1), PROBES))
    n = max(1, round(TARGET_S / once))
    return [t / (n * copies) for t in timer(rounds(n))]


def say(text: str) -> None:
    """Progress; stdout has the result only."""
    print(text, file=sys.stderr, flush=True)


def command() -> str:
    """What was run, less where its result goes and where the model lies."""
    words = ["python", *sys.orig_argv[1:]]
    words = [Path(word).name if word.endswith(".gguf") else word for word in words]
    for option in ("--out", "--into", "--commit"):
        if option in words:
            at = words.index(option)
            del words[at : at + 2]
    return shlex.join(words)


def about(ordinal: int = 0) -> dict[str, Any]:
    """Card, software, commit, date and the command."""
    return {"command": command(), **about_software(), **about_gpu(ordinal)}


def finish(result: dict[str, Any], out: Path, commit: str | None = None) -> None:
    """Write the result, indented, and print it as the last line; with the `commit` that the user
    has named, where the source tree could not tell its own."""
    if commit is not None:
        result["commit"] = result["commit"] or commit
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    say(f"written to {out}")
    print(json.dumps(result), flush=True)


def listed(text: str) -> list[str]:
    """`a,b` as a list; an empty text is an empty one."""
    return [word for word in text.split(",") if word]


def numbers(text: str) -> list[int]:
    return [int(word) for word in listed(text)]


@contextmanager
def in_memory(name: str) -> Iterator[Path]:
    """A path for a file that lives in memory where the system has /dev/shm, gone afterwards."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        yield Path(folder) / name


def quantiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, and the values that a tenth lie below and above."""
    ordered = sorted(values)
    tenth = len(ordered) // 10
    return statistics.median(ordered), ordered[tenth], ordered[-1 - tenth]
