"""Which type each tensor gets: what llama-quantize does for the same file type, and what the options say.

Which tensors are quantized and what their role asks for is llama.cpp's answer (rules.py): of a file of ours the row of its type in
the table, `token_embd` and `output`, of a stock file its mixture. Here are the options, in the order of llama_tensor_get_type() in
llama.cpp's src/llama-quant.cpp, mixtures of ours, and `fallback` of the table, which is followed until a type fits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from .._base.errors import UserError
from .._base.types import TYPES, TypeInfo
from .._formats.gguf_file import GGUFFile, Tensor, bits_per_weight
from .._formats.imatrix import ImportanceMatrix, n_importances
from .._formats.names import describe_tensors, list_experts, list_tensors, tensor_class, unknown_type_message
from .file_types import FLOAT_TYPES, FileType
from .rules import OUTPUT, PER_LAYER_TOKEN_EMBD, TOKEN_EMBD, rule_types, stock_fallback_type
from .uses import FLOOR, OUTER, SMALL_FLOOR, Uses, small_matrices

T = GGMLQuantizationType

INTEGER_TYPES = (T.I8, T.I16, T.I32, T.I64)
ACTIVATION_TYPES = (T.Q8_1, T.Q8_K, *(T(int(t.id)) for t in TYPES.values() if t.kind == "activation"))
SOURCE_TYPES = (*FLOAT_TYPES, T.Q8_0)
# What no importance changes: types of floats and of 8 bits, and those whose encoders in ggml-quants.c take none.
UNWEIGHTED_TYPES = (*FLOAT_TYPES, T.Q8_0, *(T[name] for name in ("MXFP4", "NVFP4", "TQ1_0", "TQ2_0") if name in T.__members__))
# stock types whose encoders take second moments: ggml_ext/encode/upstream-layouts.h and upstream-codebook-layouts.h
SCALAR_TYPES = (T.Q2_K, T.Q3_K, T.Q4_K, T.Q5_K, T.Q6_K, T.IQ4_XS, T.IQ4_NL, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1)
CODEBOOK_TYPES = (T.IQ3_S, T.IQ3_XXS, T.IQ2_S, T.IQ2_XS, T.IQ2_XXS)
IMATRIX_TYPES = (T.IQ3_XXS, T.IQ2_XXS, T.IQ2_XS, T.IQ2_S, T.IQ1_M, T.IQ1_S)
TARGET_TYPES = {t.name.lower(): t for t in T if t not in (T.F64, *INTEGER_TYPES, *ACTIVATION_TYPES)}


def parse_type(name: str, flag: str) -> GGMLQuantizationType:
    """The type with that name in any case; UserError naming the flag and the known types."""
    try:
        return TARGET_TYPES[name.lower()]
    except KeyError:
        raise UserError(unknown_type_message(flag, name, sorted(TARGET_TYPES))) from None


@dataclass(frozen=True)
class Override:
    """One --tensor-type REGEX=TYPE."""

    pattern: re.Pattern
    type: GGMLQuantizationType

    @property
    def flag(self) -> str:
        """As on the command line."""
        return f"--tensor-type {self.pattern.pattern}={self.type.name.lower()}"

    @classmethod
    def parse(cls, text: str) -> Override:
        regex, separator, type_name = text.rpartition("=")
        if not (regex and separator and type_name):
            raise UserError(f"--tensor-type: got {text!r}, need REGEX=TYPE, for example attn_v=q8_0")
        try:
            pattern = re.compile(
                regex, re.IGNORECASE
            )  # llama-quantize lowers its patterns; tensor names are lower case
        except re.error as e:
            raise UserError(f"--tensor-type: {regex!r} is not a regular expression: {e}") from None
        return cls(pattern, parse_type(type_name, "--tensor-type"))


@dataclass(frozen=True)
class Choices:
    """What is asked of types."""

    file_type: FileType
    pure: bool = False
    overrides: tuple[Override, ...] = ()
    token_embd: GGMLQuantizationType | None = None
    output: GGMLQuantizationType | None = None
    leave_output: bool = False
    allow_requantize: bool = False
    no_fallback: bool = False  # refuses types other than those asked for
    fallback_above: float | None = None  # times the usual error of a type
    target: str | None = None  # that chooses the types, as an option: file_type is what stands for them until it has

    @property
    def type(self) -> GGMLQuantizationType:
        return self.file_type.type

    @property
    def name(self) -> str:
        """As on the command line."""
        return "auto" if self.target else self.file_type.name

    @property
    def asked(self) -> str:
        """What decides the types. Stock files are named as by llama-quantize."""
        return self.target.replace("=", " ") if self.target else self.name.upper() if self.file_type.is_stock else self.name

    @property
    def title(self) -> str:
        """For a model card."""
        return f"types chosen for {self.asked.removeprefix('target-')}" if self.target else self.name.upper()

    def override_of(self, name: str) -> Override | None:
        """The --tensor-type that counts for the tensor of that name."""
        return next((o for o in self.overrides if o.pattern.search(name)), None)

    def is_settled(self, name: str) -> bool:
        """Whether llama-quantize would not ask its rules about the tensor. With --pure those of our types, which count nothing, are."""
        return self.override_of(name) is not None or (self.pure and self.file_type.is_stock)


@dataclass(frozen=True)
class Fallback:
    """Why tensors get another type than the one chosen for them."""

    n_per_row: int
    wanted: GGMLQuantizationType
    got: GGMLQuantizationType

    @property
    def is_loss(self) -> bool:
        """False where one of our own types has shorter blocks: about as many bits and no larger errors."""
        return _info(self.got) is None

    @property
    def is_same_code(self) -> bool:
        """True for itq3_t64 in place of itq3_t and the like: the type asked for in shorter blocks."""
        wanted, got = _info(self.wanted), _info(self.got)
        return bool(wanted and got and got.trellis_values) and wanted.trellis_values == got.trellis_values

    def describe(self, names: list[str]) -> str:
        """For the tensors with these names, on one line."""
        got, wanted, rows = self.got.name.lower(), self.wanted.name.lower(), f", rows of {self.n_per_row}"
        if not self.is_loss:
            return describe_tensors(names, f"{rows}: {got} ({_info(self.got).bpw:g} bpw) in place of {wanted}")
        needed = str(GGML_QUANT_SIZES[self.wanted][0])
        for shorter in filter(_info, fallback_chain(self.wanted)):
            needed += f" (as {shorter.name.lower()} of {_info(shorter).block_size})"
        return describe_tensors(names, f"{rows}: {got} instead of {wanted}, which needs a multiple of {needed}")


@dataclass
class Plan:
    """Target types in the order of the file's tensors, and what to tell the user about them."""

    tensors: list[Tensor]
    types: list[GGMLQuantizationType] = field(default_factory=list)
    wanted: list[GGMLQuantizationType] = field(default_factory=list)  # types before fallbacks
    n_matrices: int = 0  # weight matrices, which get the type chosen for them
    warnings: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)  # by the name of a tensor that keeps its type why it does
    notes: list[str] = field(default_factory=list)  # known before anything is calibrated
    unseen: set[str] = field(default_factory=set)  # names of matrices whose inputs no calibration sees
    fallbacks: dict[Fallback, list[str]] = field(default_factory=dict)  # names of the tensors
    # what --fallback-above replaced: names by type before and after
    inaccurate: dict[tuple[GGMLQuantizationType, GGMLQuantizationType], list[str]] = field(default_factory=dict)
    importance: set[str] = field(default_factory=set)  # names of tensors that are encoded with an importance matrix
    weighted_type: GGMLQuantizationType | None = None  # what needs importances in the layers of this file, beside IMATRIX_TYPES

    def add(self, tensor: Tensor, wanted: GGMLQuantizationType, got: GGMLQuantizationType) -> None:
        """The next tensor of the file."""
        self.wanted.append(wanted)
        self.types.append(got)
        if got != wanted:
            self.fallbacks.setdefault(Fallback(tensor.ne[0], wanted, got), []).append(tensor.name)

    def replace_inaccurate(self, i: int) -> None:
        """Tensor i gets what takes the place of its type: it was encoded, and its error was too large."""
        tensor, target = self.tensors[i], self.types[i]
        self.types[i] = replacement_type(tensor, target)
        self.inaccurate.setdefault((target, self.types[i]), []).append(tensor.name)

    def layers_bpw(self, types: list[GGMLQuantizationType]) -> float | None:
        """Bits per weight of the matrices of the layers with these types; None if there are none. As in ggml-ext-ftype.h."""
        n_bits = n_weights = 0.0
        for tensor, qtype in zip(self.tensors, types, strict=True):
            if tensor.n_dims >= 2 and "blk." in tensor.name and tensor.name.endswith("weight"):
                block_size, block_bytes = GGML_QUANT_SIZES[qtype]
                n_bits += tensor.n_elements * 8 * block_bytes / block_size
                n_weights += tensor.n_elements
        return n_bits / n_weights if n_weights else None

    def size_before(self) -> int:
        return sum(t.n_bytes for t in self.tensors)

    def size_after(self) -> int:
        return sum(t.bytes_as(q) for t, q in zip(self.tensors, self.types))

    def n_elements(self) -> int:
        return sum(t.n_elements for t in self.tensors)


def deciding_option(tensor: Tensor, choices: Choices) -> tuple[str, GGMLQuantizationType] | None:
    """The option that names the type of a weight matrix, as on the command line, and that type."""
    name, override = tensor.name, choices.override_of(tensor.name)
    is_embd = name == TOKEN_EMBD or (name == PER_LAYER_TOKEN_EMBD and not override)
    if is_embd and choices.token_embd is not None:
        return "--token-embedding-type", choices.token_embd
    if name == OUTPUT and choices.output is not None:
        return "--output-tensor-type", choices.output
    return (override.flag, override.type) if override else None


def choose_type(tensor: Tensor, choices: Choices, rule: GGMLQuantizationType) -> GGMLQuantizationType:
    """Target type of a weight matrix before shape is looked at. rule: llama.cpp's type for it (rules.py)."""
    if named := deciding_option(tensor, choices):
        return named[1]
    recipe = choices.file_type.recipe
    if recipe and (better := recipe.type_of(tensor.name)):
        return T[better.upper()]
    return choices.type if choices.pure else rule


def _info(qtype: GGMLQuantizationType) -> TypeInfo | None:
    """The row of one of our types."""
    return TYPES.get(qtype.name.lower())


def metric_of(qtype: GGMLQuantizationType) -> str | None:
    """What its encoder needs of second moments: one metric serves all scalar types. None if it takes the diagonal alone."""
    if qtype in SCALAR_TYPES:
        return "scalar"
    return qtype.name if _info(qtype) is not None or qtype in CODEBOOK_TYPES else None


def uses_metric(qtype: GGMLQuantizationType) -> bool:
    """True if its encoder takes second moments, not the diagonal alone."""
    return metric_of(qtype) is not None


def fallback_chain(target: GGMLQuantizationType) -> Iterator[GGMLQuantizationType]:
    """The fallbacks of one of our types down to a stock type: of itq3_t itq3_t64, iq4_nl. Stock types have none here."""
    while info := _info(target):
        target = T[info.fallback.upper()]
        yield target


def stock_fallback(target: GGMLQuantizationType) -> GGMLQuantizationType:
    """What takes the place of a type of ours whose error is too large: not another one, which has the same limits of scale."""
    return next(t for t in fallback_chain(target) if _info(t) is None)


def replacement_type(tensor: Tensor, target: GGMLQuantizationType) -> GGMLQuantizationType:
    """stock_fallback() if it fits the rows, or F16."""
    stock = stock_fallback(target)
    return stock if _fits(tensor, stock) else T.F16


def may_be_replaced(tensor: Tensor, target: GGMLQuantizationType) -> bool:
    """Whether --fallback-above may: what is encoded here, in a type of ours."""
    return target != tensor.type and _info(target) is not None


def _fits(tensor: Tensor, qtype: GGMLQuantizationType) -> bool:
    return tensor.ne[0] % GGML_QUANT_SIZES[qtype][0] == 0


def fit_to_row(tensor: Tensor, target: GGMLQuantizationType) -> GGMLQuantizationType:
    """target, or what takes its place where the row is no multiple of its block; UserError if nothing does."""
    tried = [target, *fallback_chain(target)]
    fitting = next((t for t in tried if _fits(tensor, t)), None)
    if fitting is not None:
        return fitting
    fallback = stock_fallback_type(tried[-1], tensor.ne[0])
    if fallback is None:
        raise UserError(
            f"tensor {tensor.name}: rows of {tensor.ne[0]} are no multiple of {GGML_QUANT_SIZES[target][0]} as "
            f"{target.name.lower()} needs: choose another type with --tensor-type '{re.escape(tensor.name)}=TYPE'"
        )
    return fallback


def make_plan(file: GGUFFile, choices: Choices, has_imatrix: bool = False, uses: Uses | None = None) -> Plan:
    """Target types for all tensors; UserError for inputs and types that cannot be handled. has_imatrix: importances will be used;
    uses: what the model does with its tensors, where that is known."""
    uses, file_type = uses or Uses(), choices.file_type
    settled = [choices.is_settled(t.name) for t in file.tensors]
    rules, warnings = rule_types(file, file_type, choices.token_embd, choices.output, settled, has_imatrix)
    plan = Plan(file.tensors, warnings=warnings, weighted_type=file_type.weighted_type)
    kept: dict[str, list[str]] = {}  # by what keeps them
    is_pure = choices.pure and not choices.target
    small = set() if file_type.is_stock or is_pure else small_matrices(file.tensors)
    raised: dict[str, list[str]] = {}  # by what is said of them
    for tensor, rule in zip(file.tensors, rules, strict=True):
        if (why := why_kept(tensor, choices, rule, uses)) is not None:
            kept.setdefault(why, []).append(tensor.name)
            plan.add(tensor, tensor.type, tensor.type)
            continue
        plan.n_matrices += 1
        wanted = choose_type(tensor, choices, rule)
        said, floor = "", wanted
        if uses.is_unseen(tensor.name):
            plan.unseen.add(tensor.name)
            said, floor = UNSEEN, FLOOR
        elif tensor.name in small:
            said, floor = SMALL, SMALL_FLOOR
        if (least := _at_least(plan, tensor, wanted, choices, floor)) != wanted:
            raised.setdefault(said, []).append(tensor.name)
            wanted = least
        plan.add(tensor, wanted, _fit_matrix(tensor, wanted, choices))
    if file_type.is_stock:
        _check_stock(plan, file_type)
    if not plan.n_matrices and QUANTIZED in kept:
        raise _already_quantized(next(t for t in file.tensors if t.name == kept[QUANTIZED][0]))
    if not plan.n_matrices:
        raise UserError(f"{file.path} {_what_has_no_matrices(file)}: nothing to quantize; pass a model with weight matrices")
    if plan.types == [t.type for t in file.tensors]:
        plan.warnings.append(f"all {plan.n_matrices} matrices have the types asked for already: copied as they are")
    plan.notes += [describe_tensors(names, f", {said} at the least; --tensor-type names another type") for said, names in raised.items()]
    plan.kept = {name: why for why, names in kept.items() for name in names}
    for why, names in kept.items():
        told = plan.notes if why in SAID else plan.warnings if why.endswith(NO_WEIGHTS) else []
        told.append(describe_tensors(names, f", {why}"))
    return plan


# why a matrix keeps its type whatever is asked for
OF_RULES, OF_LEAVE_OUTPUT, NO_WEIGHTS = "kept by llama.cpp's rules", "kept by --leave-output-tensor", ": holds no weights: kept"
NO_PRODUCT = "with which the model's graph multiplies nothing: kept"
OUTSIDE = "outside of the layers, where no calibration sees inputs: kept"
QUANTIZED = "quantized already: kept; --allow-requantize lets the target choose other types"
SAID = (NO_PRODUCT, OUTSIDE, QUANTIZED)

# why a matrix has more bits than were asked for
UNSEEN = f"which the model does not run on text, so that nothing says what errors in them cost: {FLOOR.name.lower()}"
SMALL = f"with less than a thousandth of their layer's weights each: {SMALL_FLOOR.name.lower()}"


def why_kept(tensor: Tensor, choices: Choices, rule: GGMLQuantizationType | None, uses: Uses) -> str | None:
    """None for a matrix that gets the type chosen for it."""
    is_named = deciding_option(tensor, choices) is not None
    if rule is None:
        return OF_RULES
    if choices.leave_output and tensor.name == OUTPUT:
        return OF_LEAVE_OUTPUT
    if tensor.type in (T.F64, *INTEGER_TYPES, *ACTIVATION_TYPES):
        return tensor.type.name.lower() + NO_WEIGHTS
    if uses.is_no_product(tensor.name):
        return NO_PRODUCT
    if uses.is_outside(tensor.name) and not is_named:
        return OUTSIDE
    is_quantized = tensor.type not in SOURCE_TYPES and not choices.allow_requantize
    return QUANTIZED if choices.target and is_quantized and not is_named else None


def _at_least(plan: Plan, tensor: Tensor, wanted: GGMLQuantizationType, choices: Choices, floor: GGMLQuantizationType) -> GGMLQuantizationType:
    """wanted, or where that has fewer bits than the floor, the floor. Stock files have the types of llama.cpp's rules, but for what needs
    importances."""
    is_of_rules = choices.file_type.is_stock and not _needs_importance(plan, tensor, wanted)
    if deciding_option(tensor, choices) or is_of_rules or bits_per_weight(wanted) >= bits_per_weight(floor):
        return wanted
    return tensor.type if bits_per_weight(tensor.type) < bits_per_weight(floor) else floor


def _check_stock(plan: Plan, file_type: FileType) -> None:
    """UserError if a tensor keeps a type of ours in a stock file."""
    kept = [t.name for t, q in zip(plan.tensors, plan.types, strict=True) if _info(q)]
    if kept:
        raise UserError(
            f"{describe_tensors(kept, ', in types of ggml-ext, kept as they are')}; --type {file_type.name} makes a file that every "
            "llama.cpp loads: make stock types of them with ggml-ext export, or with --tensor-type and without --leave-output-tensor"
        )


def check_model(file: GGUFFile) -> None:
    """UserError for GGUF files that are no models, by name."""
    kind, arch = file.value("general.type"), file.value("general.architecture")
    for is_one, what in (
        (kind == "adapter", "a LoRA adapter (general.type is adapter)"),
        (arch == "controlvector", "a control vector (general.architecture is controlvector)"),
        (kind == "imatrix", "an importance matrix (general.type is imatrix), which goes after --imatrix"),
    ):
        if is_one:
            raise UserError(f"{file.path} is {what}, no model: nothing to quantize; pass the model that it was made for")


def _what_has_no_matrices(file: GGUFFile) -> str:
    return f"has only vectors and small tensors ({len(file.tensors)})" if file.tensors else "has no tensors"


def _fit_matrix(tensor: Tensor, wanted: GGMLQuantizationType, choices: Choices) -> GGMLQuantizationType:
    """Type of a weight matrix; UserError if it was quantized before, to another type."""
    fitting = fit_to_row(tensor, wanted)
    if fitting != tensor.type and tensor.type not in SOURCE_TYPES and not choices.allow_requantize:
        raise _already_quantized(tensor)
    return fitting


def _already_quantized(tensor: Tensor) -> UserError:
    qtype, is_of_experts = tensor.type.name.lower(), tensor.name.endswith("_exps.weight")
    pattern = "exps" if is_of_experts else re.escape(tensor.name)
    return UserError(
        f"tensor {tensor.name} is already quantized to {qtype}, which costs quality twice: start from F32, F16, BF16 or Q8_0, keep it "
        f"with --tensor-type '{pattern}={qtype}', or pass --allow-requantize"
    )


def importance_uses(plan: Plan) -> list[GGMLQuantizationType]:
    """Types of the tensors that calibration can help: llama-imatrix collects no inputs of embeddings and output matrix."""
    return [
        q
        for t, q in zip(plan.tensors, plan.types, strict=True)
        if q != t.type and q not in UNWEIGHTED_TYPES and t.name not in OUTER
    ]


def plan_importance(plan: Plan, imatrix: ImportanceMatrix | None) -> None:
    """Decides which tensors are encoded with importances, as llama-quantize does.

    UserError where the matrix is for another model, and where a type needs importances that are not there.
    """
    changed = [(t, q) for t, q in zip(plan.tensors, plan.types, strict=True) if q != t.type and q not in FLOAT_TYPES]
    if imatrix is not None:
        _match_importance(plan, changed, imatrix)
    lacking = [(t, q) for t, q in changed if _needs_importance(plan, t, q) and t.name not in plan.importance]
    if lacking:
        target = lacking[0][1]
        names = [t.name for t, q in lacking if q == target]
        found = "pass --imatrix FILE" if imatrix is None else f"{imatrix.path} has none for {'it' if len(names) == 1 else 'them'}"
        patterns = dict.fromkeys(re.escape(tensor_class(name)).replace(r"\*", r"\d+") for name in names)
        raise UserError(
            f"{describe_tensors(names)}: {target.name.lower()} needs an importance matrix: {found} (llama-imatrix makes "
            f"one), or choose another type with --tensor-type '{re.escape(names[0]) if len(names) == 1 else '|'.join(patterns)}=TYPE'"
        )


def _needs_importance(plan: Plan, tensor: Tensor, target: GGMLQuantizationType) -> bool:
    return target in IMATRIX_TYPES or (target == plan.weighted_type and tensor.name not in OUTER)


def _match_importance(plan: Plan, changed: list[tuple[Tensor, GGMLQuantizationType]], imatrix: ImportanceMatrix) -> None:
    """Fills plan.importance for the tensors that will be encoded. What a type does not use may be missing, or of another size."""
    names = {t.name for t in plan.tensors}
    missing, lacking = [], {}
    for tensor, target in changed:
        is_used = target not in UNWEIGHTED_TYPES
        # entries for these exist only if the matrix was made with --process-output
        is_outer = tensor.name in OUTER
        if tensor.name not in imatrix:
            is_known = is_outer or tensor.name in imatrix.excluded or tensor.name in plan.unseen
            missing += [tensor.name] if is_used and not is_known else []
            continue
        found, needed = imatrix.n_values(tensor.name), n_importances(tensor)
        if found == needed:
            plan.importance.add(tensor.name)
            if experts := imatrix.experts_without_tokens(tensor):
                lacking[tensor.name] = experts
            continue
        if not is_used:
            continue
        message = (
            f"--imatrix: {imatrix.path}: tensor {tensor.name} has {found:,} importances, the model needs {needed:,} "
            f"({needed // tensor.ne[0]:,} x {tensor.ne[0]:,} columns)"
        )
        if not is_outer or tensor.name == OUTPUT:
            raise UserError(f"{message}: it is for another model; make one with llama-imatrix -m MODEL -f TEXT, "
                            f"or leave it out with --exclude-weights {tensor.name}")
        plan.warnings.append(f"{message}: quantized without")
    if missing and not any(name in names for name in imatrix.names()):
        raise UserError(
            f"--imatrix: {imatrix.path} is for another model: it has {len(imatrix):,} entries, such as {imatrix.names()[0]}, "
            f"and none for a tensor of this one, such as {missing[0]}; make one with llama-imatrix -m MODEL -f TEXT"
        )
    if missing:
        plan.warnings.append(
            f"--imatrix: {imatrix.path} has no importances for {len(missing)} of {len(changed)} tensors, which are "
            f"quantized without: {list_tensors(missing)}"
        )
    if lacking:
        n = sum(map(len, lacking.values()))
        plan.warnings.append(
            f"--imatrix: {imatrix.path}: {n} expert{'s' if n > 1 else ''} saw no token and get{'' if n > 1 else 's'} the mean of "
            f"{'their layers' if n > 1 else 'its layer'}: {list_experts(lacking)}"
        )
    if unknown := [name for name in imatrix.names() if name not in names]:
        plan.warnings.append(
            f"--imatrix: {imatrix.path} has importances for {len(unknown)} tensors that the model lacks, such as "
            f"{unknown[0]}: is it for another model?"
        )


def refused_fallback(plan: Plan) -> str | None:
    """The first that --no-fallback refuses, if there is one."""
    return next((f.describe(names) for f, names in plan.fallbacks.items() if not f.is_same_code), None)


def check_fallbacks(plan: Plan, are_refused: bool) -> None:
    """UserError for what --no-fallback refuses. are_refused: it is given."""
    if are_refused and (refused := refused_fallback(plan)):
        raise UserError(f"--no-fallback: {refused}; choose another type with --tensor-type REGEX=TYPE, or leave out --no-fallback")
