"""Quantizes a GGUF model to one of our types: python -m ggml_ext.quantize IN OUT --type itq3_s"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from gguf import GGMLQuantizationType
from tqdm import tqdm

from . import __version__, _calibration, _choice, _lib, _source
from ._accuracy import NAMES_KEY, VALUES_KEY, Accuracy, epsilon_metadata, read_epsilons
from ._card import Card, describe_importance, shown_command
from ._cli import Parser, add_threads_option, add_version_option, check_threads, run_command
from ._encode import EFFORTS, UNWEIGHTED_IN_NUMPY, Codec
from ._errors import UserError
from ._gguf_file import GGUFFile, KeyValue, Tensor, pack_header, string_value, uint32_value
from ._importance import Importance, plan_moments
from ._log import FORMATS, Log
from ._names import unknown_type
from ._output import Output, open_file, parse_split_size, part_metadata, written_beside
from ._plan import TARGET_TYPES, Choices, Override, Plan, check_model, make_plan, parse_type, plan_importance, replacement_type
from ._recipes import RECIPES
from ._report import (
    WARN_ABOVE,
    columns,
    error_warnings,
    fallback_lines,
    refused_fallback,
    summary,
    tensor_lines,
    tensor_record,
    totals_record,
)
from ._split import SPLIT_KEYS
from ._types import WEIGHT_TYPES
from ._verify import verify
from ._writer import largest_sizes, tensor_sizes, write_tensors

QUANTIZATION_VERSION = 2  # GGML_QNT_VERSION
T = GGMLQuantizationType
CODEBOOKS = ("block", "tensor")
TRELLIS_TYPES = [name for name, info in WEIGHT_TYPES.items() if info.trellis_mix]
IMPORTANCE_KEYS = (
    *(f"quantize.imatrix.{key}" for key in ("file", "dataset", "entries_count", "chunks_count")),
    "ggml_ext.importance",
    "ggml_ext.calibration",
)
WAY_OUT = "pass --quiet if nobody reads it"


def build_parser() -> argparse.ArgumentParser:
    embd_and_output = "\n".join(
        f"  {t.name}: {t.bpw:g} bpw; token embeddings {t.token_embd}, output matrix {t.output}; {t.fallback} where rows are no "
        f"multiple of {t.block_size}"
        for t in WEIGHT_TYPES.values()
    )
    mixtures = "\n".join(f"  {r.name}: {r.about}" for r in RECIPES.values())
    parser = Parser(
        prog="ggml-ext-quantize",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Quantizes an F32, F16, BF16 or Q8_0 GGUF model or a Hugging Face checkpoint to a low-bit type of ggml-ext.",
        epilog=f"types:\n{embd_and_output}\nmixed files:\n{mixtures}\n"
        "A model without output.weight computes its output with the token embeddings: they get the output's type.\n"
        "Vectors, norms, expert routing and other small tensors keep their type, as with llama-quantize.",
    )
    add = parser.add_argument
    add(
        "input",
        metavar="IN",
        type=Path,
        nargs="?",
        help="GGUF model in F32, F16, BF16 or Q8_0, of a split one any part; or the folder of a Hugging Face checkpoint",
    )
    add("output", metavar="OUT", type=Path, nargs="?", help="file to write; not needed with --dry-run")
    add(
        "--type",
        metavar="TYPE",
        help=f"type of the weights: {', '.join([*WEIGHT_TYPES, *RECIPES])}; auto, or nothing, with a target",
    )
    _choice.add_options(add)
    add("--pure", action="store_true", help="the type of most matrices of the blocks for embeddings and output too")
    add(
        "--tensor-type",
        metavar="REGEX=TYPE",
        action="append",
        default=[],
        help="type for tensors whose name matches; may be repeated, the first match counts; stock types too, such as attn_v=q8_0",
    )
    add("--token-embedding-type", metavar="TYPE", help="type of the token embeddings")
    add(
        "--output-tensor-type", metavar="TYPE", help="type of the output matrix (or of the embeddings that serve as it)"
    )
    add(
        "--fallback-above",
        metavar="X",
        type=float,
        help="store tensors whose relative squared error is more than X times what is usual for their type in a stock type, "
        f"iq4_nl; without it errors above {WARN_ABOVE} times the usual are a warning",
    )
    add(
        "--no-fallback",
        action="store_true",
        help="refuse a model with rows that the types do not fit; itq3_t64 in place of itq3_t and itq2_t64 in place of itq2_t, "
        "the same codes in blocks of 64, are not refused",
    )
    add("--leave-output-tensor", action="store_true", help="leave output.weight as it is")
    add(
        "--allow-requantize",
        action="store_true",
        help="accept tensors that are already quantized below 8 bits; costs quality",
    )
    _source.add_options(add)
    _calibration.add_options(add)
    add("--itq3-levels", metavar="{8,3}", type=int, default=8, help="itq3_s: 8 levels (default) or the paper's ternary")
    add(
        "--ditto-codebook",
        metavar="{block,tensor}",
        default="block",
        help="ditto3: a codebook for each block (default) or the paper's one for each tensor; llama-quantize makes the former",
    )
    add(
        "--effort",
        metavar=f"{{{','.join(EFFORTS)}}}",
        default="normal",
        help=f"{', '.join(TRELLIS_TYPES)}: scales tried for each block: fast (1), normal (2 or 3, with a diagonal up to 6), "
        "best (6, and errors are fed back more finely); default normal",
    )
    add_threads_option(parser)
    add(
        "--encoder",
        choices=("auto", "c", "numpy"),
        default="auto",
        help="auto (default): the built library if there is one, else numpy; the bytes are the same",
    )
    add("--dry-run", action="store_true", help="show types and sizes, write nothing")
    add(
        "--split-max-size",
        metavar="N(M|G)",
        help="write OUT-00001-of-0000N.gguf and so on, each with at most so many bytes of tensors (M: millions), as "
        "llama-gguf-split does",
    )
    add("--verify", action="store_true", help="read what was written from the disk again and compare it before it becomes OUT")
    add("--report", metavar="FILE", type=Path, help="write types, sizes, errors and checksums of all tensors to this JSON file")
    add("--model-card", metavar="FILE", type=Path, help="write a card for the Hugging Face hub to this file, such as README.md")
    add("--log-format", choices=FORMATS, default="text", help="json: one object a line on both streams; default text")
    add("-f", "--force", action="store_true", help="replace OUT if it exists")
    add("--progress", action="store_true", help="show the progress bar even if stderr is no terminal")
    add("--summary", action="store_true", help="print no line for each tensor, only warnings and the summary")
    add("-q", "--quiet", action="store_true", help="print errors and warnings only, and nothing about fallbacks")
    add_version_option(parser)
    return parser


def parse_choices(args: argparse.Namespace) -> Choices:
    """The type-related options; UserError naming the flag."""
    target = _choice.parse_target(args)
    name = _choice.STAND_IN if target else args.type.lower()
    recipe = RECIPES.get(name)
    info = WEIGHT_TYPES.get(recipe.base if recipe else name)
    if info is None:
        remark = " (for stock types use llama-quantize)" if name in TARGET_TYPES else ""
        raise UserError(unknown_type("--type", args.type, [*WEIGHT_TYPES, *RECIPES], remark))
    if args.itq3_levels not in (3, 8):
        raise UserError(f"--itq3-levels: got {args.itq3_levels}, must be 8 or 3")
    if args.ditto_codebook not in CODEBOOKS:
        raise UserError(f"--ditto-codebook: got {args.ditto_codebook!r}, must be {' or '.join(CODEBOOKS)}")
    if args.effort not in EFFORTS:
        raise UserError(f"--effort: got {args.effort!r}, must be {', '.join(EFFORTS)}")
    if args.fallback_above is not None and not 1 <= args.fallback_above < float("inf"):
        raise UserError(f"--fallback-above: got {args.fallback_above:g}, must be at least 1, such as {WARN_ABOVE}")
    check_threads(args.threads)
    _calibration.check_options(args)
    for flag in ("verify", "report", "model-card"):
        if args.dry_run and getattr(args, flag.replace("-", "_")):
            raise UserError(f"--{flag}: --dry-run writes nothing; leave one of them out")

    def optional(name: str | None, flag: str) -> GGMLQuantizationType | None:
        return None if name is None else parse_type(name, flag)

    return Choices(
        info=info,
        recipe=recipe,
        pure=args.pure or target is not None,
        overrides=tuple(map(Override.parse, args.tensor_type)),
        token_embd=optional(args.token_embedding_type, "--token-embedding-type"),
        output=optional(args.output_tensor_type, "--output-tensor-type"),
        leave_output=args.leave_output_tensor,
        allow_requantize=args.allow_requantize,
        target=target and target.option,
    )


def check_output(sources: list[Path], output: Path | None, force: bool) -> Path:
    """OUT with links resolved, if it may be written and is none of the sources; UserError otherwise."""
    if output is None:
        raise UserError("OUT is missing: name the file to write, or pass --dry-run")
    path = Path(os.path.realpath(output))
    try:
        path.exists()
    except OSError as e:
        raise UserError(f"OUT: {e.strerror}: {output}") from e
    if not path.parent.is_dir():
        raise UserError(f"OUT: the folder {path.parent} does not exist: create it first")
    if path.is_dir():
        raise UserError(f"OUT: {output} is a directory: name a file in it")
    if path.exists():
        if any(source.exists() and path.samefile(source) for source in sources):
            raise UserError(f"OUT: {output} is the same file as IN: choose another name")
        if not path.is_file():
            raise UserError(f"OUT: {output} is not a regular file: name one")
        if not force:
            raise UserError(f"OUT: {output} exists: choose another name or pass --force to replace it")
    return path


def write_with_bar(
    output: Output, file: GGUFFile, plan: Plan, codec: Codec, importance: Importance, n_threads: int, title: str, show_bar: bool,
    begun: Callable[[int], None], ended: Callable[[int], None], fallback_above: float | None = None,
) -> list[Accuracy]:
    """write_tensors() under a progress bar that begins where an earlier run stopped. begun, ended: called with a tensor's index."""
    n_done = sum(t.n_elements for t in plan.tensors[: len(output.finished)])
    with tqdm(total=plan.n_elements(), unit="w", unit_scale=True, desc=title, disable=not show_bar, initial=n_done) as bar:
        return write_tensors(output, file, plan, codec, importance, n_threads, begun, bar.update, ended, fallback_above)


def check_report(report: Path, outputs: Mapping[Path, str], sources: list[Path], force: bool, flag: str = "--report") -> None:
    """UserError if the file of a flag may not be written. outputs: with links resolved, and what they are called; they and
    report may be missing."""
    path, way_out = Path(os.path.realpath(report)), "name another file"
    try:
        is_there = path.exists()
    except OSError as e:  # of a name that is too long
        raise UserError(f"{flag}: {report}: {e.strerror}: {way_out}") from e
    if not path.parent.is_dir():
        raise UserError(f"{flag}: the folder {path.parent} does not exist: create it first")
    if path in outputs or (is_there and any(path.samefile(source) for source in sources)):
        raise UserError(f"{flag}: {report} is the same file as {outputs.get(path, 'IN')}: {way_out}")
    if is_there and not path.is_file():
        raise UserError(f"{flag}: {report} is not a regular file: {way_out}")
    if is_there and not force:
        raise UserError(f"{flag}: {report} exists: {way_out} or pass --force to replace it")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"{flag}: the folder {path.parent} may not be written: {way_out}")


def write_beside(flag: str, path: Path, data: bytes, output: Path, force: bool) -> None:
    """UserError naming the flag if it cannot be written, or, without force, exists by now, which says that OUT is written."""
    path = Path(os.path.realpath(path))
    try:
        with written_beside(path, force) as part, open_file(part) as f:
            f.write(data)
    except FileExistsError as e:
        raise UserError(f"{flag}: {path} appeared meanwhile, and was left as it is; {output} is written") from e
    except OSError as e:
        raise UserError(f"{flag}: cannot write {path}: {e.strerror}; {output} is written") from e


def identity(path: Path, n_header: int = 0) -> dict:
    """What tells a file from others and from what it was before."""
    return {**_calibration.fingerprint(path, n_header), "modified": path.stat().st_mtime_ns}


def load_codec(args: argparse.Namespace) -> Codec:
    """The encoder asked for; UserError if it is not there."""
    lib = None if args.encoder == "numpy" else _lib.load()
    if lib is None and args.encoder == "c":
        raise UserError(
            "--encoder c: the library was not built with this package: reinstall ggml-ext with a C compiler, or "
            "leave out --encoder"
        )
    return Codec(lib, args.itq3_levels, args.ditto_codebook, args.effort)


def check_encoders(args: argparse.Namespace, codec: Codec, plan: Plan) -> None:
    """UserError if it cannot make a type of the plan."""
    for tensor, target in zip(plan.tensors, plan.types, strict=True):
        if codec.lib is None and args.fallback_above is not None and target != tensor.type and target.name.lower() in WEIGHT_TYPES:
            fallback = replacement_type(tensor, target)
            if not codec.can_encode(fallback):
                raise UserError(
                    f"--fallback-above: {fallback.name.lower()} has no numpy encoder and the built library is not in use: build it, "
                    "or leave the option out"
                )
    check_known_encoders(codec, plan)


def check_known_encoders(codec: Codec, plan: Plan) -> None:
    """UserError where neither the library nor numpy makes a type."""
    for tensor, target in zip(plan.tensors, plan.types, strict=True):
        if target != tensor.type and not codec.can_encode(target):
            raise no_numpy_encoder(tensor, target)


def check_fallbacks(args: argparse.Namespace, plan: Plan) -> None:
    """UserError for what --no-fallback refuses."""
    if args.no_fallback and (refused := refused_fallback(plan)):
        raise UserError(f"--no-fallback: {refused}; choose another type with --tensor-type REGEX=TYPE, or leave out --no-fallback")


def no_numpy_encoder(tensor: Tensor, target: GGMLQuantizationType, what: str = "") -> UserError:
    flag = {
        "output.weight": "--output-tensor-type q8_0",
        "token_embd.weight": "--token-embedding-type q8_0",
    }.get(tensor.name, f"--tensor-type '{re.escape(tensor.name)}=q8_0'")
    return UserError(
        f"tensor {tensor.name}: {target.name.lower()} has no numpy encoder{what} and the built library is not in use: build it, or pass {flag}"
    )


def check_numpy_encoders(codec: Codec, plan: Plan) -> None:
    """UserError if a tensor has importances that its encoder cannot take."""
    if codec.lib is not None:
        return
    for tensor, target in zip(plan.tensors, plan.types, strict=True):
        if target != tensor.type and tensor.name in plan.importance and target in UNWEIGHTED_IN_NUMPY:
            raise no_numpy_encoder(tensor, target, " with importances")


def find_importance(
    args: argparse.Namespace, file: GGUFFile, plan: Plan, output: Path | None, say: Callable, warn: Callable, show_bar: bool
) -> tuple[Importance, str]:
    """What is known of the inputs, matched with the plan, and a line about it. A dry run has no output and calibrates nothing."""
    folder = None if output is None else output.parent
    found = _calibration.prepare(args, file, plan, folder, check_threads(args.threads), say, warn, show_bar)
    if isinstance(found, _calibration.Calibration):
        kept = None if args.output is None else found.finished(Path(os.path.realpath(args.output)).parent)
        if kept is None:
            return Importance(found.kind), f"{found.kind}, by a {found.describe()}"
        found = kept
    plan_importance(plan, found.matrix)
    plan_moments(plan, found, args.importance is not None)
    return found, found.describe()


def describe_options(args: argparse.Namespace, plan: Plan) -> str:
    """The options that decide the bytes of the output, for the file's record."""
    of_types = {T.ITQ3_S: f"itq3-levels={args.itq3_levels}", T.DITTO3: f"ditto-codebook={args.ditto_codebook}"}
    of_types |= {T[name.upper()]: f"effort={args.effort}" for name in TRELLIS_TYPES}
    target = _choice.parse_target(args)
    options = [] if target is None else [target.option]
    options += list(dict.fromkeys(text for qtype, text in of_types.items() if qtype in plan.types))
    if args.fallback_above is not None:
        options.append(f"fallback-above={args.fallback_above:g}")
    options += [
        flag for flag in ("pure", "leave-output-tensor", "allow-requantize") if getattr(args, flag.replace("-", "_"))
    ]
    for flag in ("token-embedding-type", "output-tensor-type", "target-types"):
        if value := getattr(args, flag.replace("-", "_")):
            options.append(f"{flag}={value}")
    return " ".join([*options, *(f"tensor-type={text}" for text in args.tensor_type)])


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
    args: argparse.Namespace, file: GGUFFile, choices: Choices, plan: Plan, items: list[_choice.Item], importance: Importance,
    max_bytes: int | None,
) -> int:
    """Of OUT before its data, at most, whatever types the items get; in a split model of all parts."""
    planned, every_type = list(plan.types), Plan([])
    for item in items:
        every_type.types += item.types
        planned[item.index] = T.DITTO3 if T.DITTO3 in item.types else item.types[0]
    options, epsilons = describe_options(args, every_type), list_epsilons(file, plan, planned, None)
    header = pack_header(output_metadata(file, choices, options, importance, epsilons), plan.tensors, plan.types, file.alignment)
    n_parts = 0 if max_bytes is None else min(len(plan.tensors), 2 * plan.size_before() // max_bytes + 1)
    return len(header) + n_parts * (_choice.PART_HEADER + file.alignment)


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


def run(args: argparse.Namespace, log: Log) -> None:
    """The whole program after the command line; UserError for what the user can change."""
    with contextlib.ExitStack() as stack:
        _run(args, log, stack)


def _run(args: argparse.Namespace, log: Log, stack: contextlib.ExitStack) -> None:
    """stack: ends when nothing is read or written any more."""
    target = _choice.parse_target(args)
    _source.check_options(args)
    choices = parse_choices(args)
    max_bytes = None if args.split_max_size is None else parse_split_size(args.split_max_size)
    path = None if args.dry_run else check_output(_source.source_files(args), args.output, args.force or max_bytes is not None)
    output = None if path is None else stack.enter_context(Output(path, args.force, is_split=max_bytes is not None))
    show_bar = not (args.quiet or log.is_json) and sys.stderr is not None and (args.progress or sys.stderr.isatty())

    file = stack.enter_context(_source.open_source(args, path, log.note, show_bar))
    check_model(file)
    plan = make_plan(file, choices)
    if target is None:
        check_fallbacks(args, plan)
    codec = None if args.dry_run and target is None else load_codec(args)
    if codec is not None and target is None:
        check_encoders(args, codec, plan)

    def plan_output(sizes: list[int]) -> None:
        if output is not None:
            sources = [part.path for part in file.parts]
            largest = None if args.fallback_above is None else largest_sizes(plan)
            output.plan(sizes, _calibration.header_bytes(file), file.alignment, max_bytes, sources, largest)
            written = dict.fromkeys([path, *(part.path for part in output.parts)], "OUT")
            for flag, beside in (("--report", args.report), ("--model-card", args.model_card)):
                if beside is not None:
                    check_report(beside, written, sources, args.force, flag)
                    written[Path(os.path.realpath(beside))] = flag

    chosen, sizes = None, tensor_sizes(plan)
    if target is not None:
        items = _choice.make_items(plan, choices, codec, args.target_types)
        chosen = _choice.choose_at_once(target, file, plan, items)
        for item in items:  # at the least
            sizes[item.index] = min(_choice.n_bytes(item.tensor, t) for t in item.types)
    if chosen is None:
        plan_output(sizes)
        importance, described = find_importance(args, file, plan, path, log.note, log.warn, show_bar)
    else:
        importance, described = Importance(), "none: nothing is encoded"
    if target is not None:
        if chosen is None:
            header = header_bytes(args, file, choices, plan, items, importance, max_bytes)
            folder = None if path is None else path.parent
            chosen = _choice.choose(
                args, target, file, plan, items, header, importance, codec, folder, check_threads(args.threads), log.note, log.warn,
                show_bar,
            )
        chosen.apply(plan)
        check_fallbacks(args, plan)
        name, file_type = chosen.file_type()
        choices = replace(choices, info=WEIGHT_TYPES[name]) if name else replace(choices, stock_file_type=file_type)
        plan_output(tensor_sizes(plan))
    if codec is not None:
        check_numpy_encoders(codec, plan)
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
    planned, options = list(plan.types), describe_options(args, plan)

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
    made_from = {
        "version": [__version__, "numpy" if codec.lib is None else _calibration.fingerprint(codec.lib.path)],
        "input": [identity(part.path, _calibration.header_bytes(part)) for part in file.parts],
        "importance": [importance.kind, [identity(p) for p in importance.paths()]],
        "options": [choices.name, options, max_bytes],
        "metadata": [hashlib.sha256(h).hexdigest() for h in first_headers],
    }
    output.begin(made_from, first_headers, log.note)
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
        write_beside("--report", args.report, json.dumps(report, indent=1).encode() + b"\n", path, args.force)
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
    log = Log("text", False, WAY_OUT)

    def parse_and_run() -> None:
        nonlocal log
        build_parser().parse_intermixed_args(argv, args)  # OUT may stand after options
        log = Log(args.log_format, args.quiet, WAY_OUT)
        run(args, log)

    return run_command(parse_and_run, lambda: f"{args.output} was not written", WAY_OUT, lambda text: log.error(text))


if __name__ == "__main__":
    sys.exit(main())
