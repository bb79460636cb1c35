"""How many threads a run uses, and what they make in the order of what it is made from."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .cgroup import own_groups, read_values
from .errors import UserError


def map_in_order(pool: ThreadPoolExecutor, function: Callable, items: Iterable, n_ahead: int) -> Iterator:
    """Results of function(item) in the order of items, with at most n_ahead of them computed and not yet taken."""
    pending = deque()
    for item in items:
        pending.append(pool.submit(function, item))
        if len(pending) >= n_ahead:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def check_threads(threads: int | None) -> int:
    """The number to use of --threads, None for all; UserError if the one asked for is no number of threads."""
    if threads is not None and threads < 1:
        raise UserError(f"--threads: got {threads}, must be at least 1; leave it out to use all processors")
    return threads or usable_cores()


def usable_cores(root: Path = Path("/")) -> int:
    """Processors that this process may use; no more than its control groups, as the files under root tell of them, let it keep busy."""
    quotas = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1]
    for group in own_groups("cpu", root):
        old = read_values(group / "cpu.cfs_quota_us") + read_values(group / "cpu.cfs_period_us")  # version 1: -1 for no quota
        for quota in (read_values(group / "cpu.max"), old):  # microseconds in a period of so many; version 2: max
            if len(quota) == 2 and quota[0].isdigit():
                quotas.append(max(math.ceil(int(quota[0]) / int(quota[1])), 1))
    return min(quotas)
