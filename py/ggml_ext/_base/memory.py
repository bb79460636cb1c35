"""How much memory there is."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from .units import GIB


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that can be taken without swapping, of the machine and of the control group, as far as the files under root tell."""
    found = [1024 * kib for kib in _numbers(root / "proc" / "meminfo", "MemAvailable:")]
    group = root / "sys" / "fs" / "cgroup"
    with contextlib.suppress(OSError):
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        # pages of files count as used; those that nobody reads any more are dropped when memory is asked for
        dropped = sum(_numbers(group / "memory.stat", "inactive_file"))
        found += [int(limit) - int(used) + dropped] if limit.isdigit() else []
    if not found and hasattr(os, "sysconf"):
        found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    return max(min(found, default=8 * GIB), 0)


def _numbers(path: Path, key: str) -> list[int]:
    """What stands after a key at the begin of a line; nothing without such a line or file."""
    with contextlib.suppress(OSError):
        return [int(words[1]) for words in map(str.split, path.read_text().splitlines()) if words and words[0] == key]
    return []
