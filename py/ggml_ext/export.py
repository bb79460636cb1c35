"""Turns a file with our types into one that stock llama.cpp loads: python -m ggml_ext.export IN OUT --type q4_k"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from gguf import GGMLQuantizationType, LlamaFileType

from ._base.errors import UserError
from ._base.text import columns
from ._base.types import TYPES, WEIGHT_TYPES
from ._console.card import Card, describe_importance, recorded_importance, shown_command
from ._console.cli import Parser, add_common_options, add_threads_option, check_threads, run_command
from ._console.log import Log
from ._console.report import fallback_lines, summary, tensor_lines
from ._encode.accuracy import Accuracy
from ._encode.checks import check_known_encoders, check_numpy_encoders
from ._encode.codec import Codec
from ._formats.gguf_file import GGUFFile, KeyValue, Tensor, bits_per_weight, pack_header, uint32_value
from ._formats.names import unknown_type
from ._formats.split import SPLIT_KEYS, open_model
from ._importance import calibration
from ._importance.importance import Importance, open_importance
from ._native import library
from ._native.blas import one_blas_thread
from ._output.conversion import IMPORTANCE_KEYS, QUANTIZATION_VERSION, WAY_OUT, made_from, write_beside
from ._output.output import Output
from ._output.paths import Taken, check_beside, check_output
from ._output.writer import write_with_bar
from ._plan.plan import (
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
from ._plan.sizes import possible_sizes, tensor_sizes
from ._source import source

T = GGMLQuantizationType
STOCK_TYPES = {name: qtype for name, qtype in TARGET_TYPES.items() if name not in TYPES}
OURS = "ggml_ext."  # keys of the metadata begin with it
# general.file_type is of whole files, which llama-quantize names by a recipe; the recipe that is nearest to one type for all
FILE_TYPES = {
    T.F32: "ALL_F32",
    T.Q3_K: "MOSTLY_Q3_K_S",
    T.Q4_K: "MOSTLY_Q4_K_S",
    T.Q5_K: "MOSTLY_Q5_K_S",
    T.IQ2_S: "MOSTLY_IQ2_M",
    T.MXFP4: "MOSTLY_MXFP4_MOE",
}


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="ggml-ext-export",
        description="Writes a GGUF model that has types of ggml-ext with llama.cpp's own types, and says what that costs.",
        epilog="Tensors that have stock types already are copied as they are, but with a type of floats or --pure. An output "
        "matrix in a type of ggml-ext becomes q6_k where TYPE has fewer bits, as llama-quantize would make it.",
    )
    add = parser.add_argument
    add("input", metavar="IN", type=Path, help="GGUF model with types of ggml-ext, of a split one any part")
    add("output", metavar="OUT", type=Path, nargs="?", help="file to write; not needed with --dry-run")
    add("--type", metavar="TYPE", required=True, help=f"type in place of ours: {', '.join(sorted(STOCK_TYPES))}")
    add("--pure", action="store_true", help="TYPE for all quantized tensors, also for those in stock types and the output matrix")
    add(
        "--tensor-type",
        metavar="REGEX=TYPE",
        action="append",
        default=[],
        help="stock type for quantized tensors whose name matches; may be repeated, the first match counts",
    )
    add("--imatrix", metavar="FILE", type=Path, help="importance matrix of llama-imatrix, which iq1_*, iq2_* and iq3_xxs need")
    add("--no-fallback", action="store_true", help="refuse a model with rows that the types do not fit")
    add_threads_option(parser)
    add("--dry-run", action="store_true", help="show types and sizes, write nothing")
    add("--model-card", metavar="FILE", type=Path, help="write a card for the Hugging Face hub to this file, such as README.md")
    add("-f", "--force", action="store_true", help="replace OUT if it exists")
    add("--progress", action="store_true", help="show the progress bar even if stderr is no terminal")
    add("--summary", action="store_true", help="print no line for each tensor, only warnings and the summary")
    add("-q", "--quiet", action="store_true", help="print errors and warnings only, and nothing about fallbacks")
    add_common_options(parser)
    return parser


def parse_stock_type(name: str, flag: str = "--type") -> GGMLQuantizationType:
    """UserError naming the flag for a type that is not llama.cpp's."""
    if name.lower() not in STOCK_TYPES:
        remark = ": it is a type of ggml-ext, which ggml-ext-quantize makes" if name.lower() in WEIGHT_TYPES else ""
        raise UserError(unknown_type(flag, name, sorted(STOCK_TYPES), remark))
    return STOCK_TYPES[name.lower()]


def is_ours(tensor: Tensor) -> bool:
    return tensor.type.name.lower() in TYPES


@dataclass(frozen=True)
class Choices:
    """What the command line says about types."""

    type: GGMLQuantizationType
    pure: bool
    overrides: tuple[Override, ...]

    @property
    def name(self) -> str:
        return self.type.name.lower()

    @property
    def asked(self) -> str:
        """What decides the types, for summary()."""
        return self.name

    def type_of(self, tensor: Tensor, tied: bool) -> GGMLQuantizationType:
        """Of a quantized tensor, before its shape is looked at. tied: the file has no output.weight.

        Source of the rules for embeddings and output matrix: llama.cpp, src/llama-quant.cpp, llama_tensor_get_type_impl().
        """
        is_embd = tensor.name in (TOKEN_EMBD, PER_LAYER_TOKEN_EMBD)
        if override := next((o for o in self.overrides if o.pattern.search(tensor.name)), None):
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


def parse_choices(args: argparse.Namespace) -> Choices:
    overrides = tuple(map(Override.parse, args.tensor_type))
    for override in overrides:
        parse_stock_type(override.type.name.lower(), "--tensor-type")
    return Choices(parse_stock_type(args.type), args.pure, overrides)


def make_plan(file: GGUFFile, choices: Choices) -> Plan:
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


def file_type(qtype: GGMLQuantizationType) -> int:
    """general.file_type of a file of that type."""
    return int(LlamaFileType[FILE_TYPES.get(qtype, f"MOSTLY_{qtype.name}")])


def output_metadata(file: GGUFFile, choices: Choices, importance: Importance) -> dict[str, KeyValue]:
    """The keys of the input without ours, and those that llama-quantize writes."""
    old = {k: kv for k, kv in file.metadata.items() if not k.startswith(OURS) and k not in (*IMPORTANCE_KEYS, *SPLIT_KEYS)}
    new = [
        *([] if importance.matrix is None else importance.matrix.metadata()),
        uint32_value("general.file_type", file_type(choices.type)),
        uint32_value("general.quantization_version", QUANTIZATION_VERSION),
    ]
    return old | {kv.key: kv for kv in new}


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


@one_blas_thread()
def run(args: argparse.Namespace, log: Log) -> None:
    """The whole program after the command line; UserError for what the user can change."""
    with contextlib.ExitStack() as stack:
        _run(args, log, stack)


def _run(args: argparse.Namespace, log: Log, stack: contextlib.ExitStack) -> None:
    choices, n_threads = parse_choices(args), check_threads(args.threads)
    if args.dry_run and args.model_card:
        raise UserError("--model-card: --dry-run writes nothing; leave one of them out")
    taken = Taken(source.read_files(args))
    taken = taken if args.dry_run else check_output(taken, args.output, args.force)
    if args.model_card is not None:
        check_beside("--model-card", args.model_card, taken, args.force)
    path = taken.out
    output = None if path is None else stack.enter_context(Output(path, args.force))
    file = open_model(args.input)
    check_model(file)
    plan = make_plan(file, choices)
    check_fallbacks(args, plan)
    codec = Codec(library.load())
    check_known_encoders(codec, plan, {})
    importance = Importance() if args.imatrix is None else open_importance([args.imatrix], "diagonal")
    plan_importance(plan, importance.matrix)
    check_numpy_encoders(codec, plan, {})
    for line in [*([] if args.quiet else fallback_lines(plan)), *(f"warning: {w}" for w in plan.warnings)]:
        kind, text = line.split(": ", 1)
        (log.warn if kind == "warning" else log.note)(text)
    width = columns()
    lines = [] if args.summary or args.quiet else tensor_lines(plan, width)
    if output is None:
        log.report("\n".join([*lines, summary(plan, choices, width, importance.describe())]))
        return

    output.plan(tensor_sizes(plan), calibration.header_bytes(file), file.alignment, None, taken.reads)
    started = time.monotonic()
    header = pack_header(output_metadata(file, choices, importance), plan.tensors, plan.types, file.alignment)
    bound_to = made_from(file, codec, importance, types=hashlib.sha256(header).hexdigest())
    output.begin(bound_to, [header], possible_sizes(plan, None), log.note)
    show_bar = not args.quiet and sys.stderr is not None and (args.progress or sys.stderr.isatty())
    seconds_before = sum(done.seconds for done in output.finished)
    accuracies = write_with_bar(
        output, file, plan, codec, importance, n_threads, choices.name, show_bar,
        lambda i: log.report(lines[i]) if lines else None, lambda i: None,
    )
    output.complete([header])
    output.publish()
    seconds = time.monotonic() - started + seconds_before
    report = summary(plan, choices, width, importance.describe(), accuracies, seconds)
    log.report("\n".join([report, *cost_lines(plan, accuracies)]))
    if args.model_card is not None:
        before = recorded_importance(file)
        card = Card(
            [path],
            file,
            plan,
            accuracies,
            choices.name.upper(),
            f"{describe_importance(importance)}{f'; of {file.path.name}, which it was made from: {before}' if before else ''}",
            f"the weights as {file.path.name} holds them, which had lost something before against the original",
            shown_command("export", build_parser(), args),
        )
        write_beside("--model-card", args.model_card, card.text().encode(), path, args.force)


def main(argv: list[str] | None = None) -> int:
    """Entry point; see run_command() for the exit code."""
    args = argparse.Namespace(output=None)
    log = Log("text", False, WAY_OUT)

    def parse_and_run() -> None:
        nonlocal log
        build_parser().parse_intermixed_args(argv, args)  # OUT may stand after options
        log = Log("text", args.quiet, WAY_OUT)
        run(args, log)

    return run_command(parse_and_run, lambda: f"{args.output} was not written", WAY_OUT, lambda *said: log.error(*said), args)


if __name__ == "__main__":
    sys.exit(main())
