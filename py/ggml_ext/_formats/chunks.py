"""Chunks of a tensor's rows for worker threads."""

from __future__ import annotations

import math
from collections.abc import Iterator

from .gguf_file import Tensor

# Weights per chunk. Each of the 2*threads chunks in flight takes 4 bytes per weight (in the numpy encoder about 60): large enough to hide
# Python's overhead, small enough for many threads.
CHUNK_WEIGHTS = 1 << 19
# Smaller tensors are cut into up to MAX_PARTS equal parts, so that all threads have work to the end. The number of parts does not depend
# on the number of threads, and neither do sums over them.
PART_WEIGHTS, MAX_PARTS = 1 << 16, 16
ROWS_TOGETHER = 16  # EXT_ROWS of encode/rows.h


def row_chunks(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """Yield (first row, number of rows) of chunks of up to CHUNK_WEIGHTS weights and at least one row."""
    parts = min(MAX_PARTS, 1 << (tensor.n_elements // PART_WEIGHTS).bit_length())
    rows = math.ceil(tensor.n_rows / (parts * ROWS_TOGETHER)) * ROWS_TOGETHER
    step = max(1, min(CHUNK_WEIGHTS // tensor.ne[0], rows))
    for first in range(0, tensor.n_rows, step):
        yield first, min(step, tensor.n_rows - first)
