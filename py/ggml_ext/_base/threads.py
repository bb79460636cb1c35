"""Number of threads, and parallel work with results in order."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from .cgroup import own_groups, read_values
from .errors import UserError
from .option import option

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_in_order(pool: ThreadPoolExecutor, function: Callable[[Item], Result], items: Iterable[Item], n_ahead: int) -> Iterator[Result]:
    """Yield function(item) in the order of items, with at most n_ahead results computed and not yet taken."""
    pending: deque[Future[Result]] = deque()
    for item in items:
        pending.append(pool.submit(function, item))
        if len(pending) >= n_ahead:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def threads_option() -> Any:
    """State --threads, which most commands have."""
    return option(
        None, short="-t", metavar="N", in_command=False, help="threads (default: all cores that this process may use, within its CPU quota)"
    )


def check_threads(threads: int | None) -> int:
    """Return the number of threads for --threads, None being all cores. UserError for numbers below 1."""
    if threads is not None and threads < 1:
        raise UserError(f"--threads: got {threads}, must be at least 1; leave it out to use all cores")
    return threads or usable_cores()


def usable_cores(root: Path = Path("/")) -> int:
    """Return the number of cores that this process may use, within the quotas of its control groups. root: holds proc and sys."""
    limits = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1]
    for group in own_groups("cpu", root):
        version_1 = read_values(group / "cpu.cfs_quota_us") + read_values(group / "cpu.cfs_period_us")  # -1: no quota
        for quota in (read_values(group / "cpu.max"), version_1):  # microseconds per period, and the period; version 2: max
            if len(quota) == 2 and quota[0].isdigit():
                limits.append(max(math.ceil(int(quota[0]) / int(quota[1])), 1))
    return min(limits)
