"""Runners by device: where a model runs, decided once, aloud."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minfer_cuda.config import Qwen2Config
from minfer_cuda.engine import Progress, Runner
from minfer_cuda.errors import DeviceError, UsageError
from minfer_cuda.gguf import GGUFFile
from minfer_cuda.kernels.driver import wake
from minfer_cuda.kernels.module import CudaDevice
from minfer_cuda.runners.numpy_runner import NumpyRunner

Notify = Callable[[str], None]


def prepare(device: str) -> None:
    """Let what `make_runner` will wait for begin, and return at once. Raises UsageError for a word
    that names no device; what else is wrong, `make_runner` says."""
    ordinal = _ordinal(device)
    if ordinal is not None:
        wake(ordinal)


def make_runner(
    file: GGUFFile,
    config: Qwen2Config,
    *,
    device: str = "auto",
    n_ctx: int,
    kv_type: str | None = None,
    n_batch: int = 2048,
    progress: Progress | None = None,
    notify: Notify | None = None,
) -> Runner:
    """The runner of `device`: "cuda", "cuda:N", "cpu", or "auto", CUDA where it is usable.

    `kv_type` None: f16 on CUDA, f32 on the CPU, which is the reference. `notify` is told which
    device "auto" took, and why not CUDA. Raises UsageError for another word,
    DeviceError where CUDA was asked for and cannot be used.
    """
    ordinal = _ordinal(device)
    sizes: dict[str, Any] = {
        "n_ctx": n_ctx,
        "n_batch": n_batch,
        "progress": progress,
    }
    if ordinal is None:
        return NumpyRunner(file, config, kv_type=kv_type or "f32", notify=notify, **sizes)
    try:
        card = CudaDevice(ordinal)
    except DeviceError as error:
        if device != "auto":
            raise
        if notify:
            notify(f"running on the CPU: {error}")
        return NumpyRunner(file, config, kv_type=kv_type or "f32", notify=notify, **sizes)
    from minfer_cuda.runners.cuda_runner import CudaRunner  # imports CuPy

    runner: Runner = CudaRunner(
        card, file, config, kv_type=kv_type or "f16", notify=notify, **sizes
    )
    if notify and device == "auto":
        notify(f"running on {runner.describe()}")
    return runner


def _ordinal(device: str) -> int | None:
    """The number of the CUDA device that the word means; None for the CPU."""
    kind, colon, number = device.partition(":")
    if device == "cpu":
        return None
    if (kind == "cuda" and colon and number.isdecimal()) or device in ("auto", "cuda"):
        return int(number or 0)
    raise UsageError(f"device is {device!r}: must be auto, cpu, cuda or cuda:N")
