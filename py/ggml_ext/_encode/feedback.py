"""Rows of a matrix that make up for the errors of the rows before them.

What errors E of a matrix, float (rows, columns), cost together is trace(G E H E^T) for G = E[g g^T] of the gradients g at its outputs and
H = E[x x^T] of its inputs (YAQA: Tseng et al. 2025, arXiv 2505.22988; their Kronecker factors). With G = U U^T, U upper triangular, the
rows b in their order cost the form H of

    U_bb^T E_b + sum over rows a before them of U_ab^T E_a,

so that W_b + U_bb^-T (sum U_ab^T (W_a - Q_a)) is what to encode in place of W_b, Q_a the values that the rows a have got.

GROUP rows are encoded at once, and those of a group do not make up for each other. Neighbours in attn_q and attn_k are alike, so groups of
them would leave much undone: row_order() says which rows go together, and when.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

# Encoded together, for the encoders take so many at a time.
GROUP = 16
# Of the mean on the diagonal, where tokens are so many that nothing is to be replaced: rows may be the same.
SMALLEST = 0.01


@dataclass(frozen=True)
class Rows:
    """Rows first .. first + len(factor) - 1 of a matrix, which know of each other. order: of these rows, the first to be encoded first;
    factor: U of the rows in that order, float32 (rows, rows)."""

    first: int
    order: np.ndarray
    factor: np.ndarray

    def targets(self, at: int, weights: np.ndarray, errors: np.ndarray) -> np.ndarray:
        """What to encode for GROUP rows, or those that are left, from row `at` of the order. weights, errors: float32 (rows, columns) of
        the matrix, these rows in their order; errors, of those before `at`, are weights less the values that they have got."""
        u, to = self.factor, min(at + GROUP, len(self.factor))
        wanted = weights[self.first + at : self.first + to].copy()
        if at:
            wanted += np.linalg.solve(u[at:to, at:to].T, u[:at, at:to].T) @ errors[self.first : self.first + at]
        return wanted


def shrinkage(g: np.ndarray, n_tokens: float) -> float:
    """What part of a sum of second moments, float (rows, rows), is to be replaced by its mean on the diagonal, 0 to 1: the sum is of
    n_tokens tokens, and so far from what many would give. OAS of Chen, Wiesel, Eldar and Hero 2010, arXiv 0907.4698, equation 23."""
    p = int(np.count_nonzero(np.diag(g)))  # rows of zeros, as padding has them, have no gradients
    squares, square = float(np.vdot(g, g)), float(np.trace(g)) ** 2
    excess = squares - square / max(p, 1)
    if excess <= 0:
        return 1.0
    return min(1.0, ((1 - 2 / p) * squares + square) / ((n_tokens + 1 - 2 / p) * excess))


def row_order(g: np.ndarray) -> np.ndarray:
    """In what order to encode rows, int (rows,), by GROUP. g: G, float64 (rows, rows), positive definite.

    An error costs what the rows behind its group cannot make up for. So the group that is encoded last has the rows with the least on the
    diagonal, the one before it those with the least of what remains of G once the last are eliminated, and so on."""
    left, groups = np.arange(len(g)), []
    while len(left):
        by_cost, n = np.argsort(np.diag(g), kind="stable"), len(left) % GROUP or GROUP
        last, rest = by_cost[:n], by_cost[n:]
        groups.append(left[last])
        left = left[rest]
        g = g[np.ix_(rest, rest)] - g[np.ix_(rest, last)] @ np.linalg.solve(g[np.ix_(last, last)], g[np.ix_(last, rest)])
    return np.concatenate(groups[::-1])


def make_rows(moments: Sequence[np.ndarray], n_tokens: float) -> list[Rows]:
    """moments: G of rows that know of each other, float32 (rows, rows), one after the other, finite, of any scale; n_tokens: that they are
    sums of."""
    made, first = [], 0
    for g in moments:
        part, n = shrinkage(g, n_tokens), max(1, np.count_nonzero(np.diag(g)))
        mean = float(np.trace(g)) / n or 1.0
        whole = (1 - part) * g + max(part, SMALLEST) * mean * np.eye(len(g))
        order = row_order(whole)
        factor = np.linalg.cholesky(whole[np.ix_(order[::-1], order[::-1])])[::-1, ::-1]
        made.append(Rows(first, order, factor.astype(np.float32)))
        first += len(g)
    return made


def encode_fed(
    weights: np.ndarray, rows: Sequence[Rows], encode: Callable, decode: Callable, n_parts: int, run: Callable
) -> tuple[np.ndarray, np.ndarray]:
    """Bytes, uint8 (rows, row_bytes), and values, float32 (rows, columns), of weights, float32 (rows, columns).

    encode, decode: rows to bytes and back. run: map() of a pool that does n_parts at a time, on which the result does not depend.
    """
    order = np.concatenate([r.first + r.order for r in rows])
    weights = weights[order]  # and errors: one behind the other, as they are encoded
    data, values, errors = None, np.empty_like(weights), np.zeros_like(weights)
    size = max(1, GROUP // max(1, n_parts // len(rows)))

    def make(piece: tuple[int, np.ndarray]) -> tuple[int, np.ndarray, np.ndarray]:
        made = encode(piece[1])
        return piece[0], made, decode(made)

    for at in range(0, max(len(r.factor) for r in rows), GROUP):
        there = [r for r in rows if at < len(r.factor)]
        wanted = list(run(lambda r, at=at: r.targets(at, weights, errors), there))
        pieces = [(r.first + at + i, w[i : i + size]) for r, w in zip(there, wanted, strict=True) for i in range(0, len(w), size)]
        for first, made, decoded in run(make, pieces):
            if data is None:
                data = np.empty((len(weights), made.shape[1]), np.uint8)
            part = slice(first, first + len(made))
            data[order[part]], values[order[part]], errors[part] = made, decoded, weights[part] - decoded
    return data, values
