"""Quantize a model: plan, calibrate, encode, write and report."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from .._allocation.allocation import Allocation, add_needed_low_types, allocate_types, allocate_without_measuring
from .._allocation.error_measurement import ErrorMeasurement
from .._allocation.items import Item, make_items
from .._allocation.target import Target
from .._base.console import BarsOnly, Console
from .._base.encoding import to_json
from .._base.errors import UserError
from .._base.files import temporary_directory
from .._base.package import __version__
from .._base.signals import heed_signals
from .._base.text import terminal_width
from .._calibration import calibration
from .._calibration.importance import Importance, check_hessians
from .._calibration.scaling import provide_column_scales
from .._encode.accuracy import MeasuredTensor
from .._encode.checks import TYPE_FLAGS, check_encoders, check_numpy_encoders, check_source
from .._encode.codec import Codec
from .._formats.column_scales import ColumnScales, ScaledFile
from .._formats.gguf_file import GGUFFile, bits_per_weight, pack_header, string_value
from .._formats.names import describe_tensors
from .._formats.quality import RecordedQuality
from .._formats.split import PARTS_KEY
from .._formats.tensor_types import DITTO3, metric_name
from .._native.blas import one_blas_thread
from .._native.streams import FLAG, HINT
from .._output.conversion import Conversion, write_beside
from .._output.metadata import error_metadata, output_metadata
from .._output.other_parts import DEPENDENCY, digest_dependencies
from .._output.output import Output
from .._output.parts import PartNumber, part_metadata
from .._plan.effects import report_options_without_effect
from .._plan.imatrix_use import assign_imatrix, check_imatrix_types
from .._plan.partition import select_part
from .._plan.plan import Choices, QuantizationPlan, check_fallbacks
from .._plan.planning import make_plan
from .._plan.uses import GraphUses
from .._report.card import Card, describe_importance
from .._report.recorded_quality import quality_lines
from .._report.results import Result, TensorResult, Totals
from .._report.tables import calibration_lines, error_warnings, hessian_record, summary, tensor_lines
from .._sequential.estimate import configure_propagation
from .._sequential.layers import PropagationConfig, SequentialQuantizer, check_cut
from .estimate import estimate
from .opening import OpenedModel, open_model, plan_of_part
from .output_quality import check_evaluation, evaluate_output
from .settings import Settings
from .target_check import TEMPORARY, check_target, fixed_settings, list_fixed_types
from .uploading import Destination
from .writing import WritingJob, WrittenFile, report_plan

SKIPPING = "no sequential quantization"
# Sequential quantization is the default for types of at most this many bits per weight (docs/results/sequential.md).
GAINING_BITS = 5
PART_HEADER = 1024  # bytes of the header of a later part, without the names of its tensors


@dataclass(frozen=True)
class QuantizationJob:
    """Everything that is decided before encoding. file: the model, with column scales if there are some."""

    file: GGUFFile
    plan: QuantizationPlan
    choices: Choices
    codec: Codec
    importance: Importance
    allocation: Allocation | None = None  # with a target
    propagation_config: PropagationConfig | None = None
    options: str = ""  # those that determine the bytes
    model_plan: QuantizationPlan | None = None  # with --part: that of the complete model


def quantize(settings: Settings, console: Console) -> Result:
    """Quantize a model. Raise UserError with a way out."""
    with one_blas_thread(), contextlib.ExitStack() as stack:
        destination = prepare_upload(settings, console)
        model = open_model(settings, console, stack)
        check_evaluation(settings, model.file)
        with model.file.explain_errors():
            job = plan_job(settings, model, console)
            report_plan(job.plan, console)
            job = select_job(settings, job, console)
            if model.output is None:
                return report_dry_run(settings, job, console)
            job = compare_before_propagation(settings, model, job, console)
            if not console.quiet and (expected := estimate(job.plan, job.codec, job.importance, settings.n_threads)):
                console.note(expected.describe())
            writing = prepare_writing(settings, model, job, console, stack)
            written = writing.write(console)
            writing, written = keep_better(settings, model, writing, written, console)
        quality = evaluate_output(settings, model.file, written.paths, console)
        result = report_result(settings, writing, written, quality, console)
    if destination is not None:
        console.report(destination.upload([*result.paths], make_card(settings, writing, written, quality).text()))
    return result


def select_job(settings: Settings, job: QuantizationJob, console: Console) -> QuantizationJob:
    """Select the tensors of --part, and say which they are; without the option return the job.

    Raises:
        UserError: a tensor gets DITTO3. Its largest error belongs in the metadata of the first part, but another run may encode it.
    """
    number, plan = settings.output.part_number, job.plan
    if number is None:
        return job
    if names := [t.name for t in plan.changed if t.type == DITTO3]:
        raise UserError(f"--part: {describe_tensors(names)}: the first part of a ditto3 model records errors that other parts find: choose another type")
    part = select_part(plan, number.number, number.count)
    path, tensors = number.path(settings.output.path or Path("OUT.gguf")), part.plan.tensors
    console.report(
        f"part {number.number} of {number.count}: {path.name}, tensors {part.first + 1:,} to {part.first + len(tensors):,} of "
        f"{len(plan.tensors):,} ({tensors[0].name} to {tensors[-1].name}), {part.share:.1%} of the work; the largest part has {part.largest:.1%}"
    )
    return replace(job, plan=part.plan, model_plan=plan)


def keep_better(
    settings: Settings, model: OpenedModel, writing: QuantizeWritingJob, written: WrittenFile, console: Console
) -> tuple[QuantizeWritingJob, WrittenFile]:
    """Without sequential quantization: compare OUT with the best fixed type. Return the job and the result of the file that is kept."""
    if (allocation := writing.job.allocation) is None or allocation.check or writing.job.propagation_config is not None:
        return writing, written
    path = written.paths[0]
    allocation, result = check_target(
        settings, model.file, allocation, path, partial(write_quietly, model, console), console, state=f"{path} is complete, with the chosen types"
    )
    if result is not None:
        writing, written = replace(result[0], output=writing.output), replace(result[1], paths=written.paths)
        for n, tensor in enumerate(written.results, 1):
            console.event("tensor", {"index": n, "of": len(written.results), **tensor.record()})
    return replace(writing, job=replace(writing.job, allocation=allocation)), written


def write_quietly(
    model: OpenedModel, console: Console, settings: Settings, job: QuantizationJob | None = None
) -> tuple[QuantizeWritingJob, WrittenFile]:
    """Write a file to compare with, showing progress bars alone. job: what to write; None: plan it."""
    assert settings.output.path is not None
    silent = BarsOnly(console)
    with contextlib.ExitStack() as stack:
        own = replace(model, output=stack.enter_context(Output(settings.output.path, force=True)))
        if job is None:
            job = plan_job(settings, own, silent)
        else:
            own.plan_parts(job.plan, settings, {})
        writing = prepare_writing(settings, own, job, silent, stack)
        return writing, writing.write(silent)


def compare_before_propagation(settings: Settings, model: OpenedModel, job: QuantizationJob, console: Console) -> QuantizationJob:
    """With sequential quantization: compare the chosen types with the best fixed type before OUT is written. Return the job of the better one.

    Both files are encoded without sequential quantization: a sequential run takes longer than both encodings, and lowers the KL divergence
    of either file by about the same factor.
    """
    if job.propagation_config is None or job.allocation is None or job.allocation.rival is None:
        return job
    assert model.output is not None
    plain = settings.without_propagation()
    with temporary_directory(model.output.path.parent, TEMPORARY, console.note) as directory:
        path = directory / model.output.path.name
        console.note("encoding the chosen types without sequential quantization, to compare them; --no-target-check skips this")
        chosen = replace(plain, output=replace(plain.output, path=path))
        write_quietly(model, console, chosen, replace(job, propagation_config=None))
        heed_signals()
        write = partial(write_quietly, model, console)
        allocation, better = check_target(plain, model.file, job.allocation, path, write, console, state=None)
    heed_signals()
    if better is not None:
        job = plan_job(fixed_settings(settings, allocation.check["written"], settings.output.path), model, BarsOnly(console))
    return replace(job, allocation=allocation)


def prepare_upload(settings: Settings, console: Console) -> Destination | None:
    """Create the repository of --upload before the long work; return None without the option."""
    if settings.output.upload is None:
        return None
    destination = Destination(settings.output.upload, settings.source.hf_token, False, None, console)
    destination.prepare()
    return destination


def plan_job(settings: Settings, model: OpenedModel, console: Console) -> QuantizationJob:
    """Choose the types of all tensors and calibrate, or prepare calibration in a dry run."""
    choices, target, is_dry, options = settings.choices, settings.target, settings.output.is_dry, settings.calibration
    has_imatrix = choices.file_type.is_mixed_by_rules and calibration.expects_importance(options)
    uses = GraphUses.read(model.file, options.imatrix_names(), options.imatrix is None and calibration.expects_importance(options))
    plan = make_plan(model.file, choices, has_imatrix, uses)
    report_options_without_effect(plan, choices)
    console.notes(plan.notes)
    if target is None:
        check_fallbacks(plan, choices.no_fallback)
    codec = settings.encoder.load(settings.n_threads)
    if target is not None:
        job = plan_job_for_target(settings, target, model, plan, uses=uses, codec=codec, console=console)
    else:
        if not is_dry:
            check_encoders(codec, plan, choices.fallback_above is not None)
        model.plan_parts(plan, settings, {})
        check_source(model.file, plan_of_part(plan, settings), codec, console, n_threads=settings.n_threads, candidates={})
        config, notes = prepare_propagation(plan, settings, model, console)
        importance = calibrate_for_plan(settings, model, plan, console) if config is None else config.importance()
        console.notes(notes)
        importance.scales = choose_scales(settings, model, plan, importance, console)
        job = QuantizationJob(model.file, plan, choices, codec, importance, propagation_config=config)
    if not is_dry or target is not None:
        check_numpy_encoders(codec, plan, TYPE_FLAGS)
    if scales := job.importance.scales:
        job = replace(job, file=ScaledFile(model.file, scales))
    return replace(job, options=settings.describe_options({t.type for t in plan.tensors}, job.propagation_config is not None))


def choose_scales(settings: Settings, model: OpenedModel, plan: QuantizationPlan, importance: Importance, console: Console) -> ColumnScales:
    """Choose column scales if the types gain from them; return an empty ColumnScales if not, and in a dry run, which runs no model."""
    directory = cache_dir(settings)
    if model.output is None or directory is None or not settings.uses_column_scales(plan, importance):
        return ColumnScales()
    return provide_column_scales(
        settings.calibration, model.file, plan, importance.matrix, directory=directory, n_threads=settings.n_threads, console=console
    )


def prepare_propagation(
    plan: QuantizationPlan, settings: Settings, model: OpenedModel, console: Console
) -> tuple[PropagationConfig | None, list[str]]:
    """Configure sequential quantization and mark the matrices that it covers.

    Returns:
        The configuration, None for a run without sequential quantization, and notes that say why a run skips the default.
    """
    options = settings.calibration
    if options.may_do_without and not any(metric_name(t.type) and bits_per_weight(t.type) <= GAINING_BITS for t in plan.changed):
        return None, []
    if not options.propagates:
        return None, [f"{SKIPPING}: {settings.excludes_propagate} excludes it"] if settings.excludes_propagate else []
    try:
        config = configure_propagation(options, model.file, cache_dir(settings), settings.n_threads, console, plan.runs_mtp_layers)
        if options.may_do_without and model.output is not None:
            check_cut(config, console.note)
    except UserError as e:
        if not options.may_do_without:
            raise
        return None, [f"{SKIPPING}: {str(e).removeprefix(f'{FLAG}: ').removesuffix(f'; {HINT}')}"]
    if settings.target is None:  # the calibration for a target uses these options, and has marked the matrices already
        if options.ignored_by_propagate:
            console.note(f"no effect with {FLAG}: {', '.join(options.ignored_by_propagate)}")
        for t in plan.changed:
            t.uses_imatrix |= t.name.startswith("blk.") and not t.is_unseen
        check_imatrix_types(plan)
    plan.order_by_layer()  # as tensors are encoded, so that each is written at once and an interrupted run keeps it
    model.plan_parts(plan, settings, {})
    return config, []


def plan_job_for_target(
    settings: Settings, target: Target, model: OpenedModel, plan: QuantizationPlan, *, uses: GraphUses, codec: Codec, console: Console
) -> QuantizationJob:
    """Check the weights, calibrate, choose types for a target, and configure --propagate."""
    choices, file = settings.choices, model.file
    items = make_items(target, plan, choices, codec)
    add_needed_low_types(target, file, plan, items, codec)
    candidates = {item.planned.name: item.types for item in items}
    if settings.output.part is None:
        check_source(file, plan, codec, console, n_threads=settings.n_threads, candidates=candidates)
    allocation, scales = allocate_without_measuring(target, file, plan, items), ColumnScales()
    importance = Importance(description="none (nothing to encode)")
    if allocation is None:
        model.plan_parts(plan, settings, candidates)  # smallest sizes: fail before calibration
        importance = calibrate_for_plan(settings, model, plan, console)
        measurement = ErrorMeasurement(
            file=file,
            plan=plan,
            importance=importance,
            codec=codec,
            n_threads=settings.n_threads,
            console=console,
            directory=cache_dir(settings),
            is_dry=model.output is None,
            runs_model=settings.calibration.runs_model,
            text=settings.calibration.text,
            sensitivity=settings.types.sensitivity,
        )
        scales = choose_scales(settings, model, plan, importance, console)
        header = find_largest_header(settings, file, plan, items, replace(importance, scales=scales))
        allocation = allocate_types(target, items, header, measurement, list_fixed_types(settings, file, uses))
    allocation.apply(plan)
    check_fallbacks(plan, choices.no_fallback)
    choices = replace(choices, file_type=allocation.file_type(choices.file_type, target.upstream_only))
    model.plan_parts(plan, settings, {})  # final sizes
    if settings.output.part is not None:  # the types decide which tensors the part has
        check_source(file, plan_of_part(plan, settings), codec, console, n_threads=settings.n_threads, candidates={})
    config, notes = prepare_propagation(plan, settings, model, console)
    console.notes(notes)
    importance.scales = scales  # errors without them choose better types (docs/results/column-scales.md)
    return QuantizationJob(file, plan, choices, codec, importance, allocation, propagation_config=config)


def cache_dir(settings: Settings) -> Path | None:
    """Return the directory of OUT with links resolved; None only without OUT."""
    if settings.cache_path is not None or settings.output.path is None:
        return settings.cache_path
    return Path(os.path.realpath(settings.output.path)).parent


def calibrate_for_plan(settings: Settings, model: OpenedModel, plan: QuantizationPlan, console: Console) -> Importance:
    """Calibrate, or open an imatrix, and mark the tensors that use it. A dry run does not calibrate."""
    options, target = settings.calibration, settings.target
    prepared = calibration.prepare(
        options, model.file, plan, cache_dir(settings), is_dry=model.output is None, n_threads=settings.n_threads,
        n_compared_metrics=target.n_metrics if target else settings.n_compared_metrics, console=console,
    )
    importance = prepared.importance
    if not prepared.is_pending:
        options.select(importance)
        assign_imatrix(plan, importance.matrix)
        check_hessians(plan, importance, options.kind is not None)
    return importance


def find_largest_header(settings: Settings, file: GGUFFile, plan: QuantizationPlan, items: list[Item], importance: Importance) -> int:
    """Return an upper bound for the bytes of all headers, whatever types allocation chooses."""
    candidates = {item.planned.name: item.types for item in items}
    tensors = []
    for t in plan.tensors:
        types = candidates.get(t.name, [t.type])
        tensors.append(MeasuredTensor(replace(t, type=DITTO3 if DITTO3 in types else types[0])))
    propagates, max_bytes, part = settings.calibration.propagates, settings.output.max_bytes, settings.output.part_number
    options = settings.describe_options({q for types in candidates.values() for q in types}, propagates)
    errors = error_metadata(file, tensors, propagates)
    metadata = output_metadata(file, settings.choices, options, importance, errors, is_evaluated=settings.output.evaluate)
    header = pack_header(metadata, [t.tensor for t in plan.tensors], [t.type for t in plan.tensors], file.alignment)
    n_parts = part.count if part else 0 if max_bytes is None else min(len(plan.tensors), 2 * plan.size_before() // max_bytes + 1)
    return len(header) + n_parts * (PART_HEADER + file.alignment)


@dataclass(frozen=True, kw_only=True)
class QuantizeWritingJob(WritingJob):
    """The output of quantize, ready to be written."""

    job: QuantizationJob
    max_bytes: int | None  # of a part
    is_evaluated: bool  # --evaluate

    def pack_headers(self, tensors: Sequence[MeasuredTensor]) -> list[bytes]:
        file, job, parts = self.conversion.file, self.job, self.output.parts
        model_plan = job.model_plan or job.plan
        all_tensors = tensors if job.model_plan is None else [MeasuredTensor(t) for t in model_plan.tensors]
        errors = error_metadata(file, all_tensors, job.propagation_config is not None)
        metadata = output_metadata(file, job.choices, job.options, job.importance, errors, is_evaluated=self.is_evaluated)
        if self.part:
            metadata[PARTS_KEY] = string_value(PARTS_KEY, to_json(self.digests))
        headers = []
        for n, part in enumerate(parts, 1):
            planned = job.plan.tensors[part.first : part.last]
            number = self.part or (PartNumber(n, len(parts)) if self.output.is_split else None)
            keys = part_metadata(metadata, number, len(model_plan.tensors)) if number else metadata
            headers.append(pack_header(keys, [t.tensor for t in planned], [t.type for t in planned], file.alignment))
        return headers

    def list_dependencies(self, headers: Sequence[bytes]) -> dict:
        hashes = [hashlib.sha256(header).hexdigest() for header in headers]
        part = {DEPENDENCY: self.digests} if self.part else {}
        return self.conversion.list_dependencies(
            options=[self.job.choices.name, self.job.options, self.max_bytes], metadata=hashes, **part
        )


def prepare_writing(
    settings: Settings, model: OpenedModel, job: QuantizationJob, console: Console, stack: contextlib.ExitStack
) -> QuantizeWritingJob:
    """Prepare writing. The stack closes what this opens."""
    assert model.output is not None
    part, quantizer = settings.output.part_number, None
    if job.propagation_config is not None:
        console.note(job.propagation_config.description)
        quantizer = stack.enter_context(SequentialQuantizer(
            config=job.propagation_config, file=job.file, plan=job.plan, codec=job.codec, n_threads=settings.n_threads,
            warn=job.importance.warnings.append, console=console, scales=job.importance.scales,
        ))
    conversion = Conversion(
        file=job.file,
        plan=job.plan,
        codec=job.codec,
        importance=job.importance,
        n_threads=settings.n_threads,
        fallback_above=job.choices.fallback_above,
        sequential_quantizer=quantizer,
        checkpoint=model.checkpoint,
    )
    return QuantizeWritingJob(
        output=model.output,
        conversion=conversion,
        title=job.choices.name,
        lines=tensor_lines(job.plan, terminal_width()) if console.details else [],
        is_verified=settings.output.verify,
        job=job,
        max_bytes=settings.output.max_bytes,
        part=part,
        digests={} if part is None else digest_dependencies(conversion, job.model_plan or job.plan, part.count, f"{job.choices.name} {job.options}"),
        is_evaluated=settings.output.evaluate,
    )


def report_dry_run(settings: Settings, job: QuantizationJob, console: Console) -> Result:
    """Report types and sizes."""
    plan, width, importance_text = job.plan, terminal_width(), job.importance.describe()
    lines = tensor_lines(plan, width) if console.details else []
    expected = estimate(job.plan, job.codec, job.importance, settings.n_threads)
    dead, hessians = job.importance.dead_columns(plan), job.importance.hessian_uses(plan)
    lines.append(summary(plan, job.choices, width, allocation=job.allocation, calibration=calibration_lines(importance_text, dead, hessians)))
    times = ([expected.describe()] if expected else []) + ([job.propagation_config.description] if job.propagation_config else [])
    console.report("\n".join([*lines, *times]))
    tensors, totals = [TensorResult.make(t) for t in plan.tensors], Totals.compute(plan, allocation=job.allocation)
    for tensor in tensors:
        console.event("tensor", tensor.record())
    seconds = {"encoding_seconds": round(expected.encoding, 1)} if expected else {}
    console.event("summary", {"type": job.choices.name, "importance": importance_text, **seconds, **totals.record()})
    return Result.make(
        tensors, totals, type=job.choices.name, options=job.options, importance=importance_text, warnings=console.warnings
    )


def report_result(
    settings: Settings, writing: QuantizeWritingJob, written: WrittenFile, quality: RecordedQuality | None, console: Console
) -> Result:
    """Report the result, and write the files next to OUT."""
    job, output, path = writing.job, settings.output, writing.output.path
    plan, importance_text = job.plan, job.importance.describe()
    for warning in [*job.importance.warnings, *error_warnings(written.tensors)]:
        console.warn(warning)
    dead, hessians = writing.conversion.dead_columns(), writing.conversion.hessian_uses()
    console.report(summary(
        plan, job.choices, terminal_width(), calibration=calibration_lines(importance_text, dead, hessians), tensors=written.tensors, seconds=written.seconds,
        allocation=job.allocation,
    ))
    if quality is not None:
        console.report("\n".join(["", *quality_lines(quality, False)]))
    if output.verify:
        run = "; one token run" if written.was_run else ""
        console.report(f"verified: {len(plan.tensors)} tensors read back without a difference{run}")
    record = {
        "input": settings.source.hf_repo or str(settings.source.path),
        "output": [{"path": str(part), "bytes": part.stat().st_size} for part in written.paths],
        "type": job.choices.name,
        "options": job.options,
        "importance": importance_text,
        "version": __version__,
        "seconds": round(written.seconds, 3),
        "tensors_of_an_earlier_run": written.n_before,
        "verified": output.verify,
        "dead_columns": {name: c.n_dead for name, c in dead.items() if c.n_dead},
        "hessians": hessian_record(hessians),
        **(totals := Totals.compute(plan, written.tensors, job.allocation)).record(),
        **({} if quality is None else {"quality": quality.record()}),
    }
    console.event("summary", record)
    if output.report is not None:
        report = {**record, "warnings": console.warnings, "tensors": [t.record() for t in written.results]}
        write_beside("--report", output.report, to_json(report, 1).encode() + b"\n", path, output.force)
    if output.model_card is not None:
        write_beside("--model-card", output.model_card, make_card(settings, writing, written, quality).text().encode(), path, output.force)
    return Result.make(
        written.results, totals, type=job.choices.name, options=job.options, importance=importance_text, warnings=console.warnings,
        paths=written.paths, seconds=written.seconds,
    )


def make_card(settings: Settings, writing: QuantizeWritingJob, written: WrittenFile, quality: RecordedQuality | None) -> Card:
    job, repo, path = writing.job, settings.source.hf_repo, settings.source.path
    source = repo or Path(os.path.abspath(path or "")).name
    return Card(
        outputs=written.paths,
        source=writing.conversion.file,
        plan=job.plan,
        tensors=written.tensors,
        title=job.choices.title,
        importance=describe_importance(job.importance),
        reference=source,
        command=settings.command,
        repo=repo,
        quality=quality,
    )
