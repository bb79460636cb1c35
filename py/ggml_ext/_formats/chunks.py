"""The pieces of a tensor that worker threads take."""

from __future__ import annotations

import math
from collections.abc import Iterator

from .gguf_file import Tensor

# Weights a chunk. Each of the 2*threads chunks in flight takes 4 bytes a weight (the numpy encoder some 15 times that):
# large enough that Python's share stays below a percent, small enough for many threads.
CHUNK_WEIGHTS = 1 << 19
# Smaller tensors fall into up to MAX_PARTS equal parts of at most about PART_WEIGHTS, a power of two of them, so that no thread waits
# for the last chunk of a few. Share of the time in which two threads both have one: SmolLM2-135M 75 % with chunks of CHUNK_WEIGHTS
# and 100 % so, the demo's model 50 and 92 %. The parts do not depend on the number of threads, nor do sums over them.
PART_WEIGHTS, MAX_PARTS = 1 << 16, 16
ROWS_TOGETHER = 16  # EXT_ROWS of encode/rows.h


def row_chunks(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """(first row, number of rows) of chunks of up to CHUNK_WEIGHTS weights, at least a row each."""
    parts = min(MAX_PARTS, 1 << (tensor.n_elements // PART_WEIGHTS).bit_length())
    rows = math.ceil(tensor.n_rows / (parts * ROWS_TOGETHER)) * ROWS_TOGETHER
    step = max(1, min(CHUNK_WEIGHTS // tensor.ne[0], rows))
    for first in range(0, tensor.n_rows, step):
        yield first, min(step, tensor.n_rows - first)
