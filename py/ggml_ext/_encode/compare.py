"""Differences of a stored tensor from its original."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from .._base.errors import UserError
from .._base.threads import map_in_order
from .._formats.chunks import row_chunks
from .._formats.gguf_file import GGUFFile, Tensor
from .accuracy import Accuracy
from .codec import NO_WEIGHTS, Codec, Guide


def compare(
    pool: ThreadPoolExecutor,
    n_ahead: int,
    codec: Codec,
    file: GGUFFile,
    tensor: Tensor,
    original: GGUFFile,
    other: Tensor,
    guide: Guide,
) -> Accuracy:
    """Differences of a tensor from its original, weighed with what the guide knows of its inputs; UserError where one of them is not finite or cannot be compared."""
    if tensor.type in NO_WEIGHTS or other.type in NO_WEIGHTS:
        if tensor.type != other.type:
            raise UserError(
                f"tensor {tensor.name} is {tensor.type.name.lower()} in {file.path} and {other.type.name.lower()} in "
                f"{original.path}, which cannot be compared: name the file it was made from"
            )

    def measure(chunk: tuple[int, int]) -> Accuracy:
        ours, theirs = file.rows(tensor, *chunk), original.rows(other, *chunk)
        if tensor.type in NO_WEIGHTS:  # compared byte for byte
            if not np.array_equal(ours, theirs):
                raise UserError(f"tensor {tensor.name} differs from {original.path}: name the file it was made from")
            return Accuracy()
        expected, stored = codec.decode(theirs, other.type, other.ne[0]), codec.decode(ours, tensor.type, tensor.ne[0])
        accuracy = guide.measure(tensor, chunk[0], expected, stored)
        if not accuracy.is_finite:
            raise UserError(
                f"tensor {tensor.name}: rows {chunk[0]:,} to {sum(chunk) - 1:,} hold NaN or Inf in {file.path} or "
                f"{original.path}: the file is damaged; quantize the model again"
            )
        return accuracy

    total, done = Accuracy(), 0
    for chunk, accuracy in zip(row_chunks(tensor), map_in_order(pool, measure, row_chunks(tensor), n_ahead)):
        total += accuracy
        done += chunk[1]
        guide.written(tensor, done)
    return total
