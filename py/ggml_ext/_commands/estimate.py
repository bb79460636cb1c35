"""How long a run will take, said before it starts: measured on a sample of what it does."""

from __future__ import annotations

from dataclasses import dataclass

from gguf import GGMLQuantizationType

from .._base.text import format_duration
from .._calibration.cost import shared_input
from .._encode.codec import Codec
from .._encode.rate import Rate, measure
from .._formats.gguf_file import Tensor
from .._formats.names import layer_number
from .._plan.plan import FLOAT_TYPES, Plan, metric_of, uses_metric

T = GGMLQuantizationType
WORTH_IT = 50_000_000  # weights to encode: with fewer a run takes some seconds, and so does the sample


@dataclass(frozen=True)
class Estimate:
    """Seconds. factorizing: of `encoding`, in one thread while the others wait."""

    encoding: float
    factorizing: float
    n_threads: int

    def describe(self) -> str:
        of_one = f", of which {format_duration(self.factorizing)} factorizing second moments" if self.factorizing > 0.05 * self.encoding else ""
        return f"encoding: an estimated {format_duration(self.encoding)} on {self.n_threads} threads{of_one}"


def estimate(plan: Plan, codec: Codec, kind: str, n_threads: int) -> Estimate | None:
    """None where little is encoded. kind: of importance, for the matrices that the plan has some for."""
    changed = [(t, q) for t, q in zip(plan.tensors, plan.types, strict=True) if q != t.type and q not in FLOAT_TYPES]
    if sum(t.n_elements for t, _ in changed) < WORTH_IT or codec.lib is None:
        return None
    rates: dict[tuple, Rate] = {}
    encoding = factorizing = 0.0
    last = None
    for tensor, target in changed:
        used = _kind_for(plan, tensor, target, kind)
        if (target, used) not in rates:
            rates[target, used] = measure(codec, target, used, n_threads)
        rate, whole = rates[target, used], used == "full"
        encoding += rate.seconds(tensor.n_elements, tensor.ne[0], whole)
        key = layer_number(tensor.name), shared_input(tensor.name), metric_of(target)  # as Importance.with_metrics() makes them again
        if used in ("block", "full") and (key != last or tensor.n_dims > 2):
            factorizing += rate.factorizing(tensor.ne[0], whole) * (tensor.ne[2] if tensor.n_dims > 2 else 1)
        last = key
    return Estimate(encoding + factorizing, factorizing, n_threads)


def _kind_for(plan: Plan, tensor: Tensor, target: GGMLQuantizationType, kind: str) -> str:
    """Of importance, as the encoder of that tensor uses it."""
    expected = plan.importance or layer_number(tensor.name) is None  # a dry run knows of none yet: calibration gives the layers some
    if expected and tensor.name not in plan.importance:
        return "none"
    return kind if kind in ("none", "diagonal") or uses_metric(target) else "diagonal"
