"""The matrices whose types allocation chooses, and the candidates for each."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from gguf import GGMLQuantizationType

from .._base.errors import UserError
from .._encode.codec import UNWEIGHTED_IN_NUMPY, Codec
from .._formats.gguf_file import Tensor
from .._formats.tensor_types import IMATRIX_TYPES, SOURCE_TYPES, parse_type
from .._plan.plan import Choices, PlannedTensor, QuantizationPlan, deciding_option, fit_to_row
from .._plan.rules import OUTPUT, PER_LAYER_TOKEN_EMBD, TOKEN_EMBD
from .target import LOW_TYPES, Target


@dataclass
class Item:
    """A weight matrix and its candidate types."""

    planned: PlannedTensor
    types: list[GGMLQuantizationType]
    is_named: bool = False  # an option names its type

    @property
    def tensor(self) -> Tensor:
        return self.planned.tensor


def find_named_type(tensor: Tensor, choices: Choices, tied: bool) -> GGMLQuantizationType | None:
    """Return the type that an option names. tied: the embeddings are the output matrix too, and follow its option."""
    if option := deciding_option(tensor, choices):
        return option[1]
    is_embd = tensor.name in (TOKEN_EMBD, PER_LAYER_TOKEN_EMBD)
    return choices.output if tied and is_embd else None


def make_items(target: Target, plan: QuantizationPlan, choices: Choices, codec: Codec) -> list[Item]:
    """List the matrices that allocation decides, and those whose type an option names, with that single candidate."""
    tied = all(t.name != OUTPUT for t in plan.tensors)
    items = []
    for t in plan.tensors:
        named = find_named_type(t.tensor, choices, tied)
        if named is not None and (t.requested != t.tensor.type or t.is_changed):
            if named != t.requested:  # tied embeddings follow --output-tensor-type here, not in the plan
                t.set_type(fit_to_row(t.tensor, named))
            items += [Item(t, [t.type], is_named=True)] if t.is_changed else []
        elif t.requested == choices.type:
            source_type = [] if target.types_are_listed or t.tensor.type not in SOURCE_TYPES else [t.tensor.type]
            items.append(Item(t, [*dict.fromkeys([*_fit_types(t.tensor, target.types, codec), *source_type])]))
            if not items[-1].types:
                reason = f"with rows of {t.tensor.ne[0]}" if codec.lib else "with the numpy encoder"
                raise _none_usable(t.tensor, target.types, reason)
    return items


def _none_usable(tensor: Tensor, types: Sequence[GGMLQuantizationType], reason: str) -> UserError:
    names = ", ".join(t.name.lower() for t in types)
    return UserError(f"--target-types: tensor {tensor.name} fits none of {names} {reason}: add a type such as q8_0")


def _fit_types(tensor: Tensor, types: Sequence[GGMLQuantizationType], codec: Codec) -> list[GGMLQuantizationType]:
    fitting = []
    for qtype in types:
        with contextlib.suppress(UserError):  # no fallback fits either
            fitting.append(fit_to_row(tensor, qtype))
    return [t for t in dict.fromkeys(fitting) if codec.can_encode(t)]


def add_low_types(items: list[Item], codec: Codec) -> None:
    """Add the types below two bits to the candidates of all items whose type no option names."""
    low_types = [parse_type(name, "--target-types") for name in LOW_TYPES]
    for item in items:
        if not item.is_named:
            item.types = [*dict.fromkeys([*_fit_types(item.tensor, low_types, codec), *item.types])]


def is_usable(planned: PlannedTensor, qtype: GGMLQuantizationType, codec: Codec) -> bool:
    """Whether a tensor can be encoded in a type with, or without, the imatrix."""
    weighted = planned.uses_imatrix
    unusable = UNWEIGHTED_IN_NUMPY if weighted and codec.lib is None else () if weighted else IMATRIX_TYPES
    return qtype == planned.tensor.type or qtype not in unusable


def drop_unusable(items: list[Item], codec: Codec) -> None:
    """Drop the types that cannot be encoded with, or without, the imatrix. UserError if none remains."""
    for item in items:
        usable = [t for t in item.types if is_usable(item.planned, t, codec)]
        if not usable:
            reason = "with the numpy encoder" if item.planned.uses_imatrix else "without an imatrix"
            raise _none_usable(item.tensor, item.types, reason)
        item.types = usable
