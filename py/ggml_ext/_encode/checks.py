"""Check before writing that the types of a plan have encoders and can hold the model's weights."""

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
from .._formats.tensor_types import COPIED_TYPES
from .._plan.plan import QuantizationPlan, accurate_type
from .codec import UNWEIGHTED_IN_NUMPY, BadWeights, Codec, largest_weight

TYPE_FLAGS = {"output.weight": "--output-tensor-type", "token_embd.weight": "--token-embedding-type"}  # of quantize


def check_encoders(codec: Codec, plan: QuantizationPlan, may_replace: bool) -> None:
    """Raise UserError if a type of the plan has no encoder. may_replace: --fallback-above is given."""
    if codec.lib is None and may_replace:
        for t in plan.tensors:
            if t.may_be_replaced and not codec.can_encode(accurate := accurate_type(t.tensor, t.type)):
                raise UserError(
                    f"--fallback-above: {accurate.name.lower()} has no numpy encoder and the built library is not in use: build it, "
                    "or leave the option out"
                )
    check_known_encoders(codec, plan, TYPE_FLAGS)


def check_known_encoders(codec: Codec, plan: QuantizationPlan, flags: Mapping[str, str]) -> None:
    """Raise UserError if neither the library nor numpy encodes a type. flags: the type options of single tensors, by tensor."""
    for t in plan.changed:
        if not codec.can_encode(t.type):
            raise _no_numpy_encoder(t.tensor, t.type, flags)


def check_numpy_encoders(codec: Codec, plan: QuantizationPlan, flags: Mapping[str, str]) -> None:
    """Raise UserError if a numpy encoder cannot use the imatrix of its tensor. flags: as in check_known_encoders()."""
    if codec.lib is not None:
        return
    for t in plan.changed:
        if t.uses_imatrix and t.type in UNWEIGHTED_IN_NUMPY:
            raise _no_numpy_encoder(t.tensor, t.type, flags, " with an imatrix")


def _no_numpy_encoder(tensor: Tensor, qtype: GGMLQuantizationType, flags: Mapping[str, str], use: str = "") -> UserError:
    flag = f"{flags[tensor.name]} q8_0" if tensor.name in flags else f"--tensor-type '{re.escape(tensor.name)}=q8_0'"
    return UserError(
        f"tensor {tensor.name}: {qtype.name.lower()} has no numpy encoder{use} and the built library is not in use: build it, or pass {flag}"
    )


def check_source(
    file: GGUFFile, plan: QuantizationPlan, codec: Codec, console: Console, *, n_threads: int,
    candidates: Mapping[str, Sequence[GGMLQuantizationType]],
) -> None:
    """Check that the planned types can hold every weight.

    Args:
        file: the model.
        plan: its tensors and their types.
        codec: decodes the weights.
        console: gets the progress bar.
        n_threads: of reading.
        candidates: by tensor, the types that allocation may choose instead of the planned one.

    Raises:
        UserError: weights are not finite or too large; it names the tensors.
    """
    bad: dict[str, str] = {}
    with ThreadPoolExecutor(n_threads) as pool, console.bar("checking", plan.n_elements(), "w", is_scaled=True) as bar:
        for t in plan.tensors:
            tensor = t.tensor
            possible = [q for q in candidates.get(t.name, [t.type]) if q != tensor.type]
            strictest = min(possible, key=largest_weight, default=tensor.type)

            def check(chunk: tuple[int, int], tensor: Tensor = tensor, strictest: GGMLQuantizationType = strictest) -> None:
                codec.check(file.rows(tensor, *chunk), tensor, chunk[0], strictest)

            chunks = () if tensor.type in COPIED_TYPES or file.is_hole(tensor) else row_chunks(tensor)
            try:
                for _ in map_in_order(pool, check, chunks, 2 * n_threads):
                    pass
            except BadWeights as e:
                bad[t.name] = str(e)
            bar.update(tensor.n_elements)
    if bad:
        first, *others = bad
        more = f"; {len(others)} more tensor{'s have' if len(others) > 1 else ' has'} such weights: {list_tensors(others)}" if others else ""
        raise UserError(f"{bad[first]}{more}")
