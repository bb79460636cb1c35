"""Whether an encoder can make the types of a plan of the weights that there are, asked before anything is written."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from gguf import GGMLQuantizationType

from .._base.console import Console
from .._base.errors import UserError
from .._base.threads import map_in_order
from .._formats.chunks import row_chunks
from .._formats.gguf_file import GGUFFile, Tensor
from .._formats.names import list_tensors
from .._plan.plan import Plan, may_be_replaced, replacement_type
from .codec import NO_WEIGHTS, UNWEIGHTED_IN_NUMPY, BadWeights, Codec, largest_weight

TYPE_FLAGS = {"output.weight": "--output-tensor-type", "token_embd.weight": "--token-embedding-type"}  # of the quantizer


def check_encoders(codec: Codec, plan: Plan, may_replace: bool) -> None:
    """UserError if it cannot make a type of the plan. may_replace: --fallback-above is given."""
    for tensor, target in zip(plan.tensors, plan.types, strict=True):
        if codec.lib is None and may_replace and may_be_replaced(tensor, target):
            fallback = replacement_type(tensor, target)
            if not codec.can_encode(fallback):
                raise UserError(
                    f"--fallback-above: {fallback.name.lower()} has no numpy encoder and the built library is not in use: build it, "
                    "or leave the option out"
                )
    check_known_encoders(codec, plan, TYPE_FLAGS)


def check_known_encoders(codec: Codec, plan: Plan, flags: Mapping[str, str]) -> None:
    """UserError where neither the library nor numpy makes a type. flags: those for the types of single tensors, by tensor."""
    for tensor, target in zip(plan.tensors, plan.types, strict=True):
        if target != tensor.type and not codec.can_encode(target):
            raise no_numpy_encoder(tensor, target, flags)


def check_source(
    file: GGUFFile, tensors: Sequence[Tensor], types: Sequence[Sequence[GGMLQuantizationType]], codec: Codec, n_threads: int, console: Console
) -> None:
    """Reads every weight. types: that each tensor may get. UserError for weights that are not finite, or that a type cannot hold."""
    bad: dict[str, str] = {}
    with ThreadPoolExecutor(n_threads) as pool, console.bar("checking", sum(t.n_elements for t in tensors), "w", is_scaled=True) as bar:
        for tensor, possible in zip(tensors, types, strict=True):
            others = [t for t in possible if t != tensor.type]
            strictest = min(others, key=largest_weight, default=tensor.type)

            def check(chunk: tuple[int, int], tensor=tensor, strictest=strictest) -> None:
                codec.check(file.rows(tensor, *chunk), tensor, chunk[0], strictest)

            chunks = () if tensor.type in NO_WEIGHTS or file.is_hole(tensor) else row_chunks(tensor)
            try:
                for _ in map_in_order(pool, check, chunks, 2 * n_threads):
                    pass
            except BadWeights as e:
                bad[tensor.name] = str(e)
            bar.update(tensor.n_elements)
    if bad:
        first, *more = bad
        others = f"; {len(more)} more tensor{'s have' if len(more) > 1 else ' has'} such weights: {list_tensors(more)}" if more else ""
        raise UserError(f"{bad[first]}{others}")


def no_numpy_encoder(tensor: Tensor, target: GGMLQuantizationType, flags: Mapping[str, str], what: str = "") -> UserError:
    flag = f"{flags[tensor.name]} q8_0" if tensor.name in flags else f"--tensor-type '{re.escape(tensor.name)}=q8_0'"
    return UserError(
        f"tensor {tensor.name}: {target.name.lower()} has no numpy encoder{what} and the built library is not in use: build it, or pass {flag}"
    )


def check_numpy_encoders(codec: Codec, plan: Plan, flags: Mapping[str, str]) -> None:
    """UserError if a tensor has importances that its encoder cannot take. flags: as in check_known_encoders()."""
    if codec.lib is not None:
        return
    for tensor, target in zip(plan.tensors, plan.types, strict=True):
        if target != tensor.type and tensor.name in plan.importance and target in UNWEIGHTED_IN_NUMPY:
            raise no_numpy_encoder(tensor, target, flags, " with importances")
