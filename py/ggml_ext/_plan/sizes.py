"""Bytes of the tensors in the types of a plan."""

from __future__ import annotations

from .plan import Plan, may_be_replaced, replacement_type


def possible_sizes(plan: Plan, fallback_above: float | None) -> list[dict[str, int]]:
    """Of each tensor the types that it may get, the planned one first, and the bytes of its data in them."""
    out = []
    for tensor, target in zip(plan.tensors, plan.types, strict=True):
        is_sure = fallback_above is None or not may_be_replaced(tensor, target)
        types = [target] if is_sure else [target, replacement_type(tensor, target)]
        out.append({q.name: tensor.bytes_as(q) for q in types})
    return out


def tensor_sizes(plan: Plan) -> list[int]:
    """Bytes of the data of each tensor in the types planned."""
    return [t.bytes_as(q) for t, q in zip(plan.tensors, plan.types, strict=True)]
