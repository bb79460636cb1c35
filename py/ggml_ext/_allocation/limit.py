"""A target, converted to bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from gguf import GGMLQuantizationType

from .._base.errors import UserError
from .._base.units import MIB
from .._formats.gguf_file import Tensor, pad
from .._plan.plan import QuantizationPlan
from .items import Item
from .target import Target


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
                f"to that, or {suggest_types(self.target, 'smaller')}{named}"
            )


def suggest_types(target: Target, size: str) -> str:
    """Suggest candidates of another size, "smaller" or "larger"."""
    if target.types_are_listed:
        return f"add {size} types to --target-types"
    return f"list the default types (see --help) and {size} ones in --target-types"
