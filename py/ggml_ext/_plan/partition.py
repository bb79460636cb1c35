"""Divide a plan into parts of about equal work, for --part. The same plan gives the same parts everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from .._base.errors import UserError
from .._formats.names import layer_number
from .._formats.tensor_types import FLOAT_TYPES
from .plan import PlannedTensor, QuantizationPlan

# Nanoseconds per weight in a layer, where the encoder has Hessians, and outside, where it has none (docs/results/cost.md). Only ratios matter.
SCALAR = (500, 150)
BY_FAMILY = {"IQ1": (1400, 600), "IQ2": (1400, 600), "IQ3": (2300, 1200), "IQ4": (1100, 600), "Q8_": (50, 50)}
COPY = 30


def work(planned: PlannedTensor) -> int:
    """Return the work of writing a tensor: its weights times the cost of its type."""
    in_layer, outside = BY_FAMILY.get(planned.type.name[:3], SCALAR)
    is_copied = not planned.is_changed or planned.type in FLOAT_TYPES
    cost = COPY if is_copied else outside if layer_number(planned.name) is None else in_layer
    return planned.tensor.n_elements * cost


def balance(works: Sequence[int], n_parts: int) -> list[int]:
    """Divide consecutive items into parts, the largest of which has as little work as possible. No part is empty.

    Returns:
        The index of the first item of each part, and at the end the number of items.
    """
    low, high = max(works), sum(works)
    while low < high:
        limit = (low + high) // 2
        low, high = (low, limit) if len(_fill(works, limit, 1)) - 1 <= n_parts else (limit + 1, high)
    return _fill(works, low, n_parts)


def _fill(works: Sequence[int], limit: int, n_parts: int) -> list[int]:
    """Fill part after part up to a limit of work, and make at least n_parts."""
    starts, total = [0], 0
    for i, item in enumerate(works):
        is_needed = len(works) - i <= n_parts - len(starts)  # each item left has to begin a part
        if i and (total + item > limit or is_needed):
            starts.append(i)
            total = 0
        total += item
    return [*starts, len(works)]


@dataclass(frozen=True)
class PlanPart:
    """A part of a plan. plan: its tensors; share: its part of the work, 0 to 1; largest: that of the part with the most work."""

    plan: QuantizationPlan
    first: int  # index of its first tensor in the complete plan
    share: float
    largest: float


def select_part(plan: QuantizationPlan, number: int, n_parts: int) -> PlanPart:
    """Select part `number`, from 1. UserError if the model has fewer tensors than parts."""
    if n_parts > len(plan.tensors):
        raise UserError(f"--part: {n_parts:,} parts, but the model has {len(plan.tensors):,} tensors: make at most as many parts")
    works = [work(t) for t in plan.tensors]
    starts = balance(works, n_parts)
    sums = [sum(works[first:last]) for first, last in pairwise(starts)]
    first, last = starts[number - 1], starts[number]
    return PlanPart(replace(plan, tensors=plan.tensors[first:last]), first, sums[number - 1] / sum(sums), max(sums) / sum(sums))
