"""Second moments as matrices, for tests of what encoders make of them."""

import numpy as np

SEED = 15


def correlated(n: int, n_tokens: int, seed: int = SEED) -> np.ndarray:
    """Second moments of correlated inputs whose energies differ, float64 (n, n)."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n_tokens, n)) @ (rng.standard_normal((n, n)) * rng.lognormal(0, 1, n) / np.sqrt(n))
    return x.T @ x


def triangles(moments: np.ndarray, whole: bool) -> np.ndarray:
    n = len(moments)
    columns = n if whole else 256
    parts = [moments[a : a + columns, a : a + columns] for a in range(0, n, columns)]
    return np.concatenate([p[np.tril_indices(len(p))] for p in parts]).astype(np.float32)


def masked(moments: np.ndarray, whole: bool) -> np.ndarray:
    """With what triangles() leaves out set to zero."""
    block = np.arange(len(moments)) // (len(moments) if whole else 256)
    return moments * (block[:, None] == block)


def cost(moments: np.ndarray, errors: np.ndarray) -> float:
    return float(np.einsum("ri,ij,rj->", errors.astype(np.float64), moments, errors.astype(np.float64)))
