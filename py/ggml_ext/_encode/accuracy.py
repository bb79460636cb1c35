"""The error of stored weights, and the bound on outputs that follows from it for DITTO3.

Source: Ditto, section 3.2.4, equation 1: |W x - W' x|_inf <= epsilon * |x|_1, with epsilon the largest |w - w'|.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType

from .._base.errors import UserError
from .._base.types import WEIGHT_TYPES
from .._formats.gguf_file import GGUFFile, KeyValue, floats_value, strings_value
from .._plan.plan import PlannedTensor

# Two arrays of the same length: names of the DITTO3 tensors, and the epsilon of each as float32.
NAMES_KEY, VALUES_KEY = "ggml_ext.ditto3.epsilon.tensors", "ggml_ext.ditto3.epsilon"


@dataclass(frozen=True)
class Accuracy:
    """The error of weights w stored as w'. The sum of two is that of both."""

    max_abs: float = 0.0  # largest |w - w'|
    error: float = 0.0  # sum of (w - w')^2
    energy: float = 0.0  # sum of w^2
    # sums of (w - w')^T H (w - w') and of w^T H w over the rows; 0 without calibration statistics H
    weighted_error: float = 0.0
    weighted_energy: float = 0.0
    of_moments: bool = False  # H is more than a diagonal
    stream_error: float = 0.0  # of the residual stream after the layer, with --propagate (_sequential/errors.py)
    # sums of (t - w')^T H (t - w') and of t^T H t for the corrected weights t that --propagate encodes (targets.py)
    target_error: float = 0.0
    target_energy: float = 0.0

    @classmethod
    def measure(cls, original: np.ndarray, stored: np.ndarray) -> Accuracy:
        """Compare two float32 arrays of the same shape, in float64. NaN in either gives NaN."""
        difference = (stored.astype(np.float64) - original).ravel()
        weights = original.astype(np.float64).ravel()
        return cls(
            float(max(difference.max(), -difference.min())), float(difference @ difference), float(weights @ weights)
        )

    def __add__(self, other: Accuracy) -> Accuracy:
        return Accuracy(
            max_abs=float(np.maximum(self.max_abs, other.max_abs)),  # keeps NaN
            error=self.error + other.error,
            energy=self.energy + other.energy,
            weighted_error=self.weighted_error + other.weighted_error,
            weighted_energy=self.weighted_energy + other.weighted_energy,
            of_moments=self.of_moments or other.of_moments,
            stream_error=max(self.stream_error, other.stream_error),
            target_error=self.target_error + other.target_error,
            target_energy=self.target_energy + other.target_energy,
        )

    @property
    def relative(self) -> float:
        """NMSE; 0 for zeros stored as zeros, infinite for zeros stored as anything else."""
        if self.energy:
            return self.error / self.energy
        return np.inf if self.error else 0.0

    @property
    def weighted(self) -> float | None:
        """NMSE under the Hessian; None without one."""
        return self.weighted_error / self.weighted_energy if self.weighted_energy > 0 else None

    @property
    def to_target(self) -> float | None:
        """NMSE under the Hessian against the corrected weights of --propagate; None without them."""
        return self.target_error / self.target_energy if self.target_energy > 0 else None

    @property
    def judged(self) -> float:
        """The error to compare with the type's usual one: encoders double the plain one on purpose under a Hessian or for corrected weights."""
        if self.to_target is not None:
            return self.to_target
        return self.weighted if self.of_moments and self.weighted is not None else self.relative

    def exceeds_usual(self, qtype: GGMLQuantizationType, factor: float) -> bool:
        """Whether the judged error is more than `factor` times what a ggml-ext type has on Gaussian weights."""
        info = WEIGHT_TYPES.get(qtype.name.lower())
        return info is not None and info.usual_rel_mse is not None and self.judged > factor * info.usual_rel_mse

    @property
    def best_known(self) -> float:
        """The error that allocation compares: under the Hessian if there is one."""
        return float(self.relative if self.weighted is None else self.weighted)

    @property
    def is_finite(self) -> bool:
        return bool(np.isfinite(self.error))

    @property
    def epsilon(self) -> np.float32:
        """max_abs, rounded up twice: the difference of two float32 was rounded to float64, which is rounded to float32."""
        if self.max_abs == 0:
            return np.float32(0)
        above = np.nextafter(self.max_abs, np.inf)
        value = np.float32(above)
        return value if value >= above else np.nextafter(value, np.float32(np.inf))


@dataclass(frozen=True)
class MeasuredTensor:
    """A planned tensor and the error it has as stored: none before it is written."""

    planned: PlannedTensor
    accuracy: Accuracy = Accuracy()


def sum_errors(tensors: Iterable[MeasuredTensor]) -> Accuracy:
    """Add up the errors of the tensors that changed their type."""
    return sum((t.accuracy for t in tensors if t.planned.is_changed), Accuracy())


def epsilon_metadata(epsilons: Mapping[str, float]) -> list[KeyValue]:
    """Make the keys for epsilon by tensor; none without tensors. Their size depends on the names only."""
    if not epsilons:
        return []
    return [
        strings_value(NAMES_KEY, list(epsilons)),
        floats_value(VALUES_KEY, np.array(list(epsilons.values()), np.float32)),
    ]


def read_epsilons(file: GGUFFile) -> dict[str, float]:
    """Read epsilon by tensor; UserError if the keys are not what epsilon_metadata() makes."""
    if NAMES_KEY not in file.metadata and VALUES_KEY not in file.metadata:
        return {}
    names, values = file.strings(NAMES_KEY), file.floats(VALUES_KEY)
    if names is None or values is None or len(names) != len(values):
        sizes = ["missing or of another type" if v is None else f"{len(v):,} values" for v in (names, values)]
        raise UserError(
            f"{file.path}: {NAMES_KEY} ({sizes[0]}) and {VALUES_KEY} ({sizes[1]}) must be arrays of strings and of float32 of "
            "the same length: quantize the model again"
        )
    return dict(zip(names, map(float, values), strict=True))
