"""Rows of any type to float32 and back to any type, through the built library or in numpy."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import gguf.quants
import numpy as np
from gguf import GGMLQuantizationType

from .. import quants
from .._base.errors import UserError
from .._base.types import TYPES
from .._formats.gguf_file import Tensor
from .._formats.hessians import TensorHessian
from .._formats.imatrix import apply_floor
from .._native.library import Library, Metric, NotPositiveDefinite
from .._plan.plan import ACTIVATION_TYPES, FLOAT_TYPES, INTEGER_TYPES
from ..quants import _metric
from .accuracy import Accuracy

T = GGMLQuantizationType

# Integers of the size of floats whose order is that of their magnitudes, once the sign is masked out.
MAGNITUDES = {T.F32: ("<u4", 0x7FFFFFFF), T.F16: ("<u2", 0x7FFF), T.BF16: ("<u2", 0x7FFF)}
NO_WEIGHTS = (T.F64, *INTEGER_TYPES, *ACTIVATION_TYPES)  # copied as they are


def largest_weight(qtype: GGMLQuantizationType) -> float:
    """Largest magnitude that surely survives: scales of blocks are halves, up to 65504, or bytes, up to 240.

    A rotated value is at most sqrt(block size), 16 or 8, times the largest weight, and the codes span twice that; encoders cut rotated
    values at eight times the largest half.
    """
    if qtype in (T.F32, T.BF16):
        return np.inf
    info = TYPES.get(qtype.name.lower())
    if info and info.rotated:
        largest_scale = quants.E5M3_MAX if info.trellis_values else quants.HALF_MAX
        largest_value = min(float(largest_scale) * (info.unpack_max - info.unpack_min) / 2, 8 * float(quants.HALF_MAX))
        return largest_value / math.sqrt(info.block_size)
    return float(quants.HALF_MAX)


EFFORTS = {"fast": 1, "normal": 0, "best": 6}  # scales that the trellis encoders try for each block; 0: as their defaults are
# Weights that they decide together with second moments. Prototype, 2 bits, KL divergence: 0.0813 with 32, 0.0784 with 16 at
# 1.3 times the time, 0.0762 with 8 at 2.2 times.
SEGMENTS = {"fast": 32, "normal": 32, "best": 8}

STOCK_SWEEPS = {"fast": 1, "normal": 2, "best": 4}  # of stock types over a matrix of second moments

# What gguf encodes in numpy without a regard to importances, and ggml in C with it.
UNWEIGHTED_IN_NUMPY = (T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1)

CODEBOOKS = ("block", "tensor")
ENCODERS = ("auto", "c", "numpy")

Made = TypeVar("Made")


class BadWeights(UserError):
    """Weights that no type holds, or not the one that was asked for."""


@dataclass(frozen=True)
class Guide:
    """What is known of a tensor before its rows are encoded."""

    importance: np.ndarray | None = None  # float32 (n_experts or 1, n_per_row)
    codebook: np.ndarray | None = None  # float32 (8,), for all blocks of DITTO3
    moments: TensorHessian | None = None
    triangles: PerExpert[np.ndarray] | None = None  # of the moments
    metrics: PerExpert[Metric] | None = None  # where the encoder takes them

    @property
    def n_matrices(self) -> int:
        """1 or the number of experts."""
        if self.moments is not None:
            return self.moments.n_matrices
        return 1 if self.importance is None else len(self.importance)

    def expert_rows(self, tensor: Tensor) -> int:
        return tensor.ne[1] if self.n_matrices > 1 else tensor.n_rows

    def slices(self, tensor: Tensor, first_row: int, n_rows: int) -> Iterator[tuple[slice, int]]:
        """Parts of the rows first_row..first_row+n_rows-1, counted from first_row, with the expert of each."""
        expert_rows, start = self.expert_rows(tensor), 0
        while start < n_rows:
            expert, done = divmod(first_row + start, expert_rows)
            stop = min(n_rows, start + expert_rows - done)
            yield slice(start, stop), expert % self.n_matrices
            start = stop

    def importances(self, expert: int) -> np.ndarray | None:
        """What encoders get: float32 (n_per_row,)."""
        return None if self.importance is None else apply_floor(self.importance[expert : expert + 1])[0]

    def metric(self, expert: int) -> Metric | None:
        return None if self.metrics is None else self.metrics.get(expert)

    def written(self, tensor: Tensor, n_rows: int) -> None:
        """The first n_rows rows are done: what was made for their experts is no longer needed."""
        for made in filter(None, (self.triangles, self.metrics)):
            made.drop_before(n_rows // self.expert_rows(tensor))

    def measure(self, tensor: Tensor, first_row: int, original: np.ndarray, stored: np.ndarray) -> Accuracy:
        """How far stored rows are from the originals, float32 (n_rows, n_per_row) each, from first_row of the tensor on."""
        total = Accuracy()
        for part, expert in self.slices(tensor, first_row, len(original)):
            total += self._weigh(Accuracy.measure(original[part], stored[part]), expert, original[part], stored[part])
        return total

    def _weigh(self, accuracy: Accuracy, expert: int, original: np.ndarray, stored: np.ndarray) -> Accuracy:
        """The accuracy of these rows with their weighted error: with the moments, else with the importances, else without."""
        if self.moments is None and self.importance is None:
            return accuracy
        difference = stored - original
        if self.moments is not None:
            weighted = self.moments.weighted_energies(self.triangles.get(expert), difference, original)
        else:
            squares = (np.einsum("ij,ij->j", rows, rows, dtype=np.float64) for rows in (difference, original))
            weighted = [float(s @ self.importance[expert]) for s in squares]
        return replace(accuracy, weighted_error=weighted[0], weighted_energy=weighted[1], of_moments=self.moments is not None)


class PerExpert(Generic[Made]):
    """Something for each expert of a tensor: made by the first thread that needs it, shared by the others, dropped when the rows
    of the expert are written."""

    def __init__(self, make: Callable[[int], Made]):
        self._make, self._made, self._lock = make, {}, threading.Lock()

    def get(self, expert: int) -> Made:
        """Raises in all threads what making it raised in one."""
        with self._lock:
            is_first = expert not in self._made
            future = self._made.setdefault(expert, Future())
        if is_first:
            try:
                future.set_result(self._make(expert))
            except BaseException as e:
                future.set_exception(e)
        return future.result()

    def drop_before(self, expert: int) -> None:
        with self._lock:
            for done in [e for e in self._made if e < expert]:
                del self._made[done]


class Codec:
    """lib: the built library, or None to do all in numpy. itq3_levels: 8 or 3, for ITQ3_S alone.

    ditto_codebook: "block" or "tensor", what has a codebook of its own in DITTO3. effort: a name of EFFORTS. n_threads: that factorize a
    matrix of second moments, for which those that encode wait.
    """

    def __init__(
        self, lib: Library | None, itq3_levels: int = 8, ditto_codebook: str = "block", effort: str = "normal", n_threads: int = 1
    ):
        self.lib = lib
        self.itq3_levels = itq3_levels
        self.ditto_codebook = ditto_codebook
        self.effort = effort
        self.n_threads = n_threads
        self.trellis_passes = EFFORTS[effort]
        self.segment = SEGMENTS[effort]
        self.stock_sweeps = STOCK_SWEEPS[effort]

    def with_one_thread(self) -> Codec:
        """For tensors that threads measure beside each other."""
        return Codec(self.lib, self.itq3_levels, self.ditto_codebook, self.effort)

    def can_encode(self, qtype: GGMLQuantizationType) -> bool:
        """True for every type with the library; without it for those that have a numpy encoder."""
        if self.lib is not None or qtype in FLOAT_TYPES or qtype.name.lower() in TYPES:
            return True
        try:
            gguf.quants.quantize(np.zeros((1, gguf.GGML_QUANT_SIZES[qtype][0]), np.float32), qtype)
        except NotImplementedError:
            return False
        return True

    def metric(
        self, tensor: Tensor, target: GGMLQuantizationType, guide: Guide, expert: int, warn: Callable[[str], None]
    ) -> Metric | _metric.Metric:
        """The moments of an expert, damped and factorized for encode(). UserError naming the tensor if that cannot be done."""
        moments = guide.moments
        of_expert = f", matrix {expert}" if moments.n_matrices > 1 else ""
        triangles, damping = guide.triangles.get(expert), moments.damping(expert, target.name.lower() not in TYPES)
        for factor in (1, 10):
            try:
                made = self._make_metric(target, tensor.ne[0], triangles, moments.is_full, factor * damping)
            except NotPositiveDefinite:
                continue
            except MemoryError:
                way_out = "--importance block" if moments.is_full else "--importance diagonal, or a smaller --threads"
                raise UserError(
                    f"tensor {tensor.name}{of_expert}: no memory for the second moments of {moments.width:,} columns: pass {way_out}"
                ) from None
            if factor > 1:
                warn(f"{moments.where}{of_expert}: the moments are not positive definite; damped ten times as much, with {10 * damping:g}")
            return made
        raise UserError(
            f"{moments.where}{of_expert}: the moments are not positive definite, even with {10 * damping:g} of their mean added to the "
            "diagonal: the file is damaged; make it again with llama-imatrix -m MODEL -f TEXT --moments block, or pass --importance diagonal"
        )

    def _make_metric(
        self, qtype: GGMLQuantizationType, n_per_row: int, triangles: np.ndarray, whole: bool, damping: float
    ) -> Metric | _metric.Metric:
        info = TYPES.get(qtype.name.lower())
        segment = self.segment if info and info.trellis_values else SEGMENTS["fast"]  # the others gain at most 1.5 % by finer ones
        if self.lib is not None:
            return self.lib.metric(int(qtype), n_per_row, triangles, whole, damping, segment, self.n_threads)
        try:
            return _metric.Metric.of_moments(triangles, n_per_row, info.block_size, info.rotated, whole, damping, segment)
        except ValueError as e:
            raise NotPositiveDefinite(str(e)) from e

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
        metric: Metric | _metric.Metric | None = None,
    ) -> np.ndarray:
        """float32 (n_rows, n_per_row) to uint8 (n_rows, row_bytes).

        importance: float32 (n_per_row,) or None. codebook: float32 (8,) for DITTO3, or None. metric: in place of importance.
        """
        if qtype in FLOAT_TYPES:
            return np.ascontiguousarray(gguf.quants.quantize(rows, qtype)).view(np.uint8)
        if self.lib is not None:
            return self.lib.quantize(
                int(qtype), rows, self.itq3_levels, importance, codebook, self.trellis_passes, metric, self.stock_sweeps
            )
        if (info := TYPES.get(qtype.name.lower())) is None:
            return np.ascontiguousarray(gguf.quants.quantize(rows, qtype)).view(np.uint8)
        if importance is not None:
            importance = importance.reshape(-1, info.block_size)
            if not info.rotated:  # which know of rows
                importance = np.tile(importance, (len(rows), 1))
        if info.trellis_values:
            options = {"passes": self.trellis_passes}
        else:
            options = {T.ITQ3_S: {"levels": self.itq3_levels}, T.DITTO3: {"codebook": codebook}}.get(qtype, {})
        blocks = quants.reference(info.name).quantize_blocks(
            rows.reshape(-1, info.block_size), importance, metric=metric, **options)
        return blocks.reshape(len(rows), -1)

    def needs_codebook(self, tensor: Tensor, target: GGMLQuantizationType) -> bool:
        """True if all rows must be seen before the first is encoded."""
        return self.ditto_codebook == "tensor" and target == T.DITTO3 != tensor.type

    def codebook(self, chunks: Iterable[tuple[int, np.ndarray]], tensor: Tensor, guide: Guide) -> np.ndarray:
        """Codebook of a tensor for DITTO3, float32 (8,), from all its rows: (first row, float32 (n_rows, n_per_row))."""
        histogram = quants.ditto3.Histogram() if self.lib is None else self.lib.ditto3_histogram()
        for first_row, weights in chunks:
            for rows, expert in guide.slices(tensor, first_row, len(weights)):
                histogram.add_rows(weights[rows], guide.importances(expert))
        return histogram.codebook()

    def weights(self, rows: np.ndarray, tensor: Tensor, first_row: int, target: GGMLQuantizationType) -> np.ndarray:
        """Rows of a tensor in its own type, uint8, as float32 (n_rows, n_per_row). The first of them is row first_row.

        BadWeights naming the tensor and the position of a weight that is NaN, Inf or too large for the target.
        """
        weights = self.decode(rows, tensor.type, tensor.ne[0])
        check_weights(weights, tensor, first_row, target)
        return weights

    def check(self, rows: np.ndarray, tensor: Tensor, first_row: int, target: GGMLQuantizationType) -> None:
        """BadWeights as in weights(), of floats by their bits where none is bad."""
        if tensor.type in MAGNITUDES:
            dtype, mask = MAGNITUDES[tensor.type]
            largest = (rows.view(dtype) & np.array(mask, dtype)).max(keepdims=True)
            if self.decode(largest.view(np.uint8), tensor.type, 1)[0, 0] <= min(largest_weight(target), np.finfo(np.float32).max):
                return
        self.weights(rows, tensor, first_row, target)

    def convert(
        self, rows: np.ndarray, tensor: Tensor, first_row: int, target: GGMLQuantizationType, guide: Guide
    ) -> tuple[np.ndarray, Accuracy]:
        """Rows of a tensor in its own type, uint8, to the target type, and how far they are from the originals.

        BadWeights as in weights(), and UserError where the encoder makes no finite weights of these.
        """
        if tensor.type in NO_WEIGHTS:
            return rows, Accuracy()
        weights = self.weights(rows, tensor, first_row, target)
        if target == tensor.type:
            return rows, Accuracy()
        return self.encode_rows(weights, tensor, first_row, target, guide)

    def encode_rows(
        self, weights: np.ndarray, tensor: Tensor, first_row: int, target: GGMLQuantizationType, guide: Guide
    ) -> tuple[np.ndarray, Accuracy]:
        """float32 (n_rows, n_per_row) to the target type, and how far that is from them. The first is row first_row of the tensor."""
        data = self.encode_guided(weights, tensor, first_row, target, guide)
        return data, measured(tensor, first_row, weights, self.decode(data, target, tensor.ne[0]), target, guide)

    def encode_guided(
        self, weights: np.ndarray, tensor: Tensor, first_row: int, target: GGMLQuantizationType, guide: Guide
    ) -> np.ndarray:
        """The data of encode_rows()."""
        parts = [
            self.encode(weights[part], target, guide.importances(expert), guide.codebook, guide.metric(expert))
            for part, expert in guide.slices(tensor, first_row, len(weights))
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def measured(
    tensor: Tensor, first_row: int, weights: np.ndarray, stored: np.ndarray, target: GGMLQuantizationType, guide: Guide
) -> Accuracy:
    """How far stored rows are from the weights, float32 (n_rows, n_per_row) each. UserError where they are not finite."""
    accuracy = guide.measure(tensor, first_row, weights, stored)
    if not accuracy.is_finite:
        raise UserError(
            f"tensor {tensor.name}: rows {first_row:,} to {first_row + len(weights) - 1:,} are not finite as "
            f"{target.name.lower()}: choose another type with --tensor-type '{re.escape(tensor.name)}=TYPE'"
        )
    return accuracy


def check_weights(weights: np.ndarray, tensor: Tensor, first_row: int, target: GGMLQuantizationType) -> None:
    """BadWeights if a weight is NaN, Inf or, where the type changes, larger than the target can hold."""
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
        raise BadWeights(
            f"{where} is {value:g}; {target.name.lower()} is sure to hold weights up to {limit:g} only: keep the "
            f"tensor with --tensor-type '{re.escape(tensor.name)}=f32'"
        )
    raise BadWeights(f"{where} is {value}: the model is damaged; convert it again from a good source")
