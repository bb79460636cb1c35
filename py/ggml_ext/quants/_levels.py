"""Codes of blocks whose weights each take one of eight values, under a metric: ggml_ext/encode/levels.h in numpy, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import BLOCK_SIZE, sum_lanes
from ._metric import Metric, form_times

LEVELS, MAX_SWEEPS, ROUNDS = 8, 4, 3


@dataclass
class Best:
    """The best codes so far of some blocks, and their levels."""

    cost: np.ndarray  # float32 (n_blocks,)
    level: np.ndarray  # float32 (n_blocks, 8)
    code: np.ndarray  # uint8 (n_blocks, 256)


class Block:
    """A block of many rows, by step: x, and wish, with what the errors of earlier blocks ask for; float32 (n_rows, 256)."""

    def __init__(self, metric: Metric, first: int, x: np.ndarray, wish: np.ndarray):
        self.metric, self.first, self.x, self.wish = metric, first, x, wish
        self.form = metric.blocks[first // BLOCK_SIZE]
        self.target = metric.aim(first, x, wish)
        self.pull = form_times(self.form, self.target)

    def start(self, level: np.ndarray) -> np.ndarray:
        """First codes uint8 (n_rows, 256) under levels float32 (n_rows, 8): each segment with the errors of those before it fed back."""
        S, metric, wish, errors = self.metric.segment, self.metric, self.wish.copy(), np.zeros_like(self.x)
        code = np.zeros(self.x.shape, np.uint8)
        for s in range(0, BLOCK_SIZE, S):
            here, form = slice(s, s + S), metric.forms[self.first + s : self.first + s + S]
            metric.feed_segment(self.first, s, errors, wish)
            code[:, here] = nearest_levels(level, wish[:, here])
            g = form_times(form, wish[:, here] - _values(level, code[:, here]))
            descend(form, level, code[:, here], g)
            errors[:, here] = self.x[:, here] - _values(level, code[:, here])
        return code

    def improve(self, level: np.ndarray, code: np.ndarray, best: Best, allowed: np.ndarray) -> np.ndarray:
        """Better codes, in place, kept where they are the best so far and allowed. Returns where."""
        g = form_times(self.form, self.target - _values(level, code))
        descend(self.form, level, code, g)
        cost = sum_lanes((self.target - _values(level, code)) * g)
        better = allowed & (cost < best.cost)
        best.cost[better], best.level[better], best.code[better] = cost[better], level[better], code[better]
        return better

    def normal(self, code: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Normal equations of the levels, float64 (n_rows, 8, 8) and (n_rows, 8); ext_levels_normal()."""
        rows = np.arange(len(code))
        sums = np.zeros((len(code), LEVELS, BLOCK_SIZE), np.float32)
        a, b = np.zeros((len(code), LEVELS, LEVELS)), np.zeros((len(code), LEVELS))
        for j in range(BLOCK_SIZE):
            sums[rows, code[:, j]] += self.form[j]
        for j in range(BLOCK_SIZE):
            a[rows, code[:, j]] += sums[:, :, j]
            b[rows, code[:, j]] += self.pull[:, j]
        return a, b


def solve(a: np.ndarray, b: np.ndarray, given: np.ndarray) -> np.ndarray:
    """x of a x = b, float64 (n_rows, n), a (n_rows, n, n) positive definite but for rows of zeros, which give `given`; in place, as
    ext_solve()."""
    n = b.shape[1]
    for k in range(n):
        empty = ~(a[:, k, k] > 0)
        a[empty, k, k], b[empty, k] = 1, given[empty, k]
        for i in range(k + 1, n):
            by = a[:, i, k] / a[:, k, k]
            a[:, i, k:] -= by[:, None] * a[:, k, k:]
            b[:, i] -= by * b[:, k]
    x = np.empty_like(b)
    for k in range(n - 1, -1, -1):
        x[:, k] = b[:, k]
        for j in range(k + 1, n):
            x[:, k] -= a[:, k, j] * x[:, j]
        x[:, k] /= a[:, k, k]
    return x


def nearest_levels(level: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Codes uint8 of the levels, float32 (n_rows, 8), nearest to v (n_rows, n), the higher one of equals."""
    middle = np.float32(0.5) * (level[:, :-1] + level[:, 1:])
    return (v[..., None] >= middle[:, None]).sum(axis=2, dtype=np.uint8)


def _values(level: np.ndarray, code: np.ndarray) -> np.ndarray:
    return np.take_along_axis(level, code.astype(np.intp), axis=1)


def descend(form: np.ndarray, level: np.ndarray, code: np.ndarray, g: np.ndarray) -> None:
    """Coordinate descent over the steps, in place; ext_descend(). g: the form times what the values lack."""
    for _ in range(MAX_SWEEPS):
        changed = False
        for i in range(code.shape[1]):
            old = _values(level, code[:, i : i + 1])
            best = nearest_levels(level, old + g[:, i : i + 1] / form[i, i])
            moves = best[:, 0] != code[:, i]
            if moves.any():
                by = (_values(level, best) - old)[moves]
                g[moves] -= form[i] * by
                code[:, i], changed = best[:, 0], True
        if not changed:
            return
