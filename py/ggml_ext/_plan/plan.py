"""The plan of a quantization: the type of each tensor, and why.

planning.py makes the plan from llama.cpp's rules and the options; imatrix_use.py decides which tensors use an imatrix.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from .._base.errors import UserError
from .._formats.gguf_file import Tensor
from .._formats.names import describe_tensors, layer_number
from .._formats.tensor_types import accurate_upstream_type, fallback_chain, parse_type, type_info
from .file_types import FileType
from .rules import OUTPUT, PER_LAYER_TOKEN_EMBD, TOKEN_EMBD, upstream_fallback_type

MAX_FALLBACK_GROWTH = 1.4  # of the bits per weight: shorter blocks of the same code have at most 1.22 times as many


@dataclass(frozen=True)
class Override:
    """One --tensor-type REGEX=TYPE."""

    pattern: re.Pattern
    type: GGMLQuantizationType

    @property
    def flag(self) -> str:
        """The option, as on the command line."""
        return f"--tensor-type {self.pattern.pattern}={self.type.name.lower()}"

    @classmethod
    def parse(cls, text: str) -> Override:
        """Parse REGEX=TYPE. Raise UserError if it is malformed."""
        regex, separator, type_name = text.rpartition("=")
        if not (regex and separator and type_name):
            raise UserError(f"--tensor-type: got {text!r}, need REGEX=TYPE, for example attn_v=q8_0")
        try:
            pattern = re.compile(regex, re.IGNORECASE)  # llama-quantize lowers its patterns; tensor names are lower case
        except re.error as e:
            raise UserError(f"--tensor-type: {regex!r} is not a regular expression: {e}") from None
        return cls(pattern, parse_type(type_name, "--tensor-type"))


def find_override(overrides: Sequence[Override], name: str) -> Override | None:
    """Return the first override that matches the name of a tensor."""
    return next((o for o in overrides if o.pattern.search(name)), None)


class TypeChoices(Protocol):
    """The type options that quantize and export share."""

    @property
    def overrides(self) -> tuple[Override, ...]: ...

    @property
    def token_embd(self) -> GGMLQuantizationType | None: ...

    @property
    def output(self) -> GGMLQuantizationType | None: ...

    @property
    def leave_output(self) -> bool: ...

    @property
    def request(self) -> str: ...


@dataclass(frozen=True)
class Choices:
    """The type options of quantize."""

    file_type: FileType
    pure: bool = False
    overrides: tuple[Override, ...] = ()
    token_embd: GGMLQuantizationType | None = None
    output: GGMLQuantizationType | None = None
    leave_output: bool = False
    allow_requantize: bool = False
    no_fallback: bool = False  # refuse types other than the requested ones and the same code in shorter blocks
    fallback_above: float | None = None  # times the usual error of a type
    target_option: str | None = None  # makes allocation choose the types, such as target-bpw=3.3; file_type is a placeholder until then

    @property
    def type(self) -> GGMLQuantizationType:
        return self.file_type.type

    @property
    def name(self) -> str:
        """The value of --type."""
        return "auto" if self.target_option else self.file_type.name

    @property
    def request(self) -> str:
        """The option that decides the types; upstream file types under llama-quantize's names."""
        if self.target_option:
            return self.target_option.replace("=", " ")
        return self.name.upper() if self.file_type.is_upstream else self.name

    @property
    def title(self) -> str:
        """The name in a model card."""
        return f"types chosen for {self.request.removeprefix('target-')}" if self.target_option else self.name.upper()

    def is_settled(self, name: str) -> bool:
        """Whether the options alone choose the type. --pure does so for upstream file types only."""
        return find_override(self.overrides, name) is not None or (self.pure and self.file_type.is_upstream)


def deciding_option(tensor: Tensor, options: TypeChoices) -> tuple[str, GGMLQuantizationType] | None:
    """Return the option that sets the type of a weight matrix, as on the command line, and the type."""
    name, override = tensor.name, find_override(options.overrides, tensor.name)
    is_embd = name == TOKEN_EMBD or (name == PER_LAYER_TOKEN_EMBD and not override)
    if is_embd and options.token_embd is not None:
        return "--token-embedding-type", options.token_embd
    if name == OUTPUT and options.output is not None:
        return "--output-tensor-type", options.output
    return (override.flag, override.type) if override else None


@dataclass(frozen=True)
class Fallback:
    """A type in place of a requested one that does not fit the row size."""

    n_per_row: int
    requested: GGMLQuantizationType
    type: GGMLQuantizationType

    @property
    def is_loss(self) -> bool:
        """Whether the fallback costs accuracy or many bits: a standard type, or itq2_t32 for the types below two bits."""
        requested, fallback = type_info(self.requested), type_info(self.type)
        return fallback is None or requested is None or fallback.bpw > MAX_FALLBACK_GROWTH * requested.bpw

    @property
    def is_same_code(self) -> bool:
        """Whether the fallback is the same code in shorter blocks, such as itq3_t64 for itq3_t."""
        requested, fallback = type_info(self.requested), type_info(self.type)
        if requested is None or fallback is None or not fallback.trellis_values:
            return False
        return requested.trellis_values == fallback.trellis_values

    def describe(self, names: list[str]) -> str:
        """Describe the fallback of these tensors on one line."""
        name, requested, rows = self.type.name.lower(), self.requested.name.lower(), f", rows of {self.n_per_row}"
        if info := type_info(self.type):
            return describe_tensors(names, f"{rows}: {name} ({info.bpw:g} bpw) in place of {requested}")
        needed = str(GGML_QUANT_SIZES[self.requested][0])
        if shorter := [f"{t.name} of {t.block_size}" for t in map(type_info, fallback_chain(self.requested)) if t]:
            needed += f" (as {', '.join(shorter)})"
        return describe_tensors(names, f"{rows}: {name} instead of {requested}, which needs a multiple of {needed}")


@dataclass
class PlannedTensor:
    """A tensor of the model and the type it gets."""

    tensor: Tensor
    requested: GGMLQuantizationType  # before the row size is considered
    type: GGMLQuantizationType  # in the output file
    reason_kept: str | None = None  # why the tensor keeps its type; None for a matrix that gets a type
    reason_raised: str | None = None  # why a matrix gets more bits than chosen
    is_unseen: bool = False  # calibration does not see its inputs
    uses_imatrix: bool = False
    inaccurate_type: GGMLQuantizationType | None = None  # the type that --fallback-above replaced

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def is_changed(self) -> bool:
        return self.type != self.tensor.type

    @property
    def planned_type(self) -> GGMLQuantizationType:
        """The type before --fallback-above replaced it."""
        return self.inaccurate_type or self.type

    @property
    def fallback(self) -> Fallback | None:
        if self.planned_type == self.requested:
            return None
        return Fallback(self.tensor.ne[0], self.requested, self.planned_type)

    @property
    def may_be_replaced(self) -> bool:
        """Whether --fallback-above applies: the tensor is encoded in a ggml-ext type."""
        return self.is_changed and type_info(self.type) is not None

    @property
    def n_bytes(self) -> int:
        return self.tensor.bytes_as(self.type)

    def set_type(self, qtype: GGMLQuantizationType) -> None:
        """Set requested and final type; the caller has checked that it fits the rows."""
        self.requested = self.type = qtype

    def replace_inaccurate_type(self) -> None:
        """Replace the type, whose error is too large, by accurate_type()."""
        self.inaccurate_type, self.type = self.type, accurate_type(self.tensor, self.type)


@dataclass
class QuantizationPlan:
    """All tensors in the order of the output, with warnings and notes."""

    tensors: list[PlannedTensor] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # known before calibration
    # A type that needs an imatrix in the layers of this file type, besides IMATRIX_TYPES: Q2_K in a Q2_K_S file, as in llama-quantize
    imatrix_required_type: GGMLQuantizationType | None = None
    runs_mtp_layers: bool = False  # calibration also runs the layers that predict further tokens

    @property
    def n_matrices(self) -> int:
        """Number of weight matrices that get a type."""
        return sum(t.reason_kept is None for t in self.tensors)

    @property
    def changed(self) -> list[PlannedTensor]:
        """The tensors that are encoded."""
        return [t for t in self.tensors if t.is_changed]

    @property
    def has_imatrix(self) -> bool:
        """Whether any tensor is encoded with an imatrix."""
        return any(t.uses_imatrix for t in self.tensors)

    def order_by_layer(self) -> None:
        """Order the tensors as sequential quantization encodes them: token embeddings, layers, others."""

        def place(t: PlannedTensor) -> float:
            layer = layer_number(t.name)
            return layer if layer is not None else -1 if t.name == TOKEN_EMBD else math.inf

        self.tensors.sort(key=place)

    def fallbacks(self) -> dict[Fallback, list[str]]:
        """Group the names of the tensors whose requested type does not fit their rows."""
        groups: dict[Fallback, list[str]] = {}
        for t in self.tensors:
            if (fallback := t.fallback) is not None:
                groups.setdefault(fallback, []).append(t.name)
        return groups

    def replaced(self) -> dict[tuple[GGMLQuantizationType, GGMLQuantizationType], list[str]]:
        """Group the names of the tensors that --fallback-above changed, by type before and after."""
        groups: dict[tuple[GGMLQuantizationType, GGMLQuantizationType], list[str]] = {}
        for t in self.tensors:
            if t.inaccurate_type is not None:
                groups.setdefault((t.inaccurate_type, t.type), []).append(t.name)
        return groups

    def possible_sizes(self, fallback_above: float | None) -> list[dict[str, int]]:
        """List the possible types of each tensor, the planned one first, with the size of its data."""
        sizes = []
        for t in self.tensors:
            types = [t.type]
            if fallback_above is not None and t.may_be_replaced:
                types.append(accurate_type(t.tensor, t.type))
            sizes.append({q.name: t.tensor.bytes_as(q) for q in types})
        return sizes

    def layers_bpw(self) -> float | None:
        """Return the bits per weight of the block weights; None if there are none."""
        return _layers_bpw((t.tensor, t.type) for t in self.tensors)

    def requested_layers_bpw(self) -> float | None:
        """Return layers_bpw() of the requested types."""
        return _layers_bpw((t.tensor, t.requested) for t in self.tensors)

    def size_before(self) -> int:
        return sum(t.tensor.n_bytes for t in self.tensors)

    def size_after(self) -> int:
        return sum(t.n_bytes for t in self.tensors)

    def n_elements(self) -> int:
        return sum(t.tensor.n_elements for t in self.tensors)


def _layers_bpw(tensors: Iterable[tuple[Tensor, GGMLQuantizationType]]) -> float | None:
    """Compute bits per weight as ggml-ext-ftype.h does."""
    n_bits = n_weights = 0.0
    for tensor, qtype in tensors:
        if tensor.n_dims >= 2 and "blk." in tensor.name and tensor.name.endswith("weight"):
            block_size, block_bytes = GGML_QUANT_SIZES[qtype]
            n_bits += tensor.n_elements * 8 * block_bytes / block_size
            n_weights += tensor.n_elements
    return n_bits / n_weights if n_weights else None


def _fits(tensor: Tensor, qtype: GGMLQuantizationType) -> bool:
    return tensor.ne[0] % GGML_QUANT_SIZES[qtype][0] == 0


def accurate_type(tensor: Tensor, qtype: GGMLQuantizationType) -> GGMLQuantizationType:
    """Return the type that replaces one whose error is too large: accurate_upstream_type() if it fits the rows, else F16."""
    upstream = accurate_upstream_type(qtype)
    return upstream if _fits(tensor, upstream) else GGMLQuantizationType.F16


def fit_to_row(tensor: Tensor, qtype: GGMLQuantizationType) -> GGMLQuantizationType:
    """Return the type, or its fallback if the row size is not a multiple of its block. Raise UserError if none fits."""
    types = [qtype, *fallback_chain(qtype)]
    fitting = next((t for t in types if _fits(tensor, t)), None) or upstream_fallback_type(types[-1], tensor.ne[0])
    if fitting is None:
        raise UserError(
            f"tensor {tensor.name}: rows of {tensor.ne[0]} do not fit {qtype.name.lower()}, which "
            f"needs a multiple of {GGML_QUANT_SIZES[qtype][0]}: choose another type with --tensor-type '{re.escape(tensor.name)}=TYPE'"
        )
    return fitting


def check_fallbacks(plan: QuantizationPlan, no_fallback: bool) -> None:
    """With --no-fallback, raise UserError for the first fallback that is not the same code in shorter blocks."""
    refused = next((f.describe(names) for f, names in plan.fallbacks().items() if not f.is_same_code), None)
    if no_fallback and refused:
        raise UserError(f"--no-fallback: {refused}; choose another type with --tensor-type REGEX=TYPE, or leave out --no-fallback")
