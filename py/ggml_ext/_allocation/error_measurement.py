"""Measure the NMSE of each type in each matrix, and the model's sensitivity to it.

The NMSE is measured on a sample of rows, under the Hessian if there is one. sensitivity.py runs the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from gguf import GGMLQuantizationType

from .._base.console import Console
from .._base.files import fingerprint
from .._base.locks import lock_directory
from .._base.package import __version__
from .._base.signals import StopRequest
from .._base.threads import map_in_order
from .._calibration import calibration
from .._calibration.importance import Importance
from .._encode.codec import Codec
from .._encode.encode_tensor import Chunk, SourceTensor, encode_tensor
from .._encode.tensor_calibration import MetricCache
from .._formats.cache_names import choice_cache_name
from .._formats.gguf_file import GGUFFile, Tensor
from .._formats.language_model import describe_other_model
from .._formats.tensor_types import SOURCE_TYPES
from .._native.programs import find_tool
from .._plan.plan import PlannedTensor, QuantizationPlan
from . import sensitivity
from .choice_record import ChoiceRecord, RecordWriter
from .items import Item
from .sensitivity import MeasuredCosts, Probe
from .target import USUAL

GROUPS, GROUP_ROWS = 4, 16  # sample of a tensor: groups of consecutive rows, evenly spaced


@dataclass(frozen=True)
class ErrorCosts:
    """The predicted KL divergence of each type in each matrix."""

    errors: Mapping[str, Mapping[str, float]]  # NMSE by tensor and name of the type
    sensitivities: Mapping[str, float]  # KL divergence per NMSE, by tensor
    is_measured: bool  # sensitivities were measured on this model

    def predict(self, name: str, qtype: GGMLQuantizationType) -> float:
        """Predict the KL divergence that a tensor adds in a type."""
        return self.sensitivities[name] * self.errors[name][qtype.name.lower()]


@dataclass(frozen=True)
class ErrorMeasurement:
    """A measurement of a model for a target."""

    file: GGUFFile
    plan: QuantizationPlan  # knows which tensors use the imatrix
    importance: Importance
    codec: Codec
    n_threads: int
    console: Console
    directory: Path | None  # that of OUT, with links resolved; None in a dry run without OUT
    is_dry: bool  # do not run the model and do not write the cache
    runs_model: bool  # False with --no-calibration
    text: Path | None  # of --imatrix-from
    sensitivity: str  # of SENSITIVITIES

    def measure(self, items: Sequence[Item]) -> ErrorCosts:
        """Measure errors and sensitivities, except those in the cache. One run at a time measures, so that the next ones reuse its results."""
        if self.directory is None or self.is_dry:
            return self._measure(items)
        with lock_directory(self.directory, lambda: self.console.note(f"another run measures in {self.directory}: waiting for it")):
            return self._measure(items)

    def _measure(self, items: Sequence[Item]) -> ErrorCosts:
        path = None if self.directory is None else self.directory / choice_cache_name(self.file.stem)
        record = ChoiceRecord.read(path, self._list_dependencies())
        if self.importance.matrix is None:
            self.console.warn("no imatrix: choosing types by unweighted error, which costs quality")
        writer = RecordWriter(record, None if self.is_dry else path)
        try:
            self._measure_errors(items, writer)
        except StopRequest:
            writer.write()
            raise
        writer.write()
        sensitivities, is_measured = self._find_sensitivities([item.planned for item in items], writer)
        return ErrorCosts(record.errors, sensitivities, is_measured)

    def _list_dependencies(self) -> dict:
        matrix = self.importance.matrix
        excluded = [sorted(matrix.excluded)] if matrix and matrix.excluded else []
        return {
            "version": __version__,
            "model": self.file.fingerprints(),
            "importance": [self.importance.title, [fingerprint(p) for p in self.importance.paths()], *excluded],
            "encoder": self.codec.list_dependencies(),
        }

    def _measure_sample(self, planned: PlannedTensor, qtype: GGMLQuantizationType, cache: MetricCache) -> float:
        """Measure the NMSE of a sample of a tensor's rows."""
        if qtype == planned.tensor.type:
            return 0.0
        codec = self.codec.with_one_thread()  # tensors are measured in parallel
        calibration = self.importance.calibrate(planned, qtype, codec, cache)
        source = SourceTensor(self.file, planned.tensor, codec)
        return encode_tensor(source, qtype, calibration, sample=choose_sample(planned.tensor)).best_known_nmse

    def _measure_errors(self, items: Sequence[Item], writer: RecordWriter) -> None:
        """Measure the errors that the record lacks."""
        errors = writer.record.errors
        missing = [
            (item.planned, types)
            for item in items
            if (types := [t for t in item.types if t.name.lower() not in errors.get(item.planned.name, {})])
        ]
        if not missing:
            self.console.note("reusing cached errors of all types")
            return
        n_types = len({t for _, types in missing for t in types})
        self.console.note(
            f"measuring errors: {n_types} type{'s' * (n_types > 1)}, {len(missing)} tensors, up to {GROUPS * GROUP_ROWS} rows each"
        )

        def measure(job: tuple[PlannedTensor, list[GGMLQuantizationType]]) -> dict[str, float]:
            planned, types = job
            cache = MetricCache()  # not shared between threads
            return {t.name.lower(): self._measure_sample(planned, t, cache) for t in types}

        with ThreadPoolExecutor(self.n_threads) as pool, self.console.bar("errors", len(missing), "tensor") as bar:
            try:
                for (planned, _), measured in zip(missing, map_in_order(pool, measure, missing, 2 * self.n_threads), strict=True):
                    errors.setdefault(planned.name, {}).update(measured)
                    writer.write_if_due()
                    bar.update()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _find_sensitivities(self, tensors: Sequence[PlannedTensor], writer: RecordWriter) -> tuple[dict[str, float], bool]:
        """Return the sensitivities by tensor, and whether they were measured on this model."""
        usual = sensitivity.usual_sensitivities([t.name for t in tensors])
        if self.sensitivity == USUAL:
            return usual, False
        text, program = self.text or calibration.TEXT, find_tool("llama-perplexity")
        dependencies = {"text": fingerprint(text) if text.is_file() else {}, "chunks": sensitivity.N_CHUNKS}
        known = writer.record.costs_with(dependencies)
        if known.is_complete() and set(known.errors) >= {t.name for t in tensors}:
            self.console.note("reusing cached sensitivities")
            start = sensitivity.usual_sensitivities(list(known.errors))
            return sensitivity.fit_sensitivities(start, known.errors, known.costs), True
        reason = self._find_obstacle([t.tensor for t in tensors], text, program)
        if reason or program is None or self.directory is None:
            (self.console.warn if program is None and not self.is_dry else self.console.note)(
                f"using the sensitivities of another model: {reason}"
            )
            return usual, False
        probe = Probe(
            file=self.file, tensors=tensors, importance=self.importance, codec=self.codec, program=program, text=text,
            directory=self.directory,
            n_threads=self.n_threads,
        )
        self.console.note(probe.describe())

        def keep(costs: MeasuredCosts) -> None:
            writer.record.set_costs(dependencies, costs)
            writer.write()

        costs = probe.measure(known, keep, self.console)
        return sensitivity.fit_sensitivities(usual, costs.errors, costs.costs), True

    def _find_obstacle(self, tensors: Sequence[Tensor], text: Path, program: Path | None) -> str | None:
        """Return why the sensitivities cannot be measured on this model; None if they can."""
        other = describe_other_model(self.file)
        reasons = (
            (self.is_dry, "--dry-run runs no model"),
            (not self.runs_model, "--no-calibration runs no model"),
            (program is None, "llama-perplexity is not in the package"),
            (other is not None, f"this one is {other} and predicts no tokens"),
            (self.codec.lib is None, "the native library is not in use"),
            (any(t.type not in SOURCE_TYPES for t in tensors), "the model is quantized already"),
            (not text.is_file(), f"{text} does not exist"),
        )
        return next((reason for applies, reason in reasons if applies), None)


def choose_sample(tensor: Tensor) -> list[Chunk]:
    """Choose the sampled rows of a tensor: the middle of each of GROUPS equal parts."""
    n_groups = min(GROUPS, -(-tensor.n_rows // GROUP_ROWS))
    starts = [max(0, (2 * i + 1) * tensor.n_rows // (2 * n_groups) - GROUP_ROWS // 2) for i in range(n_groups)]
    return [(first, min(GROUP_ROWS, tensor.n_rows - first)) for first in starts]
