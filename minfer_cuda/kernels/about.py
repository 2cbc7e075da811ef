"""What the GPU and its software are called, for benchmarks and test records."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any


def driver_version(index: int = 0) -> str | None:
    """The version of the NVIDIA driver as its tools print it; None where neither tool nor /proc
    tells."""
    if tool := shutil.which("nvidia-smi"):
        command = [tool, f"--id={index}", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode == 0 and answer.stdout.strip():
            return answer.stdout.strip()
    module = Path("/proc/driver/nvidia/version")
    words = module.read_text().split() if module.exists() else []
    return next((word for word in words if word[0].isdigit() and "." in word), None)


def about_gpu(index: int = 0) -> dict[str, Any]:
    """Name, compute capability times ten, bytes, driver, CuPy and NVRTC version of a GPU."""
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(index)
    return {
        "device": properties["name"].decode(),
        "arch": 10 * properties["major"] + properties["minor"],
        "memory_bytes": properties["totalGlobalMem"],
        "driver": driver_version(index),
        "driver_cuda": cupy.cuda.runtime.driverGetVersion(),
        "cupy": cupy.__version__,
        "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
    }
