"""The calibration statistics of one tensor: the Hessian H = X^T X of its inputs, or the diagonal."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np

from .._formats.gguf_file import Tensor
from .._formats.hessians import TensorHessian
from .._formats.imatrix import apply_floor
from .._native.library import Metric as NativeMetric
from ..quants._metric import Metric as NumpyMetric
from .accuracy import Accuracy

Metric = NativeMetric | NumpyMetric
Value = TypeVar("Value")


class PerExpert(Generic[Value]):
    """A value per expert of a tensor: the first thread that needs it computes it, the others wait for it."""

    def __init__(self, compute: Callable[[int], Value]):
        self._compute = compute
        self._values: dict[int, Future[Value]] = {}
        self._lock = threading.Lock()

    def get(self, expert: int) -> Value:
        """Return the value. If computing it fails, all threads get the exception."""
        with self._lock:
            is_first = expert not in self._values
            future = self._values.setdefault(expert, Future())
        if is_first:
            try:
                future.set_result(self._compute(expert))
            except BaseException as e:
                future.set_exception(e)
        return future.result()

    def drop_before(self, expert: int) -> None:
        with self._lock:
            self._values = {e: value for e, value in self._values.items() if e >= expert}


class MetricCache:
    """The last factorized Hessian: neighbouring matrices with the same input, such as gate and up, share it."""

    def __init__(self) -> None:
        self._key: Hashable = None
        self._metric: Metric | None = None

    def get(self, key: Hashable, compute: Callable[[], Metric]) -> Metric:
        """Return the metric of the key; compute it if the last key differs."""
        if self._metric is None or self._key != key:
            self._metric = None  # frees it first: memory holds one
            self._metric, self._key = compute(), key
        return self._metric


@dataclass(frozen=True)
class TensorCalibration:
    """The calibration statistics of a tensor, empty without calibration."""

    diagonal: np.ndarray | None = None  # of H, float32 (n_experts or 1, n_per_row)
    codebook: np.ndarray | None = None  # float32 (8,), for all blocks of DITTO3
    hessian: TensorHessian | None = None
    triangles: PerExpert[np.ndarray] | None = None  # of the Hessian
    metrics: PerExpert[Metric] | None = None  # the factorized Hessian, for encoders that use it

    @classmethod
    def from_hessian(cls, diagonal: np.ndarray | None, hessian: TensorHessian | None) -> TensorCalibration:
        """Make statistics without a metric."""
        return cls(diagonal, None, hessian, None if hessian is None else PerExpert(hessian.triangles))

    @property
    def n_matrices(self) -> int:
        """The number of experts, or 1."""
        if self.hessian is not None:
            return self.hessian.n_matrices
        return 1 if self.diagonal is None else len(self.diagonal)

    def expert_rows(self, tensor: Tensor) -> int:
        return tensor.ne[1] if self.n_matrices > 1 else tensor.n_rows

    def slices(self, tensor: Tensor, first_row: int, n_rows: int) -> Iterator[tuple[slice, int]]:
        """Split n_rows rows from first_row on by expert. Yield slices relative to first_row, and their experts."""
        expert_rows, start = self.expert_rows(tensor), 0
        while start < n_rows:
            expert, done = divmod(first_row + start, expert_rows)
            stop = min(n_rows, start + expert_rows - done)
            yield slice(start, stop), expert % self.n_matrices
            start = stop

    def importances(self, expert: int) -> np.ndarray | None:
        """Return the diagonal for the encoder, float32 (n_per_row,), with its floor."""
        return None if self.diagonal is None else apply_floor(self.diagonal[expert : expert + 1])[0]

    def metric(self, expert: int) -> Metric | None:
        return None if self.metrics is None else self.metrics.get(expert)

    def release(self, tensor: Tensor, n_rows: int) -> None:
        """Free the values of the experts in the first n_rows rows."""
        for per_expert in (self.triangles, self.metrics):
            if per_expert is not None:
                per_expert.drop_before(n_rows // self.expert_rows(tensor))

    def measure(self, tensor: Tensor, first_row: int, original: np.ndarray, stored: np.ndarray) -> Accuracy:
        """Measure the error of stored rows, float32 (n_rows, n_per_row), from first_row on."""
        total = Accuracy()
        for part, expert in self.slices(tensor, first_row, len(original)):
            total += self._weigh(Accuracy.measure(original[part], stored[part]), expert, original[part], stored[part])
        return total

    def _weigh(self, accuracy: Accuracy, expert: int, original: np.ndarray, stored: np.ndarray) -> Accuracy:
        """Add the error weighted by the Hessian, else by the diagonal."""
        difference = stored - original
        if self.hessian is not None and self.triangles is not None:
            weighted = self.hessian.weighted_energies(self.triangles.get(expert), difference, original)
        elif self.diagonal is not None:
            squares = (np.einsum("ij,ij->j", rows, rows, dtype=np.float64) for rows in (difference, original))
            weighted = [float(s @ self.diagonal[expert]) for s in squares]
        else:
            return accuracy
        return replace(accuracy, weighted_error=weighted[0], weighted_energy=weighted[1], has_hessian=self.hessian is not None)
