"""What came of a run as values for JSON: --report, --log-format json, inspect --json, and the results of the Python API."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .._encode.accuracy import Accuracy
from .._plan.plan import Plan

if TYPE_CHECKING:
    from .._allocation.choice import Chosen


def _number(value: float | None) -> float | None:
    """JSON has neither NaN nor infinity."""
    return float(value) if value is not None and math.isfinite(value) else None


def error_record(accuracy: Accuracy) -> dict:
    return {
        "relative_squared_error": _number(accuracy.relative),
        "weighted_relative_squared_error": _number(accuracy.weighted),
        "largest_error": _number(accuracy.max_abs),
        **({} if accuracy.to_target is None else {"target_error": _number(accuracy.to_target)}),
        **({"stream_error": accuracy.stream_error} if accuracy.stream_error else {}),
    }


def tensor_record(plan: Plan, i: int, accuracy: Accuracy | None = None) -> dict:
    """A tensor for --report and --log-format json. accuracy: None for a dry run."""
    tensor, target = plan.tensors[i], plan.types[i]
    changed = accuracy is not None and target != tensor.type
    return {
        "name": tensor.name,
        "shape": list(tensor.ne),
        "type_before": tensor.type.name.lower(),
        "type": target.name.lower(),
        "bytes_before": tensor.n_bytes,
        "bytes": tensor.bytes_as(target),
        **(error_record(accuracy) if changed else {}),
    }


def totals_record(plan: Plan, accuracies: list[Accuracy] | None, chosen: Chosen | None = None) -> dict:
    """What summary() says of the whole. accuracies: None for a dry run; chosen: what a target led to."""
    changed = zip(plan.tensors, plan.types, accuracies or [])
    total = sum((a for tensor, target, a in changed if target != tensor.type), Accuracy())
    return {
        "weights": plan.n_elements(),
        "bytes_before": plan.size_before(),
        "bytes": plan.size_after(),
        "bits_per_weight": _number(plan.size_after() * 8 / max(plan.n_elements(), 1)),
        "bits_per_weight_in_the_layers": _number(plan.layers_bpw(plan.types)),
        **({} if accuracies is None else error_record(total)),
        **({} if chosen is None else chosen.record()),
    }
