"""Hessians factored for error feedback, in numpy: ggml_ext/encode/metric.h and metric.c, bit for bit.

A step is a weight of a row (a rotated one if the type rotates), block by block in the order of positions(). Segments of steps are encoded
one after the other, and each compensates the errors of those before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ._blocks import BLOCK_SIZE, HALF_MAX, SIGNS

BLOCK_COLUMNS = 256  # per block of a block-diagonal Hessian
UNROTATED_MAX = 64 * HALF_MAX  # more than any block without rotation can represent
FLOOR = 0.01  # added to importances, relative to their mean
DIAGONAL_FLOOR = 0.001  # added to the diagonal of a Hessian, relative to its mean
SEGMENT = 32  # steps, for a diagonal Hessian
WINDOW = 32  # steps


def positions(n: int) -> np.ndarray:
    """Return the positions of a block's steps among its n weights, int (n,)."""
    return np.arange(n).reshape(8, n // 8).T.ravel()


def butterflies(x: np.ndarray) -> np.ndarray:
    """Apply the Walsh-Hadamard transform to the last axis, without normalization."""
    x, stride = np.ascontiguousarray(x).copy(), 1
    while stride < x.shape[-1]:
        pairs = x.reshape(*x.shape[:-1], -1, 2, stride)
        u, v = pairs[..., 0, :].copy(), pairs[..., 1, :].copy()
        pairs[..., 0, :], pairs[..., 1, :] = u + v, u - v
        stride *= 2
    return x


@dataclass(frozen=True)
class Metric:
    """A block LDL factorization of the Hessian H: e^T H e = sum of r^T D[s] r, r = e[s] + sum over j < s of L[s][j] * e[j].

    Attributes:
        columns: steps per matrix; the last may have fewer.
        segment: steps per segment.
        D: of all segments, float32 (n_per_row, segment).
        L: of each segment, float32 (steps before it in its matrix, segment).
        schur: each block's Schur complement, after elimination of later blocks, float32 (n, n); empty for importances of shorter blocks.
        windows: inverses of each block's parts of WINDOW steps, float32 (n_windows, 32, 32); None for importances.
    """

    columns: int
    segment: int
    D: np.ndarray
    L: list[np.ndarray]
    schur: list[np.ndarray]
    windows: list[np.ndarray] | None = None

    def feed_block(self, first: int, x: np.ndarray, y: np.ndarray) -> None:
        """Add to each segment of y the feedback from the segments of x before it. x, y: the block at step `first`, float32 (rows, n)."""
        for s in range(self.segment, x.shape[1], self.segment):
            self.feed_segment(first, s, x, y)

    def feed_segment(self, first: int, s: int, x: np.ndarray, y: np.ndarray) -> None:
        """Add to segment s of y the feedback from the steps of x before it in the block. x, y as for feed_block()."""
        L = self.L[(first + s) // self.segment][first % self.columns :]
        _add_rows(L, x[:, :s], y[:, s : s + self.segment])

    def feed_later(self, first: int, s: int, errors: np.ndarray, y: np.ndarray) -> None:
        """Add to the later segments of y the feedback from the errors of segment s, float32 (rows, segment)."""
        for r in range(s + self.segment, y.shape[1], self.segment):
            start = first % self.columns + s
            L = self.L[(first + r) // self.segment][start : start + self.segment]
            _add_rows(L, errors, y[:, r : r + self.segment])

    def feed_row(self, first: int, errors: np.ndarray, y: np.ndarray) -> None:
        """Add to y the feedback from the errors of all steps before the block in its matrix, float32 (rows, steps)."""
        for s in range(0, y.shape[1], self.segment):
            _add_rows(self.L[(first + s) // self.segment], errors, y[:, s : s + self.segment])

    def apply_D(self, first: int, r: np.ndarray) -> np.ndarray:
        """Return D r, segment by segment."""
        y = np.zeros_like(r)
        for s in range(0, r.shape[1], self.segment):
            columns = slice(s, s + self.segment)
            _add_rows(self.D[first + s : first + s + self.segment], r[:, columns], y[:, columns])
        return y

    def find_optimum(self, first: int, x: np.ndarray, goal: np.ndarray) -> np.ndarray:
        """Return the optimum of a block, whose values v cost (optimum - v)^T B (optimum - v); metric_find_optimum()."""
        shift, minus, S = goal - x, np.zeros_like(x), self.segment
        for s in range(0, x.shape[1], S):
            self.feed_segment(first, s, minus, shift)
            minus[:, s : s + S] = -shift[:, s : s + S]
        return x + shift

    @classmethod
    def from_importance(cls, importance: np.ndarray, block_size: int) -> Metric:
        """Factor the diagonal Hessian of a row's unrotated weights, float32 (n_per_row,), for rotated types; metric_from_importance()."""
        blocks = importance.reshape(-1, block_size)
        sums = np.cumsum(blocks, axis=1, dtype=np.float64)[:, -1:]
        with np.errstate(divide="ignore", invalid="ignore"):
            scaled = (blocks.astype(np.float64) * (block_size / sums) + FLOOR).astype(np.float32)
        scaled = np.where(sums > 0, scaled, np.float32(1))
        n_segments = block_size // SEGMENT
        by_frequency = scaled[:, positions(block_size)].reshape(-1, n_segments, SEGMENT).transpose(0, 2, 1)
        index, bits = np.arange(n_segments), np.arange(SEGMENT)
        d = butterflies(by_frequency)[:, :, index[:, None] ^ index].astype(np.float64)

        def expand(spectrum: np.ndarray) -> np.ndarray:
            """Return the matrices with these eigenvalues, float32 (blocks, frequencies), in the Walsh-Hadamard basis."""
            return butterflies(spectrum)[:, bits[:, None] ^ bits] * np.float32(1 / SEGMENT)

        D = np.empty((len(blocks), n_segments, SEGMENT, SEGMENT), np.float32)
        L = np.zeros((len(blocks), n_segments, block_size, SEGMENT), np.float32)
        for s in range(n_segments - 1, -1, -1):
            row, pivot = d[:, :, s, :s].copy(), d[:, :, s, s].copy()
            D[:, s] = expand(pivot.astype(np.float32))
            for r in range(s):
                L[:, s, SEGMENT * r : SEGMENT * (r + 1)] = expand((row[..., r] / pivot).astype(np.float32))
            d[:, :, :s, :s] -= row[..., :, None] * row[..., None, :] / pivot[..., None, None]
        order = positions(block_size)
        schur = [row[order[:, None] ^ order] * np.float32(1 / block_size) for row in butterflies(scaled)] if block_size == BLOCK_SIZE else []
        row_L = [L[b, s, : SEGMENT * s] for b in range(len(blocks)) for s in range(n_segments)]
        return cls(block_size, SEGMENT, D.reshape(-1, SEGMENT), row_L, schur)

    @classmethod
    def from_hessian(
        cls, triangles: np.ndarray, n_per_row: int, block_size: int, rotated: bool, is_full: bool, shrinkage: float, segment: int = SEGMENT
    ) -> Metric:
        """Factor a full or block-diagonal Hessian; ggml_ext_metric_init() of ggml-ext.h.

        triangles: packed lower triangles, float32. ValueError if one is not positive definite.
        """
        columns = n_per_row if is_full else min(BLOCK_COLUMNS, n_per_row)
        D: list[np.ndarray] = []
        L: list[np.ndarray] = []
        schur: list[np.ndarray] = []
        offset = 0
        for first in range(0, n_per_row, columns):
            n = min(columns, n_per_row - first)
            matrix = _load(triangles[offset : offset + n * (n + 1) // 2], n, float(np.float32(shrinkage)), block_size, rotated)
            offset += n * (n + 1) // 2
            matrix_D, matrix_L, matrix_schur = _factorize(matrix, segment, block_size)
            D += matrix_D
            L += matrix_L
            schur += matrix_schur
        return cls(columns, segment, np.concatenate(D), L=L, schur=schur, windows=[_invert_windows(block) for block in schur])


def encode_rows(
    metric: Metric | None, x: np.ndarray, encode: Callable[[slice, int, np.ndarray, np.ndarray], np.ndarray]
) -> None:
    """Encode rows block by block with error feedback; encode/rows.h.

    x: float32 (n_blocks, n) by step, row after row, zero in refused blocks. encode(block_rows, first, x, goal) encodes the blocks
    x[block_rows], which begin at step `first` of their rows, and returns their values, float32 like x, zero for refused ones.
    """
    n = x.shape[1]
    row_blocks = 1 if metric is None else len(metric.D) // n
    errors = np.zeros((len(x) // row_blocks, row_blocks * n), np.float32)
    for i in range(row_blocks):
        block_rows, first, goal = slice(i, None, row_blocks), i * n, np.zeros_like(x[i::row_blocks])
        if metric is not None:
            metric.feed_row(first, errors[:, first // metric.columns * metric.columns : first], goal)
        errors[:, first : first + n] = x[block_rows] - encode(block_rows, first, x[block_rows], x[block_rows] + goal)


def _add_rows(rows: np.ndarray, x: np.ndarray, out: np.ndarray) -> None:
    """Add rows[j, i] * x[:, j] to out[:, i], in the order of j; metric_add_rows()."""
    for j in range(x.shape[1]):
        out += rows[j] * x[:, j, None]


def multiply(A: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return A x for each row x, float32 (n_rows, n), and symmetric A: metric_multiply()."""
    y = np.zeros_like(x)
    for j in range(x.shape[1]):
        y += A[j] * x[:, j, None]
    return y


def load_shrunk(triangle: np.ndarray, n: int, shrinkage: float) -> np.ndarray:
    """Scale a Hessian H to a mean diagonal of 1 and add shrinkage * diag(H) + DIAGONAL_FLOOR to its diagonal; load_hessian().

    Return float64 (n, n). ValueError for invalid sums.
    """
    a = np.zeros((n, n))
    a[np.tril_indices(n)] = triangle
    if not np.isfinite(a).all() or (np.diag(a) < 0).any():
        raise ValueError("the Hessian is not finite, or a diagonal value is negative")
    trace = np.cumsum(np.diag(a))[-1]
    mean = trace / n if trace > 0 else 1.0
    diagonal = np.arange(n)
    squares = np.diag(a)
    a[diagonal, diagonal] = squares + shrinkage * squares + DIAGONAL_FLOOR * mean
    a /= mean
    return a + np.tril(a, -1).T


def _load(triangle: np.ndarray, n: int, shrinkage: float, block_size: int, rotated: bool) -> np.ndarray:
    """Return the shrunk and rotated Hessian in the order of steps, float64 (n, n)."""
    a = load_shrunk(triangle, n, shrinkage)
    signs = SIGNS[:block_size].astype(np.float64)
    for _ in range(2):
        blocks = a.reshape(n, -1, block_size)
        if rotated:
            blocks = butterflies(blocks * signs) * block_size**-0.5
        a = np.ascontiguousarray(blocks[:, :, positions(block_size)].reshape(n, n).T)
    return a


def _factorize(a: np.ndarray, S: int, block_size: int) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """Return D float32 (S, S) and L float32 (steps before, S) of all segments and the Schur complements of all blocks, from the lower triangle."""
    D: list[np.ndarray] = []
    L: list[np.ndarray] = []
    schur: list[np.ndarray] = []
    for f in range(len(a) - S, -1, -S):
        end = f + S
        if end % block_size == 0:
            own = np.tril(a[end - block_size : end, end - block_size : end])
            schur.append((own + np.tril(own, -1).T).astype(np.float32))
        rows = a[f : f + S, : f + S].copy()
        own = np.tril(rows[:, f:])
        rows[:, f:] = own + np.tril(own, -1).T
        g = rows.copy()
        for i in range(S - 1, -1, -1):
            if not g[i, f + i] > 0:
                raise ValueError("the Hessian is not positive definite")
            g[i] /= g[i, f + i]
            for k in range(S):
                if k != i:
                    g[k] -= g[k, f + i] * g[i]
        D.append(rows[:, f:].T.astype(np.float32))
        L.append(np.ascontiguousarray(g[:, :f].T.astype(np.float32)))
        for k in range(S - 1, -1, -1):
            a[:f, :f] -= rows[k, :f, None] * g[k, :f]
    return D[::-1], L[::-1], schur[::-1]


def _invert_windows(B: np.ndarray) -> np.ndarray:
    """Invert the parts of WINDOW steps of B, a block's Schur complement, at a distance of half a window; invert_window() in C."""
    a = np.array([B[s : s + WINDOW, s : s + WINDOW] for s in range(0, len(B) - WINDOW // 2, WINDOW // 2)], np.float64)
    for i in range(WINDOW):
        pivot = a[:, i, i].copy()
        a[:, i, i] = 1
        a[:, i] /= pivot[:, None]
        for k in range(WINDOW):
            if k != i:
                factor = a[:, k, i].copy()
                a[:, k, i] = 0
                a[:, k] -= factor[:, None] * a[:, i]
    return a.astype(np.float32)
