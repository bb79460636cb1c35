"""Export a model with ggml-ext types to upstream types, and report the error that this adds."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from gguf import GGMLQuantizationType

from .._base.console import Console
from .._base.errors import UserError
from .._base.option import command_line, option
from .._base.text import terminal_width
from .._base.threads import check_threads, threads_option
from .._base.types import TYPES, WEIGHT_TYPES
from .._calibration.importance import Importance, check_hessians, open_importance
from .._encode.accuracy import Accuracy, MeasuredTensor
from .._encode.checks import check_known_encoders, check_numpy_encoders, check_source
from .._encode.codec import Codec
from .._formats.column_scales import ColumnScales
from .._formats.gguf_file import GGUFFile, Tensor, bits_per_weight, header_bytes, pack_header
from .._formats.names import unknown_type_message
from .._formats.reserved_paths import ReservedPaths, reserve_file, reserve_output
from .._formats.split import open_model
from .._formats.tensor_types import COPIED_TYPES, FLOAT_TYPES, IMATRIX_TYPES, TARGET_TYPES, type_info
from .._native import library
from .._native.blas import one_blas_thread
from .._output.conversion import Conversion, upstream_metadata, write_beside
from .._output.output import Output
from .._plan.effects import report_options_without_effect
from .._plan.file_types import uniform_file_type
from .._plan.imatrix_use import assign_imatrix
from .._plan.plan import Override, PlannedTensor, QuantizationPlan, check_fallbacks, find_override, fit_to_row
from .._plan.planning import check_model
from .._plan.rules import OUTPUT, PER_LAYER_TOKEN_EMBD, TOKEN_EMBD
from .._report.card import Card, describe_importance, recorded_importance
from .._report.results import Result, TensorResult, Totals
from .._report.tables import calibration_lines, summary, tensor_lines
from .._source.source import list_input_files
from .writing import WritingJob, WrittenFile, report_plan

T = GGMLQuantizationType
UPSTREAM_TYPES = {name: qtype for name, qtype in TARGET_TYPES.items() if name not in TYPES}


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of `ggml-ext export`, except those of the terminal."""

    input: Path = option(is_positional=True, metavar="IN", help="GGUF model with ggml-ext types, of a split one any part")
    output: Path | None = option(None, is_positional=True, metavar="OUT", help="file to write; optional with --dry-run")
    type: str = option(metavar="TYPE", help="type to convert ggml-ext types to, such as q4_k")
    pure: bool = option(False, help="convert all quantized tensors, with standard types and the output matrix too")
    tensor_type: Sequence[str] = option(
        (), metavar="REGEX=TYPE", help="standard type of quantized tensors whose name matches; may be repeated, the first match counts"
    )
    imatrix: Path | None = option(None, metavar="FILE", help="imatrix file of llama-imatrix; iq1_*, iq2_* and iq3_xxs need one")
    no_fallback: bool = option(False, help="fail if a tensor's row size does not fit the type, instead of choosing another type")
    threads: int | None = threads_option()
    dry_run: bool = option(False, in_command=False, help="show types and sizes, write nothing")
    model_card: Path | None = option(
        None, metavar="FILE", in_command=False, help="write a model card for the Hugging Face hub to this file, such as README.md"
    )
    force: bool = option(False, short="-f", in_command=False, help="replace OUT if it exists")


def parse_upstream_type(name: str, flag: str = "--type") -> GGMLQuantizationType:
    """Parse the name of an upstream type. UserError naming the flag for any other name."""
    if name.lower() not in UPSTREAM_TYPES:
        remark = ": it is a ggml-ext type, for ggml-ext quantize" if name.lower() in WEIGHT_TYPES else ""
        raise UserError(unknown_type_message(flag, name, sorted(UPSTREAM_TYPES), remark))
    return UPSTREAM_TYPES[name.lower()]


def is_ours(tensor: Tensor) -> bool:
    return type_info(tensor.type) is not None


@dataclass(frozen=True)
class ExportChoices:
    """The types that options name."""

    type: GGMLQuantizationType
    pure: bool
    overrides: tuple[Override, ...]
    # options of quantize that export lacks
    token_embd: ClassVar[None] = None
    output: ClassVar[None] = None
    leave_output: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return self.type.name.lower()

    @property
    def request(self) -> str:
        """The requested type, for summary()."""
        return self.name

    def type_of(self, tensor: Tensor, tied: bool) -> GGMLQuantizationType:
        """Choose the type of a quantized tensor, regardless of its shape. tied: the file has no output.weight.

        Source of the rules for embeddings and output matrix: llama.cpp, src/llama-quant.cpp, llama_tensor_get_type_impl().
        """
        is_embd = tensor.name in (TOKEN_EMBD, PER_LAYER_TOKEN_EMBD)
        if override := find_override(self.overrides, tensor.name):
            return override.type
        if self.pure or self.type in FLOAT_TYPES:
            return self.type
        if not is_ours(tensor):
            return tensor.type
        if tensor.name == OUTPUT or (tied and is_embd):
            return max(self.type, T.Q6_K, key=bits_per_weight)
        if is_embd and self.type in IMATRIX_TYPES:  # llama-imatrix sees no inputs of embeddings
            return T.IQ3_S if self.type == T.IQ3_XXS else T.Q2_K
        return self.type


@dataclass(frozen=True)
class ExportSettings:
    """The parsed options of export."""

    options: ExportOptions
    choices: ExportChoices
    n_threads: int

    @classmethod
    def parse(cls, options: ExportOptions) -> ExportSettings:
        """Parse options. UserError naming the flag for an invalid value or combination."""
        overrides = tuple(map(Override.parse, options.tensor_type))
        for override in overrides:
            parse_upstream_type(override.type.name.lower(), "--tensor-type")
        choices = ExportChoices(parse_upstream_type(options.type), options.pure, overrides)
        n_threads = check_threads(options.threads)
        if options.dry_run and options.model_card:
            raise UserError("--model-card: --dry-run writes nothing; drop one of them")
        return cls(options, choices, n_threads)


def make_plan(file: GGUFFile, choices: ExportChoices) -> QuantizationPlan:
    """Plan the types of all tensors. UserError for files without ggml-ext types."""
    if not any(map(is_ours, file.tensors)):
        raise UserError(
            f"{file.path} has no tensor in a ggml-ext type, so every llama.cpp loads it; llama-quantize --allow-requantize "
            "changes its types"
        )
    tied = all(t.name != OUTPUT for t in file.tensors)
    plan = QuantizationPlan()
    for tensor in file.tensors:
        if tensor.type in (*FLOAT_TYPES, *COPIED_TYPES):
            plan.tensors.append(PlannedTensor(tensor, tensor.type, tensor.type, reason_kept=""))
        else:
            requested = choices.type_of(tensor, tied)
            plan.tensors.append(PlannedTensor(tensor, requested, fit_to_row(tensor, requested)))
    for override in choices.overrides:
        if not any(override.pattern.search(t.name) for t in file.tensors):
            plan.warnings.append(f"{override.flag} matches no tensor")
    return plan


def cost_lines(tensors: Sequence[MeasuredTensor]) -> list[str]:
    """Format, for each ggml-ext type, the NMSE that the conversion adds."""
    pairs: dict[tuple[GGMLQuantizationType, GGMLQuantizationType], Accuracy] = {}
    for t in tensors:
        before, after = t.planned.tensor.type, t.planned.type
        if is_ours(t.planned.tensor):
            pairs[before, after] = pairs.get((before, after), Accuracy()) + t.accuracy
    lines = []
    for (before, after), total in pairs.items():
        name, usual = before.name.lower(), WEIGHT_TYPES[before.name.lower()].usual_rel_mse
        assert usual is not None
        lines.append(
            f"{name} -> {after.name.lower()} adds an NMSE of {total.nmse:.3g} to that of {name}, "
            f"{usual:.3g} for Gaussian weights: about {1 + total.nmse / usual:.3g} times the error"
        )
    return lines


@dataclass(frozen=True)
class ExportWritingJob(WritingJob):
    """The output of export, ready to be written."""

    header: bytes = b""

    def pack_headers(self, tensors: Sequence[MeasuredTensor]) -> list[bytes]:
        return [self.header]

    def list_dependencies(self, headers: Sequence[bytes]) -> dict:
        return self.conversion.list_dependencies(types=hashlib.sha256(self.header).hexdigest())


def export(settings: ExportSettings, console: Console) -> Result:
    """Export a model. Raise UserError with a way out."""
    options, choices = settings.options, settings.choices
    with one_blas_thread(), contextlib.ExitStack() as stack:
        paths = reserve_paths(options)
        output = None if paths.out is None else stack.enter_context(Output(paths.out, options.force))
        conversion = prepare(settings)
        file, plan, importance = conversion.file, conversion.plan, conversion.importance
        stack.enter_context(file.explain_errors())
        report_plan(plan, console)
        lines = tensor_lines(plan, terminal_width()) if console.details else []
        check_source(file, plan, conversion.codec, console, n_threads=settings.n_threads, candidates={})
        if output is None:
            table = summary(plan, choices, terminal_width(), calibration=describe_calibration(conversion))
            console.report("\n".join([*lines, table]))
            return Result.make(
                map(TensorResult.make, plan.tensors), Totals.compute(plan), type=choices.name, options="", importance=importance.describe(),
                warnings=console.warnings,
            )
        output.plan_parts(
            [t.n_bytes for t in plan.tensors],
            n_header=header_bytes(file),
            alignment=file.alignment,
            max_bytes=None,
            describe_input=paths.describe_input,
        )
        metadata = upstream_metadata(file, uniform_file_type(choices.type), importance)
        header = pack_header(metadata, file.tensors, [t.type for t in plan.tensors], file.alignment)
        writing = ExportWritingJob(output, conversion, choices.name, lines, header=header)
        return report_result(settings, writing, writing.write(console), console)


def describe_calibration(conversion: Conversion) -> list[str]:
    return calibration_lines(conversion.importance.describe(), conversion.dead_columns(), conversion.hessian_uses())


def reserve_paths(options: ExportOptions) -> ReservedPaths:
    """Reserve the files that are read and written. UserError if an output may not be written."""
    paths = ReservedPaths(list_input_files(options.input, {"--imatrix": options.imatrix}))
    paths = paths if options.dry_run else reserve_output(paths, options.output, options.force)
    if options.model_card is not None:
        reserve_file("--model-card", options.model_card, paths, options.force)
    return paths


def prepare(settings: ExportSettings) -> Conversion:
    """Open the model and plan its types."""
    options = settings.options
    file = open_model(options.input)
    check_model(file)
    plan = make_plan(file, settings.choices)
    report_options_without_effect(plan, settings.choices)
    check_fallbacks(plan, options.no_fallback)
    codec = Codec(library.load(), n_threads=settings.n_threads)
    check_known_encoders(codec, plan, {})
    importance = Importance() if options.imatrix is None else open_importance([options.imatrix], None)  # of the original model
    importance.scales = ColumnScales.read(file)
    assign_imatrix(plan, importance.matrix)
    check_hessians(plan, importance, False)
    check_numpy_encoders(codec, plan, {})
    return Conversion(file, plan, codec, importance, settings.n_threads)


def report_result(settings: ExportSettings, writing: ExportWritingJob, written: WrittenFile, console: Console) -> Result:
    """Report the result, and write the model card."""
    options, choices, path = settings.options, settings.choices, writing.output.path
    file, plan, importance = writing.conversion.file, writing.conversion.plan, writing.conversion.importance
    table = summary(
        plan, choices, terminal_width(), calibration=describe_calibration(writing.conversion), tensors=written.tensors, seconds=written.seconds
    )
    console.report("\n".join([table, *cost_lines(written.tensors)]))
    if options.model_card is not None:
        recorded = recorded_importance(file)
        card = Card(
            outputs=[path],
            source=file,
            plan=plan,
            tensors=written.tensors,
            title=choices.name.upper(),
            importance=f"{describe_importance(importance)}{f'; that of {file.path.name}: {recorded}' if recorded else ''}",
            reference=f"{file.path.name}, which is quantized itself",
            command=command_line(["ggml-ext", "export"], options),
        )
        write_beside("--model-card", options.model_card, card.text().encode(), path, options.force)
    return Result.make(
        written.results, Totals.compute(plan, written.tensors), type=choices.name, options="", importance=importance.describe(),
        warnings=console.warnings, paths=written.paths, seconds=written.seconds,
    )
