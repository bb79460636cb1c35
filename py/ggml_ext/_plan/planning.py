"""Make the plan of quantize: the type of each tensor, as llama-quantize chooses it for the same file type and options.

llama.cpp's rules (rules.py) choose the tensors to quantize. The first of these that applies decides the type of a matrix:

1. the options that name its type, in the order of llama_tensor_get_type() in llama.cpp's src/llama-quant.cpp
2. the quant mix of ggml-ext
3. llama.cpp's rule or, with --pure, the base type

Small matrices, and those that the graph does not use for text, are then raised to a minimum type. Last, a type that does not
fit the rows is replaced: a ggml-ext type by the first of its fallbacks in the type table that fits, a standard type by llama.cpp's fallback.
"""

from __future__ import annotations

import re
from dataclasses import replace

from gguf import GGMLQuantizationType

from .._base.errors import UserError
from .._formats.gguf_file import GGUFFile, Tensor, bits_per_weight
from .._formats.names import describe_tensors
from .._formats.tensor_types import COPIED_TYPES, SOURCE_TYPES, type_info
from .file_types import FileType
from .imatrix_use import needs_imatrix
from .plan import Choices, PlannedTensor, QuantizationPlan, deciding_option, fit_to_row
from .recipes import EXPERTS
from .rules import OUTPUT, rule_types
from .uses import FLOOR, SMALL_FLOOR, SMALL_PART, GraphUses, small_matrices

# reasons to keep the type of a matrix
KEPT_BY_RULES, KEPT_BY_LEAVE_OUTPUT, NO_WEIGHTS = "kept by llama.cpp's rules", "kept by --leave-output-tensor", ": holds no weights: kept"
NO_PRODUCT = "not used in matrix products: kept"
OUTSIDE = "outside of the layers, where calibration collects no inputs: kept"
QUANTIZED = "already quantized: kept; --allow-requantize lets the target choose other types"
NOTED_REASONS = (NO_PRODUCT, OUTSIDE, QUANTIZED)

# reasons for more bits than chosen
UNSEEN = f"which the model does not use for text, so their sensitivity is unknown: at least {FLOOR.name.lower()}"
SMALL = f"with less than 1/{1 / SMALL_PART:.0f} of their layer's weights each: at least {SMALL_FLOOR.name.lower()}"


def make_plan(file: GGUFFile, choices: Choices, has_imatrix: bool = False, uses: GraphUses | None = None) -> QuantizationPlan:
    """Plan the types of all tensors.

    Args:
        file: the model.
        choices: the options.
        has_imatrix: whether an imatrix will be used.
        uses: how the model's graph uses its tensors; None if unknown.

    Raises:
        UserError: the model or a type is not supported.
    """
    file_type, uses = choices.file_type, uses or GraphUses()
    rules, warnings = rule_types(
        file, file_type, token_embd=choices.token_embd, output=choices.output, named=[choices.is_settled(t.name) for t in file.tensors],
        has_imatrix=has_imatrix,
    )
    plan = QuantizationPlan(
        warnings=warnings, imatrix_required_type=file_type.imatrix_required_type, runs_mtp_layers=bool(uses.in_mtp_layers)
    )
    has_small_floor = not file_type.is_upstream and (not choices.pure or bool(choices.target_option))
    small = small_matrices(file.tensors) if has_small_floor else set()
    has_experts = any(part in t.name for t in file.tensors for part in EXPERTS)
    for tensor, rule in zip(file.tensors, rules, strict=True):
        reason = find_reason_to_keep(tensor, choices, rule, uses)
        if rule is None or reason is not None:
            plan.tensors.append(PlannedTensor(tensor, tensor.type, tensor.type, reason))
        else:
            is_unseen = uses.is_unseen(tensor.name)
            floor = None
            if is_unseen or (choices.target_option and uses.is_in_mtp_layer(tensor.name)):
                floor = FLOOR
            elif tensor.name in small:
                floor = SMALL_FLOOR
            plan.tensors.append(replace(_plan_matrix(tensor, choices, rule, has_experts, floor), is_unseen=is_unseen))
    _check_plan(plan, file, file_type)
    _add_notes(plan)
    return plan


def find_reason_to_keep(tensor: Tensor, choices: Choices, rule: GGMLQuantizationType | None, uses: GraphUses) -> str | None:
    """Return why a tensor keeps its type; None for a matrix that gets a type."""
    is_named = deciding_option(tensor, choices) is not None
    if rule is None:
        return KEPT_BY_RULES
    if choices.leave_output and tensor.name == OUTPUT:
        return KEPT_BY_LEAVE_OUTPUT
    if tensor.type in COPIED_TYPES:
        return tensor.type.name.lower() + NO_WEIGHTS
    if uses.is_no_product(tensor.name):
        return NO_PRODUCT
    if uses.is_outside(tensor.name) and not is_named:
        return OUTSIDE
    may_not_requantize = tensor.type not in SOURCE_TYPES and not choices.allow_requantize
    return QUANTIZED if choices.target_option and may_not_requantize and not is_named else None


def choose_type(tensor: Tensor, choices: Choices, rule: GGMLQuantizationType, has_experts: bool) -> GGMLQuantizationType:
    """Choose the type of a weight matrix, regardless of its shape. rule: llama.cpp's type for it (rules.py)."""
    if option := deciding_option(tensor, choices):
        return option[1]
    recipe = choices.file_type.recipe
    if recipe and (better := recipe.type_of(tensor.name, has_experts)):
        return GGMLQuantizationType[better.upper()]
    return choices.type if choices.pure else rule


def _plan_matrix(
    tensor: Tensor, choices: Choices, rule: GGMLQuantizationType, has_experts: bool, floor: GGMLQuantizationType | None
) -> PlannedTensor:
    """Plan a matrix. floor: its minimum type. Raise UserError if it is already quantized to a type other than the planned one."""
    chosen = requested = choose_type(tensor, choices, rule, has_experts)
    if floor is not None:
        requested = _raise_to_floor(tensor, chosen, choices, floor)
    fitting = fit_to_row(tensor, requested)
    if fitting != tensor.type and tensor.type not in SOURCE_TYPES and not choices.allow_requantize:
        raise _already_quantized(tensor)
    reason = None if requested == chosen else UNSEEN if floor == FLOOR else SMALL
    return PlannedTensor(tensor, requested, fitting, reason_raised=reason)


def _raise_to_floor(
    tensor: Tensor, chosen: GGMLQuantizationType, choices: Choices, floor: GGMLQuantizationType
) -> GGMLQuantizationType:
    """Return the type of a matrix that has a minimum type, the floor.

    The chosen type stays if an option names it, if it has at least the floor's bits, or if the file type is upstream and the type needs no
    imatrix. Else the matrix gets the floor, or keeps its own type if that has fewer bits than the floor.
    """
    follows_rules = choices.file_type.is_upstream and not needs_imatrix(tensor, chosen, choices.file_type.imatrix_required_type)
    if deciding_option(tensor, choices) or follows_rules or bits_per_weight(chosen) >= bits_per_weight(floor):
        return chosen
    return tensor.type if bits_per_weight(tensor.type) < bits_per_weight(floor) else floor


def _check_plan(plan: QuantizationPlan, file: GGUFFile, file_type: FileType) -> None:
    """Raise UserError for upstream file types with ggml-ext types and for models without matrices to quantize."""
    names = [t.name for t in plan.tensors if type_info(t.type)]
    if file_type.is_upstream and names:
        raise UserError(
            f"{describe_tensors(names, ' would keep ggml-ext types')}, but --type {file_type.name} writes a file that every llama.cpp loads: "
            "pass a standard type for them with --tensor-type, drop --leave-output-tensor, or run ggml-ext export"
        )
    if plan.n_matrices:
        return
    if quantized := next((t for t in plan.tensors if t.reason_kept == QUANTIZED), None):
        raise _already_quantized(quantized.tensor)
    content = f"has only vectors and small tensors ({len(file.tensors)})" if file.tensors else "has no tensors"
    raise UserError(f"{file.path} {content}: nothing to quantize; pass a model with weight matrices")


def _add_notes(plan: QuantizationPlan) -> None:
    """Add notes and warnings about matrices that keep their type or get more bits than chosen."""
    if not plan.changed:
        plan.warnings.append(f"all {plan.n_matrices} matrices already have the requested types: copied unchanged")
    raised: dict[str, list[str]] = {}
    kept: dict[str, list[str]] = {}
    for t in plan.tensors:
        for groups, reason in ((raised, t.reason_raised), (kept, t.reason_kept)):
            if reason:
                groups.setdefault(reason, []).append(t.name)
    plan.notes += [describe_tensors(names, f", {reason}; --tensor-type sets another type") for reason, names in raised.items()]
    for reason, names in kept.items():
        if reason in NOTED_REASONS:
            plan.notes.append(describe_tensors(names, f", {reason}"))
        elif reason.endswith(NO_WEIGHTS):
            plan.warnings.append(describe_tensors(names, f", {reason}"))


def _already_quantized(tensor: Tensor) -> UserError:
    name = tensor.type.name.lower()
    pattern = "exps" if tensor.name.endswith("_exps.weight") else re.escape(tensor.name)
    return UserError(
        f"tensor {tensor.name} is already quantized to {name}; quantizing it again loses more: start from F32, F16, BF16 or Q8_0, keep "
        f"it with --tensor-type '{pattern}={name}', or pass --allow-requantize"
    )


def check_model(file: GGUFFile) -> None:
    """Raise UserError for GGUF files that are not models."""
    kind, arch = file.value("general.type"), file.value("general.architecture")
    for is_match, description in (
        (kind == "adapter", "a LoRA adapter (general.type is adapter)"),
        (arch == "controlvector", "a control vector (general.architecture is controlvector)"),
        (kind == "imatrix", "an imatrix (general.type is imatrix), for --imatrix"),
    ):
        if is_match:
            raise UserError(f"{file.path} is {description}, not a model: nothing to quantize; pass the model that it belongs to")
