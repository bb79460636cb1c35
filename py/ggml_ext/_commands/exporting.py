"""Turns a model with our types into one that stock llama.cpp loads: from checked settings to the file and what it cost."""

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
from .._calibration.importance import Importance, open_importance, plan_moments
from .._encode.accuracy import Accuracy
from .._encode.checks import check_known_encoders, check_numpy_encoders, check_source
from .._encode.codec import Codec
from .._formats.gguf_file import GGUFFile, Tensor, bits_per_weight, header_bytes, pack_header
from .._formats.names import unknown_type_message
from .._formats.split import open_model
from .._native import library
from .._native.blas import one_blas_thread
from .._output.conversion import Conversion, stock_metadata, write_beside
from .._output.output import Output
from .._output.paths import Taken, check_beside, check_output
from .._plan.effects import tell_options_without_effect
from .._plan.file_types import uniform_file_type
from .._plan.plan import (
    ACTIVATION_TYPES,
    FLOAT_TYPES,
    IMATRIX_TYPES,
    INTEGER_TYPES,
    OUTPUT,
    PER_LAYER_TOKEN_EMBD,
    TARGET_TYPES,
    TOKEN_EMBD,
    Override,
    Plan,
    check_fallbacks,
    check_model,
    fit_to_row,
    plan_importance,
)
from .._plan.sizes import tensor_sizes
from .._report.card import Card, describe_importance, recorded_importance
from .._report.records import tensor_record, totals_record
from .._report.tables import summary, tensor_lines
from .._source.source import list_input_files
from .result import Result
from .writing import Job, Written, tell_plan

T = GGMLQuantizationType
STOCK_TYPES = {name: qtype for name, qtype in TARGET_TYPES.items() if name not in TYPES}


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The options of `ggml-ext export`, without those of its terminal."""

    input: Path = option(is_positional=True, metavar="IN", help="GGUF model with ggml-ext types, of a split one any part")
    output: Path | None = option(None, is_positional=True, metavar="OUT", help="file to write; optional with --dry-run")
    type: str = option(metavar="TYPE", help="type to convert ggml-ext types to, such as q4_k")
    pure: bool = option(False, help="convert all quantized tensors, with standard types and the output matrix too")
    tensor_type: Sequence[str] = option(
        (), metavar="REGEX=TYPE", help="standard type of quantized tensors whose name matches; may be repeated, the first match counts"
    )
    imatrix: Path | None = option(None, metavar="FILE", help="importance matrix of llama-imatrix; iq1_*, iq2_* and iq3_xxs need one")
    no_fallback: bool = option(False, help="fail if a tensor's row size does not fit the type, instead of choosing another type")
    threads: int | None = threads_option()
    dry_run: bool = option(False, in_command=False, help="show types and sizes, write nothing")
    model_card: Path | None = option(
        None, metavar="FILE", in_command=False, help="write a model card for the Hugging Face hub to this file, such as README.md"
    )
    force: bool = option(False, short="-f", in_command=False, help="replace OUT if it exists")


def parse_stock_type(name: str, flag: str = "--type") -> GGMLQuantizationType:
    """UserError naming the flag for a type that is not llama.cpp's."""
    if name.lower() not in STOCK_TYPES:
        remark = ": it is a type of ggml-ext, which ggml-ext quantize makes" if name.lower() in WEIGHT_TYPES else ""
        raise UserError(unknown_type_message(flag, name, sorted(STOCK_TYPES), remark))
    return STOCK_TYPES[name.lower()]


def is_ours(tensor: Tensor) -> bool:
    return tensor.type.name.lower() in TYPES


@dataclass(frozen=True)
class StockChoices:
    """The types that options name."""

    type: GGMLQuantizationType
    pure: bool
    overrides: tuple[Override, ...]
    # options that quantizing alone has
    token_embd: ClassVar[None] = None
    output: ClassVar[None] = None
    leave_output: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return self.type.name.lower()

    def override_of(self, name: str) -> Override | None:
        """The --tensor-type that counts for the tensor of that name."""
        return next((o for o in self.overrides if o.pattern.search(name)), None)

    @property
    def asked(self) -> str:
        """What decides the types, for summary()."""
        return self.name

    def type_of(self, tensor: Tensor, tied: bool) -> GGMLQuantizationType:
        """Of a quantized tensor, before its shape is looked at. tied: the file has no output.weight.

        Source of the rules for embeddings and output matrix: llama.cpp, src/llama-quant.cpp, llama_tensor_get_type_impl().
        """
        is_embd = tensor.name in (TOKEN_EMBD, PER_LAYER_TOKEN_EMBD)
        if override := self.override_of(tensor.name):
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
    """All that a run of export is told."""

    options: ExportOptions
    choices: StockChoices
    n_threads: int

    @classmethod
    def parse(cls, options: ExportOptions) -> ExportSettings:
        """UserError naming the flag that is wrong, or those that do not go together."""
        overrides = tuple(map(Override.parse, options.tensor_type))
        for override in overrides:
            parse_stock_type(override.type.name.lower(), "--tensor-type")
        choices = StockChoices(parse_stock_type(options.type), options.pure, overrides)
        n_threads = check_threads(options.threads)
        if options.dry_run and options.model_card:
            raise UserError("--model-card: --dry-run writes nothing; leave one of them out")
        return cls(options, choices, n_threads)


def make_plan(file: GGUFFile, choices: StockChoices) -> Plan:
    """Target types of all tensors; UserError for files that have none of our types."""
    if not any(map(is_ours, file.tensors)):
        raise UserError(
            f"{file.path} has no tensor in a type of ggml-ext: every llama.cpp loads it as it is; llama-quantize "
            "--allow-requantize changes its types"
        )
    tied = all(t.name != OUTPUT for t in file.tensors)
    plan = Plan(file.tensors)
    for tensor in file.tensors:
        if tensor.type in (*FLOAT_TYPES, *INTEGER_TYPES, *ACTIVATION_TYPES, T.F64):
            plan.add(tensor, tensor.type, tensor.type)
            continue
        wanted = choices.type_of(tensor, tied)
        plan.add(tensor, wanted, fit_to_row(tensor, wanted))
        plan.n_matrices += 1
    for override in choices.overrides:
        if not any(override.pattern.search(t.name) for t in file.tensors):
            plan.warnings.append(f"--tensor-type {override.pattern.pattern}={override.type.name.lower()} matches no tensor")
    return plan


def cost_lines(plan: Plan, accuracies: list[Accuracy]) -> list[str]:
    """For each of our types what its new types add to the error that it has by itself."""
    pairs: dict[tuple[GGMLQuantizationType, GGMLQuantizationType], Accuracy] = {}
    for tensor, target, accuracy in zip(plan.tensors, plan.types, accuracies, strict=True):
        if is_ours(tensor):
            pairs[tensor.type, target] = pairs.get((tensor.type, target), Accuracy()) + accuracy
    lines = []
    for (ours, target), total in pairs.items():
        name, usual = ours.name.lower(), WEIGHT_TYPES[ours.name.lower()].usual_rel_mse
        lines.append(
            f"{name} -> {target.name.lower()} adds a relative squared error of {total.relative:.3g} to what {name} lost before, "
            f"on Gaussian weights {usual:.3g}: about {1 + total.relative / usual:.3g} times the error"
        )
    return lines


def export(settings: ExportSettings, console: Console) -> Result:
    """Everything after the command line; UserError for what the user can change."""
    options, choices = settings.options, settings.choices
    with one_blas_thread(), contextlib.ExitStack() as stack:
        taken = check_paths(options)
        output = None if taken.out is None else stack.enter_context(Output(taken.out, options.force))
        conversion = prepare(settings)
        stack.enter_context(conversion.file.explain_errors())
        plan, described = conversion.plan, conversion.importance.describe()
        tell_plan(plan, console)
        lines = tensor_lines(plan, terminal_width()) if console.details else []
        types = [[q] for q in plan.types]
        check_source(conversion.file, plan.tensors, types, conversion.codec, settings.n_threads, console)
        if output is None:
            console.report("\n".join([*lines, summary(plan, choices, terminal_width(), described, dead=conversion.dead_columns())]))
            tensors = [tensor_record(plan, i) for i in range(len(plan.tensors))]
            return Result.of([], (choices.name, "", described), tensors, totals_record(plan, None), 0.0, console.warnings)
        file = conversion.file
        output.plan(tensor_sizes(plan), header_bytes(file), file.alignment, None, taken.reads)
        metadata = stock_metadata(file, uniform_file_type(choices.type), conversion.importance)
        header = pack_header(metadata, plan.tensors, plan.types, file.alignment)
        job = Job(
            output, conversion, choices.name, lambda _: [header],
            lambda first: conversion.made_from(types=hashlib.sha256(first[0]).hexdigest()), lines,
        )
        return finish(settings, job, job.write(console), console)


def check_paths(options: ExportOptions) -> Taken:
    """All files that are read and written; UserError if one of those to be written may not be."""
    taken = Taken(list_input_files(options.input, {"--imatrix": options.imatrix}))
    taken = taken if options.dry_run else check_output(taken, options.output, options.force)
    if options.model_card is not None:
        check_beside("--model-card", options.model_card, taken, options.force)
    return taken


def prepare(settings: ExportSettings) -> Conversion:
    """The model and what becomes of it."""
    options = settings.options
    file = open_model(options.input)
    check_model(file)
    plan = make_plan(file, settings.choices)
    tell_options_without_effect(plan, settings.choices)
    check_fallbacks(plan, options.no_fallback)
    codec = Codec(library.load(), n_threads=settings.n_threads)
    check_known_encoders(codec, plan, {})
    importance = Importance() if options.imatrix is None else open_importance([options.imatrix], None)
    plan_importance(plan, importance.matrix)
    plan_moments(plan, importance, False)
    check_numpy_encoders(codec, plan, {})
    return Conversion(file, plan, codec, importance, settings.n_threads)


def finish(settings: ExportSettings, job: Job, written: Written, console: Console) -> Result:
    """Says what was done, and writes the card."""
    options, choices, path = settings.options, settings.choices, job.output.path
    file, plan, importance = job.conversion.file, job.conversion.plan, job.conversion.importance
    dead = job.conversion.dead_columns()
    report = summary(plan, choices, terminal_width(), importance.describe(), written.accuracies, written.seconds, dead=dead)
    console.report("\n".join([report, *cost_lines(plan, written.accuracies)]))
    if options.model_card is not None:
        before = recorded_importance(file)
        card = Card(
            [path],
            file,
            plan,
            written.accuracies,
            choices.name.upper(),
            f"{describe_importance(importance)}{f'; of {file.path.name}, which it was made from: {before}' if before else ''}",
            f"the weights as {file.path.name} holds them, which had lost something before against the original",
            command_line(["python", "-m", "ggml_ext.export"], options),
        )
        write_beside("--model-card", options.model_card, card.text().encode(), path, options.force)
    totals = totals_record(plan, written.accuracies)
    return Result.of([path], (choices.name, "", importance.describe()), job.records(), totals, written.seconds, console.warnings)
