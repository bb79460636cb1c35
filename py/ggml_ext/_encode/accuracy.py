"""The error of stored weights, and DITTO3's bound on the outputs (Ditto, section 3.2.4, equation 1):

    |W x - W' x|_inf <= epsilon * |x|_1, with epsilon the largest |w - w'|.
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
    """The error of weights w stored as w'. Two errors add up."""

    max_abs: float = 0.0  # largest |w - w'|
    error: float = 0.0  # sum of (w - w')^2
    energy: float = 0.0  # sum of w^2
    # sums of (w - w')^T H (w - w') and w^T H w over the rows; 0 without calibration
    weighted_error: float = 0.0
    weighted_energy: float = 0.0
    has_hessian: bool = False  # H is more than a diagonal
    stream_error: float = 0.0  # of the residual stream after the layer, under --propagate (_sequential/errors.py)
    # sums of (c - w')^T H (c - w') and c^T H c; c: the corrected weights of --propagate (correction.py), targets in the journal's keys
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
            has_hessian=self.has_hessian or other.has_hessian,
            stream_error=max(self.stream_error, other.stream_error),
            target_error=self.target_error + other.target_error,
            target_energy=self.target_energy + other.target_energy,
        )

    @property
    def nmse(self) -> float:
        """The normalized mean squared error; infinite if all weights are 0 and a stored one is not."""
        if self.energy:
            return self.error / self.energy
        return np.inf if self.error else 0.0

    @property
    def weighted_nmse(self) -> float | None:
        """NMSE under the Hessian; None without one."""
        return self.weighted_error / self.weighted_energy if self.weighted_energy > 0 else None

    @property
    def corrected_nmse(self) -> float | None:
        """NMSE under the Hessian against the corrected weights of --propagate; None without them."""
        return self.target_error / self.target_energy if self.target_energy > 0 else None

    @property
    def judged_nmse(self) -> float:
        """The NMSE to compare with the type's usual one. Under a Hessian or for corrected weights, encoders accept a larger plain one."""
        if self.corrected_nmse is not None:
            return self.corrected_nmse
        return self.weighted_nmse if self.has_hessian and self.weighted_nmse is not None else self.nmse

    def exceeds_usual(self, qtype: GGMLQuantizationType, factor: float) -> bool:
        """Whether the judged error is above `factor` times the error of a ggml-ext type on Gaussian weights."""
        info = WEIGHT_TYPES.get(qtype.name.lower())
        return info is not None and info.usual_rel_mse is not None and self.judged_nmse > factor * info.usual_rel_mse

    @property
    def best_known_nmse(self) -> float:
        """The NMSE that allocation compares: weighted by H if there is one."""
        return float(self.nmse if self.weighted_nmse is None else self.weighted_nmse)

    @property
    def is_finite(self) -> bool:
        return bool(np.isfinite(self.error))

    @property
    def epsilon(self) -> np.float32:
        """max_abs, rounded up twice: for the rounding of the difference to float64, and of that to float32."""
        if self.max_abs == 0:
            return np.float32(0)
        above = np.nextafter(self.max_abs, np.inf)
        value = np.float32(above)
        return value if value >= above else np.nextafter(value, np.float32(np.inf))


@dataclass(frozen=True)
class MeasuredTensor:
    """A planned tensor and its error, empty before it is written."""

    planned: PlannedTensor
    accuracy: Accuracy = Accuracy()


def sum_errors(tensors: Iterable[MeasuredTensor]) -> Accuracy:
    """Sum the errors of the tensors whose type changed."""
    return sum((t.accuracy for t in tensors if t.planned.is_changed), Accuracy())


def epsilon_metadata(epsilons: Mapping[str, float]) -> list[KeyValue]:
    """Make the metadata for epsilon by tensor, none without tensors. Its size depends on the names only."""
    if not epsilons:
        return []
    return [
        strings_value(NAMES_KEY, list(epsilons)),
        floats_value(VALUES_KEY, np.array(list(epsilons.values()), np.float32)),
    ]


def read_epsilons(file: GGUFFile) -> dict[str, float]:
    """Read epsilon by tensor. Raise UserError if the metadata is not as epsilon_metadata() makes it."""
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
