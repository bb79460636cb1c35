"""Results of worker threads, in the order of what they are made from."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor


def map_in_order(pool: ThreadPoolExecutor, function: Callable, items: Iterable, n_ahead: int) -> Iterator:
    """Results of function(item) in the order of items, with at most n_ahead of them computed and not yet taken."""
    pending = deque()
    for item in items:
        pending.append(pool.submit(function, item))
        if len(pending) >= n_ahead:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()
