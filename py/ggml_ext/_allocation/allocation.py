"""Choose the type of each tensor under a limit: --target-size, --target-bpw, --target-kld (target.py).

Each matrix has candidate types (items.py). Its predicted KL divergence is the NMSE of a type (error_measurement.py) times the matrix's
sensitivity (sensitivity.py). knapsack.py minimizes the sum under a limit of bytes, or the bytes under a limit of the sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gguf import GGMLQuantizationType, LlamaFileType

from .._base.errors import UserError
from .._base.text import format_table
from .._base.types import WEIGHT_TYPES
from .._encode.codec import Codec
from .._formats.gguf_file import GGUFFile, header_bytes
from .._formats.names import tensor_class
from .._plan.file_types import FILE_TYPES, FileType
from .._plan.plan import QuantizationPlan
from .error_measurement import ErrorCosts, ErrorMeasurement
from .fixed_types import FixedType, list_fitting_types
from .items import Item, add_low_types, drop_unusable
from .knapsack import Solution, solve
from .limit import Limit, suggest_types
from .target import MEASURED, USUAL, Target

HEADER_ROOM = 4096  # bytes for the keys that quantizing adds: file names, options
LOW_ROOM = 1.1  # types below two bits are candidates if the smallest file without them, times this, is above the limit
UNCHANGED = "{}: the input is within the target; no type changes"


@dataclass(frozen=True)
class AllocatedType:
    """The type chosen for an item."""

    item: Item
    type: GGMLQuantizationType
    predicted: float = 0.0  # KL divergence that the item adds


@dataclass(frozen=True)
class Allocation:
    """The types of all items and their predicted KL divergence."""

    types: Sequence[AllocatedType]
    is_measured: bool = True  # sensitivities were measured on this model
    gap: float = 0.0  # optimality gap, relative
    is_fixed: bool = False  # the types are those of a --type
    notes: Sequence[str] = field(default_factory=list)
    rival: tuple[str, Allocation] | None = None  # the best --type that fits, with the types that it gives the items
    check: Mapping[str, Any] = field(default_factory=dict)  # the measured comparison with the rival, for JSON

    def apply(self, plan: QuantizationPlan) -> None:
        """Set the types of the plan. Only tensors whose type an option names count as fallbacks afterwards."""
        named = {a.item.planned.name for a in self.types if a.item.is_named}
        for a in self.types:
            if not a.item.is_named:
                a.item.planned.set_type(a.type)
        for t in plan.tensors:
            if t.name not in named:
                t.requested = t.type

    @property
    def predicted(self) -> float:
        """Predicted KL divergence."""
        return math.fsum(a.predicted for a in self.types)

    def table(self, width: int) -> list[str]:
        """Tabulate the predicted KL divergence by class and type."""
        classes: dict[tuple[str, str], list[float]] = {}
        for a in self.types:
            classes.setdefault((tensor_class(a.item.planned.name), a.type.name.lower()), []).append(a.predicted)
        rows = [
            (name, f"{type_name:<8} {len(parts):5d} {math.fsum(parts):13.6f}") for (name, type_name), parts in classes.items()
        ]
        return format_table("tensors", f"{'type':<8} {'count':>5} {'predicted KLD':>13}", rows, width)

    def record(self) -> dict:
        """Return the values for JSON."""
        return {
            "predicted_kl_divergence": self.predicted,
            "sensitivities": MEASURED if self.is_measured else USUAL,
            "optimality_gap": self.gap,
            **({"target_check": self.check} if self.check else {}),
        }

    def describe(self) -> list[str]:
        """Describe the prediction for the summary."""
        remark = "" if self.is_measured else " (sensitivities of another model; may be off by a factor of ten)"
        best = f"within {self.gap:.2%} of the optimum" if self.gap else "optimal for these types"
        return [f"predicted KL divergence {self.predicted:.4g}{remark}{'' if self.is_fixed else f'; {best}'}", *self.notes]

    def file_type(self, placeholder: FileType, upstream_only: bool) -> FileType:
        """Return the file type of most block weights: a ggml-ext type if there is any, else an upstream type.

        placeholder: the file type during planning; upstream_only: of the target.
        """
        counts: dict[GGMLQuantizationType, int] = {}
        for a in self.types:
            is_in_layers = a.item.planned.name.startswith("blk.")
            counts[a.type] = counts.get(a.type, 0) + (a.item.tensor.n_elements if is_in_layers else 0)
        ext_counts = {q: n for q, n in counts.items() if q.name.lower() in WEIGHT_TYPES and n}
        if ext_counts:
            return FILE_TYPES[max(ext_counts, key=lambda q: ext_counts[q]).name.lower()]
        qtype = max(counts, key=lambda q: counts[q]) if counts else GGMLQuantizationType.F16
        name = qtype.name
        members = (getattr(LlamaFileType, n, None) for n in (f"MOSTLY_{name}", f"MOSTLY_{name}_M", f"MOSTLY_{name}_S", f"MOSTLY_{name}_MOE", f"ALL_{name}"))
        file_type = int(next((f for f in members if f is not None), LlamaFileType.GUESSED))
        return FileType(name.lower(), file_type, qtype) if upstream_only else replace(placeholder, id=file_type)


def add_needed_low_types(target: Target, file: GGUFFile, plan: QuantizationPlan, items: list[Item], codec: Codec) -> None:
    """Add the types below two bits to the candidates if the default types do not fit into the limit, or hardly."""
    limit = Limit.compute(target, plan, items, header_bytes(file), file.alignment)
    if not target.types_are_listed and not target.upstream_only and LOW_ROOM * limit.smallest(items) > limit.n_bytes:
        add_low_types(items, codec)


def allocate_without_measuring(target: Target, file: GGUFFile, plan: QuantizationPlan, items: list[Item]) -> Allocation | None:
    """Keep all types if the target allows that; return None if errors must be measured. UserError if no file can be small enough."""
    limit = Limit.compute(target, plan, items, header_bytes(file), file.alignment)
    room = HEADER_ROOM if target.kind == "size" else 0
    limit.check(items, room)
    if not items:
        return Allocation([], notes=["options fix the types of all matrices"])
    fits = target.kind != "kld" and sum(limit.weight(item.tensor, item.tensor.type) for item in items) + room <= limit.n_bytes
    if fits and all(item.tensor.type in item.types for item in items):
        return Allocation([AllocatedType(item, item.tensor.type) for item in items], notes=[_describe_unchanged(target)])
    return None


def allocate_types(
    target: Target, items: list[Item], header: int, measurement: ErrorMeasurement, fixed: Sequence[FixedType] = ()
) -> Allocation:
    """Choose the types of the items.

    Args:
        target: the limit.
        items: with their candidate types.
        header: bytes of OUT before its data.
        measurement: measures errors and sensitivities.
        fixed: the types of which the best that fits becomes the rival.

    Raises:
        UserError: the target cannot be reached.
    """
    drop_unusable(items, measurement.codec)
    limit = Limit.compute(target, measurement.plan, items, header, measurement.file.alignment)
    limit.check(items)
    fixed = list_fitting_types(fixed, limit, measurement.plan, items, measurement.codec)
    measured = [replace(item, types=[*dict.fromkeys([*item.types, *(f.types[item.planned.name] for f in fixed)])]) for item in items]
    costs = measurement.measure(measured)
    options: list[list[tuple[float, float]]] = [
        [(limit.weight(item.tensor, t), costs.predict(item.planned.name, t)) for t in item.types] for item in items
    ]
    if target.kind == "kld":
        solution = solve([[(cost, weight) for weight, cost in candidates] for candidates in options], target.value)
    else:
        solution = solve(options, limit.n_bytes)
    if solution is None:  # limit.check() has raised for sizes
        least = sum(min(cost for _, cost in candidates) for candidates in options)
        raise UserError(
            f"--target-kld {target.text} is below the smallest possible, {_round_up(least)}: raise it, {suggest_types(target, 'larger')}, "
            "or drop the options that fix types"
        )
    types = [
        AllocatedType(item, item.types[i], candidates[i][1]) for item, i, candidates in zip(items, solution.picks, options, strict=True)
    ]
    return Allocation(
        types, costs.is_measured, solution.gap, notes=_describe_limit(target, types, solution, options),
        rival=_find_rival(fixed, items, costs),
    )


def _find_rival(fixed: Sequence[FixedType], items: list[Item], costs: ErrorCosts) -> tuple[str, Allocation] | None:
    """Return the fixed type with the smallest predicted KL divergence, and its types of the items."""
    rivals = []
    for f in fixed:
        pairs = [(item, f.types[item.planned.name]) for item in items]
        types = [AllocatedType(item, qtype, costs.predict(item.planned.name, qtype)) for item, qtype in pairs]
        rivals.append((f.name, Allocation(types, costs.is_measured, is_fixed=True)))
    return min(rivals, key=lambda rival: rival[1].predicted, default=None)


def _round_up(value: float) -> str:
    """Format four digits, rounded up."""
    step = 10.0 ** (math.floor(math.log10(value)) - 3) if value > 0 else 1.0
    return f"{math.ceil(value / step) * step:.4g}"


def _describe_unchanged(target: Target) -> str:
    return UNCHANGED.format(target.option.replace("=", " "))


def _describe_limit(
    target: Target, types: list[AllocatedType], solution: Solution, options: list[list[tuple[float, float]]]
) -> list[str]:
    """Note that no type changes, or that the target is larger than the best types need."""
    if all(a.type == a.item.tensor.type for a in types):
        return [_describe_unchanged(target)]
    best = sum(min(cost for _, cost in candidates) for candidates in options)
    reached = sum(candidates[i][1] for candidates, i in zip(options, solution.picks, strict=True))
    if target.kind != "kld" and reached <= best:
        return [f"{target.option.replace('=', ' ')} exceeds what the best types need: OUT is smaller"]
    return []
