"""Quantizes a model: from checked settings to the file and its report."""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import dataclass, replace
from pathlib import Path

from gguf import GGMLQuantizationType

from .._allocation import choice
from .._allocation.inquiry import Inquiry
from .._allocation.items import Item, make_items
from .._base.console import Console
from .._base.encoding import to_json
from .._base.errors import UserError
from .._base.package import __version__
from .._base.text import terminal_width
from .._calibration import calibration
from .._calibration.importance import Importance, plan_moments
from .._encode.accuracy import NAMES_KEY, VALUES_KEY, Accuracy, epsilon_metadata, read_epsilons
from .._encode.checks import TYPE_FLAGS, check_encoders, check_numpy_encoders, check_source
from .._encode.codec import Codec
from .._formats.gguf_file import GGUFFile, KeyValue, header_bytes, pack_header, string_value, uint32_value
from .._formats.split import SPLIT_KEYS
from .._native.blas import one_blas_thread
from .._native.streams import FLAG, WAY_OUT
from .._output.conversion import IMPORTANCE_KEYS, QUANTIZATION_VERSION, Conversion, stock_metadata, write_beside
from .._output.output import Output
from .._output.parts import part_metadata
from .._output.paths import Taken, check_beside, check_output
from .._plan.effects import tell_options_without_effect
from .._plan.plan import Choices, Plan, check_fallbacks, check_model, make_plan, metric_of, plan_importance
from .._plan.sizes import possible_sizes, tensor_sizes
from .._plan.uses import Uses
from .._report.card import Card, describe_importance
from .._report.records import tensor_record, totals_record
from .._report.tables import error_warnings, summary, tensor_lines
from .._sequential.errors import KEY as STREAM_KEY
from .._sequential.errors import stream_metadata
from .._sequential.estimate import make_propagation
from .._sequential.layers import Propagation, Run, check_cut
from .._source.source import check_keep_gguf, list_input_files, open_source
from .estimate import Estimate, estimate
from .result import Result
from .settings import Settings
from .uploading import Destination
from .writing import Job, Written, tell_plan

T = GGMLQuantizationType
PART_HEADER = 1024  # bytes of the header of a part but the first, beside the names of its tensors


@dataclass(frozen=True)
class Opened:
    """The model and the place of OUT. output: None in a dry run."""

    file: GGUFFile
    taken: Taken
    output: Output | None

    def make_room(self, plan: Plan, sizes: list[int], settings: Settings) -> None:
        """Looks for the room that OUT needs. sizes: bytes of the tensors' data."""
        if self.output is None:
            return
        above = settings.choices.fallback_above
        largest = None if above is None else [max(of_tensor.values()) for of_tensor in possible_sizes(plan, above)]
        self.output.plan(
            sizes, header_bytes(self.file), self.file.alignment, settings.output.max_bytes, self.taken.reads, largest
        )


@dataclass(frozen=True)
class Decided:
    """What is to be written. codec: None where nothing is encoded; described: a line about the importance; chosen: what a target led
    to; options: those that decide the bytes, of which --fallback-above may change types later; run: of --propagate."""

    plan: Plan
    choices: Choices
    codec: Codec | None
    importance: Importance
    described: str
    chosen: choice.Chosen | None = None
    options: str = ""
    run: Run | None = None


def quantize(settings: Settings, console: Console) -> Result:
    """Everything after the command line; UserError for what the user can change."""
    with one_blas_thread(), contextlib.ExitStack() as stack:
        destination = prepare_upload(settings, console)
        opened = open_model(settings, console, stack)
        with opened.file.explain_errors():
            decided = decide(settings, opened, console)
            tell_plan(decided.plan, console)
            if opened.output is None:
                return tell_dry_run(settings, decided, console)
            if not console.quiet and (expected := expected_time(settings, decided)):
                console.note(expected.describe())
            job = make_job(settings, opened, decided, console, stack)
            written = job.write(console)
        result = finish(settings, decided, job, written, console)
    if destination is not None:
        console.report(destination.upload([*result.paths], make_card(settings, decided, job, written).text()))
    return result


def prepare_upload(settings: Settings, console: Console) -> Destination | None:
    """The repository of --upload, made before the work begins; None without the option."""
    if settings.output.upload is None:
        return None
    destination = Destination(settings.output.upload, settings.source.hf_token, False, None, console)
    destination.prepare()
    return destination


def check_paths(settings: Settings, read: dict[Path, str], stem: str, is_again: bool = False) -> Taken:
    """All files that are read and written. read, stem: see Taken. UserError if one of those to be written may not be. is_again: more
    is known than before the model was found; the file of --keep-gguf is there since then."""
    out = settings.output
    taken = Taken(read, stem, out.is_split)
    if not out.is_dry:
        taken = check_output(taken, out.path, out.force)
    if not is_again:
        taken = check_keep_gguf(settings.source.keep_gguf, taken)
    for flag, beside in (("--report", out.report), ("--model-card", out.model_card)):
        taken = taken if beside is None else check_beside(flag, beside, taken, out.force)
    return taken


def open_model(settings: Settings, console: Console, stack: contextlib.ExitStack) -> Opened:
    """stack: ends when nothing is read or written any more."""
    source, wanted = settings.source, settings.importance
    read = list_input_files(source.path, {"--imatrix": wanted.imatrix, "--imatrix-from": wanted.text})
    taken = check_paths(settings, read, source.expected_stem)
    path = taken.out
    output = None if path is None else stack.enter_context(Output(path, settings.output.force, settings.output.is_split))
    file = stack.enter_context(open_source(source, path, console))
    taken = check_paths(settings, taken.read | {part.path: "IN" for part in file.parts}, file.stem, is_again=True)
    check_model(file)
    return Opened(file, taken, output)


def decide(settings: Settings, opened: Opened, console: Console) -> Decided:
    """Types of all tensors, and what their encoders know of the inputs."""
    choices = settings.choices
    has_imatrix = choices.file_type.is_mixed_by_rules and calibration.expects_importance(settings.importance)
    plan = make_plan(opened.file, choices, has_imatrix, Uses.read(opened.file, settings.importance.given_names()))
    tell_options_without_effect(plan, choices)
    for note in plan.notes:
        console.note(note)
    if settings.target is None:
        check_fallbacks(plan, choices.no_fallback)
    codec = None if settings.output.is_dry and settings.target is None else settings.encoder.load(settings.n_threads)
    if settings.target is not None:
        decided = choose_types(settings, opened, plan, codec, console)
    else:
        if codec is not None:
            check_encoders(codec, plan, choices.fallback_above is not None)
        opened.make_room(plan, tensor_sizes(plan), settings)
        check_weights(settings, opened.file, plan, [], codec, console)
        run = propagate_to(plan, settings, opened, console)
        described = find_importance(settings, opened, plan, console) if run is None else (run.importance(), run.importance_described())
        decided = Decided(plan, choices, codec, *described, run=run)
    if codec is not None:
        check_numpy_encoders(codec, plan, TYPE_FLAGS)
    return replace(decided, options=settings.describe_options(plan.types, decided.run is not None))


def check_weights(settings: Settings, file: GGUFFile, plan: Plan, items: list[Item], codec: Codec | None, console: Console) -> None:
    """UserError for weights that cannot be stored. items: of a target."""
    types = [[q] for q in plan.types]
    for item in items:
        types[item.index] = item.types
    check_source(file, plan.tensors, types, codec or settings.encoder.load(settings.n_threads), settings.n_threads, console)


def propagate_to(plan: Plan, settings: Settings, opened: Opened, console: Console) -> Run | None:
    """The run of --propagate, which finds importances for the layers of the plan; None without the option, or where it may be done
    without and cannot be done."""
    wanted = settings.importance
    if not wanted.propagates or (wanted.may_do_without and not any(metric_of(q) for q in plan.types)):
        return None
    try:
        run = make_propagation(wanted, opened.file, opened.taken.out and opened.taken.out.parent, settings.n_threads, console)
        if wanted.may_do_without and opened.output is not None:
            check_cut(run, console.note)
    except UserError as e:
        if not wanted.may_do_without:
            raise
        console.note(f"done without --propagate, which --effort best adds: {str(e).removeprefix(FLAG).removesuffix(f'; {WAY_OUT}')}")
        return None
    if settings.target is None:  # with one, a calibration has found them
        in_layers = {t.name for t, q in zip(plan.tensors, plan.types, strict=True) if q != t.type and t.name.startswith("blk.")}
        plan.importance |= in_layers - plan.unseen
        plan_importance(plan, None)
    return run


def choose_types(settings: Settings, opened: Opened, plan: Plan, codec: Codec, console: Console) -> Decided:
    """Those that a target leads to."""
    target, choices, file = settings.target, settings.choices, opened.file
    items = make_items(target, plan, choices, codec)
    check_weights(settings, file, plan, items, codec, console)
    chosen = choice.choose_at_once(target, file, plan, items)
    importance, described = Importance(), "none: nothing is encoded"
    if chosen is None:
        sizes = tensor_sizes(plan)
        for item in items:  # at the least
            sizes[item.index] = min(item.tensor.bytes_as(t) for t in item.types)
        opened.make_room(plan, sizes, settings)
        importance, described = find_importance(settings, opened, plan, console)
        out = settings.output.path
        inquiry = Inquiry(
            file, plan, importance, codec, settings.n_threads, console, None if out is None else Path(os.path.realpath(out)).parent,
            opened.output is None, settings.importance.runs_model, settings.importance.text, settings.types.sensitivity,
        )
        chosen = choice.choose(target, items, largest_header(settings, file, plan, items, importance), inquiry)
    chosen.apply(plan)
    check_fallbacks(plan, choices.no_fallback)
    choices = replace(choices, file_type=chosen.file_type(choices.file_type, target.is_stock))
    opened.make_room(plan, tensor_sizes(plan), settings)
    return Decided(plan, choices, codec, importance, described, chosen, run=propagate_to(plan, settings, opened, console))


def find_importance(settings: Settings, opened: Opened, plan: Plan, console: Console) -> tuple[Importance, str]:
    """What is known of the inputs, matched with the plan, and a line about it. A dry run calibrates nothing."""
    wanted, target, folder = settings.importance, settings.target, None if opened.output is None else opened.taken.out.parent
    n_types = len({m for q in target.types if (m := metric_of(q))}) if target else 0
    found = calibration.prepare(wanted, opened.file, plan, folder, settings.n_threads, n_types, console)
    if isinstance(found, calibration.Calibration):
        out = settings.output.path
        kept = None if out is None else found.finished(Path(os.path.realpath(out)).parent)
        if kept is None:
            return Importance(found.kind), f"{found.kind}, by a {found.describe()}"
        found = kept
    wanted.select(found)
    plan_importance(plan, found.matrix)
    plan_moments(plan, found, wanted.kind is not None)
    return found, found.describe()


def output_metadata(
    file: GGUFFile, choices: Choices, options: str, importance: Importance, errors: list[KeyValue]
) -> dict[str, KeyValue]:
    """All keys of the input, in their order, those of llama-quantize and, but in stock files, ours. errors: as error_metadata() makes
    them."""
    if choices.file_type.is_stock:
        return stock_metadata(file, choices.file_type.id, importance)
    ours = [
        *importance.metadata(),
        uint32_value("general.file_type", choices.file_type.id),
        uint32_value("general.quantization_version", QUANTIZATION_VERSION),
        string_value("ggml_ext.version", __version__),
        string_value("ggml_ext.type", choices.name),
        string_value("ggml_ext.options", options),
        *errors,
    ]
    old = {key: kv for key, kv in file.metadata.items() if key not in (NAMES_KEY, VALUES_KEY, STREAM_KEY, *IMPORTANCE_KEYS, *SPLIT_KEYS)}
    return old | {kv.key: kv for kv in ours}


def largest_header(settings: Settings, file: GGUFFile, plan: Plan, items: list[Item], importance: Importance) -> int:
    """Bytes of OUT before its data, at most, whatever types the items get; in a split model of all parts."""
    planned, every_type, max_bytes = list(plan.types), Plan([]), settings.output.max_bytes
    for item in items:
        every_type.types += item.types
        planned[item.index] = T.DITTO3 if T.DITTO3 in item.types else item.types[0]
    options = settings.describe_options(every_type.types, settings.importance.propagates)
    errors = error_metadata(file, plan, planned, None, settings.importance.propagates)
    metadata = output_metadata(file, settings.choices, options, importance, errors)
    header = pack_header(metadata, plan.tensors, plan.types, file.alignment)
    n_parts = 0 if max_bytes is None else min(len(plan.tensors), 2 * plan.size_before() // max_bytes + 1)
    return len(header) + n_parts * (PART_HEADER + file.alignment)


def error_metadata(
    file: GGUFFile, plan: Plan, planned: list[GGMLQuantizationType], accuracies: list[Accuracy] | None, propagates: bool
) -> list[KeyValue]:
    """The keys for epsilons and for the errors of the residual stream. accuracies, planned: as list_epsilons() takes them."""
    epsilons = epsilon_metadata(list_epsilons(file, plan, planned, accuracies))
    return epsilons + (stream_metadata(plan.tensors, accuracies) if propagates else [])


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


def make_job(settings: Settings, opened: Opened, decided: Decided, console: Console, stack: contextlib.ExitStack) -> Job:
    """Ready to be written."""
    file, output, plan, choices = opened.file, opened.output, decided.plan, decided.choices
    planned, options = list(plan.types), decided.options
    propagation = None
    if decided.run is not None:
        console.note(decided.run.described)
        warn = decided.importance.warnings.append
        made = Propagation(decided.run, file, plan, decided.codec, settings.n_threads, warn, console)
        propagation = stack.enter_context(made)
    conversion = Conversion(
        file, plan, decided.codec, decided.importance, settings.n_threads, choices.fallback_above, propagation
    )

    def headers(accuracies: list[Accuracy] | None) -> list[bytes]:
        errors = error_metadata(file, plan, planned, accuracies, propagation is not None)
        metadata = output_metadata(file, choices, options, decided.importance, errors)
        return [
            pack_header(
                part_metadata(metadata, output.parts, n) if output.is_split else metadata,
                plan.tensors[part.first : part.last],
                plan.types[part.first : part.last],
                file.alignment,
            )
            for n, part in enumerate(output.parts)
        ]

    def bound_to(first: list[bytes]) -> dict:
        hashes = [hashlib.sha256(header).hexdigest() for header in first]
        return conversion.made_from(options=[choices.name, options, settings.output.max_bytes], metadata=hashes)

    lines = tensor_lines(plan, terminal_width()) if console.details else []
    return Job(output, conversion, choices.name, headers, bound_to, lines, settings.output.verify)


def expected_time(settings: Settings, decided: Decided) -> Estimate | None:
    """Of encoding. None where it takes seconds, or where --propagate runs beside it."""
    codec = decided.codec or settings.encoder.load(settings.n_threads)
    return None if decided.run is not None else estimate(decided.plan, codec, decided.importance.kind, settings.n_threads)


def tell_dry_run(settings: Settings, decided: Decided, console: Console) -> Result:
    """Types and sizes."""
    plan, width, name = decided.plan, terminal_width(), decided.choices.name
    lines = tensor_lines(plan, width) if console.details else []
    expected = expected_time(settings, decided)
    dead = decided.importance.dead_columns(plan)
    lines.append(summary(plan, decided.choices, width, decided.described, chosen=decided.chosen, dead=dead))
    times = ([expected.describe()] if expected else []) + ([decided.run.described] if decided.run else [])
    console.report("\n".join([*lines, *times]))
    tensors, totals = [tensor_record(plan, i) for i in range(len(plan.tensors))], totals_record(plan, None, decided.chosen)
    for record in tensors:
        console.event("tensor", record)
    seconds = {"encoding_seconds": round(expected.encoding, 1)} if expected else {}
    console.event("summary", {"type": name, "importance": decided.described, **seconds, **totals})
    said = name, decided.options, decided.described
    return Result.of([], said, tensors, totals, 0.0, console.warnings)


def finish(settings: Settings, decided: Decided, job: Job, written: Written, console: Console) -> Result:
    """Says what was done, and writes the files beside OUT."""
    plan, choices, out, paths = decided.plan, decided.choices, settings.output, [part.path for part in job.output.parts]
    for warning in [*decided.importance.warnings, *error_warnings(plan, written.accuracies)]:
        console.warn(warning)
    dead = job.conversion.dead_columns()
    console.report(summary(plan, choices, terminal_width(), decided.described, written.accuracies, written.seconds, decided.chosen, dead))
    if out.verify:
        ran = ", and one token run" if written.was_run else ""
        console.report(f"verified: {len(plan.tensors)} tensors read back, as they were written{ran}")
    totals = totals_record(plan, written.accuracies, decided.chosen)
    record = {
        "input": settings.source.hf_repo or str(settings.source.path),
        "output": [{"path": str(path), "bytes": path.stat().st_size} for path in paths],
        "type": choices.name,
        "options": decided.options,
        "importance": decided.described,
        "version": __version__,
        "seconds": round(written.seconds, 3),
        "tensors_of_an_earlier_run": written.n_before,
        "verified": out.verify,
        "dead_columns": {name: n for name, (n, _) in dead.items() if n},
        **totals,
    }
    console.event("summary", record)
    tensors = job.records()
    if out.report is not None:
        report = {**record, "warnings": console.warnings, "tensors": tensors}
        write_beside("--report", out.report, to_json(report, 1).encode() + b"\n", job.output.path, out.force)
    if out.model_card is not None:
        card = make_card(settings, decided, job, written)
        write_beside("--model-card", out.model_card, card.text().encode(), job.output.path, out.force)
    return Result.of(paths, (choices.name, decided.options, decided.described), tensors, totals, written.seconds, console.warnings)


def make_card(settings: Settings, decided: Decided, job: Job, written: Written) -> Card:
    repo, path = settings.source.hf_repo, settings.source.path
    source = repo or Path(os.path.abspath(path)).name
    return Card(
        [part.path for part in job.output.parts], job.conversion.file, decided.plan, written.accuracies, decided.choices.title,
        describe_importance(decided.importance), f"those of {source}", settings.command, repo,
    )
