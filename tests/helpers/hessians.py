"""Hessians for tests of the encoders."""

import numpy as np

SEED = 15


def correlated_hessian(n: int, n_tokens: int, seed: int = SEED) -> np.ndarray:
    """Return the Hessian of correlated inputs of unequal energy, float64 (n, n)."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n_tokens, n)) @ (rng.standard_normal((n, n)) * rng.lognormal(0, 1, n) / np.sqrt(n))
    return x.T @ x


def pack_triangles(hessian: np.ndarray, full: bool) -> np.ndarray:
    n = len(hessian)
    columns = n if full else 256
    parts = [hessian[a : a + columns, a : a + columns] for a in range(0, n, columns)]
    return np.concatenate([p[np.tril_indices(len(p))] for p in parts]).astype(np.float32)


def block_numbers(n: int, full: bool) -> np.ndarray:
    """Return the block of each column, int (n,)."""
    return np.arange(n) // (n if full else 256)


def keep_blocks(hessian: np.ndarray, full: bool) -> np.ndarray:
    """Zero what pack_triangles() leaves out."""
    block = block_numbers(len(hessian), full)
    return hessian * (block[:, None] == block)


def shrink(hessian: np.ndarray, shrinkage: float, full: bool = True) -> np.ndarray:
    """Return what ggml_ext_metric_init() factorizes of the result of keep_blocks(), in the same scale."""
    squares, block = np.diag(hessian), block_numbers(len(hessian), full)
    means = np.bincount(block, squares) / np.bincount(block)
    return hessian + np.diag(shrinkage * squares + 0.001 * means[block])


def output_error(hessian: np.ndarray, errors: np.ndarray) -> float:
    return float(np.einsum("ri,ij,rj->", errors.astype(np.float64), hessian, errors.astype(np.float64)))
