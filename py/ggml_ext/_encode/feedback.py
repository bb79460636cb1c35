"""Error feedback between the rows of a matrix: each row compensates the errors of the rows before it.

The loss of errors E, float (rows, columns), is trace(G E H E^T), with the Kronecker factors G of the outputs and H of the inputs as in YAQA
(Tseng et al. 2025, arXiv 2505.22988). H is the mean of x x^T over the inputs x of the matrix. G is the sum of u u^T over all tokens except
the first ones of chunks, with u = g/|g| of the gradients g at the outputs (RowSums in _sequential/sums.py); YAQA uses g itself. The scale
of G does not matter. Let G = U U^T, U upper triangular, and

    S_b = U_bb^T E_b + sum over earlier rows a of U_ab^T E_a.

Then rows b add trace(S_b H S_b^T) to the loss. The encoder therefore gets W_b + U_bb^-T (sum U_ab^T (W_a - Q_a)) instead of W_b. Q_a are the
stored values of the rows a.

GROUP rows are encoded at once and cannot compensate each other. Neighbouring rows of attn_q and attn_k are correlated, so order_rows()
chooses the groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

# Rows encoded at once: the encoders process as many together.
GROUP = 16
# Smallest multiple of mean(diag G) added to the diagonal of G. Even with many tokens it is needed: equal rows make G singular.
LEAST_DAMPING = 0.01
HALF_ROUNDING = 2.0**-11  # relative error of G, which is stored in half precision


@dataclass(frozen=True)
class RowSpan:
    """Rows first .. first + len(factor) - 1 of a matrix, which compensate each other's errors."""

    first: int
    order: np.ndarray  # of encoding, relative to first, int (rows,)
    factor: np.ndarray  # U of the rows in that order, float32 (rows, rows)

    def corrected_rows(self, start: int, weights: np.ndarray, errors: np.ndarray) -> np.ndarray:
        """Compute the corrected weights of the next GROUP rows, from row `start` of the order.

        Args:
            start: number of encoded rows.
            weights: all rows of the matrix, float32 (rows, columns), permuted so that first .. first + len(factor) - 1 are these rows in
                the order of encoding.
            errors: W - Q, in the same order; those of the rows before `start` are used.
        """
        u, stop = self.factor, min(start + GROUP, len(self.factor))
        corrected = weights[self.first + start : self.first + stop].copy()
        if start:
            corrected += np.linalg.solve(u[start:stop, start:stop].T, u[:start, start:stop].T) @ errors[self.first : self.first + start]
        return corrected


def oas_weight(g: np.ndarray, n_tokens: float) -> float:
    """Compute the weight s, 0 to 1, in (1 - s) G + s mean(diag G) I, for G from n_tokens tokens.

    OAS (oracle approximating shrinkage) of Chen, Wiesel, Eldar and Hero 2010, arXiv 0907.4698, equation 23.
    """
    p = int(np.count_nonzero(np.diag(g)))  # padding rows have no gradients
    trace_of_square, squared_trace = float(np.vdot(g, g)), float(np.trace(g)) ** 2
    excess = trace_of_square - squared_trace / max(p, 1)
    if excess <= 0:
        return 1.0
    return min(1.0, ((1 - 2 / p) * trace_of_square + squared_trace) / ((n_tokens + 1 - 2 / p) * excess))


def order_rows(g: np.ndarray) -> np.ndarray:
    """Choose the order of encoding, int (rows,), in groups of GROUP rows. g: G, float64 (rows, rows), positive definite.

    Later rows compensate the errors of earlier ones, so the last group has the rows of least diagonal, whose errors cost least. Its rows
    are eliminated from G, and the group before it is chosen in the same way.
    """
    eliminated = np.zeros_like(g)  # rows of R in G = R^T R + S; S is the Schur complement of the rows that remain
    diagonal = np.diagonal(g).copy()  # of S
    remains, groups, n_done = np.ones(len(g), bool), [], 0
    while n_done < len(g):
        n = (len(g) - n_done) % GROUP or GROUP
        last = np.argsort(np.where(remains, diagonal, np.inf), kind="stable")[:n]
        rows = g[last] - eliminated[:n_done, last].T @ eliminated[:n_done]
        rows = np.linalg.solve(np.linalg.cholesky(rows[:, last]), rows)
        eliminated[n_done : n_done + n] = rows
        diagonal -= (rows**2).sum(axis=0)
        remains[last] = False
        groups.append(last)
        n_done += n
    return np.concatenate(groups[::-1])


def make_row_spans(statistics: Sequence[np.ndarray], n_tokens: float, map_items: Callable[[Callable, Iterable], Iterable]) -> list[RowSpan]:
    """Damp G of each span of rows, choose its order and factorize it.

    Args:
        statistics: G of each span, in the order of the rows, float32 (rows, rows), finite, of any scale.
        n_tokens: number of tokens in the sums.
        map_items: map() of a pool.
    """
    firsts = np.cumsum([0, *(len(g) for g in statistics)])
    return list(map_items(lambda item: _make_row_span(item[0], item[1], n_tokens), zip(firsts[:-1], statistics, strict=True)))


def _make_row_span(first: int, g: np.ndarray, n_tokens: float) -> RowSpan:
    weight, n = oas_weight(g, n_tokens), max(1, int(np.count_nonzero(np.diag(g))))
    mean = float(np.trace(g)) / n or 1.0
    damped = (1 - weight) * g.astype(np.float64) + max(weight, LEAST_DAMPING) * mean * np.eye(len(g))
    try:
        order, factor = _factorize(damped)
    except np.linalg.LinAlgError:  # a few rows have most of G, whose rounding to half precision exceeds the damping; the row sums bound it
        order, factor = _factorize(damped + HALF_ROUNDING * float(np.abs(g).sum(axis=1).max()) * np.eye(len(g)))
    return RowSpan(int(first), order, factor.astype(np.float32))


def _factorize(damped: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Choose the order of rows, and factorize G in it."""
    order = order_rows(damped)
    return order, np.linalg.cholesky(damped[np.ix_(order[::-1], order[::-1])])[::-1, ::-1]


def encode_with_row_feedback(
    weights: np.ndarray,
    spans: Sequence[RowSpan],
    encode: Callable[[np.ndarray], np.ndarray],
    decode: Callable[[np.ndarray], np.ndarray],
    n_threads: int,
    map_items: Callable[[Callable, Iterable], Iterable],
) -> np.ndarray:
    """Encode a matrix with error feedback between its rows.

    Args:
        weights: float32 (rows, columns).
        spans: consecutive spans that cover all rows. Rows compensate each other's errors only within their span.
        encode: encodes rows to bytes.
        decode: decodes them.
        n_threads: threads of `map_items`. With more threads than spans, the GROUP rows of a span are split among
            them without changing the result.
        map_items: map() of a pool.

    Returns:
        Bytes, uint8 (rows, row_bytes).
    """
    order = np.concatenate([r.first + r.order for r in spans])
    weights = weights[order]  # in the order of encoding, as the errors are
    errors = np.zeros_like(weights)
    data = np.empty((len(weights), 0), np.uint8)
    size = max(1, GROUP // max(1, n_threads // len(spans)))

    def process(piece: tuple[int, np.ndarray]) -> tuple[int, np.ndarray, np.ndarray]:
        encoded = encode(piece[1])
        return piece[0], encoded, decode(encoded)

    for start in range(0, max(len(r.factor) for r in spans), GROUP):
        active = [r for r in spans if start < len(r.factor)]
        corrected = list(map_items(lambda r, start=start: r.corrected_rows(start, weights, errors), active))
        pieces = [(r.first + start + i, w[i : i + size]) for r, w in zip(active, corrected, strict=True) for i in range(0, len(w), size)]
        for first, encoded, decoded in map_items(process, pieces):
            if not data.size:
                data = np.empty((len(weights), encoded.shape[1]), np.uint8)
            block_rows = slice(first, first + len(encoded))
            data[order[block_rows]], errors[block_rows] = encoded, weights[block_rows] - decoded
    return data
