"""Corrected weights that compensate the errors of earlier matrices.

After quantized matrices, the inputs of a matrix W are x^ instead of the original model's x. Its product is added to a residual stream r^
instead of r. The mean squared error of the result, E|W x + r - (W' x^ + r^)|^2, is least for

    W' = W + (W D + R) H^-1,   H = E[x^ x^^T],  D = E[(x - x^) x^^T],  R = E[(r - r^) x^^T].

The term W D is that of GPTAQ (Li et al. 2025, arXiv 2504.02692) and QEP (Arai and Ichikawa 2025, arXiv 2504.09629). W' is then encoded
under H.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from .._formats.hessians import regularization

# Tokens per column at which the ridge equals the mean diagonal of H. Along an eigenvector of H with that eigenvalue, half of the correction
# remains.
RIDGE = 6
LEAST_RIDGE = 0.03  # with many tokens
PANEL = 256  # rows and columns of a block of the factorization


def choose_ridge(columns: int, n_tokens: float) -> float:
    """Choose the ridge that is added to the diagonal of H, as a part of its mean.

    D and R are mostly errors that no weights can compensate. Fitting them gets worse with more columns and fewer tokens. The search for the
    constants is in docs/results/sequential.md.
    """
    return regularization(RIDGE, LEAST_RIDGE, columns, n_tokens)


class Corrector:
    """Corrects matrices that have the same inputs. The results do not depend on the number of threads."""

    def __init__(self, h: np.ndarray, ridge: float, map_items: Callable[[Callable, Iterable], Iterable]):
        """Factorize H.

        Args:
            h: H, float32 (columns, columns), of any scale.
            ridge: choose_ridge().
            map_items: map(), or that of a thread pool.

        Raises:
            LinAlgError: H is singular in spite of the ridge.
        """
        mean = float(np.trace(h)) / len(h)
        self._map, self._factors = map_items, np.zeros(len(h), np.float32)
        if not mean:  # without inputs there are no errors
            return
        diagonal = np.diagonal(h) + np.float32(ridge * mean)
        if not diagonal.min() > 0:
            raise np.linalg.LinAlgError("a diagonal element is not positive")
        # With a diagonal of ones, loud columns do not spoil the accuracy of single precision.
        self._factors = (1 / np.sqrt(diagonal)).astype(np.float32)
        self._factor = h * self._factors
        self._factor *= self._factors[:, None]
        np.fill_diagonal(self._factor, 1)
        self._inverses = _factorize(self._factor, map_items)

    def correct(self, weights: np.ndarray, d: np.ndarray | None, r: np.ndarray | None) -> None:
        """Replace W by W', float32 (rows, columns).

        Args:
            weights: W.
            d: D, float32 (columns, columns), of the same scale as H; None if R includes W D.
            r: R, divided by the factor of the product in the residual stream, float32 (rows, columns); None if the product is not added to one.
        """
        if not self._factors.any():
            return

        def correct_panel(first: int) -> None:
            rows = weights[first : first + PANEL]
            change = rows @ d if d is not None else np.zeros_like(rows)
            if r is not None:
                change += r[first : first + PANEL]
            change *= self._factors
            _solve_rows(change, self._factor, self._inverses)
            rows += change * self._factors

        list(self._map(correct_panel, range(0, len(weights), PANEL)))

    def transform(self, d: np.ndarray) -> np.ndarray:
        """Return D H^-1, which corrects any weights without R: W' = W + W (D H^-1). It pays if many rows have the same inputs."""
        out = np.zeros_like(d)
        self.correct(out, None, d)
        return out


def _factorize(a: np.ndarray, map_items: Callable[[Callable, Iterable], Iterable]) -> list[np.ndarray]:
    """Replace the lower triangle of a positive definite matrix by its Cholesky factor, and return the inverses of the factor's diagonal blocks."""
    starts, inverses = range(0, len(a), PANEL), []
    for k in starts:
        end = k + PANEL
        inverses.append(inverse := np.linalg.inv(np.linalg.cholesky(a[k:end, k:end])))

        def divide(i: int, k: int = k, end: int = end, inverse: np.ndarray = inverse) -> None:
            a[i : i + PANEL, k:end] = a[i : i + PANEL, k:end] @ inverse.T

        def subtract(i: int, k: int = k, end: int = end) -> None:
            a[i : i + PANEL, end : i + PANEL] -= a[i : i + PANEL, k:end] @ a[end : i + PANEL, k:end].T

        for step in (divide, subtract):
            list(map_items(step, [i for i in starts if i >= end][::-1]))  # the longest first
    return inverses


def _solve_rows(rows: np.ndarray, factor: np.ndarray, inverses: list[np.ndarray]) -> None:
    """Multiply rows by (L L^T)^-1 from the right, in place. factor: L, whose lower triangle counts."""
    blocks = [(k, k + PANEL, inverse) for k, inverse in zip(range(0, len(factor), PANEL), inverses, strict=True)]
    for k, end, inverse in blocks:
        rows[:, k:end] = (rows[:, k:end] - rows[:, :k] @ factor[k:end, :k].T) @ inverse.T
    for k, end, inverse in reversed(blocks):
        rows[:, k:end] = (rows[:, k:end] - rows[:, end:] @ factor[end:, k:end]) @ inverse
