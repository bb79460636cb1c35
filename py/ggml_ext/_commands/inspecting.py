"""List the tensors of a file, and compare them with the original."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from .._base.errors import UserError
from .._base.option import option
from .._base.threads import check_threads, map_in_order, threads_option
from .._base.types import WEIGHT_TYPES
from .._calibration.importance import KINDS, Importance, open_importance
from .._encode.accuracy import Accuracy, read_epsilons
from .._encode.codec import Codec
from .._encode.compare import FileTensor, compare_tensors
from .._encode.histogram import Histogram
from .._formats.column_scales import KEY, ColumnScales, ScaledFile
from .._formats.gguf_file import GGUFFile, Tensor
from .._formats.imatrix import n_importances
from .._formats.quality import read_quality
from .._formats.split import open_model
from .._formats.tensor_types import DITTO3
from .._native import library
from .._native.blas import one_blas_thread
from .._plan.plan import accurate_type
from .._report import picture
from .._report.findings import Finding, Inspection
from .._sequential.errors import read_stream_errors


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """Options of `ggml-ext inspect`, except those of the terminal."""

    file: Path = option(is_positional=True, metavar="FILE", help="GGUF file, or the first part of a split one")
    against: Path | None = option(
        None, metavar="ORIGINAL", help="the file it was made from: compute all errors and check epsilon (exit code 1 if one is larger)"
    )
    imatrix: Path | None = option(None, metavar="FILE", help="with --against: weight errors with this imatrix too")
    importance: str | None = option(None, choices=KINDS[1:], help="statistics to weight errors with (default: the most that --imatrix holds)")
    tensor: str | None = option(None, metavar="REGEX", help="list only tensors whose name matches, such as blk.3.attn_q.weight or ffn_")
    histograms: bool = option(False, help="count the codes and scales of each ggml-ext type, in samples of large tensors")
    picture: Path | None = option(
        None, metavar="FILE", help="with --against: draw the errors by layer and class into this .svg or .png file"
    )
    force: bool = option(False, short="-f", help="replace the file of --picture if it exists")
    threads: int | None = threads_option()

    def check(self) -> int:
        """Return the number of threads. Raise UserError for an invalid combination, or a picture that may not be written."""
        n_threads = check_threads(self.threads)
        if self.picture is not None and self.against is None:
            raise UserError("--picture draws errors: pass --against ORIGINAL")
        if self.picture is not None:
            read = {"FILE": self.file, "--against": self.against, "--imatrix": self.imatrix}
            picture.check_picture(self.picture, self.force, {path: name for name, path in read.items() if path is not None})
        return n_threads


def choose_tensors(file: GGUFFile, pattern: str | None) -> list[Tensor]:
    """Return the tensors that --tensor selects. UserError if there are none."""
    if pattern is None:
        return file.tensors
    try:
        regex = re.compile(pattern)
    except re.error as e:
        raise UserError(f"--tensor: {pattern!r} is not a regular expression: {e}") from None
    matches = [t for t in file.tensors if t.name == pattern] or [t for t in file.tensors if regex.search(t.name)]
    if not matches:
        example = f", such as {file.tensors[0].name}" if file.tensors else ""
        raise UserError(f"--tensor: {pattern!r} matches none of the {len(file.tensors)} tensors of {file.path}{example}")
    return matches


def load_importance(options: InspectOptions, file: GGUFFile) -> Importance:
    """Open the imatrix that weights errors. UserError if it is for another model."""
    if options.imatrix is None or options.against is None:
        for flag, value in (("--imatrix", options.imatrix), ("--importance", options.importance)):
            if value is not None:
                raise UserError(f"{flag} weights errors: pass both --against ORIGINAL and --imatrix FILE")
        return Importance()
    importance = open_importance([options.imatrix], options.importance)
    matrix = importance.matrix
    assert matrix is not None
    for tensor in file.tensors:
        if tensor.name in matrix and matrix.n_values(tensor.name) != n_importances(tensor):
            raise UserError(
                f"--imatrix: {options.imatrix}: tensor {tensor.name} has {matrix.n_values(tensor.name):,} values, the model needs "
                f"{n_importances(tensor):,}: it is for another model"
            )
    if not any(t.name in matrix for t in file.tensors):
        raise UserError(f"--imatrix: {options.imatrix} has no tensor of {file.path}: it is for another model")
    return importance


def check_same_tensors(file: GGUFFile, original: GGUFFile) -> None:
    """Raise UserError for the first tensor that is missing from one file or has another shape."""
    originals = {t.name: t for t in original.tensors}
    for tensor in file.tensors:
        other = originals.pop(tensor.name, None)
        if other is None:
            raise UserError(f"tensor {tensor.name} of {file.path} is not in {original.path}: pass the original of this file")
        shapes = [list(t.ne[: t.n_dims]) for t in (tensor, other)]
        if shapes[0] != shapes[1]:
            raise UserError(
                f"tensor {tensor.name} is {shapes[0]} in {file.path} and {shapes[1]} in {original.path}: pass the "
                "original of this file"
            )
    if originals:
        raise UserError(f"tensor {next(iter(originals))} of {original.path} is not in {file.path}: pass the original of this file")


def scale_original(file: GGUFFile, original: GGUFFile, scales: ColumnScales) -> GGUFFile:
    """Return the original with the column scales of the file. UserError if it has others."""
    if KEY not in original.metadata:
        return ScaledFile(original, scales) if scales else original
    if original.value(KEY) != file.value(KEY):
        raise UserError(f"{file.path} and {original.path} have different column scales: compare both with the model that they were quantized from")
    return original


def check_epsilons(file: GGUFFile, epsilons: dict[str, float]) -> None:
    """Raise UserError for a recorded epsilon that is invalid or not of a DITTO3 tensor. --fallback-above may have replaced DITTO3."""
    ditto3 = {t.name for t in file.tensors if t.type in (DITTO3, accurate_type(t, DITTO3))}
    for name, epsilon in epsilons.items():
        if name not in ditto3:
            raise UserError(f"{file.path} records an epsilon for {name}, which is not a ditto3 tensor: quantize the model again")
        if not (np.isfinite(epsilon) and epsilon >= 0):
            raise UserError(
                f"tensor {name}: the recorded epsilon is {epsilon}, must be finite and not negative: quantize the model again"
            )


def inspect(
    options: InspectOptions, on_start: Callable[[list[Tensor], Importance], None], on_finding: Callable[[Finding], None]
) -> Inspection:
    """Inspect a file.

    Args:
        options: of the command.
        on_start: called with the tensors and the statistics that weight errors, before the first finding.
        on_finding: called with each finding.

    Raises:
        UserError: with a way out.
    """
    n_threads = options.check()
    with one_blas_thread():
        file = open_model(options.file)
        epsilons = read_epsilons(file)
        check_epsilons(file, epsilons)
        stream_errors, (quality, has_other_quality) = read_stream_errors(file), read_quality(file)
        scales = ColumnScales.read(file)
        original = None if options.against is None else open_model(options.against)
        if original is not None:
            check_same_tensors(file, original)
            original = scale_original(file, original, scales)
        tensors = choose_tensors(file, options.tensor)
        importance = load_importance(options, file)
        importance.scales = scales
        on_start(tensors, importance)
        findings: list[Finding] = []
        for finding in inspect_tensors(file, original, tensors, epsilons=epsilons, importance=importance, n_threads=n_threads):
            findings.append(finding)
            on_finding(finding)
        total = None if original is None else sum((f.accuracy for f in findings if f.accuracy is not None), Accuracy())
        histograms = count_codes(file, tensors) if options.histograms else None
        return Inspection(
            path=options.file, n_tensors=len(file.tensors), against=options.against, importance=importance.describe(),
            made_with=file.value("quantize.imatrix.file"), findings=findings, total=total, histograms=histograms, stream_errors=stream_errors,
            quality=quality, has_other_quality=has_other_quality,
        )


def inspect_tensors(
    file: GGUFFile,
    original: GGUFFile | None,
    tensors: list[Tensor],
    epsilons: dict[str, float],
    importance: Importance,
    n_threads: int,
) -> Iterator[Finding]:
    """Yield the finding of each tensor.

    Args:
        file: the file.
        original: the file to compare with, or None.
        tensors: those to inspect.
        epsilons: recorded bounds by tensor.
        importance: statistics that weight errors.
        n_threads: number of threads.
    """
    others = {} if original is None else {t.name: t for t in original.tensors}
    pool = ThreadPoolExecutor(n_threads)
    run = partial(map_in_order, pool, n_ahead=2 * n_threads)
    try:
        codec = Codec(library.load())
        for tensor in tensors:
            finding = Finding(tensor, epsilons.get(tensor.name))
            if original is not None:
                other = others[tensor.name]
                finding.is_changed = tensor.type != other.type
                calibration = importance.read(tensor)
                finding.accuracy = compare_tensors(FileTensor(file, tensor), FileTensor(original, other), codec, calibration, run)
            yield finding
    finally:
        pool.shutdown(cancel_futures=True)


def count_codes(file: GGUFFile, tensors: list[Tensor]) -> dict[str, Histogram]:
    """Count the codes of each ggml-ext type, in the order of its first tensor."""
    histograms: dict[str, Histogram] = {}
    for tensor in tensors:
        if (name := tensor.type.name.lower()) in WEIGHT_TYPES:
            histograms.setdefault(name, Histogram()).add(file, tensor)
    return histograms


def draw_picture(options: InspectOptions, inspection: Inspection) -> bool:
    """Draw the errors; return False if the font lacks characters of the names. UserError if there is nothing to draw."""
    drawn = {f.tensor.name: f.accuracy for f in inspection.findings if f.is_changed and f.accuracy is not None}
    if not drawn or options.picture is None:
        raise UserError(f"--picture: no tensor changed its type against {options.against}: there are no errors to draw")
    weighted = all(a.weighted_nmse is not None for a in drawn.values())
    errors = {name: a.nmse if a.weighted_nmse is None or not weighted else a.weighted_nmse for name, a in drawn.items()}
    label = f"{'weighted ' if weighted else ''}NMSE"
    return picture.draw(errors, label, options.file.name, options.picture, options.force, stream_errors=inspection.stream_errors)


def check_bounds(inspection: Inspection) -> None:
    """Raise UserError if an error exceeds its recorded epsilon."""
    if exceeded := [(f, f.accuracy) for f in inspection.findings if f.accuracy is not None and not f.fits]:
        more = f" (and {len(exceeded) - 1} more)" if len(exceeded) > 1 else ""
        (first, accuracy), path = exceeded[0], inspection.path
        raise UserError(
            f"tensor {first.tensor.name}: its largest error is {accuracy.max_abs:.9g}, the recorded epsilon is "
            f"{first.epsilon:.9g}{more}: {path} was changed, or {inspection.against} is not its original; quantize it again"
        )
