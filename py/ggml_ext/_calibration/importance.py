"""Calibration statistics of a model: none, diagonal (imatrix), block-diagonal or full Hessians."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType

from .._base.errors import UserError
from .._encode.codec import Codec
from .._encode.tensor_calibration import Metric, MetricCache, PerExpert, TensorCalibration
from .._formats.column_scales import ColumnScales
from .._formats.gguf_file import GGUFFile, KeyValue, Tensor, string_value, uint32_value
from .._formats.hessians import HessianFile, HessianUse, TensorHessian, kind_for, token_warnings
from .._formats.imatrix import ImportanceMatrix, dead_columns
from .._formats.names import list_tensors
from .._formats.tensor_types import metric_name, uses_metric
from .._plan.plan import PlannedTensor, QuantizationPlan

KINDS = ("none", "diagonal", "block", "full")
BUILT_IN = "built-in"


@dataclass(frozen=True)
class DeadColumns:
    """The number of columns of a tensor whose inputs are almost zero."""

    n_dead: int
    n_columns: int

    @classmethod
    def count(cls, diagonal: np.ndarray) -> DeadColumns:
        """Count the dead columns in the diagonal of the Hessian, (n_experts, n_per_row)."""
        dead = dead_columns(diagonal)
        return cls(int(np.count_nonzero(dead)), dead.size)


@dataclass
class Importance:
    """The calibration statistics of a model."""

    kind: str = "none"  # one of KINDS
    matrix: ImportanceMatrix | None = None
    hessians: HessianFile | None = None
    text_name: str | None = None  # of the calibration text; None if ggml-ext did not calibrate
    description: str | None = None  # replaces the usual one in the summary
    full_columns: int | None = None  # with kind "full": inputs of more columns have block-diagonal Hessians; None: no limit
    n_tokens: int = 0  # of the text; 0: read them from the Hessians
    scales: ColumnScales = field(default_factory=ColumnScales)  # of the weights to encode
    warnings: list[str] = field(default_factory=list)  # from encoding

    def read(self, tensor: Tensor) -> TensorCalibration:
        """Return the statistics of a tensor for its scaled columns, without a factorized Hessian."""
        if self.matrix is None or tensor.name not in self.matrix:
            return TensorCalibration()
        diagonal, hessian, factors = self.matrix.values(tensor), self.hessian(tensor), self.scales.column_factors(tensor.name)
        if factors is not None:
            # the encoder gets W diag(s), whose inputs are x / s
            diagonal = diagonal / factors**2
            hessian = hessian and replace(hessian, factors=factors)
        return TensorCalibration.from_hessian(diagonal, hessian)

    def hessian(self, tensor: Tensor) -> TensorHessian | None:
        """Return the Hessian of a tensor, None without one."""
        if self.hessians is None or tensor.name not in self.hessians:
            return None
        return self.hessians.for_tensor(tensor, self.kind_for(tensor))

    def kind_for(self, tensor: Tensor) -> str:
        """Return the kind of the statistics of a tensor."""
        return kind_for(tensor.ne[0], self.kind, self.full_columns)

    def calibrate(self, planned: PlannedTensor, qtype: GGMLQuantizationType, codec: Codec, cache: MetricCache) -> TensorCalibration:
        """Return the statistics for the encoder of a type, with the factorized Hessian (the metric) if it uses one. Runs no model.

        Args:
            planned: the tensor; the plan decides whether it uses the imatrix.
            qtype: the type to encode to.
            codec: factorizes the Hessian if the encoder uses it.
            cache: keeps the metric for the next tensor with the same input.
        """
        tensor, hessians = planned.tensor, self.hessians
        calibration = self.read(tensor) if planned.uses_imatrix else TensorCalibration()
        if hessians is None or calibration.hessian is None or not uses_metric(qtype):
            return calibration

        def compute(expert: int) -> Metric:
            return codec.metric(tensor, qtype, calibration, expert, self.warnings.append)

        if calibration.n_matrices > 1:
            return replace(calibration, metrics=PerExpert(compute))
        key = hessians.entry_name(tensor.name), metric_name(qtype)
        return replace(calibration, metrics=PerExpert(lambda expert: cache.get(key, lambda: compute(expert))))

    def dead_columns(self, plan: QuantizationPlan) -> dict[str, DeadColumns]:
        """Count the dead columns of each tensor that uses the imatrix."""
        matrix = self.matrix
        if matrix is None:
            return {}
        return {t.name: DeadColumns.count(matrix.values(t.tensor)) for t in plan.tensors if t.uses_imatrix}

    def hessians_of(self, plan: QuantizationPlan) -> dict[str, TensorHessian]:
        """Return the Hessian of each tensor whose encoder uses one, by name."""
        return {t.name: hessian for t in list_tensors_using_hessians(plan) if (hessian := self.hessian(t))}

    def hessian_uses(self, plan: QuantizationPlan) -> dict[str, HessianUse]:
        """Describe the Hessian of each tensor."""
        return {name: HessianUse.of(hessian) for name, hessian in self.hessians_of(plan).items()}

    def paths(self) -> list[Path]:
        """List the files of the statistics."""
        matrix = [] if self.matrix is None else [self.matrix.path]
        return list(dict.fromkeys([*matrix, *(f.path for f in self.files())]))

    def files(self) -> Sequence[GGUFFile]:
        """List the files that are read during encoding."""
        return self.hessians.files if self.hessians else []

    @property
    def title(self) -> str:
        """The kind, with the limit of full Hessians."""
        return self.kind if self.full_columns is None else f"{self.kind} up to {self.full_columns:,} columns"

    @property
    def scales_title(self) -> str:
        """The end of a description: whether there are column scales."""
        return ", column scales" if self.scales else ""

    def describe(self) -> str:
        """Describe the statistics for the summary."""
        if self.description is not None:
            return self.description + self.scales_title
        if self.matrix is None:
            return self.title
        text = f"{self.text_name} text" if self.text_name == BUILT_IN else self.text_name
        return f"{self.title}, of {self.matrix.path}{f' ({text})' if text else ''}{self.scales_title}"

    def metadata(self) -> list[KeyValue]:
        """Make the metadata of llama-quantize and of ggml-ext about the imatrix."""
        out = [] if self.matrix is None else self.matrix.metadata()
        out.append(string_value("ggml_ext.importance", self.kind))
        if self.full_columns is not None:
            out.append(uint32_value("ggml_ext.importance.full_columns", self.full_columns))
        if n_tokens := self.n_tokens or (self.hessians.n_tokens if self.hessians else 0):
            out.append(uint32_value("ggml_ext.importance.tokens", n_tokens))
        if self.text_name:
            out.append(string_value("ggml_ext.calibration", self.text_name))
        return out + self.scales.metadata()


def open_importance(paths: Sequence[Path], kind: str | None, text_name: str | None = None, full_columns: int | None = None) -> Importance:
    """Open the imatrix file, or the files of the passes of a calibration.

    Args:
        paths: the files.
        kind: the statistics to use, None for the best in the files.
        text_name: name of the calibration text; None if ggml-ext did not calibrate.
        full_columns: with kind "full", the widest input that needs a full Hessian; None: all inputs do.

    Raises:
        UserError: a file is not an imatrix, or lacks that kind.
    """
    path, matrix = paths[0], ImportanceMatrix(paths[0])
    if kind == "diagonal":
        return Importance(kind, matrix, None, text_name)
    files = [] if matrix.is_old else [GGUFFile(p) for p in paths]
    if matrix.is_old or HessianFile.kind_in(files[0]) is None:
        if kind is None:
            return Importance("diagonal", matrix, None, text_name)
        raise UserError(
            f"--importance {kind}: {path} has no Hessians: make them with llama-imatrix --moments {kind}, or pass "
            "--importance diagonal"
        )
    hessians = HessianFile(files)
    if kind == "full" and full_columns is None and not hessians.are_full:
        wide = "" if hessians.full_columns is None else f" of inputs of more than {hessians.full_columns:,} columns"
        instead = "leave --importance out to use full Hessians for the narrower inputs" if wide else "pass --importance block"
        raise UserError(
            f"--importance full: {path} has block-diagonal Hessians{wide}: make full ones with llama-imatrix --moments full, or {instead}"
        )
    kind = kind or hessians.kind
    limit = full_columns or (hessians.full_columns if kind == "full" else None)
    return Importance(kind, matrix, hessians, text_name, full_columns=limit)


def list_tensors_using_hessians(plan: QuantizationPlan) -> list[Tensor]:
    """List the tensors whose encoders use a Hessian, if there is one."""
    return [t.tensor for t in plan.changed if uses_metric(t.type) and t.uses_imatrix]


def check_hessians(plan: QuantizationPlan, importance: Importance, is_requested: bool) -> None:
    """Check the Hessians against the model and add warnings. The kind becomes diagonal if no type uses them.

    Args:
        plan: the tensors and their types.
        importance: the statistics.
        is_requested: whether --importance sets the kind.

    Raises:
        UserError: the Hessians are for another model, or block-diagonal ones are damaged. Full ones are checked when they are used.
    """
    hessian_file = importance.hessians
    if hessian_file is None:
        return
    tensors = list_tensors_using_hessians(plan)
    if not tensors:
        if is_requested:
            plan.warnings.append(f"--importance {importance.kind}: no tensor gets a type that uses more than the diagonal")
        importance.kind, importance.hessians, importance.full_columns = "diagonal", None, None
        return
    hessians = importance.hessians_of(plan)
    if not hessians:
        raise UserError(
            f"--imatrix: {hessian_file.path} has Hessians of {len(hessian_file.names())} tensors, such as "
            f"{hessian_file.names()[0]}, and none of a tensor that could use them, such as {tensors[0].name}; make them with "
            "llama-imatrix -m MODEL -f TEXT --moments block, or pass --importance diagonal"
        )
    # tensors with the same input share an entry, which is checked once
    for hessian in {hessian_file.entry_name(name): hessian for name, hessian in hessians.items() if not hessian.stored_full}.values():
        hessian.check()
    if missing := [t.name for t in tensors if t.name not in hessians]:
        plan.warnings.append(
            f"--imatrix: {hessian_file.path} has no Hessians for {len(missing)} of {len(tensors)} tensors, which use the "
            f"diagonal: {list_tensors(missing)}"
        )
    plan.warnings += token_warnings(hessians)
