"""Quantizes a GGUF model to one of our types: python -m ggml_ext.quantize IN OUT --type itq3_s"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from gguf import GGMLQuantizationType
from tqdm import tqdm

from ._base.encoding import to_json
from ._base.errors import UserError
from ._base.package import __version__
from ._base.text import columns
from ._base.types import WEIGHT_TYPES
from ._budget import choice
from ._budget.target import parse_target
from ._console.card import Card, describe_importance, shown_command
from ._console.cli import check_threads, run_command
from ._console.log import Log
from ._console.options import asked_format, build_parser, describe_options, parse_choices
from ._console.report import error_warnings, fallback_lines, summary, tensor_lines, tensor_record, totals_record
from ._encode.accuracy import NAMES_KEY, VALUES_KEY, Accuracy, epsilon_metadata, read_epsilons
from ._encode.checks import TYPE_FLAGS, check_encoders, check_numpy_encoders
from ._encode.codec import Codec
from ._formats.gguf_file import GGUFFile, KeyValue, pack_header, string_value, uint32_value
from ._formats.split import SPLIT_KEYS
from ._importance import calibration
from ._importance.importance import Importance, plan_moments
from ._native import library
from ._native.blas import one_blas_thread
from ._output.conversion import IMPORTANCE_KEYS, QUANTIZATION_VERSION, WAY_OUT, made_from, write_beside
from ._output.output import Output
from ._output.parts import parse_split_size, part_metadata
from ._output.paths import Taken, check_beside, check_output
from ._output.verify import verify
from ._output.writer import write_with_bar
from ._plan.plan import Choices, Plan, check_fallbacks, check_model, make_plan, plan_importance
from ._plan.sizes import possible_sizes, tensor_sizes
from ._source import source as _source

T = GGMLQuantizationType


def load_codec(args: argparse.Namespace) -> Codec:
    """The encoder asked for; UserError if it is not there."""
    lib = None if args.encoder == "numpy" else library.load()
    if lib is None and args.encoder == "c":
        raise UserError(
            "--encoder c: the library was not built with this package: reinstall ggml-ext with a C compiler, or "
            "leave out --encoder"
        )
    return Codec(lib, args.itq3_levels, args.ditto_codebook, args.effort)


def check_paths(args: argparse.Namespace, read: dict[Path, str], stem: str, is_split: bool, is_again: bool = False) -> Taken:
    """All files that are read and written. read, stem: see Taken. UserError if one of those to be written may not be. is_again: more
    is known than before the model was found; the file of --keep-gguf is there since then."""
    taken = Taken(read, stem, is_split)
    if not args.dry_run:
        taken = check_output(taken, args.output, args.force)
    if not is_again:
        taken = _source.check_keep_gguf(args, taken)
    for flag, beside in (("--report", args.report), ("--model-card", args.model_card)):
        taken = taken if beside is None else check_beside(flag, beside, taken, args.force)
    return taken


def find_importance(
    args: argparse.Namespace, file: GGUFFile, plan: Plan, output: Path | None, say: Callable, warn: Callable, show_bar: bool
) -> tuple[Importance, str]:
    """What is known of the inputs, matched with the plan, and a line about it. A dry run has no output and calibrates nothing."""
    folder = None if output is None else output.parent
    found = calibration.prepare(args, file, plan, folder, check_threads(args.threads), say, warn, show_bar)
    if isinstance(found, calibration.Calibration):
        kept = None if args.output is None else found.finished(Path(os.path.realpath(args.output)).parent)
        if kept is None:
            return Importance(found.kind), f"{found.kind}, by a {found.describe()}"
        found = kept
    plan_importance(plan, found.matrix)
    plan_moments(plan, found, args.importance is not None)
    return found, found.describe()


def output_metadata(
    file: GGUFFile,
    choices: Choices,
    options: str,
    importance: Importance,
    epsilons: dict[str, float],
) -> dict[str, KeyValue]:
    """All keys of the input, in their order, those of llama-quantize and ours. epsilons: by name of the DITTO3 tensors."""
    ours = [
        *importance.metadata(),
        uint32_value("general.file_type", choices.file_type),
        uint32_value("general.quantization_version", QUANTIZATION_VERSION),
        string_value("ggml_ext.version", __version__),
        string_value("ggml_ext.type", choices.name),
        string_value("ggml_ext.options", options),
        *epsilon_metadata(epsilons),
    ]
    old = {key: kv for key, kv in file.metadata.items() if key not in (NAMES_KEY, VALUES_KEY, *IMPORTANCE_KEYS, *SPLIT_KEYS)}
    return old | {kv.key: kv for kv in ours}


def header_bytes(
    args: argparse.Namespace, file: GGUFFile, choices: Choices, plan: Plan, items: list[choice.Item], importance: Importance,
    max_bytes: int | None,
) -> int:
    """Of OUT before its data, at most, whatever types the items get; in a split model of all parts."""
    planned, every_type = list(plan.types), Plan([])
    for item in items:
        every_type.types += item.types
        planned[item.index] = T.DITTO3 if T.DITTO3 in item.types else item.types[0]
    options, epsilons = describe_options(args, choices, every_type), list_epsilons(file, plan, planned, None)
    header = pack_header(output_metadata(file, choices, options, importance, epsilons), plan.tensors, plan.types, file.alignment)
    n_parts = 0 if max_bytes is None else min(len(plan.tensors), 2 * plan.size_before() // max_bytes + 1)
    return len(header) + n_parts * (choice.PART_HEADER + file.alignment)


def list_epsilons(
    file: GGUFFile, plan: Plan, planned: list[GGMLQuantizationType], accuracies: list[Accuracy] | None
) -> dict[str, float]:
    """Epsilon of the DITTO3 tensors of the output. accuracies: None before they are known, for the size of the header.

    Tensors that were DITTO3 before are copied, and keep what is recorded for them, if anything is. planned: types before
    --fallback-above; tensors that it replaced keep their place in the list, so that the header's size does not change.
    """
    out = {}
    recorded = read_epsilons(file)
    for i, (tensor, target) in enumerate(zip(plan.tensors, planned, strict=True)):
        if target == T.DITTO3 != tensor.type:
            out[tensor.name] = 0.0 if accuracies is None else accuracies[i].epsilon
        elif target == T.DITTO3 and tensor.name in recorded:
            out[tensor.name] = recorded[tensor.name]
    return out


@one_blas_thread()
def run(args: argparse.Namespace, log: Log) -> None:
    """The whole program after the command line; UserError for what the user can change."""
    with contextlib.ExitStack() as stack:
        _run(args, log, stack)


def _run(args: argparse.Namespace, log: Log, stack: contextlib.ExitStack) -> None:
    """stack: ends when nothing is read or written any more."""
    target = parse_target(args)
    _source.check_options(args)
    choices = parse_choices(args, target)
    max_bytes = None if args.split_max_size is None else parse_split_size(args.split_max_size)
    taken = check_paths(args, _source.read_files(args), _source.expected_stem(args), max_bytes is not None)
    path = taken.out
    output = None if path is None else stack.enter_context(Output(path, args.force, is_split=max_bytes is not None))
    show_bar = not (args.quiet or log.is_json) and sys.stderr is not None and (args.progress or sys.stderr.isatty())

    file = stack.enter_context(_source.open_source(args, path, log.note, show_bar))
    taken = check_paths(args, taken.read | {part.path: "IN" for part in file.parts}, file.stem, taken.is_split, is_again=True)
    check_model(file)
    plan = make_plan(file, choices)
    if target is None:
        check_fallbacks(args, plan)
    codec = None if args.dry_run and target is None else load_codec(args)
    if codec is not None and target is None:
        check_encoders(args, codec, plan)

    def plan_output(sizes: list[int]) -> None:
        if output is not None:
            possible = None if args.fallback_above is None else possible_sizes(plan, args.fallback_above)
            largest = possible and [max(of_tensor.values()) for of_tensor in possible]
            output.plan(sizes, calibration.header_bytes(file), file.alignment, max_bytes, taken.reads, largest)

    chosen, sizes = None, tensor_sizes(plan)
    if target is not None:
        items = choice.make_items(target, plan, choices, codec)
        chosen = choice.choose_at_once(target, file, plan, items)
        for item in items:  # at the least
            sizes[item.index] = min(choice.n_bytes(item.tensor, t) for t in item.types)
    if chosen is None:
        plan_output(sizes)
        importance, described = find_importance(args, file, plan, path, log.note, log.warn, show_bar)
    else:
        importance, described = Importance(), "none: nothing is encoded"
    if target is not None:
        if chosen is None:
            header = header_bytes(args, file, choices, plan, items, importance, max_bytes)
            folder = None if path is None else path.parent
            chosen = choice.choose(
                args, target, file, plan, items, header, importance, codec, folder, check_threads(args.threads), log.note, log.warn,
                show_bar,
            )
        chosen.apply(plan)
        check_fallbacks(args, plan)
        name, file_type = chosen.file_type()
        choices = replace(choices, info=WEIGHT_TYPES[name]) if name else replace(choices, stock_file_type=file_type)
        plan_output(tensor_sizes(plan))
    if codec is not None:
        check_numpy_encoders(codec, plan, TYPE_FLAGS)
    for line in [] if args.quiet else fallback_lines(plan):
        kind, text = line.split(": ", 1)
        (log.warn if kind == "warning" else log.note)(text)
    for warning in plan.warnings:
        log.warn(warning)

    width = columns()
    lines = [] if args.summary or args.quiet else tensor_lines(plan, width)
    if output is None:
        log.report("\n".join([*lines, summary(plan, choices, width, described, chosen=chosen)]))
        for i in range(len(plan.tensors)):
            log.event("tensor", tensor_record(plan, i))
        log.event("summary", {"type": choices.name, "importance": described, **totals_record(plan, None, chosen)})
        return

    started = time.monotonic()
    planned, options = list(plan.types), describe_options(args, choices, plan)

    def headers(accuracies: list[Accuracy] | None) -> list[bytes]:
        epsilons = list_epsilons(file, plan, planned, accuracies)
        metadata = output_metadata(file, choices, options, importance, epsilons)
        return [
            pack_header(
                part_metadata(metadata, output.parts, n) if output.is_split else metadata,
                plan.tensors[part.first : part.last],
                plan.types[part.first : part.last],
                file.alignment,
            )
            for n, part in enumerate(output.parts)
        ]

    def record(i: int) -> dict:
        done = output.finished[i]
        return {**tensor_record(plan, i, done.accuracy), "seconds": round(done.seconds, 3), "sha256": done.sha256}

    first_headers = headers(None)
    bound_to = made_from(
        file, codec, importance, options=[choices.name, options, max_bytes],
        metadata=[hashlib.sha256(h).hexdigest() for h in first_headers],
    )
    output.begin(bound_to, first_headers, possible_sizes(plan, args.fallback_above), log.note)
    n_before = len(output.finished)
    seconds_before = sum(done.seconds for done in output.finished)
    accuracies = write_with_bar(
        output, file, plan, codec, importance, check_threads(args.threads), choices.name, show_bar,
        lambda i: log.report(lines[i]) if lines else None,
        lambda i: log.event("tensor", {"index": i + 1, "of": len(plan.tensors), **record(i)}),
        args.fallback_above,
    )
    final_headers = headers(accuracies)  # as long as the first ones
    output.complete(final_headers)
    if args.verify:
        with tqdm(total=plan.n_elements(), unit="w", unit_scale=True, desc="verify", disable=not show_bar) as bar:
            verify(output, final_headers, file, plan, codec, check_threads(args.threads), bar.update)
    output.publish()
    seconds = time.monotonic() - started + seconds_before
    for warning in [*importance.warnings, *error_warnings(plan, accuracies)]:
        log.warn(warning)
    log.report(summary(plan, choices, width, described, accuracies, seconds, chosen))
    if args.verify:
        log.report(f"verified: {len(plan.tensors)} tensors read back, as they were written")
    totals = {
        "input": args.hf_repo or str(args.input),
        "output": [{"path": str(part.path), "bytes": part.path.stat().st_size} for part in output.parts],
        "type": choices.name,
        "options": options,
        "importance": described,
        "version": __version__,
        "seconds": round(seconds, 3),
        "tensors_of_an_earlier_run": n_before,
        "verified": args.verify,
        **totals_record(plan, accuracies, chosen),
    }
    log.event("summary", totals)
    if args.report is not None:
        tensors = [record(i) for i in range(len(plan.tensors))]
        report = {**totals, "warnings": log.warnings, "tensors": tensors}
        write_beside("--report", args.report, to_json(report, 1).encode() + b"\n", path, args.force)
    if args.model_card is not None:
        source = args.hf_repo or Path(os.path.abspath(args.input)).name
        card = Card(
            [part.path for part in output.parts], file, plan, accuracies, choices.title, describe_importance(importance),
            f"those of {source}", shown_command("quantize", build_parser(), args), args.hf_repo,
        )
        write_beside("--model-card", args.model_card, card.text().encode(), path, args.force)


def main(argv: list[str] | None = None) -> int:
    """Entry point; see run_command() for the exit code."""
    args = argparse.Namespace(output=None)
    log = Log(asked_format(argv), False, WAY_OUT)  # a bad command line is said in it too

    def parse_and_run() -> None:
        nonlocal log
        build_parser().parse_intermixed_args(argv, args)  # OUT may stand after options
        log = Log(args.log_format, args.quiet, WAY_OUT)
        run(args, log)

    return run_command(parse_and_run, lambda: f"{args.output} was not written", WAY_OUT, lambda *said: log.error(*said), args)


if __name__ == "__main__":
    sys.exit(main())
