"""Corrected weights of experts, made when they are encoded: in single precision those of a layer may exceed the memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from gguf import GGMLQuantizationType

from .._base.errors import UserError
from .._encode.correction import Corrector, choose_ridge
from .._encode.encode_tensor import Chunk, Mapper, SourceTensor
from .._encode.tensor_calibration import PerExpert, TensorCalibration
from .._native.streams import FLAG, HINT
from .sums import Sums


def copy_rows(source: SourceTensor, chunk: Chunk, qtype: GGMLQuantizationType) -> np.ndarray:
    """Read rows of the model's weights, float32 (n_rows, n_per_row), that may be changed."""
    return np.require(source.read_rows(chunk, qtype), requirements="W")  # those of F32 are in the file's memory


def check_corrected(name: str, weights: np.ndarray) -> None:
    """Raise UserError if corrected weights are not finite."""
    if not np.isfinite(weights).all():
        raise UserError(f"{FLAG}: tensor {name}: the corrected weights are not finite; {HINT}")


def make_corrector(h: np.ndarray, n_tokens: float, names: Sequence[str], map_items: Mapper) -> Corrector:
    """Factorize H. Raise UserError, which names the matrices, if it is singular."""
    try:
        return Corrector(h, choose_ridge(len(h), n_tokens), map_items)
    except np.linalg.LinAlgError as e:
        raise UserError(f"{FLAG}: the Hessian of the inputs of {' and '.join(names)} cannot be inverted: {e}; {HINT}") from e


class ExpertCorrections:
    """The corrections of the matrices of experts with one input: W' = W + W M, with a matrix M for each of the sums.

    M replaces D in the sums.
    """

    def __init__(self, sums: Sums, names: Sequence[str]):
        """sums: complete; names: of the matrices, for messages."""
        self._sums, self._names = sums, names
        self._transforms = PerExpert(self._transform)
        sums.prepare_blend()
        if len(sums.h) == 1:  # now, on all threads
            self._transforms.get(0)

    def _transform(self, i: int) -> np.ndarray:
        """Return M of the i-th sums."""
        sums, (h, d) = self._sums, self._sums.expert_sums(i)
        assert sums.d is not None and d is not None
        corrector = make_corrector(h, sums.counts[i], self._names, sums.pool.map if len(sums.h) == 1 else map)
        sums.d[i] = corrector.transform(d)
        return sums.d[i]

    def rows(self, source: SourceTensor, qtype: GGMLQuantizationType, calibration: TensorCalibration, chunk: Chunk) -> np.ndarray:
        """Return corrected rows of a matrix, float32 (n_rows, n_per_row). calibration: that of its inputs."""
        weights = copy_rows(source, chunk, qtype)
        for part, i in calibration.slices(source.tensor, *chunk):
            weights[part] += weights[part] @ self._transforms.get(i)
        check_corrected(source.tensor.name, weights)
        return weights
