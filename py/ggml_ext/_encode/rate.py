"""How long encoding takes on this machine: some Gaussian rows are encoded with all threads at once."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from gguf import GGMLQuantizationType

from .._formats.gguf_file import Tensor
from .._formats.hessians import BLOCK, TensorHessian
from .codec import Codec
from .tensor_calibration import PerExpert, TensorCalibration

COLUMNS, ROWS = 1024, 512  # of a sample; the former a multiple of all blocks, together a chunk as writers take it
ENOUGH = 0.2  # seconds that a sample takes at the least
CORRELATION = 0.98  # of neighbours among the inputs; with 0.9 encoding is slower than on models by a quarter


@dataclass(frozen=True)
class Rate:
    """Of one type and kind of importance, all threads together.

    weight: seconds a weight; column: what each column that is decided together with it adds; factorization: seconds, of one thread, for
    n^3/3 of a matrix of second moments.
    """

    weight: float
    column: float = 0.0
    factorization: float = 0.0

    def seconds(self, n_weights: int, n_columns: int, whole: bool) -> float:
        return n_weights * (self.weight + self.column * (n_columns if whole else BLOCK))

    def factorizing(self, n_columns: int, whole: bool) -> float:
        widths = [n_columns] if whole else [BLOCK] * (n_columns // BLOCK) + [n_columns % BLOCK]
        return self.factorization * sum(n**3 / 3 for n in widths)


def measure(codec: Codec, target: GGMLQuantizationType, kind: str, n_threads: int) -> Rate:
    """kind: of importance; "block" and "full" for types that make something of second moments alone."""
    if kind not in ("block", "full"):
        diagonal = None if kind == "none" else np.ones((1, COLUMNS), np.float32)
        return Rate(_seconds(codec, target, TensorCalibration(diagonal), n_threads))
    calibration, factorization = _sample_calibration(codec, target, kind == "full")
    blocks = calibration if kind == "block" else _sample_calibration(codec, target, False)[0]
    block = _seconds(codec, target, blocks, n_threads)
    if kind == "block":
        return Rate(block, 0.0, factorization / (COLUMNS // BLOCK * BLOCK**3 / 3))
    column = max(_seconds(codec, target, calibration, n_threads) - block, 0.0) / (COLUMNS - BLOCK)
    return Rate(max(block - column * BLOCK, 0.0), column, factorization / (COLUMNS**3 / 3))


def _tensor(target: GGMLQuantizationType) -> Tensor:
    return Tensor("sample", (COLUMNS, ROWS), target, 0, 0)


def _sample_calibration(codec: Codec, target: GGMLQuantizationType, whole: bool) -> tuple[TensorCalibration, float]:
    """Make statistics with a metric, and time its factorization in seconds."""
    row, column = np.tril_indices(COLUMNS if whole else BLOCK)
    triangle = (CORRELATION ** np.abs(row - column)).astype(np.float32)
    stored = np.tile(triangle, 1 if whole else COLUMNS // BLOCK)[None]
    tokens = np.full(1, 1e6, np.float32)
    hessian = TensorHessian("sample", "full" if whole else "block", COLUMNS, tokens, stored, stored_full=whole)
    calibration = TensorCalibration.from_hessian(np.ones((1, COLUMNS), np.float32), hessian)
    start = time.perf_counter()
    metric = codec.metric(_tensor(target), target, calibration, 0, lambda _: None)
    seconds = time.perf_counter() - start
    return replace(calibration, metrics=PerExpert(lambda _: metric)), seconds


def _seconds(codec: Codec, target: GGMLQuantizationType, calibration: TensorCalibration, n_threads: int) -> float:
    """Time encoding and measuring, in seconds per weight with all threads at work."""
    weights = (0.02 * np.random.default_rng(1).standard_normal((ROWS, COLUMNS))).astype(np.float32)
    rows = weights.view(np.uint8)
    source, n = Tensor("sample", (COLUMNS, ROWS), GGMLQuantizationType.F32, 0, 0), n_threads
    with ThreadPoolExecutor(n_threads) as pool:

        def encode(times: int) -> float:
            start = time.perf_counter()
            list(pool.map(lambda _: codec.convert(rows, source, 0, target, calibration), range(times)))
            return time.perf_counter() - start

        while (seconds := encode(n)) < ENOUGH:
            n = max(2 * n, int(n * ENOUGH / max(seconds, 1e-3)))
        return min(seconds, encode(n)) / (n * weights.size)  # the first may find the CPU busy with what ran before
