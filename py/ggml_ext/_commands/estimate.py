"""Estimate how long encoding will take, from a sample of it."""

from __future__ import annotations

from dataclasses import dataclass

from .._base.text import format_duration
from .._calibration.cost import shared_input
from .._encode.codec import Codec
from .._encode.rate import Rate, measure
from .._formats.names import layer_number
from .._formats.tensor_types import FLOAT_TYPES, metric_name, uses_metric
from .._plan.plan import PlannedTensor, QuantizationPlan

WORTH_IT = 50_000_000  # weights to encode: with fewer a run takes some seconds, and so does the sample


@dataclass(frozen=True)
class Estimate:
    """An estimate in seconds."""

    encoding: float
    factorizing: float  # of `encoding`, in one thread while the others wait
    n_threads: int

    def describe(self) -> str:
        share = f", of which {format_duration(self.factorizing)} factorizing second moments" if self.factorizing > 0.05 * self.encoding else ""
        return f"encoding: an estimated {format_duration(self.encoding)} on {self.n_threads} threads{share}"


def estimate(plan: QuantizationPlan, codec: Codec, kind: str, n_threads: int) -> Estimate | None:
    """Estimate the time to encode a plan; None if little is encoded.

    Args:
        plan: the tensors and their types.
        codec: its encoders are timed.
        kind: of the calibration statistics, for the matrices that the plan has some for.
        n_threads: that encode.
    """
    encoded = [t for t in plan.changed if t.type not in FLOAT_TYPES]
    if sum(t.tensor.n_elements for t in encoded) < WORTH_IT or codec.lib is None:
        return None
    rates: dict[tuple, Rate] = {}
    encoding = factorizing = 0.0
    last = None
    for t in encoded:
        tensor, used = t.tensor, _find_kind(plan, t, kind)
        if (t.type, used) not in rates:
            rates[t.type, used] = measure(codec, t.type, used, n_threads)
        rate, whole = rates[t.type, used], used == "full"
        encoding += rate.seconds(tensor.n_elements, tensor.ne[0], whole)
        key = layer_number(t.name), shared_input(t.name), metric_name(t.type)  # MetricCache keeps the last one
        if used in ("block", "full") and (key != last or tensor.n_dims > 2):
            factorizing += rate.factorizing(tensor.ne[0], whole) * (tensor.ne[2] if tensor.n_dims > 2 else 1)
        last = key
    return Estimate(encoding + factorizing, factorizing, n_threads)


def _find_kind(plan: QuantizationPlan, planned: PlannedTensor, kind: str) -> str:
    """Return the kind of statistics that the encoder of a tensor uses. In a dry run calibration is still to give the layers some."""
    is_decided = plan.has_imatrix or layer_number(planned.name) is None
    if is_decided and not planned.uses_imatrix:
        return "none"
    return kind if kind in ("none", "diagonal") or uses_metric(planned.type) else "diagonal"
