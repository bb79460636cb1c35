"""Calibration: run llama-imatrix on the model, and cache the result next to the output for the next type.

The cache is MODEL.imatrix.gguf, a usual imatrix, and MODEL.imatrix.json, the record of its inputs. If the model and its Hessians exceed the
memory, they are collected layer by layer (by_layer.py). Where a model cannot run so, the Hessians are collected in passes over ranges of
layers, one file each.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from gguf import GGMLQuantizationType

from .._base.console import Console
from .._base.encoding import to_argument
from .._base.errors import UserError
from .._base.files import check_free_space, fingerprint, read_record, temporary_directory
from .._base.locks import lock_directory
from .._base.memory import available_memory
from .._base.package import PACKAGE_DIR
from .._base.text import format_duration
from .._base.units import GIB, MIB
from .._formats.cache_names import find_passes, imatrix_cache_name
from .._formats.context import N_CONTEXT, context_length
from .._formats.gguf_file import GGUFFile
from .._formats.tensor_types import uses_metric
from .._native.process import describe_failure, run_streamed
from .._native.programs import find_tool
from .._native.text_file import check_text, count_chunks
from .._plan.imatrix_use import list_types_using_imatrix
from .._plan.plan import QuantizationPlan
from . import by_layer, proxy
from .cost import CalibrationCost, choose_importance, split_layers
from .importance import BUILT_IN, KINDS, Importance, open_importance
from .options import COST, DEFAULT_CHUNKS, MEMORY_SHARE, CalibrationOptions
from .proxy import ProxyModel

TEXT = PACKAGE_DIR / "data" / "calibration.txt"
TEMPORARY = ".calibration-"
PROGRAM = "llama-imatrix"


Layers = list[int] | None  # of a pass; None: all


@dataclass(frozen=True, kw_only=True)
class CalibrationSetup:
    """A configured calibration, whose kind is not chosen yet."""

    file: GGUFFile
    cost: CalibrationCost  # of the model, or of its proxy
    directory: Path  # of the cached results
    text: Path
    text_name: str
    n_chunks: int
    text_chunks: int  # chunks in the text, counted up to n_chunks + 1, so that Record.serves() can tell a longer text
    n_threads: int
    memory_limit: float  # bytes
    program: Path
    proxy_model: ProxyModel | None = None
    devices: tuple[str, ...] = ()
    mtp_layers: bool = False  # run the layers that predict further tokens too

    @property
    def n_context(self) -> int:
        """Tokens per chunk."""
        return context_length(self.file)

    @property
    def n_tokens(self) -> int:
        return self.n_chunks * self.n_context

    @property
    def text_title(self) -> str:
        """The name of the text in a sentence."""
        return "the built-in text" if self.text_name == BUILT_IN else self.text_name


@dataclass(frozen=True, kw_only=True)
class CalibrationRun(CalibrationSetup):
    """A run of llama-imatrix, in one or more passes."""

    kind: str

    def cache_path(self, layers: Layers) -> Path:
        """Return the path of the cached result for a range of layers."""
        return self.directory / imatrix_cache_name(self.file.stem, layers)

    def list_dependencies(self) -> dict:
        """List what a result depends on, except kind and layers."""
        return {
            "model": self.file.fingerprints(),
            "text": fingerprint(self.text),
            "chunks": self.n_chunks,
            "context": self.n_context,
        } | ({"mtp_layers": True} if self.mtp_layers else {}) | ({} if self.proxy_model is None else self.proxy_model.list_dependencies())

    def open_cache(self) -> Importance | None:
        """Open the cached result, if it is valid for this run."""
        record = Record.read(cache := self.cache_path(None))
        is_valid = record is not None and record.layers is None and record.serves(self, self.list_dependencies())
        return self.open_results([cache]) if is_valid else None

    def open_results(self, paths: Sequence[Path]) -> Importance:
        """Open the files of the passes."""
        return open_importance(paths, self.kind, self.text_name, self.cost.full_columns)

    def memory_needed(self, layers: Layers = None) -> int:
        return self.cost.collection_bytes(self.kind, layers)

    @property
    def needs_passes(self) -> bool:
        """Whether the Hessians of all layers at once exceed the memory. Without room for those of one layer, block-diagonal ones take one pass."""
        if self.kind == "diagonal" or self.cost.by_layer or self.memory_needed() <= self.memory_limit:
            return False
        return self.kind == "full" or all(self.memory_needed([layer]) <= self.memory_limit for layer in self.cost.layers)

    def describe(self, passes: Sequence[Layers]) -> str:
        """Describe the run, with the estimated time of a pass and the memory of the largest one."""
        statistics = {"diagonal": "diagonal Hessians", "block": "block-diagonal Hessians", "full": "full Hessians"}[self.kind]
        statistics += "" if self.cost.full_columns is None else f" up to {self.cost.full_columns:,} columns, else block-diagonal ones,"
        proxy_model = "" if self.proxy_model is None else f", proxy model {self.proxy_model.title}"
        n_passes, each = (f"{len(passes)} passes over layers, ", " each") if len(passes) > 1 else ("layer by layer, " if self.cost.by_layer else "", "")
        seconds = format_duration(self.cost.seconds(self.kind, self.n_tokens, self.n_threads))
        return (
            f"calibration: {statistics} of {len(self.cost.inputs)} inputs, {self.n_chunks} chunks of {self.n_context} tokens of "
            f"{self.text_title}{proxy_model}, {n_passes}estimate {seconds}{each} on {self.n_threads} threads, "
            f"{max(map(self.memory_needed, passes)) / MIB:,.0f} MiB of memory; --no-calibration skips it"
        )


@dataclass(frozen=True)
class Record:
    """The content of MODEL.imatrix.json: the inputs of a cached result, and its fingerprint."""

    made_from: dict
    kind: str
    layers: Layers
    result: dict  # fingerprint
    full_columns: int | None = None  # of CalibrationCost

    def __post_init__(self) -> None:
        """Raise ValueError if the content is not a record: the file may be the user's."""
        are_layers = isinstance(self.layers, list) and self.layers and all(type(n) is int for n in self.layers)
        if (
            not isinstance(self.made_from, dict) or self.kind not in KINDS or not (self.layers is None or are_layers)
            or type(self.full_columns) not in (int, type(None))
        ):
            raise ValueError("not a record of a calibration")

    @classmethod
    def read(cls, cache: Path) -> Record | None:
        """Read the record of a cached file; None if there is none, or if it describes another file."""
        return read_record(cls, record_path(cache), cache)

    def serves(self, run: CalibrationRun, dependencies: dict) -> bool:
        """Whether the result is valid for a run with these dependencies."""
        recorded = dict(self.made_from)
        if isinstance(recorded.get("chunks"), int):
            # chunks may have been overestimated from bytes (count_chunks()); such a run used the full text
            recorded["chunks"] = min(recorded["chunks"], run.text_chunks)
        if "proxy" not in recorded:  # a result of the model itself is better
            dependencies = {key: value for key, value in dependencies.items() if key != "proxy"}
        recorded_limit, needed_limit = self.full_columns, run.cost.full_columns
        is_wide_enough = run.kind != "full" or recorded_limit is None or (needed_limit is not None and recorded_limit >= needed_limit)
        return recorded == dependencies and KINDS.index(self.kind) >= KINDS.index(run.kind) and is_wide_enough


def record_path(cache: Path) -> Path:
    return cache.with_suffix(".json")


def calibrate(run: CalibrationRun, console: Console) -> list[Path]:
    """Run llama-imatrix, or reuse cached results, and return the files. Raise UserError if llama-imatrix fails.

    One run at a time uses a directory, so that the next one can reuse its results.
    """
    try:
        with lock_directory(run.directory, lambda: console.note(f"another run calibrates in {run.directory}: waiting for it")):
            return _calibrate(run, console)
    except OSError as e:
        raise UserError(f"calibration: {run.directory}: {e.strerror}; write OUT to another directory, or pass --no-calibration") from e


def _calibrate(run: CalibrationRun, console: Console) -> list[Path]:
    dependencies = run.list_dependencies()
    cache = run.cache_path(None)
    record = Record.read(cache)
    if record and record.layers is None and record.serves(run, dependencies):
        console.note(f"reusing {cache}: same model and text")
        return [cache]
    refuse_foreign(cache)
    finished, to_run = _plan_passes(run, dependencies, console)
    for layers in to_run:
        refuse_foreign(run.cache_path(layers))
    if record:
        console.note(f"{cache} does not match this model, text, number of chunks or --importance; computing it again")
    results = [*finished, *_run_passes(run, to_run, dependencies, console)]
    return sorted(results, key=lambda p: (len(p.name), p.name))  # numeric order of layers, which have no leading zeros


def _run_passes(run: CalibrationRun, passes: Sequence[Layers], dependencies: dict, console: Console) -> list[Path]:
    """Run llama-imatrix once per pass and return the cached files."""
    if not passes:
        return []
    console.note(run.describe(passes))
    if len(passes) > 1:
        console.note("an interrupted calibration resumes after the last finished pass")
    results = []
    run.file.complete(run.program.name)
    with contextlib.ExitStack() as stack:
        # keep a link: the parts of a split model may be next to it, not next to its target
        model_path = Path(os.path.abspath(run.file.path))
        if run.proxy_model is not None:
            model_path = stack.enter_context(run.proxy_model.provide(model_path, run.directory, run.n_threads, console))
        for i, layers in enumerate(passes):
            title = "calibration" if len(passes) == 1 else f"pass {i + 1} of {len(passes)}"
            results.append(collect(run, model_path, layers, dependencies=dependencies, title=title, console=console))
    return results


def _plan_passes(run: CalibrationRun, dependencies: dict, console: Console) -> tuple[Sequence[Path], Sequence[Layers]]:
    """Return the files of finished passes and the passes to run: one over all layers or, if the Hessians exceed the memory, ranges of layers."""
    if run.needs_passes:
        finished, missing_layers = find_finished_passes(run, dependencies)
        to_run = split_layers(run.cost, missing_layers, run.memory_limit, run.kind)
        if finished:
            console.note(f"reusing {len(finished)} finished passes over layers, such as {finished[0]}")
        return finished, to_run
    if run.kind == "block" and run.memory_needed() > run.memory_limit:
        console.note(f"model and Hessians need {run.memory_needed() / GIB:.1f} GiB, the limit is {run.memory_limit / GIB:.1f} GiB: this may be slow")
    return [], [None]


def find_finished_passes(run: CalibrationRun, dependencies: dict) -> tuple[list[Path], list[int]]:
    """Return the valid files of an earlier run, and the layers that they lack."""
    results, missing = [], run.cost.layers
    for path in sorted(run.directory.glob(f"{glob.escape(run.cache_path(None).stem)}.layers-*.gguf")):
        record = Record.read(path)
        if record and (layers := record.layers) and record.serves(run, dependencies):
            results.append(path)
            missing = [n for n in missing if not layers[0] <= n <= layers[-1]]
    return results, missing


def refuse_foreign(cache: Path) -> None:
    """Raise UserError if there is a file at the place of a cache that is not one."""
    if cache.exists() and Record.read(cache) is None:
        raise UserError(f"{cache} is not from a calibration by ggml-ext, or was changed: pass it with --imatrix, or move it away")


def collect(
    run: CalibrationRun, model_path: Path, layers: Layers, *, dependencies: dict, title: str, console: Console
) -> Path:
    """Run llama-imatrix once and cache its result with a record. A failed run leaves nothing.

    Args:
        run: the calibration.
        model_path: the file to run, the model or its proxy.
        layers: the layers to collect, None for all.
        dependencies: of the run.
        title: of the progress bar.
        console: gets notes and the progress bar.

    Returns:
        The cached file.

    Raises:
        UserError: llama-imatrix fails, or the result cannot be written.
    """
    cache, needed = run.cache_path(layers), run.cost.hessian_bytes(run.kind, layers)
    check_free_space(run.directory, needed, "calibration", f" for {cache}", "pass --importance block or diagonal")
    try:
        with temporary_directory(run.directory, TEMPORARY, console.note) as directory:
            result = run_pass(run, model_path, layers, directory=directory, title=title, console=console)
            record = Record(dependencies, run.kind, layers, fingerprint(result), run.cost.full_columns)
            record_file = directory / "record.json"
            record_file.write_text(json.dumps(asdict(record), indent=1) + "\n")
            os.replace(record_file, record_path(cache))
            os.replace(result, cache)
    except OSError as e:
        raise UserError(f"calibration: cannot write {cache}: {e.strerror}; write OUT to another directory, or pass --no-calibration") from e
    return cache


def run_pass(run: CalibrationRun, model_path: Path, layers: Layers, *, directory: Path, title: str, console: Console) -> Path:
    """Run the model once and return the file in the directory. Raises and other arguments: as for collect()."""
    result = directory.resolve() / "imatrix.gguf"
    if run.cost.by_layer:
        streams = by_layer.list_command(
            model_path, run.text, n_context=run.n_context, n_chunks=run.n_chunks, n_threads=run.n_threads, mtp_layers=run.mtp_layers
        )
        by_layer.collect_by_layer(
            streams, result, lambda n: run.cost.kind_for(n, run.kind), n_threads=run.n_threads, title=title, console=console
        )
        return result
    # -b: logits of one chunk at a time; --output-frequency: no intermediate results
    command = [run.program, "-m", os.path.abspath(model_path), *run.devices, "-f", to_argument(run.text.name), "-c", run.n_context]
    command += ["-b", run.n_context, "--chunks", run.n_chunks, "-t", run.n_threads, "--output-frequency", 1 << 30]
    command += ["--mtp-layers"] if run.mtp_layers else []
    command += [] if run.kind == "diagonal" else ["--moments", run.kind]
    command += [] if run.cost.full_columns is None else ["--moments-columns", run.cost.full_columns]
    command += [] if layers is None else ["--layers", f"{layers[0]}-{layers[-1]}"]
    # the file records the text's path as given, so pass the name only
    run_program([*map(str, command), "-o", str(result)], run.text.parent, run, title, console)
    if not result.is_file():
        raise UserError(f"calibration: {run.program.name} wrote no file; pass --no-calibration to skip it")
    return result


def run_program(command: list[str], directory: Path, run: CalibrationRun, title: str, console: Console) -> None:
    """Run llama-imatrix with a progress bar. Raise UserError with its last error line if it fails."""
    has_estimate = False
    with console.bar(title, run.n_chunks, "chunk") as bar:

        def on_output(text: str) -> None:
            nonlocal has_estimate
            if not has_estimate and (eta := re.search(r"seconds per pass - ETA (?:(\d+) hours )?([\d.]+) minutes", text)):
                has_estimate = True
                console.note(f"{title}: estimate {format_duration(3600 * int(eta[1] or 0) + 60 * float(eta[2]))}")
            if total := re.search(r"computing over (\d+) chunks", text):
                bar.total = int(total[1])
            bar.update(len(re.findall(r"\[\d+\][^,\[]*,", text)) - bar.n)

        code, log = run_streamed(command, directory, on_output)
    if code:
        devices = f"check {' '.join(run.devices)}, " if run.devices else ""
        without = "an imatrix with --imatrix, or --no-calibration to skip it"
        raise UserError("calibration: " + describe_failure(
            "llama-imatrix", code, log, f"for {run.file.path} and {run.text}",
            hint=f"{devices}pass another text with --imatrix-from, {without}",
            less_memory=f"its limit was {run.memory_limit / GIB:.1f} GiB, pass a smaller --memory, {without}",
        ))


def expects_importance(options: CalibrationOptions) -> bool:
    """Whether prepare() will provide statistics for a plan that uses them; llama.cpp's rules need to know before."""
    if options.kind == "none" or options.imatrix is not None:
        return options.kind != "none"
    return options.runs_model and _describe_missing(options, find_tool(PROGRAM)) is None


def _describe_missing(options: CalibrationOptions, program: Path | None) -> str | None:
    """Describe what the package lacks for a calibration, with a verb; None if it lacks nothing. program: llama-imatrix."""
    if program is None:
        return "llama-imatrix is"
    return "the built-in text is" if options.text is None and not TEXT.is_file() else None


@dataclass(frozen=True)
class PreparedImportance:
    """The statistics for the encoders."""

    importance: Importance
    is_pending: bool = False  # in a dry run: only kind and description are known


def prepare(
    options: CalibrationOptions, file: GGUFFile, plan: QuantizationPlan, directory: Path | None, *, is_dry: bool, n_threads: int,
    n_compared_metrics: int, console: Console,
) -> PreparedImportance:
    """Provide the calibration statistics: from --imatrix, from a calibration, or none.

    Args:
        options: the options of calibration.
        file: the model.
        plan: the types of its tensors.
        directory: that of OUT, for the cached results; None for a dry run without OUT.
        is_dry: run nothing; cached results are used.
        n_threads: of llama-imatrix.
        n_compared_metrics: different factorizations of a Hessian (metric_name()) among the types that a target compares; 0 without a target.
        console: gets notes and the progress bar.

    Raises:
        UserError: the options, the text, the model or the memory do not allow it, or llama-imatrix fails.
    """
    if options.kind != "none" and options.imatrix is not None:
        return PreparedImportance(open_importance(find_passes(options.imatrix), options.kind))
    types = list_types_using_imatrix(plan)
    program = _find_program(options, types, console)
    if program is None:
        return PreparedImportance(Importance())
    setup = configure_calibration(
        options, file, directory or Path(), n_threads=n_threads, program=program, mtp_layers=plan.runs_mtp_layers
    )
    setup = _fit_into_memory(options, setup, types, is_dry, console)
    kind, full_columns = _choose_kind(options, setup, types, n_compared_metrics, console)
    run = CalibrationRun(**vars(setup) | {"cost": replace(setup.cost, full_columns=full_columns)}, kind=kind)
    if not is_dry:
        return PreparedImportance(run.open_results(calibrate(run, console)))
    if directory is not None and (cached := run.open_cache()) is not None:
        return PreparedImportance(cached)
    passes: Sequence[Layers] = split_layers(run.cost, run.cost.layers, run.memory_limit, run.kind) if run.needs_passes else [None]
    importance = Importance(run.kind, description=f"{run.kind}, by a {run.describe(passes)}", full_columns=full_columns)
    return PreparedImportance(importance, is_pending=True)


def _find_program(options: CalibrationOptions, types: Sequence[GGMLQuantizationType], console: Console) -> Path | None:
    """Return llama-imatrix if it should run, else None. Warn if types that use an imatrix get none.

    types: list_types_using_imatrix(). UserError if a calibration is requested and the package lacks something for it.
    """
    if options.kind == "none":
        return None
    if not options.runs_model:
        if types:
            console.warn(f"--no-calibration: quantizing without an imatrix costs quality: {COST}")
        return None
    is_requested = options.text is not None or options.kind is not None
    program = find_tool(PROGRAM)
    missing = _describe_missing(options, program)
    if missing and is_requested:
        raise UserError(f"calibration: {missing} not in the package: reinstall ggml-ext, or pass --imatrix FILE or --no-calibration")
    if missing and types:
        console.warn(f"{missing} not in the package: quantizing without an imatrix costs quality ({COST}); pass one with --imatrix FILE")
    return program if missing is None and (is_requested or types) else None


def configure_calibration(
    options: CalibrationOptions, file: GGUFFile, directory: Path, *, n_threads: int, program: Path, mtp_layers: bool = False
) -> CalibrationSetup:
    """Configure a calibration with the model itself, except its kind. Raise UserError if the text or the model cannot be used."""
    text, text_name = (TEXT, BUILT_IN) if options.text is None else (options.text, options.text.name)
    n_bytes = check_text(text)
    cost = CalibrationCost.read(file, mtp_layers)
    if not cost.inputs:
        raise UserError(f"calibration: {file.path} has no layers for llama-imatrix to collect inputs of: pass --no-calibration")
    n_chunks = options.n_chunks or DEFAULT_CHUNKS * N_CONTEXT // context_length(file)
    text_chunks = count_chunks(file, text, n_bytes, n_chunks)
    return CalibrationSetup(
        file=file,
        cost=cost,
        directory=directory,
        text=Path(os.path.realpath(text)),  # llama-imatrix runs in the directory of the file itself
        text_name=text_name,
        n_chunks=min(n_chunks, text_chunks),
        text_chunks=text_chunks,
        n_threads=n_threads,
        memory_limit=options.memory * GIB if options.memory else MEMORY_SHARE * available_memory(),
        program=program,
        devices=options.devices.arguments(),
        mtp_layers=mtp_layers,
    )


def _fit_into_memory(
    options: CalibrationOptions, setup: CalibrationSetup, types: Sequence[GGMLQuantizationType], is_dry: bool, console: Console
) -> CalibrationSetup:
    """Collect layer by layer, or with a proxy model, if the model and the Hessians exceed the memory.

    types: list_types_using_imatrix(). A dry run does not load the model, and assumes that its graph can be cut into layers.
    """
    kind = options.kind or ("full" if any(map(uses_metric, types)) else "diagonal")
    is_itself = options.proxy_model in (None, proxy.SOURCE) and not setup.devices
    if kind != "diagonal" and is_itself and setup.cost.collection_bytes(kind) > setup.memory_limit:
        obstacle = by_layer.find_obstacle(setup.file, setup.text, is_dry, setup.mtp_layers)
        if not obstacle:
            return replace(setup, cost=replace(setup.cost, by_layer=True))
        console.note(f"the Hessians cannot be collected layer by layer: {obstacle}")
    proxy_model = proxy.find_proxy(options.proxy_model, setup.file, setup.memory_limit, console)
    if proxy_model is None:
        return setup
    return replace(setup, proxy_model=proxy_model, cost=replace(setup.cost, n_bytes=proxy_model.n_bytes, type=proxy_model.product_type()))


def _choose_kind(
    options: CalibrationOptions, setup: CalibrationSetup, types: Sequence[GGMLQuantizationType], n_compared_metrics: int,
    console: Console,
) -> tuple[str, int | None]:
    """Choose one of KINDS, and with "full" the most columns of a full Hessian; None: no limit.

    types: list_types_using_imatrix(); n_compared_metrics: of prepare().
    """
    cost, limit, n_threads = setup.cost, setup.memory_limit, setup.n_threads
    if options.kind is None and not any(map(uses_metric, types)):
        return "diagonal", None
    if options.kind is None:
        n_columns, reason = choose_importance(cost, setup.n_tokens, limit, n_threads, n_compared_metrics)
        if reason:
            where = f" of inputs of more than {n_columns:,} columns" if n_columns else ""
            console.note(f"block-diagonal Hessians{where}: {reason}; --importance full overrides this")
        return ("full" if n_columns else "block"), cost.full_limit(n_columns)
    if options.kind == "full" and cost.by_layer:
        split_layers(cost, cost.layers, limit, "full")  # raises UserError if a layer does not fit
    if options.kind == "full" and (needed := cost.factorization_bytes(n_threads, n_compared_metrics)) > limit:
        fewer = ", fewer --threads" if n_compared_metrics else ""
        console.note(
            f"factorizing full Hessians needs {needed / GIB:.1f} GiB, the limit is {limit / GIB:.1f} GiB: this may be slow, or "
            f"fail; --importance block{fewer} needs less"
        )
    return options.kind, None
