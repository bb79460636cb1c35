"""Compare a stored tensor with its original."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .._base.errors import UserError
from .._formats.chunks import row_chunks
from .._formats.gguf_file import GGUFFile, Tensor
from .._formats.tensor_types import COPIED_TYPES
from .accuracy import Accuracy
from .codec import Codec
from .encode_tensor import Chunk, Mapper
from .tensor_calibration import TensorCalibration


@dataclass(frozen=True)
class FileTensor:
    """A tensor and the file that holds it."""

    file: GGUFFile
    tensor: Tensor


def compare_tensors(
    stored: FileTensor, original: FileTensor, codec: Codec, calibration: TensorCalibration, map_items: Mapper = map
) -> Accuracy:
    """Measure the error of a stored tensor.

    Args:
        stored: the tensor.
        original: the same tensor in the file that was quantized.
        codec: decodes both.
        calibration: statistics of the inputs, for the weighted error.
        map_items: map(), or that of a thread pool.

    Raises:
        UserError: one of them is not finite, or they cannot be compared.
    """
    tensor, other = stored.tensor, original.tensor
    is_copied = tensor.type in COPIED_TYPES
    if (is_copied or other.type in COPIED_TYPES) and tensor.type != other.type:
        raise UserError(
            f"tensor {tensor.name} is {tensor.type.name.lower()} in {stored.file.path} and {other.type.name.lower()} in "
            f"{original.file.path}, which cannot be compared: name the file it was made from"
        )

    def measure(chunk: Chunk) -> Accuracy:
        rows, original_rows = stored.file.rows(tensor, *chunk), original.file.rows(other, *chunk)
        if is_copied:
            if not np.array_equal(rows, original_rows):
                raise UserError(f"tensor {tensor.name} differs from {original.file.path}: name the file it was made from")
            return Accuracy()
        weights, decoded = codec.decode(original_rows, other.type, other.ne[0]), codec.decode(rows, tensor.type, tensor.ne[0])
        accuracy = calibration.measure(tensor, chunk[0], weights, decoded)
        if not accuracy.is_finite:
            raise UserError(
                f"tensor {tensor.name}: rows {chunk[0]:,} to {sum(chunk) - 1:,} hold NaN or Inf in {stored.file.path} or "
                f"{original.file.path}: the file is damaged; quantize the model again"
            )
        return accuracy

    total, chunks = Accuracy(), list(row_chunks(tensor))
    for (first, n_rows), accuracy in zip(chunks, map_items(measure, chunks), strict=True):
        total += accuracy
        calibration.release(tensor, first + n_rows)
    return total
