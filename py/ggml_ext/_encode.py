"""Rows of any type to float32 and back to any type, through the built library or in numpy."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import gguf.quants
import numpy as np
from gguf import GGMLQuantizationType

from . import quants
from ._accuracy import Accuracy
from ._errors import UserError
from ._gguf_file import Tensor
from ._lib import Library
from ._plan import ACTIVATION_TYPES, FLOAT_TYPES, INTEGER_TYPES
from ._types import TYPES

T = GGMLQuantizationType


def largest_weight(qtype: GGMLQuantizationType) -> float:
    """Largest magnitude that surely survives: scales of blocks are halves, up to 65504, or bytes, up to 240.

    A rotated value is at most sqrt(block size), 16 or 8, times the largest weight, and the codes span twice that.
    """
    if qtype in (T.F32, T.BF16):
        return np.inf
    info = TYPES.get(qtype.name.lower())
    if info and info.rotated:
        largest_scale = quants.E5M3_MAX if info.trellis_mix else quants.HALF_MAX
        return float(largest_scale) * (info.unpack_max - info.unpack_min) / (2 * math.sqrt(info.block_size))
    return float(quants.HALF_MAX)


EFFORTS = {"fast": 1, "normal": 2, "best": 6}  # scales that the trellis encoders try for each block

# What gguf encodes in numpy without a regard to importances, and ggml in C with it.
UNWEIGHTED_IN_NUMPY = (T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1)


@dataclass(frozen=True)
class Guide:
    """What is known of a tensor before its rows are encoded."""

    importance: np.ndarray | None = None  # float32 (n_experts or 1, n_per_row)
    codebook: np.ndarray | None = None  # float32 (8,), for all blocks of DITTO3

    def slices(self, tensor: Tensor, first_row: int, n_rows: int) -> Iterator[tuple[slice, np.ndarray | None]]:
        """Parts of the rows first_row..first_row+n_rows-1, counted from first_row, with the importances of each."""
        if self.importance is None:
            yield slice(n_rows), None
            return
        expert_rows = tensor.ne[1] if len(self.importance) > 1 else tensor.n_rows
        start = 0
        while start < n_rows:
            expert, done = divmod(first_row + start, expert_rows)
            stop = min(n_rows, start + expert_rows - done)
            yield slice(start, stop), self.importance[expert % len(self.importance)]
            start = stop


class Codec:
    """lib: the built library, or None to do all in numpy. itq3_levels: 8 or 3, for ITQ3_S alone.

    ditto_codebook: "block" or "tensor", what has a codebook of its own in DITTO3. effort: a name of EFFORTS.
    """

    def __init__(
        self, lib: Library | None, itq3_levels: int = 8, ditto_codebook: str = "block", effort: str = "normal"
    ):
        self.lib = lib
        self.itq3_levels = itq3_levels
        self.ditto_codebook = ditto_codebook
        self.trellis_passes = EFFORTS[effort]

    def can_encode(self, qtype: GGMLQuantizationType) -> bool:
        """True for every type with the library; without it for those that have a numpy encoder."""
        if self.lib is not None or qtype in FLOAT_TYPES or qtype.name.lower() in TYPES:
            return True
        try:
            gguf.quants.quantize(np.zeros((1, gguf.GGML_QUANT_SIZES[qtype][0]), np.float32), qtype)
        except NotImplementedError:
            return False
        return True

    def decode(self, rows: np.ndarray, qtype: GGMLQuantizationType, n_per_row: int) -> np.ndarray:
        """uint8 (n_rows, row_bytes) to contiguous float32 (n_rows, n_per_row). UserError if numpy lacks the type."""
        if qtype == T.F32:
            return np.require(rows.view("<f4"), requirements="CA")
        if qtype == T.F16:
            return rows.view("<f2").astype(np.float32)
        if qtype == T.BF16:
            return (rows.view("<u2").astype(np.uint32) << 16).view(np.float32)
        if self.lib is not None:
            return self.lib.dequantize(int(qtype), np.ascontiguousarray(rows), n_per_row)
        try:
            return gguf.quants.dequantize(rows, qtype)
        except NotImplementedError as e:
            raise UserError(f"{qtype.name.lower()} tensors cannot be read without the built library: {e}") from e

    def encode(
        self,
        rows: np.ndarray,
        qtype: GGMLQuantizationType,
        importance: np.ndarray | None = None,
        codebook: np.ndarray | None = None,
    ) -> np.ndarray:
        """float32 (n_rows, n_per_row) to uint8 (n_rows, row_bytes).

        importance: float32 (n_per_row,) or None. codebook: float32 (8,) for DITTO3, or None.
        """
        if qtype in FLOAT_TYPES:
            return np.ascontiguousarray(gguf.quants.quantize(rows, qtype)).view(np.uint8)
        if self.lib is not None:
            return self.lib.quantize(int(qtype), rows, self.itq3_levels, importance, codebook, self.trellis_passes)
        if (info := TYPES.get(qtype.name.lower())) is None:
            return np.ascontiguousarray(gguf.quants.quantize(rows, qtype)).view(np.uint8)
        if importance is not None:
            importance = importance.reshape(-1, info.block_size)
            if not info.trellis_mix:  # which know of rows
                importance = np.tile(importance, (len(rows), 1))
        if info.trellis_mix:
            options = {"passes": self.trellis_passes}
        else:
            options = {T.ITQ3_S: {"levels": self.itq3_levels}, T.DITTO3: {"codebook": codebook}}.get(qtype, {})
        blocks = quants.reference(info.name).quantize_blocks(rows.reshape(-1, info.block_size), importance, **options)
        return blocks.reshape(len(rows), -1)

    def needs_codebook(self, tensor: Tensor, target: GGMLQuantizationType) -> bool:
        """True if all rows must be seen before the first is encoded."""
        return self.ditto_codebook == "tensor" and target == T.DITTO3 != tensor.type

    def codebook(self, chunks: Iterable[tuple[int, np.ndarray]], tensor: Tensor, guide: Guide) -> np.ndarray:
        """Codebook of a tensor for DITTO3, float32 (8,), from all its rows: (first row, float32 (n_rows, n_per_row))."""
        histogram = quants.ditto3.Histogram() if self.lib is None else self.lib.ditto3_histogram()
        for first_row, weights in chunks:
            for rows, importance in guide.slices(tensor, first_row, len(weights)):
                histogram.add_rows(weights[rows], importance)
        return histogram.codebook()

    def weights(self, rows: np.ndarray, tensor: Tensor, first_row: int, target: GGMLQuantizationType) -> np.ndarray:
        """Rows of a tensor in its own type, uint8, as float32 (n_rows, n_per_row). The first of them is row first_row.

        UserError naming the tensor and the position of a weight that is NaN, Inf or too large for the target.
        """
        weights = self.decode(rows, tensor.type, tensor.ne[0])
        check_weights(weights, tensor, first_row, target)
        return weights

    def convert(
        self, rows: np.ndarray, tensor: Tensor, first_row: int, target: GGMLQuantizationType, guide: Guide
    ) -> tuple[np.ndarray, Accuracy]:
        """Rows of a tensor in its own type, uint8, to the target type, and how far they are from the originals.

        UserError as in weights(), and where the encoder makes no finite weights of these.
        """
        if tensor.type in (*INTEGER_TYPES, *ACTIVATION_TYPES, T.F64):
            return rows, Accuracy()  # no weights: copied as they are
        weights = self.weights(rows, tensor, first_row, target)
        if target == tensor.type:
            return rows, Accuracy()
        parts = [
            self.encode(weights[part], target, importance, guide.codebook)
            for part, importance in guide.slices(tensor, first_row, len(rows))
        ]
        data = parts[0] if len(parts) == 1 else np.concatenate(parts)
        accuracy = Accuracy.measure(weights, self.decode(data, target, tensor.ne[0]))
        if not accuracy.is_finite:
            raise UserError(
                f"tensor {tensor.name}: rows {first_row:,} to {first_row + len(rows) - 1:,} are not finite as "
                f"{target.name.lower()}: choose another type with --tensor-type '{re.escape(tensor.name)}=TYPE'"
            )
        return data, accuracy


def check_weights(weights: np.ndarray, tensor: Tensor, first_row: int, target: GGMLQuantizationType) -> None:
    """UserError if a weight is NaN, Inf or, where the type changes, larger than the target can hold."""
    limit = np.inf if target == tensor.type else largest_weight(target)
    low, high = weights.min(), weights.max()  # NaN if there is one
    if -limit <= low and high <= limit and -np.inf < low and high < np.inf:
        return
    row, column = np.argwhere(~(np.isfinite(weights) & (np.abs(weights) <= limit)))[0]
    value = float(weights[row, column])
    row_index = first_row + row
    index = row_index * tensor.ne[0] + column
    where = f"tensor {tensor.name}: weight {index:,} (row {row_index:,}, column {column:,})"
    if np.isfinite(value):
        raise UserError(
            f"{where} is {value:g}; {target.name.lower()} is sure to hold weights up to {limit:g} only: keep the "
            f"tensor with --tensor-type '{re.escape(tensor.name)}=f32'"
        )
    raise UserError(f"{where} is {value}: the model is damaged; convert it again from a good source")
