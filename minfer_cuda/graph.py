"""CUDA graphs of steps: captured once for each plan key, replayed for every later step.

A step reads token, position and counters from device memory (cuda/state.cuh), so its graph depends
on the key alone. Eager and captured steps enqueue the same launches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any

from minfer_cuda.kernels.module import CudaDevice


class StepGraphs:
    """Graphs by plan key. `captures` and `replays` count what happened, `capture_seconds` is what
    the captures took.

    With `enabled` false, or MINFER_SYNC=1 (nothing may wait inside a capture), every step is eager.
    """

    def __init__(self, device: CudaDevice, enabled: bool = True):
        self.enabled = enabled and not device.queue.sync
        self.captures = 0
        self.replays = 0
        self.capture_seconds = 0.0
        self._device = device
        self._graphs: dict[Hashable, Any] = {}  # None: has run eagerly once

    def run(self, key: Hashable, step: Callable[[], None]) -> None:
        """Enqueue `step`: the first time eagerly, which compiles what it needs, then by its graph.
        An allocation in a capture is a KernelError, and the capture is given up."""
        if not self.enabled:
            step()
            return
        if key not in self._graphs:
            step()
            self._graphs[key] = None
            return
        if self._graphs[key] is None:
            start = time.perf_counter()
            self._graphs[key] = self._capture(step)
            self.captures += 1
            self.capture_seconds += time.perf_counter() - start
        else:
            self.replays += 1
        with self._device.told("replaying a step"), self._device.current():
            self._graphs[key].launch(stream=self._device.stream)

    def _capture(self, step: Callable[[], None]) -> Any:
        device, stream = self._device, self._device.stream
        with device.told("capturing a step"), device.current(), device.freeze():
            stream.begin_capture()
            try:
                step()
            except BaseException:
                with suppress(Exception):  # a broken capture ends with an error of its own
                    stream.end_capture()
                raise
            return stream.end_capture()

    def clear(self) -> None:
        """Forget the graphs: a buffer that they use has been replaced."""
        self._graphs.clear()
