"""What is known of the inputs of the weights: nothing, mean squares, or second moments of blocks or of whole inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType

from .._base.errors import UserError
from .._encode.codec import Codec, Guide, PerExpert
from .._formats.gguf_file import GGUFFile, KeyValue, Tensor, string_value
from .._formats.hessians import HessianFile, TensorHessian, token_warnings
from .._formats.imatrix import ImportanceMatrix, dead_columns
from .._formats.names import list_tensors
from .._native.library import Metric
from .._plan.plan import Plan, metric_of, uses_metric

KINDS = ("none", "diagonal", "block", "full")
BUILT_IN = "built-in"


@dataclass
class Importance:
    """What the encoders get. kind: one of KINDS; calibration: name of the text, where this run or an earlier one chose it."""

    kind: str = "none"
    matrix: ImportanceMatrix | None = None
    moments: HessianFile | None = None
    calibration: str | None = None
    warnings: list[str] = field(default_factory=list)  # that came up while encoding
    _last: tuple = (None, None)  # key and metric of the last tensor without experts

    def guide(self, tensor: Tensor) -> Guide:
        """What is known of the inputs of a tensor."""
        if self.matrix is None or tensor.name not in self.matrix:
            return Guide()
        moments = self.of(tensor)
        return Guide(self.matrix.values(tensor), None, moments, moments and PerExpert(moments.triangles))

    def of(self, tensor: Tensor) -> TensorHessian | None:
        """Its second moments, if they are in use and it has some."""
        return self.moments.for_tensor(tensor, self.kind) if self.moments and tensor.name in self.moments else None

    def with_metrics(self, guide: Guide, tensor: Tensor, target: GGMLQuantizationType, codec: Codec) -> Guide:
        """The guide with what the encoder of the target makes of the moments, if it makes anything of them."""
        if guide.moments is None or not uses_metric(target):
            return guide
        key = self.moments.owner(tensor.name), metric_of(target)

        def make(expert: int) -> Metric:
            if guide.n_matrices > 1:
                return codec.metric(tensor, target, guide, expert, self.warnings.append)
            if self._last[0] != key:  # of gate and up, say, which share their input and follow each other
                self._last = None, None  # memory for one
                self._last = key, codec.metric(tensor, target, guide, expert, self.warnings.append)
            return self._last[1]

        return replace(guide, metrics=PerExpert(make))

    def dead_columns(self, plan: Plan) -> dict[str, tuple[int, int]]:
        """Of each tensor that is encoded with importances: how many columns had no inputs to speak of, and how many it has."""
        tensors = [t for t in plan.tensors if self.matrix is not None and t.name in plan.importance]
        found = {t.name: dead_columns(self.matrix.values(t)) for t in tensors}
        return {name: (int(np.count_nonzero(dead)), dead.size) for name, dead in found.items()}

    def paths(self) -> list[Path]:
        """Files that the values come from."""
        found = [] if self.matrix is None else [self.matrix.path]
        return list(dict.fromkeys([*found, *(f.path for f in self.files())]))

    def files(self) -> Sequence[GGUFFile]:
        """Those that are read while tensors are encoded."""
        return self.moments.files if self.moments else []

    def describe(self) -> str:
        """For the summary."""
        if self.matrix is None:
            return self.kind
        source = f" ({self.calibration} text)" if self.calibration == BUILT_IN else f" ({self.calibration})" if self.calibration else ""
        return f"{self.kind}, of {self.matrix.path}{source}"

    def metadata(self) -> list[KeyValue]:
        """Keys of llama-quantize about the importance matrix, and ours."""
        out = [] if self.matrix is None else self.matrix.metadata()
        out.append(string_value("ggml_ext.importance", self.kind))
        if self.calibration:
            out.append(string_value("ggml_ext.calibration", self.calibration))
        return out


def open_importance(paths: Sequence[Path], kind: str | None, calibration: str | None = None) -> Importance:
    """Opens the file of --imatrix, or those of the passes of a calibration. kind: what to use, None for the most there is.

    UserError where a file is no importance matrix, or has no moments of that kind.
    """
    path, matrix = paths[0], ImportanceMatrix(paths[0])
    if kind == "diagonal":
        return Importance(kind, matrix, None, calibration)
    files = [] if matrix.is_old else [GGUFFile(p) for p in paths]
    if matrix.is_old or HessianFile.kind_in(files[0]) is None:
        if kind is None:
            return Importance("diagonal", matrix, None, calibration)
        raise UserError(
            f"--importance {kind}: {path} holds no second moments: llama-imatrix --moments {kind} makes them; or pass "
            "--importance diagonal"
        )
    moments = HessianFile(files)
    if kind == "full" and moments.kind != kind:
        raise UserError(
            f"--importance full: {path} holds second moments of blocks: llama-imatrix --moments full makes whole matrices; or "
            "pass --importance block"
        )
    return Importance(kind or moments.kind, matrix, moments, calibration)


def plan_moments(plan: Plan, importance: Importance, explicit: bool) -> None:
    """Checks the moments against the model and adds warnings. The kind becomes diagonal where no type uses moments.

    explicit: the kind was asked for. UserError where the moments are for another model or damaged; of blocks all values are
    read for that, those of whole matrices when they are used.
    """
    if importance.moments is None:
        return
    using = [
        t for t, q in zip(plan.tensors, plan.types, strict=True) if q != t.type and uses_metric(q) and t.name in plan.importance
    ]
    if not using:
        if explicit:
            plan.warnings.append(f"--importance {importance.kind}: no tensor gets a type that uses more than the diagonal")
        importance.kind, importance.moments = "diagonal", None
        return
    found = {t.name: m for t in using if (m := importance.of(t))}
    if not found:
        raise UserError(
            f"--imatrix: {importance.moments.path} has moments of {len(importance.moments.names())} tensors, such as "
            f"{importance.moments.names()[0]}, and none of a tensor that could use them, such as {using[0].name}; make them with "
            "llama-imatrix -m MODEL -f TEXT --moments block, or pass --importance diagonal"
        )
    if not any(m.stored_full for m in found.values()):
        for name in {importance.moments.owner(name): name for name in found}.values():
            found[name].check()
    if missing := [t.name for t in using if t.name not in found]:
        plan.warnings.append(
            f"--imatrix: {importance.moments.path} has no second moments for {len(missing)} of {len(using)} tensors, for which the "
            f"diagonal is used: {list_tensors(missing)}"
        )
    plan.warnings += token_warnings(found)
