"""Matrix products over tokens, on several threads."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

PANEL = 256  # columns per thread; fixed, so that the bytes do not depend on the threads


def add_product(jobs: Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]], pool: ThreadPoolExecutor) -> None:
    """Add left^T right to total for each (total, left, right). If left is right, the product is symmetric: compute one half of it."""

    def panel(job: tuple[np.ndarray, np.ndarray, np.ndarray, int]) -> None:
        total, left, right, first = job
        stop = first + PANEL
        if left is not right:
            total[first:stop] += left[:, first:stop].T @ right
            return
        product = left[:, first:stop].T @ right[:, first:]
        total[first:stop, first:] += product
        total[stop:, first:stop] += product[:, PANEL:].T

    list(pool.map(panel, [(*job, first) for job in jobs for first in range(0, len(job[0]), PANEL)]))
