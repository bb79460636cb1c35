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


def keep_blocks(hessian: np.ndarray, full: bool) -> np.ndarray:
    """Zero what pack_triangles() leaves out."""
    block = np.arange(len(hessian)) // (len(hessian) if full else 256)
    return hessian * (block[:, None] == block)


def shrink(hessian: np.ndarray, shrinkage: float) -> np.ndarray:
    """Return the matrix that ggml_ext_metric_init() factorizes, in the scale of `hessian`."""
    squares = np.diag(hessian)
    return hessian + np.diag(shrinkage * squares + 0.001 * squares.mean())


def output_error(hessian: np.ndarray, errors: np.ndarray) -> float:
    return float(np.einsum("ri,ij,rj->", errors.astype(np.float64), hessian, errors.astype(np.float64)))
