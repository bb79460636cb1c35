"""Second moments made ready for the encoders, in numpy: ggml_ext/encode/metric.h and metric.c, bit for bit.

Steps are the weights of a row, rotated where the type is, block by block in the order of positions().
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from . import BLOCK_SIZE, HALF_MAX, SIGNS

MOMENTS_COLUMNS = 256  # of a matrix that holds no whole row
UNROTATED_MAX = 64 * HALF_MAX  # more than any block without rotation can hold
FLOOR = 0.01  # added to importances, of their mean
SEGMENT = 32  # of a metric that is made of importances
WINDOW = 32  # steps


def positions(n: int) -> np.ndarray:
    """Of the steps of a block of n weights, int (n,)."""
    return np.arange(n).reshape(8, n // 8).T.ravel()


def butterflies(x: np.ndarray) -> np.ndarray:
    """Walsh-Hadamard transform of the last axis, not normalised, as a new array."""
    x, stride = np.ascontiguousarray(x).copy(), 1
    while stride < x.shape[-1]:
        pairs = x.reshape(*x.shape[:-1], -1, 2, stride)
        u, v = pairs[..., 0, :].copy(), pairs[..., 1, :].copy()
        pairs[..., 0, :], pairs[..., 1, :] = u + v, u - v
        stride *= 2
    return x


@dataclass(frozen=True)
class Metric:
    """e^T M e of the errors of a row falls apart into segments: sum of r^T D[s] r, r = e[s] + sum over j < s of gain[s][j]*e[j]."""

    columns: int  # of each matrix but the last, which may be smaller
    segment: int  # steps
    forms: np.ndarray  # float32 (n_per_row, segment): D of one segment after the other
    gains: list[np.ndarray]  # of each segment float32 (steps before it in its matrix, segment)
    blocks: list[np.ndarray]  # the form of each, once later blocks have reacted, float32 (n, n); not of importances for blocks of 64
    windows: list[np.ndarray] | None = None  # of moments: the inverses of each block's parts of WINDOW steps, float32 (windows, 32, 32)

    def feed_block(self, first: int, x: np.ndarray, y: np.ndarray) -> None:
        """y[s] += what the steps of x before segment s ask of it. x, y: float32 (rows, n), a block each, from step `first` on."""
        for s in range(self.segment, x.shape[1], self.segment):
            self.feed_segment(first, s, x, y)

    def feed_segment(self, first: int, s: int, x: np.ndarray, y: np.ndarray) -> None:
        """What the steps of x before segment s of the block ask of it, added to its part of y. x, y as for feed_block()."""
        gains = self.gains[(first + s) // self.segment][first % self.columns :]
        _add_rows(gains, x[:, :s], y[:, s : s + self.segment])

    def feed_later(self, first: int, s: int, errors: np.ndarray, y: np.ndarray) -> None:
        """What the errors of segment s of the block, float32 (rows, segment), ask of the block's later ones, added to y."""
        for r in range(s + self.segment, y.shape[1], self.segment):
            at = first % self.columns + s
            gains = self.gains[(first + r) // self.segment][at : at + self.segment]
            _add_rows(gains, errors, y[:, r : r + self.segment])

    def feed_row(self, first: int, errors: np.ndarray, y: np.ndarray) -> None:
        """The same of the errors of all steps before the block in its matrix, float32 (rows, steps)."""
        for s in range(0, y.shape[1], self.segment):
            _add_rows(self.gains[(first + s) // self.segment], errors, y[:, s : s + self.segment])

    def apply_forms(self, first: int, r: np.ndarray) -> np.ndarray:
        """D r, segment by segment."""
        y = np.zeros_like(r)
        for s in range(0, r.shape[1], self.segment):
            here = slice(s, s + self.segment)
            _add_rows(self.forms[first + s : first + s + self.segment], r[:, here], y[:, here])
        return y

    def aim(self, first: int, x: np.ndarray, wish: np.ndarray) -> np.ndarray:
        """What would cost nothing in a block of each row: values v cost (target - v)^T B (target - v). metric_aim()."""
        shift, minus, S = wish - x, np.zeros_like(x), self.segment
        for s in range(0, x.shape[1], S):
            self.feed_segment(first, s, minus, shift)
            minus[:, s : s + S] = -shift[:, s : s + S]
        return x + shift

    @classmethod
    def of_importance(cls, importance: np.ndarray, block_size: int) -> Metric:
        """Of importances of the unrotated weights of a row, float32 (n_per_row,), for rotated types; metric_of_importance()."""
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
            """Of each block, float32 (blocks, frequencies), the matrix that is diagonal there."""
            return butterflies(spectrum)[:, bits[:, None] ^ bits] * np.float32(1 / SEGMENT)

        forms = np.empty((len(blocks), n_segments, SEGMENT, SEGMENT), np.float32)
        gains = np.zeros((len(blocks), n_segments, block_size, SEGMENT), np.float32)
        for s in range(n_segments - 1, -1, -1):
            row, pivot = d[:, :, s, :s].copy(), d[:, :, s, s].copy()
            forms[:, s] = expand(pivot.astype(np.float32))
            for r in range(s):
                gains[:, s, SEGMENT * r : SEGMENT * (r + 1)] = expand((row[..., r] / pivot).astype(np.float32))
            d[:, :, :s, :s] -= row[..., :, None] * row[..., None, :] / pivot[..., None, None]
        order = positions(block_size)
        whole = [row[order[:, None] ^ order] * np.float32(1 / block_size) for row in butterflies(scaled)] if block_size == BLOCK_SIZE else []
        in_row = [gains[b, s, : SEGMENT * s] for b in range(len(blocks)) for s in range(n_segments)]
        return cls(block_size, SEGMENT, forms.reshape(-1, SEGMENT), in_row, whole)

    @classmethod
    def of_moments(
        cls, moments: np.ndarray, n_per_row: int, block_size: int, rotated: bool, whole: bool, damping: float, segment: int = SEGMENT
    ) -> Metric:
        """ggml_ext_metric_init() of ggml-ext.h. moments: float32, lower triangles. ValueError if one is not positive definite."""
        columns = n_per_row if whole else min(MOMENTS_COLUMNS, n_per_row)
        forms, gains, blocks, at = [], [], [], 0
        for first in range(0, n_per_row, columns):
            n = min(columns, n_per_row - first)
            of_matrix = _load(moments[at : at + n * (n + 1) // 2], n, float(np.float32(damping)), block_size, rotated)
            at += n * (n + 1) // 2
            matrix_forms, matrix_gains, matrix_blocks = _factorize(of_matrix, segment, block_size)
            forms += matrix_forms
            gains += matrix_gains
            blocks += matrix_blocks
        return cls(columns, segment, np.concatenate(forms), gains, blocks, [_invert_windows(block) for block in blocks])


def encode_rows(
    metric: Metric | None, x: np.ndarray, encode: Callable[[slice, int, np.ndarray, np.ndarray], np.ndarray]
) -> None:
    """Blocks of rows in turn, each with what the errors of its row's earlier ones ask for; encode/rows.h.

    x: float32 (n_blocks, n) by step, row after row, 0 in blocks that are refused. encode(here, first, x, wish) encodes the blocks
    x[here], which begin at step `first` of their rows, and returns their values, zero for refused ones, float32 like x.
    """
    n = x.shape[1]
    row_blocks = 1 if metric is None else len(metric.forms) // n
    errors = np.zeros((len(x) // row_blocks, row_blocks * n), np.float32)
    for i in range(row_blocks):
        here, first, wish = slice(i, None, row_blocks), i * n, np.zeros_like(x[i::row_blocks])
        if metric is not None:
            metric.feed_row(first, errors[:, first // metric.columns * metric.columns : first], wish)
        errors[:, first : first + n] = x[here] - encode(here, first, x[here], x[here] + wish)


def _add_rows(rows: np.ndarray, x: np.ndarray, out: np.ndarray) -> None:
    """out[:, i] += rows[j, i] * x[:, j], one j after the other; metric_add_rows()."""
    for j in range(x.shape[1]):
        out += rows[j] * x[:, j, None]


def form_times(form: np.ndarray, x: np.ndarray) -> np.ndarray:
    """A x of each row of x, float32 (n_rows, n), for a symmetric A: metric_form_times(), metric_add_rows()."""
    y = np.zeros_like(x)
    for j in range(x.shape[1]):
        y += form[j] * x[:, j, None]
    return y


def load_damped(triangle: np.ndarray, n: int, damping: float) -> np.ndarray:
    """Moments scaled to a mean diagonal of 1 and damped, float64 (n, n); load_moments(). ValueError for values that no sum has."""
    a = np.zeros((n, n))
    a[np.tril_indices(n)] = triangle
    if not np.isfinite(a).all() or (np.diag(a) < 0).any():
        raise ValueError("moments are not finite, or a diagonal is negative")
    trace = np.cumsum(np.diag(a))[-1]
    mean = trace / n if trace > 0 else 1.0
    diagonal = np.arange(n)
    a[diagonal, diagonal] += damping * mean
    a /= mean
    return a + np.tril(a, -1).T


def _load(triangle: np.ndarray, n: int, damping: float, block_size: int, rotated: bool) -> np.ndarray:
    """The damped and rotated matrix in the order of steps, float64 (n, n)."""
    a = load_damped(triangle, n, damping)
    signs = SIGNS[:block_size].astype(np.float64)
    for _ in range(2):
        blocks = a.reshape(n, -1, block_size)
        if rotated:
            blocks = butterflies(blocks * signs) / np.sqrt(block_size)
        a = np.ascontiguousarray(blocks[:, :, positions(block_size)].reshape(n, n).T)
    return a


def _factorize(a: np.ndarray, S: int, block_size: int) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """Forms float32 (S, S) and gains float32 (steps before, S) of all segments, forms of all blocks; the lower triangle counts."""
    forms, gains, blocks = [], [], []
    for f in range(len(a) - S, -1, -S):
        end = f + S
        if end % block_size == 0:
            own = np.tril(a[end - block_size : end, end - block_size : end])
            blocks.append((own + np.tril(own, -1).T).astype(np.float32))
        rows = a[f : f + S, : f + S].copy()
        own = np.tril(rows[:, f:])
        rows[:, f:] = own + np.tril(own, -1).T
        g = rows.copy()
        for i in range(S - 1, -1, -1):
            if not g[i, f + i] > 0:
                raise ValueError("moments are not positive definite")
            g[i] /= g[i, f + i]
            for k in range(S):
                if k != i:
                    g[k] -= g[k, f + i] * g[i]
        forms.append(rows[:, f:].T.astype(np.float32))
        gains.append(np.ascontiguousarray(g[:, :f].T.astype(np.float32)))
        for k in range(S - 1, -1, -1):
            a[:f, :f] -= rows[k, :f, None] * g[k, :f]
    return forms[::-1], gains[::-1], blocks[::-1]


def _invert_windows(form: np.ndarray) -> np.ndarray:
    """Of the parts of WINDOW steps of a block's form, each half a window after the last; invert_window() in C."""
    a = np.array([form[s : s + WINDOW, s : s + WINDOW] for s in range(0, len(form) - WINDOW // 2, WINDOW // 2)], np.float64)
    for i in range(WINDOW):
        pivot = a[:, i, i].copy()
        a[:, i, i] = 1
        a[:, i] /= pivot[:, None]
        for k in range(WINDOW):
            if k != i:
                by = a[:, k, i].copy()
                a[:, k, i] = 0
                a[:, k] -= by[:, None] * a[:, i]
    return a.astype(np.float32)
