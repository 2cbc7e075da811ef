"""Microseconds of each phase of a decode step, beside the time that its bytes take.

A phase costs what a step is faster without it: the step is captured whole, and again with the
phase left out in every layer (its result, from an earlier run, is used in its place). So every
phase is measured among its neighbours, with launches that overlap and weights that are in the
cache or not, as in a real step.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.family import SIZES
from benchmarks.measure import Timer, in_memory, say
from benchmarks.synthetic import write_synthetic
from minfer_cuda.config import Qwen2Config
from minfer_cuda.gguf import GGUFFile
from minfer_cuda.kernels import DeviceArray
from minfer_cuda.kernels.layouts import Activations, Matrix
from minfer_cuda.kernels.module import CudaDevice
from minfer_cuda.ops import LayerWeights, Ops
from minfer_cuda.ops.cuda_ops import Step
from minfer_cuda.runners.cuda_runner import CudaRunner, EagerSteps
from minfer_cuda.sampling import SamplingParams

PHASES = ("embed", "norm", "qkv", "attention", "o", "gate_up", "down", "head", "sampler")
STEPS = 8  # in one graph: the gap between graphs is not a phase


class PartialOps:
    """`Ops` that leaves the operations of one phase out."""

    def __init__(self, ops: Ops):
        self._ops = ops
        self._made: dict[tuple[str, int], Any] = {}
        self.start(None)

    def start(self, without: str | None) -> None:
        """Begin a step. The first must be whole."""
        self._without = without
        self.calls: Counter[str] = Counter()

    def _run(self, phase: str, operation: Callable[..., Any], *arguments: Any) -> Any:
        key = (phase, self.calls[phase])
        self.calls[phase] += 1
        if phase != self._without:
            self._made[key] = operation(*arguments)
        return self._made[key]

    def embed(self, table: Matrix) -> DeviceArray:
        return self._run("embed", self._ops.embed, table)

    def rms_norm(self, x: DeviceArray, weight: DeviceArray) -> Activations:
        return self._run("norm", self._ops.rms_norm, x, weight)

    def qkv(self, x: Activations, layer: LayerWeights, index: int) -> DeviceArray:
        return self._run("qkv", self._ops.qkv, x, layer, index)

    def attention(self, q: DeviceArray, index: int) -> Activations:
        return self._run("attention", self._ops.attention, q, index)

    def linear(
        self, x: Activations, weight: Matrix, bias: DeviceArray | None = None
    ) -> DeviceArray:
        return self._run("head", self._ops.linear, x, weight, bias)

    def linear_add(self, x: Activations, weight: Matrix, residual: DeviceArray) -> DeviceArray:
        phase = "o" if self.calls["o"] == self.calls["down"] else "down"
        return self._run(phase, self._ops.linear_add, x, weight, residual)

    def gate_up(self, x: Activations, gate: Matrix, up: Matrix) -> Activations:
        return self._run("gate_up", self._ops.gate_up, x, gate, up)

    def add(self, residual: DeviceArray, y: DeviceArray) -> DeviceArray:
        return self._ops.add(residual, y)

    def tail(self, x: Any, n: int) -> Any:
        return self._ops.tail(x, n)


class PartialStep:
    """Decode steps of a runner at one position, whole or without a phase."""

    def __init__(self, runner: CudaRunner, device: Any, depth: int):
        self._runner = runner
        self._ops = PartialOps(runner.ops)
        device.upload(np.zeros(runner.cache.data.shape, runner.cache.data.dtype), runner.cache.data)
        runner.begin(SamplingParams(), 1, (), frozenset())
        device.upload(np.array([depth], np.int32), into=runner.sampler.position)
        self.run(None)
        self.calls = self._ops.calls + Counter(sampler=1)

    def run(self, without: str | None, steps: int = 1) -> None:
        """Enqueue steps."""
        sampler = self._runner.sampler
        for _ in range(steps):
            self._ops.start(without)
            self._runner.ops.set_step(Step(sampler.token, sampler.position))
            self._logits = self._runner.model.forward(self._ops, 1)
            if without != "sampler":
                sampler.sample(self._logits[-1], advance=0)


def phase_bytes(runner: CudaRunner, depth: int) -> dict[str, int]:
    """Bytes that each phase of a step must read."""
    weights, config = runner.model.weights, runner.config

    def matrices(*fields: str) -> int:
        return sum(getattr(w, field).data.nbytes for w in weights.layers for field in fields)

    cache = runner.cache.data
    return {
        "embed": 4 * config.d_model,
        "norm": 8 * config.d_model * (2 * config.n_layers + 1),
        "qkv": matrices("q", "k", "v"),
        "attention": cache.nbytes // cache.shape[2] * (depth + 1),
        "o": matrices("o"),
        "gate_up": matrices("gate", "up"),
        "down": matrices("down"),
        "head": weights.output.data.nbytes,
        "sampler": 4 * config.n_vocab,
    }


def phase_table(
    runner: CudaRunner, device: Any, depth: int, timer: Timer, read: float
) -> dict[str, Any]:
    """The result at one depth; `read` bytes a second."""
    step = PartialStep(runner, device, depth)
    n_bytes = phase_bytes(runner, depth)

    def microseconds(without: str | None, steps: int = STEPS) -> float:
        times = timer(lambda: step.run(without, steps))
        return 1e6 * statistics.median(times) / steps

    whole = microseconds(None)
    rows = []
    for phase in PHASES:
        us = whole - microseconds(phase)
        rows.append(
            {
                "phase": phase,
                "calls": step.calls[phase],
                "us": round(us, 2),
                "us_each": round(us / step.calls[phase], 3),
                "bytes": n_bytes[phase],
                "floor_us": round(1e6 * n_bytes[phase] / read, 2),
            }
        )
        say(f"{phase:<10} {us:9.2f} us, bytes {rows[-1]['floor_us']:9.2f} us")
    floor = 1e6 * sum(n_bytes.values()) / read
    alone = microseconds(None, steps=1)
    say(f"step       {whole:9.2f} us, bytes {floor:9.2f} us; one step a graph {alone:.2f} us")
    return {
        "depth": depth,
        "step_us": round(whole, 2),
        "step_alone_us": round(alone, 2),
        "floor_us": round(floor, 2),
        "sum_us": round(sum(row["us"] for row in rows), 2),
        "phases": rows,
    }


def run_phases(
    device: CudaDevice,
    model: str,
    ftype: str,
    depths: Sequence[int],
    timer: Timer,
    read: float,
) -> dict[str, Any]:
    """Tables at several depths of a model file, or of a synthetic one of a size."""
    if model not in SIZES:
        return _of_file(device, Path(model), depths, timer, read)
    with in_memory(f"synthetic-{model}-{ftype}.gguf") as path:
        write_synthetic(path, model, ftype)
        return _of_file(device, path, depths, timer, read)


def _of_file(
    device: CudaDevice, path: Path, depths: Sequence[int], timer: Timer, read: float
) -> dict[str, Any]:
    with GGUFFile.open(path) as file:
        config = Qwen2Config.from_gguf(file)
        n_ctx = max(depths) + 1
        runner = CudaRunner(device, file, config, n_ctx, n_batch=1, steps=EagerSteps())
        tables = [phase_table(runner, device, depth, timer, read) for depth in depths]
        described = runner.describe()
        runner.close()
    return {"model": config.name, "file": path.name, "runs_on": described, "tables": tables}
