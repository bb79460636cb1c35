"""Encode a tensor in chunks of rows and measure its error, for writing, sensitivity and sequential quantization alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from gguf import GGMLQuantizationType

from .._formats.chunks import row_chunks
from .._formats.gguf_file import GGUFFile, Tensor
from .accuracy import Accuracy
from .codec import Codec, measure_stored
from .tensor_calibration import TensorCalibration

Chunk = tuple[int, int]  # first row and number of rows


class Mapper(Protocol):
    """A map() that may use threads and keeps the order of the items."""

    def __call__(self, function: Callable, items: Iterable, /) -> Iterable: ...


@dataclass(frozen=True)
class SourceTensor:
    """A tensor in the model's file."""

    file: GGUFFile
    tensor: Tensor
    codec: Codec

    def read_rows(self, chunk: Chunk, qtype: GGMLQuantizationType) -> np.ndarray:
        """Read the original weights of a chunk, float32 (n_rows, n_per_row). UserError if the type cannot hold them."""
        return self.codec.weights(self.file.rows(self.tensor, *chunk), self.tensor, chunk[0], qtype)

    def weights(self, chunk: Chunk, qtype: GGMLQuantizationType) -> np.ndarray:
        """Return the weights to encode for a chunk, float32 (n_rows, n_per_row). Here: the original ones. CorrectedTensor overrides this."""
        return self.read_rows(chunk, qtype)

    def read_weights(self, qtype: GGMLQuantizationType, map_items: Mapper) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the first row and weights() of each chunk, in order."""
        yield from map_items(lambda chunk: (chunk[0], self.weights(chunk, qtype)), row_chunks(self.tensor))

    def encode_rows(self, chunk: Chunk, qtype: GGMLQuantizationType, calibration: TensorCalibration) -> tuple[np.ndarray, Accuracy]:
        """Encode a chunk to uint8 (n_rows, row_bytes) and measure its error."""
        return self.codec.convert(self.file.rows(self.tensor, *chunk), self.tensor, chunk[0], qtype, calibration)


@dataclass(frozen=True)
class CorrectedTensor(SourceTensor):
    """A tensor whose weights are corrected for the errors of the quantized layers before it."""

    corrected: Callable[[Chunk], np.ndarray]  # returns float32 (n_rows, n_per_row)

    def weights(self, chunk: Chunk, qtype: GGMLQuantizationType) -> np.ndarray:
        return self.corrected(chunk)

    def encode_rows(self, chunk: Chunk, qtype: GGMLQuantizationType, calibration: TensorCalibration) -> tuple[np.ndarray, Accuracy]:
        corrected = self.corrected(chunk)
        data = self.codec.encode_calibrated(corrected, self.tensor, chunk[0], qtype, calibration)
        return data, self.measure(chunk, corrected, data, qtype, calibration)

    def measure(
        self, chunk: Chunk, corrected: np.ndarray, data: np.ndarray, qtype: GGMLQuantizationType, calibration: TensorCalibration
    ) -> Accuracy:
        """Measure the error of encoded rows against the model's weights and against the corrected ones."""
        first = chunk[0]
        stored = self.codec.decode(data, qtype, self.tensor.ne[0])
        weights = self.codec.decode(self.file.rows(self.tensor, *chunk), self.tensor.type, self.tensor.ne[0])
        to_corrected = calibration.measure(self.tensor, first, corrected, stored)
        accuracy = measure_stored(self.tensor, weights, stored, first_row=first, qtype=qtype, calibration=calibration)
        return replace(accuracy, target_error=to_corrected.weighted_error, target_energy=to_corrected.weighted_energy)


def add_codebook(source: SourceTensor, qtype: GGMLQuantizationType, calibration: TensorCalibration, map_items: Mapper = map) -> TensorCalibration:
    """Add the tensor's codebook to the calibration if DITTO3 is encoded with --ditto-codebook tensor."""
    if not source.codec.needs_codebook(source.tensor, qtype):
        return calibration
    codebook = source.codec.codebook(source.read_weights(qtype, map_items), source.tensor, calibration)
    return replace(calibration, codebook=codebook)


def encode_tensor(
    source: SourceTensor,
    qtype: GGMLQuantizationType,
    calibration: TensorCalibration,
    *,
    map_items: Mapper = map,
    store: Callable[[int, np.ndarray], None] | None = None,
    sample: Sequence[Chunk] | None = None,
) -> Accuracy:
    """Encode the rows of a tensor and measure their error.

    Args:
        source: the tensor and its weights.
        qtype: the type to encode to.
        calibration: statistics of the inputs; those of an expert are freed when it is encoded.
        map_items: map(), or a thread pool's map that keeps the order of the items.
        store: called for each chunk in order, with its first row and its data, uint8 (n_rows, row_bytes).
        sample: the chunks to encode, None for all. A sample is encoded without a codebook of its tensor.

    Returns:
        The error of the encoded rows.

    Raises:
        UserError: the type cannot hold a weight.
    """
    tensor = source.tensor
    if sample is None:
        calibration = add_codebook(source, qtype, calibration, map_items)
    chunks = list(row_chunks(tensor)) if sample is None else sample
    total = Accuracy()
    encoded = map_items(lambda chunk: source.encode_rows(chunk, qtype, calibration), chunks)
    for (first, n_rows), (data, accuracy) in zip(chunks, encoded, strict=True):
        assert data.nbytes * tensor.n_rows == n_rows * tensor.bytes_as(qtype), tensor.name
        if store is not None:
            store(first, data)
        total += accuracy
        calibration.release(tensor, first + n_rows)
    return total
