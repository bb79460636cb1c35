"""Choose the type of each tensor under a limit: --target-size, --target-bpw, --target-kld (target.py).

Each matrix has candidate types (items.py). Its predicted KL divergence is the NMSE of a type (error_measurement.py) times the matrix's
sensitivity (sensitivity.py). knapsack.py minimizes the sum under a limit of bytes, or the bytes under a limit of the sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gguf import GGMLQuantizationType, LlamaFileType

from .._base.errors import UserError
from .._base.text import format_table
from .._base.types import WEIGHT_TYPES
from .._base.units import MIB
from .._encode.codec import Codec
from .._formats.gguf_file import GGUFFile, Tensor, header_bytes, pad
from .._formats.names import tensor_class
from .._plan.file_types import FILE_TYPES, FileType
from .._plan.plan import QuantizationPlan
from .error_measurement import ErrorMeasurement
from .items import Item, add_low_types, drop_unusable
from .knapsack import Solution, solve
from .target import MEASURED, USUAL, Target

HEADER_ROOM = 4096  # bytes for the keys that quantizing adds: file names, options
LOW_ROOM = 1.1  # types below two bits are candidates if the smallest file without them, times this, is above the limit
UNCHANGED = "{}: the input is within the target; no type changes"


@dataclass(frozen=True)
class Limit:
    """A target, converted to bytes for the items."""

    target: Target
    n_elements: int
    n_fixed: int  # bytes of everything but the items
    alignment: int  # of tensor data if padding counts, else 1

    @classmethod
    def compute(cls, target: Target, plan: QuantizationPlan, items: list[Item], header: int, alignment: int) -> Limit:
        """Subtract the tensors whose types are fixed. header: bytes of the file before its data."""
        limit = cls(target, plan.n_elements(), 0, alignment if target.kind == "size" else 1)
        names = {item.planned.name for item in items}
        fixed = sum(limit.weight(t.tensor, t.type) for t in plan.tensors if t.name not in names)
        return replace(limit, n_fixed=fixed + (header if target.kind == "size" else 0))

    def weight(self, tensor: Tensor, qtype: GGMLQuantizationType) -> int:
        """Return the bytes of a tensor in a type, as the target counts them."""
        return pad(tensor.bytes_as(qtype), self.alignment)

    @property
    def n_bytes(self) -> float:
        """Bytes for the items; infinite for a target without a size."""
        value = {"size": self.target.value, "bpw": self.target.value * self.n_elements / 8}.get(self.target.kind, math.inf)
        return value - self.n_fixed

    def describe(self, weight: float) -> str:
        """Convert bytes of the items to the size of all tensors, in the target's unit."""
        total = weight + self.n_fixed
        if self.target.kind == "bpw":
            return f"{math.ceil(total * 8 / self.n_elements * 1e4) / 1e4:g} bpw"
        return f"{total / MIB:,.2f} MiB ({int(total):,} bytes)"

    def smallest(self, items: list[Item]) -> int:
        return sum(min(self.weight(item.tensor, t) for t in item.types) for item in items)

    def check(self, items: list[Item], room: int = 0) -> None:
        """Raise UserError if the target is below the smallest possible file.

        room: bytes for keys that quantizing adds; part of the size that the message names.
        """
        if (least := self.smallest(items)) > self.n_bytes:
            named = ", or drop the options that fix types" if any(item.is_named for item in items) else ""
            raise UserError(
                f"--target-{self.target.kind} {self.target.text} is below the smallest possible, {self.describe(least + room)}: raise it "
                f"to that, or {_suggest_types(self.target, 'smaller')}{named}"
            )


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
    notes: Sequence[str] = field(default_factory=list)

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
        }

    def describe(self) -> list[str]:
        """Describe the prediction for the summary."""
        remark = "" if self.is_measured else " (sensitivities of another model; may be off by a factor of ten)"
        best = f"within {self.gap:.2%} of the optimum" if self.gap else "optimal for these types"
        return [f"predicted KL divergence {self.predicted:.4g}{remark}; {best}", *self.notes]

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


def allocate_types(target: Target, items: list[Item], header: int, measurement: ErrorMeasurement) -> Allocation:
    """Choose the types of the items.

    Args:
        target: the limit.
        items: with their candidate types.
        header: bytes of OUT before its data.
        measurement: measures errors and sensitivities.

    Raises:
        UserError: the target cannot be reached.
    """
    drop_unusable(items, measurement.codec)
    limit = Limit.compute(target, measurement.plan, items, header, measurement.file.alignment)
    limit.check(items)
    costs = measurement.measure(items)
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
            f"--target-kld {target.text} is below the smallest possible, {_round_up(least)}: raise it, {_suggest_types(target, 'larger')}, "
            "or drop the options that fix types"
        )
    types = [
        AllocatedType(item, item.types[i], candidates[i][1]) for item, i, candidates in zip(items, solution.picks, options, strict=True)
    ]
    return Allocation(types, costs.is_measured, solution.gap, _describe_limit(target, types, solution, options))


def _suggest_types(target: Target, size: str) -> str:
    """Suggest candidates of another size, "smaller" or "larger"."""
    if target.types_are_listed:
        return f"add {size} types to --target-types"
    return f"list the default types (see --help) and {size} ones in --target-types"


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
