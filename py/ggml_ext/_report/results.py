"""The result of a run as data for programs, and as JSON for --report and --log-format json."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .._allocation.allocation import Allocation
from .._encode.accuracy import Accuracy, MeasuredTensor, sum_errors
from .._plan.plan import PlannedTensor, QuantizationPlan


def _number(value: float | None) -> float | None:
    """Replace NaN and infinity, which JSON lacks, by None."""
    return float(value) if value is not None and math.isfinite(value) else None


def error_record(accuracy: Accuracy) -> dict:
    return {
        "relative_squared_error": _number(accuracy.nmse),
        "weighted_relative_squared_error": _number(accuracy.weighted_nmse),
        "largest_error": _number(accuracy.max_abs),
        **({} if accuracy.corrected_nmse is None else {"target_error": _number(accuracy.corrected_nmse)}),
        **({"stream_error": accuracy.stream_error} if accuracy.stream_error else {}),
    }


@dataclass(frozen=True)
class TensorResult:
    """A tensor of the output. Its errors are None if its type did not change, and in a dry run.

    Attributes:
        shape: fastest dimension first, as in ggml.
        relative_squared_error: NMSE of the decoded weights against the input.
        weighted_relative_squared_error: the same under the Hessian.
        largest_error: of a weight.
        target_error: with --propagate: weighted NMSE against the corrected weights that were encoded in place of the input's.
        stream_error: with --propagate: of the residual stream after the tensor's layer.
        seconds: to write it; None in a dry run.
        sha256: of its data; None in a dry run.
    """

    name: str
    shape: tuple[int, ...]
    type_before: str
    type: str
    bytes_before: int
    bytes: int
    relative_squared_error: float | None = None
    weighted_relative_squared_error: float | None = None
    largest_error: float | None = None
    target_error: float | None = None
    stream_error: float | None = None
    seconds: float | None = None
    sha256: str | None = None

    @classmethod
    def make(cls, planned: PlannedTensor, accuracy: Accuracy | None = None, seconds: float | None = None, sha256: str | None = None) -> TensorResult:
        """Make the result of a planned tensor. accuracy: None in a dry run."""
        return cls(
            name=planned.name,
            shape=tuple(planned.tensor.ne),
            type_before=planned.tensor.type.name.lower(),
            type=planned.type.name.lower(),
            bytes_before=planned.tensor.n_bytes,
            bytes=planned.n_bytes,
            seconds=None if seconds is None else round(seconds, 3),
            sha256=sha256,
            **(error_record(accuracy) if accuracy is not None and planned.is_changed else {}),
        )

    def record(self) -> dict:
        """Return the values for JSON."""
        names = ["name", "shape", "type_before", "type", "bytes_before", "bytes"]
        if self.largest_error is not None:
            names += ["relative_squared_error", "weighted_relative_squared_error", "largest_error"]
            names += [name for name in ("target_error", "stream_error") if getattr(self, name) is not None]
        if self.sha256 is not None:
            names += ["seconds", "sha256"]
        return {name: getattr(self, name) for name in names} | {"shape": list(self.shape)}


@dataclass(frozen=True)
class Totals:
    """Sums over all tensors: sizes and, after writing, errors."""

    plan: QuantizationPlan
    accuracy: Accuracy | None  # of the tensors whose type changed; None in a dry run
    allocation: Allocation | None = None

    @classmethod
    def compute(
        cls, plan: QuantizationPlan, tensors: Iterable[MeasuredTensor] | None = None, allocation: Allocation | None = None
    ) -> Totals:
        """Sum the errors. tensors: None in a dry run."""
        return cls(plan, None if tensors is None else sum_errors(tensors), allocation)

    @property
    def bits_per_weight(self) -> float:
        return self.plan.size_after() * 8 / max(self.plan.n_elements(), 1)

    def record(self) -> dict:
        """Return the values for JSON."""
        return {
            "weights": self.plan.n_elements(),
            "bytes_before": self.plan.size_before(),
            "bytes": self.plan.size_after(),
            "bits_per_weight": _number(self.bits_per_weight),
            "bits_per_weight_in_the_layers": _number(self.plan.layers_bpw()),
            **({} if self.accuracy is None else error_record(self.accuracy)),
            **({} if self.allocation is None else self.allocation.record()),
        }


@dataclass(frozen=True)
class Result:
    """The result of quantize_model() or export_model().

    Attributes:
        paths: files that were written; none in a dry run.
        type: the requested one.
        options: those that determine the bytes.
        importance: the calibration statistics.
        bytes: of all tensors' data.
        relative_squared_error: NMSE of all tensors whose type changed.
        weighted_relative_squared_error: the same under the Hessian.
        predicted_kl_divergence: with a target.
        seconds: time of writing, including that of a resumed run.
    """

    paths: tuple[Path, ...]
    type: str
    options: str
    importance: str
    tensors: tuple[TensorResult, ...] = field(repr=False)  # hundreds
    weights: int
    bytes_before: int
    bytes: int
    bits_per_weight: float
    relative_squared_error: float | None
    weighted_relative_squared_error: float | None
    predicted_kl_divergence: float | None
    seconds: float
    warnings: tuple[str, ...]

    @classmethod
    def make(
        cls, tensors: Iterable[TensorResult], totals: Totals, *, type: str, options: str, importance: str, warnings: Sequence[str],
        paths: Sequence[Path] = (), seconds: float = 0.0,
    ) -> Result:
        """Make the result of a run. paths: none in a dry run."""
        accuracy, allocation = totals.accuracy, totals.allocation
        return cls(
            paths=tuple(paths),
            type=type,
            options=options,
            importance=importance,
            tensors=tuple(tensors),
            weights=totals.plan.n_elements(),
            bytes_before=totals.plan.size_before(),
            bytes=totals.plan.size_after(),
            bits_per_weight=totals.bits_per_weight,
            relative_squared_error=None if accuracy is None else _number(accuracy.nmse),
            weighted_relative_squared_error=None if accuracy is None else _number(accuracy.weighted_nmse),
            predicted_kl_divergence=None if allocation is None else allocation.predicted,
            seconds=round(seconds, 3),
            warnings=tuple(warnings),
        )
