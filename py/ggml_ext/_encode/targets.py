"""Weights that make up for errors before them.

Behind matrices that are quantized already a matrix W meets other inputs x^ than the x of the original model, and its product is added to a
residual stream r^ that is not the original's r. The mean square of what comes out wrong, E|W x + r - (W' x^ + r^)|^2, is least for

    W' = W + (W D + R) H^-1,   H = E[x^ x^^T],  D = E[(x - x^) x^^T],  R = E[(r - r^) x^^T].

The first term is that of GPTAQ (Li et al. 2025, arXiv 2504.02692) and QEP (Arai and Ichikawa 2025, arXiv 2504.09629). H is what the
codes of W' are then chosen under.
"""

from __future__ import annotations

import numpy as np

RIDGE = 6  # tokens a column at which a direction whose H is the mean gets half of its correction
LEAST_RIDGE = 0.03


def ridge_of(columns: int, n_tokens: float) -> float:
    """What is added to the diagonal of H for the inverse, as a part of its mean. D and R are sums over tokens, mostly of errors that no
    weights make up for: what is fitted to these grows with columns and falls with tokens. docs/results/sequential.md has the search."""
    return max(LEAST_RIDGE, RIDGE * columns / max(n_tokens, columns))


def correction(weights: np.ndarray, h: np.ndarray, d: np.ndarray, r: np.ndarray | None, ridge: float) -> np.ndarray:
    """W' - W of the weights W, float32 (rows, columns). h, d: float (columns, columns); r: float (rows, columns), or None where the
    product is added to nothing; all of any one scale. ridge: see ridge_of().

    LinAlgError where H is singular all the same.
    """
    wanted = (weights @ d.astype(np.float32)).astype(np.float64)
    if r is not None:
        wanted += r
    mean = float(np.trace(h)) / len(h)
    if not mean:  # no input, nothing to make up for
        return np.zeros_like(weights)
    return np.linalg.solve(h + ridge * mean * np.eye(len(h)), wanted.T).T.astype(np.float32)
