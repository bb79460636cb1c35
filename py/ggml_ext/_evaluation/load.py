"""The CPU time of other programs during a measurement."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

BUSY_CPUS = 0.1  # used by others; a desktop that is left alone uses less
_STAT = Path("/proc/stat")
_COUNTED = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal (proc(5)); not idle and iowait


class OtherLoad:
    """Measures the CPU time of other programs, from the start to each call of warning()."""

    def __init__(self) -> None:
        self._start, self._seconds = time.monotonic(), _other_seconds()

    def warning(self) -> str | None:
        """Return what to tell the user if other programs were busy; None if not, or on a system without /proc/stat."""
        if self._seconds is None or (now := _other_seconds()) is None:
            return None
        cpus = (now - self._seconds) / (time.monotonic() - self._start)
        if cpus < BUSY_CPUS:
            return None
        return f"other programs used {cpus:.1f} CPUs during the measurement, so the speeds are too low: stop them and repeat it"


def _other_seconds() -> float | None:
    """Return the CPU seconds of all programs but this one and its finished children."""
    if sys.platform == "win32":
        return None
    try:
        values = [int(value) for value in _STAT.read_text().split("\n", 1)[0].split()[1:]]
        all_programs = sum(values[i] for i in _COUNTED) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
    own = os.times()
    return all_programs - (own.user + own.system + own.children_user + own.children_system)
