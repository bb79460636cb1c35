"""Corrected weights that compensate the errors of earlier matrices.

After quantized matrices, the inputs of a matrix W are x^ instead of the original model's x. Its product is added to a residual stream r^
instead of r. The mean squared error of the result, E|W x + r - (W' x^ + r^)|^2, is least for

    W' = W + (W D + R) H^-1,   H = E[x^ x^^T],  D = E[(x - x^) x^^T],  R = E[(r - r^) x^^T].

The term W D is that of GPTAQ (Li et al. 2025, arXiv 2504.02692) and QEP (Arai and Ichikawa 2025, arXiv 2504.09629). W' is then encoded
under H.
"""

from __future__ import annotations

import numpy as np

from .._formats.hessians import regularization

# Tokens per column at which the ridge equals the mean diagonal of H. Along an eigenvector of H with that eigenvalue, half of the correction
# remains.
RIDGE = 6
LEAST_RIDGE = 0.03  # with many tokens


def choose_ridge(columns: int, n_tokens: float) -> float:
    """Choose the ridge that is added to the diagonal of H, as a part of its mean.

    D and R are mostly errors that no weights can compensate. Fitting them gets worse with more columns and fewer tokens. The search for the
    constants is in docs/results/sequential.md.
    """
    return regularization(RIDGE, LEAST_RIDGE, columns, n_tokens)


def correction(weights: np.ndarray, h: np.ndarray, d: np.ndarray, r: np.ndarray | None, ridge: float) -> np.ndarray:
    """Compute W' - W, float32 (rows, columns).

    Args:
        weights: W, float32 (rows, columns).
        h: H, float (columns, columns), of the same scale as D and R.
        d: D, float (columns, columns).
        r: R, divided by the factor of the product in the residual stream, float (rows, columns); None if the product is not added to one.
        ridge: choose_ridge().

    Raises:
        LinAlgError: H is singular in spite of the ridge.
    """
    right_side = (weights @ d.astype(np.float32)).astype(np.float64)
    if r is not None:
        right_side += r
    mean = float(np.trace(h)) / len(h)
    if not mean:  # without inputs there are no errors
        return np.zeros_like(weights)
    return np.linalg.solve(h + ridge * mean * np.eye(len(h)), right_side.T).T.astype(np.float32)
