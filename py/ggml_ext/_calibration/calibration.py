"""Calibration: llama-imatrix on the model that is to be quantized, its result kept beside the output for the next type.

Kept are MODEL.imatrix.gguf, an importance matrix like any other, and MODEL.imatrix.json, which says what it was made from.
Whole matrices that do not fit into memory at once are collected in passes over ranges of layers, one file for each.
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
from .._base.files import fingerprint, free_space, lock_directory, read_record, temporary_directory
from .._base.memory import available_memory
from .._base.package import FOLDER
from .._base.text import format_duration
from .._base.units import GIB, MIB
from .._formats.cache_names import imatrix_cache_name
from .._formats.context import N_CONTEXT, context_length
from .._formats.gguf_file import GGUFFile, header_bytes
from .._native.process import describe_failure, run_streamed
from .._native.programs import find_tool
from .._native.text_file import FLAG, check_text, count_tokens
from .._plan.plan import Plan, importance_uses, uses_metric
from . import proxy
from .cost import Model, choose_importance, split_layers
from .importance import BUILT_IN, KINDS, Importance, open_importance
from .options import COST, DEFAULT_CHUNKS, MEMORY_SHARE, CalibrationOptions
from .proxy import ProxyModel

TEXT = FOLDER / "data" / "calibration.txt"
TEMPORARY = ".calibration-"


@dataclass(frozen=True)
class Calibration:
    """What is to be run, and where its results are kept."""

    file: GGUFFile
    model: Model
    folder: Path
    text: Path
    text_name: str
    kind: str
    n_chunks: int
    text_chunks: int  # that the text has, if they are no more than n_chunks; else more than those
    n_threads: int
    memory: float
    program: Path
    proxy_model: ProxyModel | None = None
    devices: tuple[str, ...] = ()

    @property
    def n_context(self) -> int:
        """Tokens of a chunk."""
        return context_length(self.file)

    @property
    def n_tokens(self) -> int:
        return self.n_chunks * self.n_context

    def kept(self, layers: list[int] | None) -> Path:
        """The result for all layers (None) or for a range of them."""
        return self.folder / imatrix_cache_name(self.file.stem, layers)

    def made_from(self) -> dict:
        """What makes a result another one, but for kind and layers."""
        return {
            "model": [fingerprint(part.path, header_bytes(part)) for part in self.file.parts],
            "text": fingerprint(self.text),
            "chunks": self.n_chunks,
            "context": self.n_context,
        } | ({} if self.proxy_model is None else self.proxy_model.made_from())

    def finished(self, folder: Path) -> Importance | None:
        """What an earlier run left in the folder, if it serves."""
        there = replace(self, folder=folder)
        record = Record.read(kept := there.kept(None))
        serves = record is not None and record.layers is None and record.serves(there, there.made_from())
        return open_importance([kept], self.kind, self.text_name) if serves else None

    def memory_needed(self, layers: list[int] | None = None) -> int:
        return self.model.n_bytes + self.model.moments_bytes(self.kind, layers)

    @property
    def text_title(self) -> str:
        """Within a sentence."""
        return "the built-in text" if self.text_name == BUILT_IN else self.text_name

    def describe(self) -> str:
        what = {"diagonal": "mean squares", "block": "second moments of blocks", "full": "second moments"}[self.kind]
        seconds = self.model.seconds(self.kind, self.n_tokens, self.n_threads)
        return (
            f"calibration: {what} of {len(self.model.inputs)} inputs, {self.n_chunks} chunks of {self.n_context} tokens of "
            f"{self.text_title}{'' if self.proxy_model is None else f', by the model {self.proxy_model.title}'}, an estimated {format_duration(seconds)} on "
            f"{self.n_threads} threads, {self.memory_needed() / MIB:,.0f} MiB of memory; --no-calibration leaves it out"
        )


@dataclass(frozen=True)
class Record:
    """Content of MODEL.imatrix.json: what a kept result was made from, and how to recognise it."""

    made_from: dict
    kind: str
    layers: list[int] | None
    result: dict  # fingerprint

    def __post_init__(self) -> None:
        """ValueError for what is no record: the file may have been written by anyone."""
        are_layers = isinstance(self.layers, list) and self.layers and all(type(n) is int for n in self.layers)
        if not isinstance(self.made_from, dict) or self.kind not in KINDS or not (self.layers is None or are_layers):
            raise ValueError("no record of a calibration")

    @classmethod
    def read(cls, kept: Path) -> Record | None:
        """The record of a kept file; None if there is none, or if the file is another one than it describes."""
        return read_record(cls, record_path(kept), kept)

    def serves(self, run: Calibration, made_from: dict) -> bool:
        """made_from: what the run's made_from() gave. A record may hold more chunks than the text has: the result is of all."""
        theirs = dict(self.made_from)
        if isinstance(theirs.get("chunks"), int):
            theirs["chunks"] = min(theirs["chunks"], run.text_chunks)
        if "stand_in" not in theirs:  # of the model itself, which is better
            made_from = {key: value for key, value in made_from.items() if key != "stand_in"}
        return theirs == made_from and KINDS.index(self.kind) >= KINDS.index(run.kind)


def record_path(kept: Path) -> Path:
    return kept.with_suffix(".json")


def calibrate(run: Calibration, console: Console) -> list[Path]:
    """Files with the importance matrix: kept ones that serve, others made. UserError where llama-imatrix fails.

    One run at a time in a folder: the next one may use what it keeps, and does not replace it meanwhile.
    """
    try:
        with lock_directory(run.folder, lambda: console.note(f"another run calibrates in {run.folder}: waiting for its end")):
            return _calibrate(run, console)
    except OSError as e:
        raise UserError(f"calibration: {run.folder}: {e.strerror}; write OUT to another folder, or pass --no-calibration") from e


def _calibrate(run: Calibration, console: Console) -> list[Path]:
    made_from = run.made_from()
    kept = run.kept(None)
    record = Record.read(kept)
    if record and record.layers is None and record.serves(run, made_from):
        console.note(f"{kept} is of this model and text: used again")
        return [kept]
    if kept.exists() and record is None:
        raise UserError(
            f"{kept} exists and was not made by a calibration of this program, or was changed: pass it with --imatrix, or move it away"
        )
    passes: list[list[int] | None] = [None]
    done: list[Path] = []
    if run.kind == "full" and run.memory_needed() > run.memory:
        done, left = finished_passes(run, made_from)
        passes = split_layers(run.model, left, run.memory)
        if done:
            console.note(f"{len(done)} finished passes over layers are used again, such as {done[0]}")
    elif run.memory_needed() > run.memory and run.kind == "block":
        console.note(f"{run.memory_needed() / GIB:.1f} GiB are needed for model and moments, {run.memory / GIB:.1f} may be used: this may be slow")
    if record:
        console.note(f"{kept} is of another model, text or number of chunks, or holds less: made again")
    console.note(run.describe())
    if len(passes) > 1:
        console.note(f"{len(passes)} passes over layers, each as long as that; finished ones are kept if this is interrupted")
    with contextlib.ExitStack() as stack:
        # a link is not followed: beside its target there may be no parts of a split model
        model = Path(os.path.abspath(run.file.path))
        if run.proxy_model is not None:
            model = stack.enter_context(run.proxy_model.made(model, run.folder, run.n_threads, console))
        for i, layers in enumerate(passes):
            title = "calibration" if len(passes) == 1 else f"pass {i + 1} of {len(passes)}"
            done.append(collect(run, model, made_from, layers, title, console))
    return sorted(done, key=lambda p: (len(p.name), p.name))


def finished_passes(run: Calibration, made_from: dict) -> tuple[list[Path], list[int]]:
    """Kept files of an earlier run that serve, and the layers that they lack."""
    found, left = [], run.model.layers
    for path in sorted(run.folder.glob(f"{glob.escape(run.kept(None).stem)}.layers-*.gguf")):
        record = Record.read(path)
        if record and record.layers and record.serves(run, made_from):
            found.append(path)
            left = [n for n in left if not record.layers[0] <= n <= record.layers[-1]]
    return found, left


def collect(
    run: Calibration, model: Path, made_from: dict, layers: list[int] | None, title: str, console: Console
) -> Path:
    """One run of llama-imatrix, its result kept with its record; nothing is left where it fails or is interrupted."""
    kept, needed = run.kept(layers), run.model.moments_bytes(run.kind, layers)
    if (free := free_space(run.folder)) < needed:
        raise UserError(
            f"no space left on device: calibration needs {needed / MIB:,.0f} MiB for {kept}, {free / MIB:,.0f} MiB are free; free some "
            "space, or pass --importance block or diagonal"
        )
    # -b: logits of one chunk at a time; --output-frequency: no copies of unfinished results
    command = [run.program, "-m", os.path.abspath(model), *run.devices, "-f", to_argument(run.text.name), "-c", run.n_context]
    command += ["-b", run.n_context, "--chunks", run.n_chunks, "-t", run.n_threads, "--output-frequency", 1 << 30]
    command += [] if run.kind == "diagonal" else ["--moments", run.kind]
    command += [] if layers is None else ["--layers", f"{layers[0]}-{layers[-1]}"]
    try:
        with temporary_directory(run.folder, TEMPORARY, console.note) as folder:
            result = folder.resolve() / "imatrix.gguf"
            # the text by its name alone: the file records it
            run_program([*map(str, command), "-o", str(result)], run.text.parent, run, title, console)
            if not result.is_file():
                raise UserError(f"calibration: {run.program.name} wrote no file; pass --no-calibration to go on without")
            record = Record(made_from, run.kind, layers, fingerprint(result))
            described = folder / "record.json"
            described.write_text(json.dumps(asdict(record), indent=1) + "\n")
            os.replace(described, record_path(kept))
            os.replace(result, kept)
    except OSError as e:
        raise UserError(f"calibration: cannot write {kept}: {e.strerror}; write OUT to another folder, or pass --no-calibration") from e
    return kept


def run_program(command: list[str], folder: Path, run: Calibration, title: str, console: Console) -> None:
    """llama-imatrix with a progress bar. UserError with its last error line if it fails; it never outlives this call."""
    told = False
    with console.bar(title, run.n_chunks, "chunk") as bar:

        def heard(text: str) -> None:
            nonlocal told
            if not told and (eta := re.search(r"seconds per pass - ETA (?:(\d+) hours )?([\d.]+) minutes", text)):
                told = True
                console.note(f"{title} takes about {format_duration(3600 * int(eta[1] or 0) + 60 * float(eta[2]))}")
            if total := re.search(r"computing over (\d+) chunks", text):
                bar.total = int(total[1])
            bar.update(len(re.findall(r"\[\d+\][^,\[]*,", text)) - bar.n)

        code, log = run_streamed(command, folder, heard)
    if code:
        devices = f"check {' '.join(run.devices)}, " if run.devices else ""
        without = "an importance matrix with --imatrix, or --no-calibration to go on without"
        raise UserError("calibration: " + describe_failure(
            "llama-imatrix", code, log, f"for {run.file.path} and {run.text}", f"{devices}pass another text with --imatrix-from, {without}",
            f"it was to use at most {run.memory / GIB:.1f} GiB, pass a smaller --memory, {without}"
        ))


def expects_importance(wanted: CalibrationOptions) -> bool:
    """Whether prepare() will give importances if a plan has a use for them: llama.cpp's rules for stock files ask before."""
    if wanted.kind == "none" or wanted.imatrix is not None:
        return wanted.kind != "none"
    return wanted.runs_model and _missing(wanted) is None


def _missing(wanted: CalibrationOptions) -> str | None:
    """What the package lacks for a calibration, as the beginning of a sentence."""
    if find_tool("llama-imatrix") is None:
        return "llama-imatrix is"
    return "the built-in text is" if wanted.text is None and not TEXT.is_file() else None


def prepare(
    wanted: CalibrationOptions, file: GGUFFile, plan: Plan, folder: Path | None, n_threads: int, n_types: int, console: Console
) -> Importance | Calibration:
    """What the encoders get: from --imatrix, from a calibration that is run here, or nothing.

    folder: of OUT, None for a dry run, which gets the calibration that would be run; n_types: types with second moments that a target
    compares, 0 without a target. UserError for what the user can change.
    """
    if wanted.kind == "none":
        return Importance()
    if wanted.imatrix is not None:
        return open_importance([wanted.imatrix], wanted.kind)
    uses = importance_uses(plan)
    if not wanted.runs_model:
        if uses:
            console.warn(f"--no-calibration: quantized without importance data, which costs quality: {COST}")
        return Importance()
    is_asked = wanted.text is not None or wanted.kind is not None
    if not uses and not is_asked:
        return Importance()
    if what := _missing(wanted):
        if is_asked:
            raise UserError(f"calibration: {what} not in the package: reinstall ggml-ext, or pass --imatrix FILE or --no-calibration")
        console.warn(
            f"{what} not in the package: quantized without importance data, which costs quality ({COST}); --imatrix FILE passes some"
        )
        return Importance()
    run = make_run(wanted, file, folder or Path(), n_threads, find_tool("llama-imatrix"), console)
    run = replace(run, kind=_choose_kind(wanted, run, uses, n_types, console))
    return run if folder is None else open_importance(calibrate(run, console), run.kind, run.text_name)


def make_run(wanted: CalibrationOptions, file: GGUFFile, folder: Path, n_threads: int, program: Path, console: Console) -> Calibration:
    """A calibration whose kind is still to be chosen. UserError for a text that does not serve."""
    text, text_name = (TEXT, BUILT_IN) if wanted.text is None else (wanted.text, wanted.text.name)
    n_bytes = check_text(text)
    model = Model.read(file)
    if not model.inputs:
        raise UserError(f"calibration: {file.path} has no blocks that llama-imatrix could collect inputs of: pass --no-calibration")
    n_asked = wanted.n_chunks or DEFAULT_CHUNKS * N_CONTEXT // context_length(file)
    text_chunks = count_chunks(file, text, n_bytes, n_asked)
    memory = wanted.memory * GIB if wanted.memory else MEMORY_SHARE * available_memory()
    found = proxy.find(wanted.proxy_model, file, memory, console)
    if found is not None:
        model = replace(model, n_bytes=found.n_bytes, type=found.product_type())
    # with links resolved: llama-imatrix gets the name alone, and runs in the folder of the file itself
    text = Path(os.path.realpath(text))
    return Calibration(
        file, model, folder, text, text_name, KINDS[0], min(n_asked, text_chunks), text_chunks, n_threads, memory, program, found, wanted.devices.arguments()
    )


def _choose_kind(wanted: CalibrationOptions, run: Calibration, uses: Sequence[GGMLQuantizationType], n_types: int, console: Console) -> str:
    """One of KINDS. uses: types that importances help; n_types: see prepare()."""
    if wanted.kind is None and not any(map(uses_metric, uses)):
        return "diagonal"
    if wanted.kind is None:
        kind, why = choose_importance(run.model, run.n_tokens, run.memory, run.n_threads, n_types)
        if why:
            console.note(f"second moments of blocks: {why}; --importance full asks for more")
        return kind
    if wanted.kind == "full" and (needed := run.model.factorization_bytes(run.n_threads, n_types)) > run.memory:
        fewer = ", fewer --threads" if n_types else ""
        console.note(
            f"factorizing whole matrices takes {needed / GIB:.1f} GiB, {run.memory / GIB:.1f} GiB may be used: this may be slow, or "
            f"fail; --importance block{fewer} takes less"
        )
    return wanted.kind


def count_chunks(file: GGUFFile, text: Path, n_bytes: int, n_asked: int) -> int:
    """Chunks that the model's vocabulary makes of a text of n_bytes, as llama-imatrix counts them; of a long text more than n_asked,
    and not all. UserError if they are too few.

    Where the vocabulary cannot be asked, as many as there would be if each byte were a token.
    """
    n_context = context_length(file)
    needed = 2 * n_context  # by llama-imatrix
    if n_bytes < needed:
        raise _too_short(text, f"{n_bytes:,} bytes", needed)
    n_tokens = count_tokens(file.path, text, (n_asked + 1) * n_context)
    if n_tokens is not None and n_tokens < needed:
        raise _too_short(text, f"{n_tokens:,} tokens", needed)
    return (n_bytes if n_tokens is None else n_tokens) // n_context


def _too_short(text: Path, found: str, needed: int) -> UserError:
    return UserError(f"{FLAG}: {text} has {found}: {needed:,} tokens are needed at the least; pass a text of some 100 kB")
