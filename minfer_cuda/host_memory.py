"""How much of the machine's memory may still be taken."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path


def available_bytes() -> int:
    """Bytes that can be allocated without swapping, an estimate.

    Linux: MemAvailable, or the control group's limit where that is less. Windows: the available
    physical memory. Elsewhere: half of the physical memory.
    """
    if sys.platform == "win32":
        return _windows_available()
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return available if text == "max" else min(available, int(text))


def _windows_available() -> int:
    class Status(ctypes.Structure):  # MEMORYSTATUSEX
        _fields_ = [("length", ctypes.c_uint32), ("load", ctypes.c_uint32)] + [
            (name, ctypes.c_uint64) for name in ("total", "available", *"abcde")
        ]

    status = Status()
    status.length = ctypes.sizeof(status)
    ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))  # type: ignore[attr-defined]
    return int(status.available)
