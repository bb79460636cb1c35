"""How much memory there is."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from .cgroup import own_groups, read_values
from .units import GIB

# Of a control group: a limit, what counts towards it, and of that the pages of files that nobody reads any more, which are dropped when
# memory is asked for. Above memory.high processes are slowed down until they give some back.
LIMITS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.high", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),  # version 1
)


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that can be taken without swapping, of the machine and of all control groups, as far as the files under root tell."""
    found = [1024 * kib for kib in _numbers(root / "proc" / "meminfo", "MemAvailable:")]
    for group in own_groups("memory", root):
        for limit, used, dropped in LIMITS:
            values = [*read_values(group / limit), *read_values(group / used)]
            if len(values) == 2 and values[0].isdigit():  # else "max"
                found.append(int(values[0]) - int(values[1]) + sum(_numbers(group / "memory.stat", dropped)))
    if not found and hasattr(os, "sysconf"):
        found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    return max(min(found, default=8 * GIB), 0)


def _numbers(path: Path, key: str) -> list[int]:
    """What stands after a key at the begin of a line; nothing without such a line or file."""
    with contextlib.suppress(OSError):
        return [int(words[1]) for words in map(str.split, path.read_text().splitlines()) if words and words[0] == key]
    return []
