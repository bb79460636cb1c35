"""Decide which tensors are encoded with an imatrix, as llama-quantize does."""

from __future__ import annotations

import re

from gguf import GGMLQuantizationType

from .._base.errors import UserError
from .._formats.gguf_file import Tensor
from .._formats.imatrix import ImportanceMatrix, n_importances
from .._formats.names import describe_tensors, list_experts, list_tensors, tensor_class
from .._formats.tensor_types import FLOAT_TYPES, IMATRIX_TYPES, UNWEIGHTED_TYPES
from .plan import PlannedTensor, QuantizationPlan
from .rules import OUTPUT
from .uses import OUTER


def needs_imatrix(tensor: Tensor, qtype: GGMLQuantizationType, imatrix_required_type: GGMLQuantizationType | None) -> bool:
    """Whether the type needs an imatrix to encode the tensor. imatrix_required_type: as in QuantizationPlan."""
    return qtype in IMATRIX_TYPES or (qtype == imatrix_required_type and tensor.name not in OUTER)


def list_types_using_imatrix(plan: QuantizationPlan) -> list[GGMLQuantizationType]:
    """List the types of the tensors that an imatrix can improve. It does not cover the embeddings and the output matrix."""
    return [t.type for t in plan.changed if t.type not in UNWEIGHTED_TYPES and t.name not in OUTER]


def assign_imatrix(plan: QuantizationPlan, imatrix: ImportanceMatrix | None) -> None:
    """Mark the tensors that use the imatrix, and add warnings.

    Raises:
        UserError: the imatrix is for another model, or a type needs values that it lacks.
    """
    if imatrix is not None:
        _match_entries(plan, _list_encoded(plan), imatrix)
    check_imatrix_types(plan, imatrix)


def _list_encoded(plan: QuantizationPlan) -> list[PlannedTensor]:
    return [t for t in plan.changed if t.type not in FLOAT_TYPES]


def check_imatrix_types(plan: QuantizationPlan, imatrix: ImportanceMatrix | None = None) -> None:
    """Raise UserError if a tensor without an imatrix has a type that requires one. imatrix: the one in use, for the message."""
    encoded = _list_encoded(plan)
    lacking = [t for t in encoded if needs_imatrix(t.tensor, t.type, plan.imatrix_required_type) and not t.uses_imatrix]
    if not lacking:
        return
    qtype = lacking[0].type
    names = [t.name for t in lacking if t.type == qtype]
    hint = "pass --imatrix FILE" if imatrix is None else f"{imatrix.path} has none for {'it' if len(names) == 1 else 'them'}"
    patterns = dict.fromkeys(re.escape(tensor_class(name)).replace(r"\*", r"\d+") for name in names)
    raise UserError(
        f"{describe_tensors(names)}: {qtype.name.lower()} needs an imatrix: {hint} (llama-imatrix makes "
        f"one), or choose another type with --tensor-type '{re.escape(names[0]) if len(names) == 1 else '|'.join(patterns)}=TYPE'"
    )


def _match_entries(plan: QuantizationPlan, encoded: list[PlannedTensor], imatrix: ImportanceMatrix) -> None:
    """Mark the tensors with an entry of their size. A type without calibration ignores missing and mismatched entries."""
    missing: list[str] = []
    experts: dict[str, list[int]] = {}  # those without tokens, by tensor
    for t in encoded:
        is_weighted = t.type not in UNWEIGHTED_TYPES
        if t.name not in imatrix:
            is_expected = t.name in OUTER or t.name in imatrix.excluded or t.is_unseen
            missing += [t.name] if is_weighted and not is_expected else []
        elif imatrix.n_values(t.name) == n_importances(t.tensor):
            t.uses_imatrix = True
            if numbers := imatrix.experts_without_tokens(t.tensor):
                experts[t.name] = numbers
        elif is_weighted:
            _report_other_size(plan, t.tensor, imatrix)
    _report_missing(plan, imatrix, missing, len(encoded))
    if experts:
        n = sum(map(len, experts.values()))
        plan.warnings.append(
            f"--imatrix: {imatrix.path}: {n} expert{'s' if n > 1 else ''} saw no token and get{'' if n > 1 else 's'} the mean of "
            f"{'their layers' if n > 1 else 'its layer'}: {list_experts(experts)}"
        )
    names = {t.name for t in plan.tensors}
    if unknown := [name for name in imatrix.names() if name not in names]:
        plan.warnings.append(
            f"--imatrix: {imatrix.path} has entries for {len(unknown)} tensors that the model lacks, such as "
            f"{unknown[0]}: is it for another model?"
        )


def _report_other_size(plan: QuantizationPlan, tensor: Tensor, imatrix: ImportanceMatrix) -> None:
    """Raise UserError; for embeddings, which only --process-output collects, add a warning."""
    needed = n_importances(tensor)
    message = (
        f"--imatrix: {imatrix.path}: tensor {tensor.name} has {imatrix.n_values(tensor.name):,} values, the model needs {needed:,} "
        f"({needed // tensor.ne[0]:,} x {tensor.ne[0]:,} columns)"
    )
    if tensor.name not in OUTER or tensor.name == OUTPUT:
        raise UserError(f"{message}: it is for another model; make one with llama-imatrix -m MODEL -f TEXT, "
                        f"or leave it out with --exclude-weights {tensor.name}")
    plan.warnings.append(f"{message}: quantized without it")


def _report_missing(plan: QuantizationPlan, imatrix: ImportanceMatrix, missing: list[str], n_encoded: int) -> None:
    """Warn about tensors without an entry. Raise UserError if no entry is for this model."""
    if not missing:
        return
    names = {t.name for t in plan.tensors}
    if not any(name in names for name in imatrix.names()):
        raise UserError(
            f"--imatrix: {imatrix.path} is for another model: it has {len(imatrix):,} entries, such as {imatrix.names()[0]}, "
            f"and none for a tensor of this one, such as {missing[0]}; make one with llama-imatrix -m MODEL -f TEXT"
        )
    plan.warnings.append(
        f"--imatrix: {imatrix.path} has no entries for {len(missing)} of {n_encoded} tensors, which are "
        f"quantized without: {list_tensors(missing)}"
    )
