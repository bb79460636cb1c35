"""Available memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from pathlib import Path

from .cgroup import own_groups, read_values
from .units import GIB

# Files of a control group: a limit, the usage that counts towards it, and the part of the usage that is page cache, which the kernel drops
# under pressure. Above memory.high the kernel slows processes down.
LIMITS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.high", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),  # version 1
)


class _MemoryStatus(ctypes.Structure):
    """Windows' MEMORYSTATUSEX."""

    _fields_ = [
        ("length", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        ("total", ctypes.c_uint64),
        ("available", ctypes.c_uint64),
        ("rest", ctypes.c_uint64 * 5),
    ]


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes that can be allocated without swapping, on the machine and in all control groups. root: holds proc and sys."""
    limits = [1024 * kib for kib in _read_numbers(root / "proc" / "meminfo", "MemAvailable:")]
    for group in own_groups("memory", root):
        for limit, usage, cache in LIMITS:
            values = [*read_values(group / limit), *read_values(group / usage)]
            if len(values) == 2 and values[0].isdigit():  # else "max"
                limits.append(int(values[0]) - int(values[1]) + sum(_read_numbers(group / "memory.stat", cache)))
    if sys.platform == "win32":
        status = _MemoryStatus(ctypes.sizeof(_MemoryStatus))
        limits += [status.available] if ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)) else []
    elif not limits:
        limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    return max(min(limits, default=8 * GIB), 0)


def _read_numbers(path: Path, key: str) -> list[int]:
    """Return the numbers after a key that begins a line; none without such a line or file."""
    with contextlib.suppress(OSError):
        return [int(words[1]) for words in map(str.split, path.read_text().splitlines()) if words and words[0] == key]
    return []
