"""The best fixed type for a target: the --type with the smallest predicted KL divergence among those whose files fit.

The types that allocation chooses are compared with it by a measurement, because both predictions may be wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gguf import GGMLQuantizationType

from .._encode.codec import Codec
from .._plan.plan import QuantizationPlan
from .items import Item, is_usable
from .limit import Limit

N_LISTED = 3  # of the largest files that fit, of ggml-ext types and of standard types: smaller ones are hardly better


@dataclass(frozen=True)
class FixedType:
    """A --type, and the type that it gives each tensor."""

    name: str
    types: Mapping[str, GGMLQuantizationType]
    is_upstream: bool


def list_fitting_types(
    fixed: Sequence[FixedType], limit: Limit, plan: QuantizationPlan, items: Sequence[Item], codec: Codec
) -> list[FixedType]:
    """List the types that can be encoded and whose files fit into the limit, the largest of each kind.

    Args:
        fixed: the types.
        limit: of the target.
        plan: of the target, with the tensors that it does not choose.
        items: those that it chooses.
        codec: encodes them.
    """
    chosen = {item.planned.name for item in items}
    room = limit.n_bytes + sum(limit.weight(t.tensor, t.type) for t in plan.tensors if t.name not in chosen)
    sizes = {f.name: sum(limit.weight(t.tensor, f.types[t.name]) for t in plan.tensors) for f in fixed}
    fitting = sorted((f for f in fixed if sizes[f.name] <= room), key=lambda f: -sizes[f.name])
    usable = [
        f for f in fitting
        if all(codec.can_encode(f.types[i.planned.name]) and is_usable(i.planned, f.types[i.planned.name], codec) for i in items)
    ]
    return [f for is_upstream in (False, True) for f in [u for u in usable if u.is_upstream == is_upstream][:N_LISTED]]
