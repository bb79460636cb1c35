"""Rows of any type to float32 and back to any type, through the built library or in numpy."""

from __future__ import annotations

import re

import gguf.quants
import numpy as np
from gguf import GGMLQuantizationType

from . import quants
from ._errors import UserError
from ._gguf_file import Tensor
from ._lib import Library
from ._plan import ACTIVATION_TYPES, FLOAT_TYPES, INTEGER_TYPES
from ._types import TYPES

T = GGMLQuantizationType


def largest_weight(qtype: GGMLQuantizationType) -> float:
    """Largest magnitude that surely survives: scales of blocks are halves, up to 65504.

    A rotated value is at most sqrt(256) = 16 times the largest weight, and the codes span twice that.
    """
    if qtype in (T.F32, T.BF16):
        return np.inf
    info = TYPES.get(qtype.name.lower())
    if info and info.rotated:
        return float(quants.HALF_MAX) * (info.unpack_max - info.unpack_min) / 32
    return float(quants.HALF_MAX)


# What gguf encodes in numpy without a regard to importances, and ggml in C with it.
UNWEIGHTED_IN_NUMPY = (T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1)


class Codec:
    """lib: the built library, or None to do all in numpy. itq3_levels: 8 or 3, for ITQ3_S alone."""

    def __init__(self, lib: Library | None, itq3_levels: int = 8):
        self.lib = lib
        self.itq3_levels = itq3_levels

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
        self, rows: np.ndarray, qtype: GGMLQuantizationType, importance: np.ndarray | None = None
    ) -> np.ndarray:
        """float32 (n_rows, n_per_row) to uint8 (n_rows, row_bytes). importance: float32 (n_per_row,) or None."""
        if qtype in FLOAT_TYPES:
            return np.ascontiguousarray(gguf.quants.quantize(rows, qtype)).view(np.uint8)
        if self.lib is not None:
            return self.lib.quantize(int(qtype), rows, self.itq3_levels, importance)
        if (info := TYPES.get(qtype.name.lower())) is None:
            return np.ascontiguousarray(gguf.quants.quantize(rows, qtype)).view(np.uint8)
        if importance is not None:
            importance = np.broadcast_to(importance, rows.shape).reshape(-1, info.block_size)
        options = {"levels": self.itq3_levels} if qtype == T.ITQ3_S else {}
        blocks = quants.reference(info.name).quantize_blocks(rows.reshape(-1, info.block_size), importance, **options)
        return blocks.reshape(len(rows), -1)

    def encode_experts(
        self,
        rows: np.ndarray,
        tensor: Tensor,
        first_row: int,
        target: GGMLQuantizationType,
        importance: np.ndarray | None,
    ) -> np.ndarray:
        """encode() of rows that may belong to several experts. importance: float32 (n_experts, n_per_row) or None."""
        if importance is None:
            return self.encode(rows, target)
        expert_rows = tensor.ne[1] if len(importance) > 1 else tensor.n_rows
        parts, start = [], 0
        while start < len(rows):
            expert, done = divmod(first_row + start, expert_rows)
            stop = min(len(rows), start + expert_rows - done)
            parts.append(self.encode(rows[start:stop], target, importance[expert % len(importance)]))
            start = stop
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def convert(
        self,
        rows: np.ndarray,
        tensor: Tensor,
        first_row: int,
        target: GGMLQuantizationType,
        importance: np.ndarray | None = None,
    ) -> np.ndarray:
        """Rows of a tensor in its own type, uint8, to the target type. The first of them is row first_row.

        importance: float32 (n_experts, n_per_row), or None. UserError naming the tensor and the position of a weight
        that is NaN, Inf or too large for the target.
        """
        if tensor.type in (*INTEGER_TYPES, *ACTIVATION_TYPES, T.F64):
            return rows  # no weights: copied as they are
        weights = self.decode(rows, tensor.type, tensor.ne[0])
        check_weights(weights, tensor, first_row, target)
        return rows if target == tensor.type else self.encode_experts(weights, tensor, first_row, target, importance)


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
