"""Step graphs, with fakes of the driver and CuPy."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_fakes import FakeCupy, FakeDriver, device_on

from minfer_cuda.errors import KernelError
from minfer_cuda.graph import StepGraphs


def test_a_step_runs_eagerly_then_is_captured_then_replayed(cupy: FakeCupy) -> None:
    graphs, steps = StepGraphs(device_on(FakeDriver())), []
    for _ in range(4):
        graphs.run("decode", lambda: steps.append("decode"))
    graphs.run("other", lambda: steps.append("other"))
    assert steps == ["decode", "decode", "other"]
    assert cupy.stream_events == ["begin", "end", "launch", "launch", "launch"]
    assert (graphs.captures, graphs.replays) == (1, 2)
    assert graphs.capture_seconds > 0
    graphs.clear()
    graphs.run("decode", lambda: steps.append("again"))
    assert steps[-1] == "again"


def test_disabled_graphs_or_minfer_sync_run_every_step_eagerly(
    cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    device = device_on(FakeDriver())
    monkeypatch.setenv("MINFER_SYNC", "1")
    for graphs in (StepGraphs(device, enabled=False), StepGraphs(device_on(FakeDriver()))):
        for _ in range(3):
            graphs.run("decode", lambda: steps.append(1))
    assert len(steps) == 6
    assert cupy.stream_events == []


def test_an_allocation_in_a_capture_is_an_error_and_the_stream_is_usable_after_it(
    cupy: FakeCupy,
) -> None:
    device = device_on(FakeDriver())
    graphs = StepGraphs(device)

    def step() -> None:
        device.empty((2, 3), np.float32)

    graphs.run("decode", step)
    for _ in range(2):
        with pytest.raises(KernelError, match="inside a step"):
            graphs.run("decode", step)
    assert cupy.stream_events == ["begin", "end"] * 2
    assert device.empty((2, 3), np.float32) is not None
