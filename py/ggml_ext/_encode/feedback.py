"""Error feedback between the rows of a matrix: each row compensates the errors of the rows before it.

Errors E of a matrix, float (rows, columns), cost trace(G E H E^T), with G = E[g g^T] of the gradients g at its outputs and H = E[x x^T] of its
inputs (YAQA: Tseng et al. 2025, arXiv 2505.22988; their Kronecker factors). With G = U U^T, U upper triangular, the rows b in their order cost
the form H of

    U_bb^T E_b + sum over rows a before them of U_ab^T E_a,

so that W_b + U_bb^-T (sum U_ab^T (W_a - Q_a)) is encoded in place of W_b, Q_a being the stored values of the rows a.

GROUP rows are encoded at once and do not compensate each other. Neighbours in attn_q and attn_k are alike, so groups of them would leave much
undone: order_rows() chooses which rows go together, and when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

# Rows encoded together: the encoders take so many at a time.
GROUP = 16
# Least part of the mean on the diagonal, however many the tokens: rows may be equal.
SMALLEST = 0.01


@dataclass(frozen=True)
class Rows:
    """Rows first .. first + len(factor) - 1 of a matrix, which compensate each other's errors."""

    first: int
    order: np.ndarray  # int (rows,), the first to be encoded first
    factor: np.ndarray  # U of the rows in that order, float32 (rows, rows)

    def targets(self, start: int, weights: np.ndarray, errors: np.ndarray) -> np.ndarray:
        """Compute what to encode for the next GROUP rows, from row `start` of the order.

        Args:
            start: number of rows that are encoded.
            weights: of the matrix, float32 (rows, columns), these rows in their order.
            errors: weights less stored values, of the rows before `start`.
        """
        u, stop = self.factor, min(start + GROUP, len(self.factor))
        targets = weights[self.first + start : self.first + stop].copy()
        if start:
            targets += np.linalg.solve(u[start:stop, start:stop].T, u[:start, start:stop].T) @ errors[self.first : self.first + start]
        return targets


def shrinkage(g: np.ndarray, n_tokens: float) -> float:
    """Return which part of G, 0 to 1, to replace by its mean on the diagonal, since it is a sum over n_tokens tokens only.

    OAS of Chen, Wiesel, Eldar and Hero 2010, arXiv 0907.4698, equation 23.
    """
    p = int(np.count_nonzero(np.diag(g)))  # rows of zeros, as padding has them, have no gradients
    squares, square = float(np.vdot(g, g)), float(np.trace(g)) ** 2
    excess = squares - square / max(p, 1)
    if excess <= 0:
        return 1.0
    return min(1.0, ((1 - 2 / p) * squares + square) / ((n_tokens + 1 - 2 / p) * excess))


def order_rows(g: np.ndarray) -> np.ndarray:
    """Choose the order in which rows are encoded, int (rows,), by GROUP. g: G, float64 (rows, rows), positive definite.

    Nothing after a group can compensate its errors. So the last group has the rows with the least diagonal, the one before it those with the
    least of what remains of G once the last are eliminated, and so on.
    """
    remaining, groups = np.arange(len(g)), []
    while len(remaining):
        by_cost, n = np.argsort(np.diag(g), kind="stable"), len(remaining) % GROUP or GROUP
        last, rest = by_cost[:n], by_cost[n:]
        groups.append(remaining[last])
        remaining = remaining[rest]
        g = g[np.ix_(rest, rest)] - g[np.ix_(rest, last)] @ np.linalg.solve(g[np.ix_(last, last)], g[np.ix_(last, rest)])
    return np.concatenate(groups[::-1])


def make_rows(moments: Sequence[np.ndarray], n_tokens: float) -> list[Rows]:
    """Factorize G of each part of a matrix.

    Args:
        moments: G of consecutive rows, float32 (rows, rows), finite, of any scale.
        n_tokens: that they are sums over.
    """
    parts, first = [], 0
    for g in moments:
        part, n = shrinkage(g, n_tokens), max(1, int(np.count_nonzero(np.diag(g))))
        mean = float(np.trace(g)) / n or 1.0
        damped = (1 - part) * g.astype(np.float64) + max(part, SMALLEST) * mean * np.eye(len(g))
        order = order_rows(damped)
        factor = np.linalg.cholesky(damped[np.ix_(order[::-1], order[::-1])])[::-1, ::-1]
        parts.append(Rows(first, order, factor.astype(np.float32)))
        first += len(g)
    return parts


def encode_fed(
    weights: np.ndarray,
    rows: Sequence[Rows],
    encode: Callable[[np.ndarray], np.ndarray],
    decode: Callable[[np.ndarray], np.ndarray],
    n_parts: int,
    run: Callable[[Callable, Iterable], Iterable],
) -> tuple[np.ndarray, np.ndarray]:
    """Encode a matrix with error feedback between its rows.

    Args:
        weights: float32 (rows, columns).
        rows: its parts.
        encode: encodes rows to bytes.
        decode: decodes them.
        n_parts: that run() processes at a time; the result does not depend on it.
        run: map() of a pool.

    Returns:
        Bytes, uint8 (rows, row_bytes), and decoded values, float32 (rows, columns).
    """
    order = np.concatenate([r.first + r.order for r in rows])
    weights = weights[order]  # like the errors in the order of encoding
    values, errors = np.empty_like(weights), np.zeros_like(weights)
    data = np.empty((len(weights), 0), np.uint8)
    size = max(1, GROUP // max(1, n_parts // len(rows)))

    def process(piece: tuple[int, np.ndarray]) -> tuple[int, np.ndarray, np.ndarray]:
        encoded = encode(piece[1])
        return piece[0], encoded, decode(encoded)

    for start in range(0, max(len(r.factor) for r in rows), GROUP):
        active = [r for r in rows if start < len(r.factor)]
        targets = list(run(lambda r, start=start: r.targets(start, weights, errors), active))
        pieces = [(r.first + start + i, w[i : i + size]) for r, w in zip(active, targets, strict=True) for i in range(0, len(w), size)]
        for first, encoded, decoded in run(process, pieces):
            if not data.size:
                data = np.empty((len(weights), encoded.shape[1]), np.uint8)
            part = slice(first, first + len(encoded))
            data[order[part]], values[order[part]], errors[part] = encoded, decoded, weights[part] - decoded
    return data, values
