"""The matrices that a target chooses types for, and the types that each may get."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from gguf import GGMLQuantizationType

from .._base.errors import UserError
from .._encode.codec import UNWEIGHTED_IN_NUMPY, Codec
from .._formats.gguf_file import Tensor
from .._plan.plan import IMATRIX_TYPES, OUTPUT, PER_LAYER_TOKEN_EMBD, SOURCE_TYPES, TOKEN_EMBD, Choices, Plan, fit_to_row
from .target import Target


@dataclass
class Item:
    """A weight matrix and the types that it may get."""

    index: int  # in the plan
    tensor: Tensor
    types: list[GGMLQuantizationType]
    is_named: bool = False  # by an option


def named_type(tensor: Tensor, choices: Choices, tied: bool) -> GGMLQuantizationType | None:
    """The type that an option names for it. tied: the embeddings serve as the output matrix."""
    is_embd = tensor.name in (TOKEN_EMBD, PER_LAYER_TOKEN_EMBD)
    by_pattern = next((o.type for o in choices.overrides if o.pattern.search(tensor.name)), None)
    if is_embd and choices.token_embd is not None and not (tensor.name == PER_LAYER_TOKEN_EMBD and by_pattern is not None):
        return choices.token_embd
    if tensor.name == OUTPUT and choices.output is not None:
        return choices.output
    return choices.output if by_pattern is None and tied and is_embd else by_pattern


def make_items(target: Target, plan: Plan, choices: Choices, codec: Codec) -> list[Item]:
    """The matrices of a plan in which each that no option names has the type that stands for all."""
    tied = all(t.name != OUTPUT for t in plan.tensors)
    items = []
    for i, (tensor, wanted, got) in enumerate(zip(plan.tensors, plan.wanted, plan.types, strict=True)):
        named = named_type(tensor, choices, tied)
        if named is not None and (wanted != tensor.type or got != tensor.type):
            if named != wanted:  # the plan's embeddings do not follow the output
                got = plan.wanted[i] = plan.types[i] = fit_to_row(tensor, named)
            items += [Item(i, tensor, [got], True)] if got != tensor.type else []
        elif wanted == choices.type:
            keeps = [] if target.types_are_listed or tensor.type not in SOURCE_TYPES else [tensor.type]
            items.append(Item(i, tensor, [*dict.fromkeys([*_fitting(tensor, target.types, codec), *keeps])]))
            if not items[-1].types:
                raise _none_usable(tensor, target.types, f"with rows of {tensor.ne[0]}" if codec.lib else "with the numpy encoder")
    return items


def _none_usable(tensor: Tensor, types: Sequence[GGMLQuantizationType], why: str) -> UserError:
    names = ", ".join(t.name.lower() for t in types)
    return UserError(f"--target-types: tensor {tensor.name} can have none of {names} {why}: add a type, such as q8_0")


def _fitting(tensor: Tensor, listed: Sequence[GGMLQuantizationType], codec: Codec) -> list[GGMLQuantizationType]:
    found = []
    for target in listed:
        with contextlib.suppress(UserError):  # it fits no such row, and has no fallback that does
            found.append(fit_to_row(tensor, target))
    return [t for t in dict.fromkeys(found) if codec.can_encode(t)]


def drop_unusable(items: list[Item], plan: Plan, codec: Codec) -> None:
    """Leaves out what cannot be made with the importances that there are. UserError if that is all."""
    for item in items:
        weighted = item.tensor.name in plan.importance
        usable = [
            t
            for t in item.types
            if t == item.tensor.type
            or not ((t in IMATRIX_TYPES and not weighted) or (weighted and codec.lib is None and t in UNWEIGHTED_IN_NUMPY))
        ]
        if not usable:
            raise _none_usable(item.tensor, item.types, "with the numpy encoder" if weighted else "without an importance matrix")
        item.types = usable
