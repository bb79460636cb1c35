"""Measure the speed of encoding on this machine, with Gaussian rows on all threads."""

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

COLUMNS, ROWS = 1024, 512  # of the sample: as large as a chunk of the writers; the columns fit all types
ENOUGH = 0.2  # least seconds per measurement
CORRELATION = 0.98  # of neighbouring inputs: gives the speed of encoding on models


@dataclass(frozen=True)
class Rate:
    """The time to encode to one type with one kind of calibration statistics."""

    weight: float  # seconds per weight, all threads together
    column: float = 0.0  # seconds per weight and column of its Hessian
    factorization: float = 0.0  # seconds of one thread per n^3/3 of a Hessian with n columns

    def seconds(self, n_weights: int, n_columns: int, is_full: bool) -> float:
        """Estimate the time to encode, without factorization."""
        return n_weights * (self.weight + self.column * (n_columns if is_full else BLOCK))

    def factorizing(self, n_columns: int, is_full: bool) -> float:
        """Estimate the time to factorize the Hessian."""
        widths = [n_columns] if is_full else [BLOCK] * (n_columns // BLOCK) + [n_columns % BLOCK]
        return self.factorization * sum(n**3 / 3 for n in widths)


def measure(codec: Codec, qtype: GGMLQuantizationType, kind: str, n_threads: int) -> Rate:
    """Measure the rate. kind: of the statistics; "block" and "full" only for types that use Hessians."""
    if kind not in ("block", "full"):
        diagonal = None if kind == "none" else np.ones((1, COLUMNS), np.float32)
        return Rate(_seconds(codec, qtype, TensorCalibration(diagonal), n_threads))
    calibration, factorization = _sample_calibration(codec, qtype, kind == "full")
    blocks = calibration if kind == "block" else _sample_calibration(codec, qtype, False)[0]
    block = _seconds(codec, qtype, blocks, n_threads)
    if kind == "block":
        return Rate(block, 0.0, factorization / (COLUMNS // BLOCK * BLOCK**3 / 3))
    column = max(_seconds(codec, qtype, calibration, n_threads) - block, 0.0) / (COLUMNS - BLOCK)
    return Rate(max(block - column * BLOCK, 0.0), column, factorization / (COLUMNS**3 / 3))


def _tensor(qtype: GGMLQuantizationType) -> Tensor:
    return Tensor("sample", (COLUMNS, ROWS), qtype, 0, 0)


def _sample_calibration(codec: Codec, qtype: GGMLQuantizationType, is_full: bool) -> tuple[TensorCalibration, float]:
    """Make statistics with a metric, and time its factorization in seconds."""
    row, column = np.tril_indices(COLUMNS if is_full else BLOCK)
    triangle = (CORRELATION ** np.abs(row - column)).astype(np.float32)
    stored = np.tile(triangle, 1 if is_full else COLUMNS // BLOCK)[None]
    tokens = np.full(1, 1e6, np.float32)
    hessian = TensorHessian("sample", "full" if is_full else "block", COLUMNS, tokens, stored, stored_full=is_full)
    calibration = TensorCalibration.from_hessian(np.ones((1, COLUMNS), np.float32), hessian)
    start = time.perf_counter()
    metric = codec.metric(_tensor(qtype), qtype, calibration, 0, lambda _: None)
    seconds = time.perf_counter() - start
    return replace(calibration, metrics=PerExpert(lambda _: metric)), seconds


def _seconds(codec: Codec, qtype: GGMLQuantizationType, calibration: TensorCalibration, n_threads: int) -> float:
    """Time encoding and error measurement on all threads, in seconds per weight."""
    weights = (0.02 * np.random.default_rng(1).standard_normal((ROWS, COLUMNS))).astype(np.float32)
    rows = weights.view(np.uint8)
    source, n = Tensor("sample", (COLUMNS, ROWS), GGMLQuantizationType.F32, 0, 0), n_threads
    with ThreadPoolExecutor(n_threads) as pool:

        def encode(times: int) -> float:
            start = time.perf_counter()
            list(pool.map(lambda _: codec.convert(rows, source, 0, qtype, calibration), range(times)))
            return time.perf_counter() - start

        while (seconds := encode(n)) < ENOUGH:
            n = max(2 * n, int(n * ENOUGH / max(seconds, 1e-3)))
        return min(seconds, encode(n)) / (n * weights.size)  # the first one may compete with earlier work
