"""Weights, their errors and comparisons of blocks."""

from __future__ import annotations

import numpy as np
import pytest

import ggml_ext


def relative_mse(actual: np.ndarray, expected: np.ndarray) -> float:
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    return float(((actual - expected) ** 2).sum() / (expected**2).sum())


def weighted_blocks(
    kind: str, n_blocks: int, decades: int, seed: int = 20240611, block_size: int = 256
) -> tuple[np.ndarray, np.ndarray]:
    """Return Gaussian weights float32 (n_blocks, block_size) and their importances.

    Importances spread over 10^-decades .. 10^decades ("spread"), are zero for seven of ten ("zeros") or for all ("all zero"), or are
    "huge"; with "ties" the weights are multiples of a quarter.
    """
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n_blocks, block_size)).astype(np.float32)
    importance = (10.0 ** rng.uniform(-decades, decades, x.shape)).astype(np.float32)
    if kind == "zeros":
        importance[rng.random(x.shape) < 0.7] = 0
    elif kind == "all zero":
        importance[:] = 0
    elif kind == "huge":
        importance *= np.float32(1e34)
    elif kind == "ties":
        x = np.round(4 * x) / 4
    else:
        assert kind == "spread"
    return x, importance


def weighted_error_ratio(lib, type_name: str) -> float:
    """Return the weighted squared error with an imatrix over that without, for importances over four decades."""
    rng = np.random.default_rng(20240611)
    type_id, x = int(ggml_ext.TYPES[type_name].id), rng.standard_normal((1, 65536)).astype(np.float32)
    importance = (10.0 ** rng.uniform(-2, 2, x.shape)).astype(np.float32)

    def error(blocks: np.ndarray) -> float:
        return (importance * (lib.dequantize(type_id, blocks, x.shape[1]) - x).astype(np.float64) ** 2).sum()

    ratio = error(lib.quantize(type_id, x, imatrix=importance.ravel())) / error(lib.quantize(type_id, x))
    print(f"{type_name}: weighted error {ratio:.3f} of the unweighted encoder's")
    return ratio


def assert_same_blocks(actual: np.ndarray, expected: np.ndarray, what: str) -> None:
    """Assert equality of two uint8 (n_blocks, block_bytes) arrays; the message names `what`, the first different block and its bytes."""
    assert actual.shape == expected.shape, what
    different = np.flatnonzero((actual != expected).any(axis=1))
    if different.size:
        i = different[0]
        pytest.fail(
            f"{what}: {different.size} of {len(actual)} blocks differ; block {i}:\n"
            f"  {actual[i].tobytes().hex()}\n  {expected[i].tobytes().hex()}"
        )
