"""Estimate the time of encoding by timing a sample."""

from __future__ import annotations

from dataclasses import dataclass

from .._base.text import format_duration
from .._calibration.cost import shared_input
from .._calibration.importance import Importance
from .._encode.codec import Codec
from .._encode.rate import Rate, measure
from .._formats.names import layer_number
from .._formats.tensor_types import FLOAT_TYPES, metric_name, uses_metric
from .._plan.plan import PlannedTensor, QuantizationPlan

WORTH_IT = 50_000_000  # weights to encode; fewer take seconds, as the sample does


@dataclass(frozen=True)
class Estimate:
    """An estimated duration, in seconds."""

    encoding: float
    factorizing: float  # part of `encoding`, single-threaded
    n_threads: int

    def describe(self) -> str:
        share = f", {format_duration(self.factorizing)} of it to factorize Hessians" if self.factorizing > 0.05 * self.encoding else ""
        return f"encoding: estimate {format_duration(self.encoding)} on {self.n_threads} threads{share}"


def estimate(plan: QuantizationPlan, codec: Codec, importance: Importance, n_threads: int) -> Estimate | None:
    """Estimate the time to encode a plan; None if there is little to encode.

    Args:
        plan: the tensors and their types.
        codec: the encoders to time.
        importance: calibration statistics of the tensors that use the imatrix.
        n_threads: number of encoding threads.
    """
    encoded = [t for t in plan.changed if t.type not in FLOAT_TYPES]
    if sum(t.tensor.n_elements for t in encoded) < WORTH_IT or codec.lib is None:
        return None
    rates: dict[tuple, Rate] = {}
    encoding = factorizing = 0.0
    last = None
    for t in encoded:
        tensor, used_kind = t.tensor, _find_kind(plan, t, importance.kind_for(t.tensor))
        if (t.type, used_kind) not in rates:
            rates[t.type, used_kind] = measure(codec, t.type, used_kind, n_threads)
        rate, is_full = rates[t.type, used_kind], used_kind == "full"
        encoding += rate.seconds(tensor.n_elements, tensor.ne[0], is_full)
        key = layer_number(t.name), shared_input(t.name), metric_name(t.type)  # as MetricCache, which holds one factorization
        if used_kind in ("block", "full") and (key != last or tensor.n_dims > 2):
            factorizing += rate.factorizing(tensor.ne[0], is_full) * (tensor.ne[2] if tensor.n_dims > 2 else 1)
        last = key
    return Estimate(encoding + factorizing, factorizing, n_threads)


def _find_kind(plan: QuantizationPlan, planned: PlannedTensor, kind: str) -> str:
    """Return the kind of statistics that a tensor's encoder uses. A dry run assumes that calibration covers the layers."""
    is_decided = plan.has_imatrix or layer_number(planned.name) is None
    if is_decided and not planned.uses_imatrix:
        return "none"
    return kind if kind in ("none", "diagonal") or uses_metric(planned.type) else "diagonal"
