"""Decode rows of any type to float32 and encode them to any type, through the built library or in numpy."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import gguf.quants
import numpy as np
from gguf import GGMLQuantizationType

from .. import quants
from .._base.errors import UserError
from .._formats.gguf_file import Tensor
from .._formats.tensor_types import COPIED_TYPES, FLOAT_TYPES, type_info
from .._native import library
from .._native.library import Library, NotPositiveDefinite
from ..quants import _metric
from .accuracy import Accuracy
from .tensor_calibration import Metric, TensorCalibration

T = GGMLQuantizationType

# Without the sign bit, the bits of floats as integers have the order of the magnitudes.
MAGNITUDES = {T.F32: ("<u4", 0x7FFFFFFF), T.F16: ("<u2", 0x7FFF), T.BF16: ("<u2", 0x7FFF)}


def largest_weight(qtype: GGMLQuantizationType) -> float:
    """Return the largest magnitude that the type is sure to hold: block scales are halves, up to 65504, or bytes, up to 240.

    Rotation multiplies the largest weight by at most sqrt(block size). Encoders clip rotated values at eight times the largest half.
    """
    if qtype in (T.F32, T.BF16):
        return np.inf
    info = type_info(qtype)
    if info and info.rotated and info.unpack_min is not None and info.unpack_max is not None:
        largest_scale, largest_code = quants.HALF_MAX, (info.unpack_max - info.unpack_min) / 2
        if info.trellis_values and info.trellis_offset:
            tops = [max(first) + max(second) for first, second in zip(info.trellis_values[::2], info.trellis_values[1::2], strict=True)]
            largest_scale, largest_code = quants.E5M3_MAX, min(info.trellis_offset, min(tops) - info.trellis_offset)
        largest_value = min(float(largest_scale) * largest_code, 8 * float(quants.HALF_MAX))
        return largest_value / math.sqrt(info.block_size)
    return float(quants.HALF_MAX)


EFFORTS = {"fast": 1, "normal": 0, "best": 6}  # scale candidates per block of the trellis encoders; 0: their default
SEGMENTS = {"fast": 32, "normal": 32, "best": 8}  # weights that trellis encoders search at once under a Hessian
UPSTREAM_SWEEPS = {"fast": 1, "normal": 2, "best": 4}  # of the encoders of upstream types under a Hessian

# gguf's numpy encoders ignore the imatrix, ggml's in C use it.
UNWEIGHTED_IN_NUMPY = (T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1)

CODEBOOKS = ("block", "tensor")
ENCODERS = ("auto", "c", "numpy")


class BadWeights(UserError):
    """Weights that the type, or every type, cannot hold."""


class Codec:
    """An encoder and decoder of all types, with the options that decide its bytes.

    Args:
        lib: the built library; None for numpy alone.
        itq3_levels: number of levels of ITQ3_S, 8 or 3.
        ditto_codebook: of DITTO3, one per "block" or per "tensor".
        effort: a name of EFFORTS.
        n_threads: of the factorization of one Hessian, for which the encoding threads wait.
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
        self.upstream_sweeps = UPSTREAM_SWEEPS[effort]

    def list_dependencies(self) -> list:
        """List the options that decide the encoded bytes."""
        return [self.effort, self.itq3_levels, self.ditto_codebook]

    def with_one_thread(self) -> Codec:
        """Return a codec for threads that each encode a tensor of their own."""
        return Codec(self.lib, self.itq3_levels, self.ditto_codebook, self.effort)

    def can_encode(self, qtype: GGMLQuantizationType) -> bool:
        """Whether the type has an encoder. The library has all, numpy some."""
        if self.lib is not None or qtype in FLOAT_TYPES or type_info(qtype):
            return True
        try:
            gguf.quants.quantize(np.zeros((1, gguf.GGML_QUANT_SIZES[qtype][0]), np.float32), qtype)
        except NotImplementedError:
            return False
        return True

    def metric(
        self, tensor: Tensor, qtype: GGMLQuantizationType, calibration: TensorCalibration, expert: int, warn: Callable[[str], None]
    ) -> Metric:
        """Shrink and factorize the Hessian of an expert.

        Args:
            tensor: the matrix.
            qtype: the type to encode to, which decides the form of the factor.
            calibration: holds the Hessian.
            expert: its number, 0 for a tensor without experts.
            warn: called with a line if the usual shrinkage is too small.

        Raises:
            UserError: the Hessian is not positive definite, or memory runs out.
        """
        hessian, triangles = calibration.hessian, calibration.triangles
        assert hessian is not None and triangles is not None
        matrix = f", matrix {expert}" if hessian.n_matrices > 1 else ""
        shrinkage = hessian.shrinkage()
        for factor in (1, 10):
            try:
                metric = self._factorize(qtype, tensor.ne[0], triangles.get(expert), is_full=hessian.is_full, shrinkage=factor * shrinkage)
            except NotPositiveDefinite:
                continue
            except MemoryError:
                hint = "--importance block" if hessian.is_full else "--importance diagonal, or a smaller --threads"
                raise UserError(
                    f"tensor {tensor.name}{matrix}: not enough memory for the Hessian of {hessian.width:,} columns: pass {hint}"
                ) from None
            if factor > 1:
                warn(f"{hessian.where}{matrix}: the Hessian is not positive definite; adding ten times as much to its diagonal, {10 * shrinkage:g} of it")
            return metric
        raise UserError(
            f"{hessian.where}{matrix}: the Hessian is not positive definite, even with {10 * shrinkage:g} of the diagonal added: "
            "the file is damaged; make it again with llama-imatrix -m MODEL -f TEXT --moments block, or pass --importance diagonal"
        )

    def _factorize(
        self, qtype: GGMLQuantizationType, n_per_row: int, triangles: np.ndarray, *, is_full: bool, shrinkage: float
    ) -> Metric:
        info = type_info(qtype)
        segment = self.segment if info and info.trellis_values else SEGMENTS["fast"]  # others gain little from shorter ones
        if self.lib is not None:
            return self.lib.metric(
                int(qtype), n_per_row, triangles, is_full=is_full, shrinkage=shrinkage, segment=segment, n_threads=self.n_threads
            )
        assert info is not None
        try:
            return _metric.Metric.from_hessian(
                triangles, n_per_row, info.block_size, info.rotated, is_full=is_full, shrinkage=shrinkage, segment=segment
            )
        except ValueError as e:
            raise NotPositiveDefinite(str(e)) from e

    def decode(self, rows: np.ndarray, qtype: GGMLQuantizationType, n_per_row: int) -> np.ndarray:
        """Decode uint8 (n_rows, row_bytes) to contiguous float32 (n_rows, n_per_row). Raise UserError if numpy lacks the type."""
        if qtype == T.F32:
            return np.require(rows.view("<f4"), requirements=["C", "A"])
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
        metric: Metric | None = None,
    ) -> np.ndarray:
        """Encode float32 (n_rows, n_per_row) to uint8 (n_rows, row_bytes).

        Args:
            rows: the weights.
            qtype: the type to encode to.
            importance: the diagonal of the Hessian, float32 (n_per_row,).
            codebook: float32 (8,), for DITTO3.
            metric: the factorized Hessian, in place of its diagonal.
        """
        if qtype in FLOAT_TYPES:
            return np.ascontiguousarray(gguf.quants.quantize(rows, qtype)).view(np.uint8)
        if self.lib is not None:
            assert not isinstance(metric, _metric.Metric)
            return self.lib.quantize(
                int(qtype), rows, self.itq3_levels, importance, codebook, trellis_passes=self.trellis_passes, metric=metric,
                upstream_sweeps=self.upstream_sweeps,
            )
        if (info := type_info(qtype)) is None:
            return np.ascontiguousarray(gguf.quants.quantize(rows, qtype)).view(np.uint8)
        if importance is not None:
            importance = importance.reshape(-1, info.block_size)
            if not info.rotated:  # these references take blocks without their rows
                importance = np.tile(importance, (len(rows), 1))
        options: dict[str, Any] = {"passes": self.trellis_passes} if info.trellis_values else {}
        if info.name == "itq3_s":
            options = {"levels": self.itq3_levels}
        elif info.name == "ditto3":
            options = {"codebook": codebook}
        assert not isinstance(metric, library.Metric)
        blocks = quants.reference(info.name).quantize_blocks(
            rows.reshape(-1, info.block_size), importance, metric=metric, **options)
        return blocks.reshape(len(rows), -1)

    def needs_codebook(self, tensor: Tensor, qtype: GGMLQuantizationType) -> bool:
        """Whether the tensor needs a codebook of all its rows before encoding."""
        return self.ditto_codebook == "tensor" and qtype.name == "DITTO3" and qtype != tensor.type

    def codebook(self, chunks: Iterable[tuple[int, np.ndarray]], tensor: Tensor, calibration: TensorCalibration) -> np.ndarray:
        """Compute the codebook of a DITTO3 tensor, float32 (8,), from chunks (first row, float32 (n_rows, n_per_row)) of all its rows."""
        histogram = quants.ditto3.Histogram() if self.lib is None else self.lib.ditto3_histogram()
        for first_row, weights in chunks:
            for rows, expert in calibration.slices(tensor, first_row, len(weights)):
                histogram.add_rows(weights[rows], calibration.importances(expert))
        return histogram.codebook()

    def weights(self, rows: np.ndarray, tensor: Tensor, first_row: int, qtype: GGMLQuantizationType) -> np.ndarray:
        """Decode rows of a tensor, uint8, from first_row on, and check that the type can hold them.

        Raises:
            BadWeights: a weight is NaN, infinite or too large; it names the tensor and the position.
        """
        weights = self.decode(rows, tensor.type, tensor.ne[0])
        check_weights(weights, tensor, first_row, qtype)
        return weights

    def check(self, rows: np.ndarray, tensor: Tensor, first_row: int, qtype: GGMLQuantizationType) -> None:
        """Raise BadWeights as weights() does; the bits of floats often suffice."""
        if tensor.type in MAGNITUDES:
            dtype, mask = MAGNITUDES[tensor.type]
            largest = (rows.view(dtype) & np.array(mask, dtype)).max(keepdims=True)
            if self.decode(largest.view(np.uint8), tensor.type, 1)[0, 0] <= min(largest_weight(qtype), np.finfo(np.float32).max):
                return
        self.weights(rows, tensor, first_row, qtype)

    def convert(
        self, rows: np.ndarray, tensor: Tensor, first_row: int, qtype: GGMLQuantizationType, calibration: TensorCalibration
    ) -> tuple[np.ndarray, Accuracy]:
        """Convert rows of a tensor, uint8, to the type and measure their error.

        Args:
            rows: in the tensor's own type.
            tensor: the tensor.
            first_row: number of the first row.
            qtype: the type to convert to.
            calibration: statistics of the tensor's inputs.

        Raises:
            UserError: the type cannot hold the weights.
        """
        if tensor.type in COPIED_TYPES:
            return rows, Accuracy()
        weights = self.weights(rows, tensor, first_row, qtype)
        if qtype == tensor.type:
            return rows, Accuracy()
        data = self.encode_calibrated(weights, tensor, first_row, qtype, calibration)
        stored = self.decode(data, qtype, tensor.ne[0])
        return data, measure_stored(tensor, weights, stored, first_row=first_row, qtype=qtype, calibration=calibration)

    def encode_calibrated(
        self, weights: np.ndarray, tensor: Tensor, first_row: int, qtype: GGMLQuantizationType, calibration: TensorCalibration
    ) -> np.ndarray:
        """Encode rows of a tensor, float32 (n_rows, n_per_row), from first_row on, with the statistics of their experts."""
        parts = [
            self.encode(weights[part], qtype, calibration.importances(expert), calibration.codebook, calibration.metric(expert))
            for part, expert in calibration.slices(tensor, first_row, len(weights))
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def measure_stored(
    tensor: Tensor, weights: np.ndarray, stored: np.ndarray, *, first_row: int, qtype: GGMLQuantizationType, calibration: TensorCalibration
) -> Accuracy:
    """Measure the error of stored rows, float32 (n_rows, n_per_row). Raise UserError if they are not finite."""
    accuracy = calibration.measure(tensor, first_row, weights, stored)
    if not accuracy.is_finite:
        raise UserError(
            f"tensor {tensor.name}: rows {first_row:,} to {first_row + len(weights) - 1:,} are not finite as "
            f"{qtype.name.lower()}: choose another type with --tensor-type '{re.escape(tensor.name)}=TYPE'"
        )
    return accuracy


def check_weights(weights: np.ndarray, tensor: Tensor, first_row: int, qtype: GGMLQuantizationType) -> None:
    """Raise BadWeights if a weight is NaN, infinite or larger than a new type can hold."""
    limit = np.inf if qtype == tensor.type else largest_weight(qtype)
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
            f"{where} is {value:g}; {qtype.name.lower()} is sure to hold weights up to {limit:g} only: keep the "
            f"tensor with --tensor-type '{re.escape(tensor.name)}=f32'"
        )
    raise BadWeights(f"{where} is {value}: the model is damaged; convert it again from a good source")
