"""Error feedback for blocks whose weights each take one of a few levels: ggml_ext/encode/levels.h in numpy, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ._blocks import BLOCK_SIZE, sum_lanes
from ._metric import Metric, multiply

LEVELS, MAX_SWEEPS, ROUNDS = 8, 4, 3


@dataclass
class Best:
    """The best codes and levels so far of some blocks."""

    cost: np.ndarray  # float32 (n_blocks,)
    level: np.ndarray  # float32 (n_blocks, 8)
    code: np.ndarray  # uint8 (n_blocks, 256)


class Block:
    """The same block of many rows, float32 (n_rows, 256) by step.

    Attributes:
        x: the weights.
        goal: the weights, corrected for the errors of earlier blocks.
        B: the block's part of the Hessian, after elimination of later blocks; metric_schur().
        optimum: the values that would cost nothing, given the errors of earlier blocks.
        B_opt: B times the optimum.
    """

    def __init__(self, metric: Metric, first: int, x: np.ndarray, goal: np.ndarray):
        self.metric, self.first, self.x, self.goal = metric, first, x, goal
        self.B = metric.schur[first // BLOCK_SIZE]
        self.optimum = metric.find_optimum(first, x, goal)
        self.B_opt = multiply(self.B, self.optimum)

    def init_codes(self, level: np.ndarray) -> np.ndarray:
        """Choose first codes uint8 (n_rows, 256) under levels float32 (n_rows, 8), segment by segment; ext_levels_init()."""
        S, metric, goal, errors = self.metric.segment, self.metric, self.goal.copy(), np.zeros_like(self.x)
        code = np.zeros(self.x.shape, np.uint8)
        for s in range(0, BLOCK_SIZE, S):
            columns, D = slice(s, s + S), metric.D[self.first + s : self.first + s + S]
            metric.feed_segment(self.first, s, errors, goal)
            code[:, columns] = nearest_levels(level, goal[:, columns])
            g = multiply(D, goal[:, columns] - _values(level, code[:, columns]))
            descend(D, level, code[:, columns], g)
            errors[:, columns] = self.x[:, columns] - _values(level, code[:, columns])
        return code

    def improve(self, level: np.ndarray, code: np.ndarray, best: Best, allowed: np.ndarray) -> np.ndarray:
        """Improve codes in place, keep them in `best` where they are better and allowed, and return where, bool (n_rows,)."""
        g = multiply(self.B, self.optimum - _values(level, code))
        descend(self.B, level, code, g)
        cost = sum_lanes((self.optimum - _values(level, code)) * g)
        better = allowed & (cost < best.cost)
        best.cost[better], best.level[better], best.code[better] = cost[better], level[better], code[better]
        return better

    def normal_equations(self, code: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the normal equations of the levels, float64 (n_rows, 8, 8) and (n_rows, 8); ext_levels_normal_equations()."""
        rows = np.arange(len(code))
        sums = np.zeros((len(code), LEVELS, BLOCK_SIZE), np.float32)
        a, b = np.zeros((len(code), LEVELS, LEVELS)), np.zeros((len(code), LEVELS))
        for j in range(BLOCK_SIZE):
            sums[rows, code[:, j]] += self.B[j]
        for j in range(BLOCK_SIZE):
            a[rows, code[:, j]] += sums[:, :, j]
            b[rows, code[:, j]] += self.B_opt[:, j]
        return a, b


def solve(a: np.ndarray, b: np.ndarray, default: np.ndarray) -> np.ndarray:
    """Solve a x = b in place, as ext_solve(): float64 (n_rows, n), a (n_rows, n, n) positive definite except for rows of zeros, where x is
    `default`."""
    n = b.shape[1]
    for k in range(n):
        empty = ~(a[:, k, k] > 0)
        a[empty, k, k], b[empty, k] = 1, default[empty, k]
        for i in range(k + 1, n):
            factor = a[:, i, k] / a[:, k, k]
            a[:, i, k:] -= factor[:, None] * a[:, k, k:]
            b[:, i] -= factor * b[:, k]
    x = np.empty_like(b)
    for k in range(n - 1, -1, -1):
        x[:, k] = b[:, k]
        for j in range(k + 1, n):
            x[:, k] -= a[:, k, j] * x[:, j]
        x[:, k] /= a[:, k, k]
    return x


def nearest_levels(level: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return the codes uint8 of the levels, float32 (n_rows, 8), nearest to v (n_rows, n); ties go to the higher level."""
    middle = np.float32(0.5) * (level[:, :-1] + level[:, 1:])
    return (v[..., None] >= middle[:, None]).sum(axis=2, dtype=np.uint8)


def _values(level: np.ndarray, code: np.ndarray) -> np.ndarray:
    return np.take_along_axis(level, code.astype(np.intp), axis=1)


def descend(H: np.ndarray, level: np.ndarray, code: np.ndarray, g: np.ndarray) -> None:
    """Improve codes by coordinate descent, in place; ext_descend(). g: H (optimum - values)."""
    for _ in range(MAX_SWEEPS):
        changed = False
        for i in range(code.shape[1]):
            old = _values(level, code[:, i : i + 1])
            best = nearest_levels(level, old + g[:, i : i + 1] / H[i, i])
            moves = best[:, 0] != code[:, i]
            if moves.any():
                change = (_values(level, best) - old)[moves]
                g[moves] -= H[i] * change
                code[:, i], changed = best[:, 0], True
        if not changed:
            return
