"""Error feedback for upstream scalar types, in numpy: ggml_ext/encode/upstream-scalars.c and upstream-metric.c, bit for bit.

It improves the scales and codes of llama.cpp's encoder, which has no numpy reference. Arrays of columns are float32 (n_columns, n_rows).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from ._block_layouts import FP4_CODES, FP4_INDICES, FP4_LEVELS, LAYOUTS, Bits, Layout
from ._blocks import HALF_MAX
from ._metric import BLOCK_COLUMNS, load_shrunk

SWEEP_PANEL, SCALE_STEPS, STEP_CANDIDATES = 256, 2, 16
ZERO, ONE = np.float32(0), np.float32(1)


@dataclass(frozen=True)
class Matrix:
    """A factored Hessian of consecutive columns: upstream-metric.h.

    Attributes:
        first: first column.
        order: columns in the order of encoding, int (n,).
        D: float32 (n,), in this order.
        L: float32 (n, n), in this order; row k holds columns 0 .. k-1.
        H: the shrunk Hessian, float32 (n, n), in the order of the row.
    """

    first: int
    order: np.ndarray
    D: np.ndarray
    L: np.ndarray
    H: np.ndarray


def factorize_hessian(triangles: np.ndarray, n_per_row: int, is_full: bool, shrinkage: float) -> list[Matrix]:
    """Factor a full or block-diagonal Hessian; ggml_ext_metric_init() for these types.

    triangles: packed lower triangles, float32. ValueError if one is not positive definite.
    """
    columns = n_per_row if is_full else min(BLOCK_COLUMNS, n_per_row)
    matrices: list[Matrix] = []
    offset = 0
    for first in range(0, n_per_row, columns):
        n = min(columns, n_per_row - first)
        matrices.append(_make_matrix(triangles[offset : offset + n * (n + 1) // 2], n, first, float(np.float32(shrinkage))))
        offset += n * (n + 1) // 2
    return matrices


def _make_matrix(triangle: np.ndarray, n: int, first: int, shrinkage: float) -> Matrix:
    a = load_shrunk(triangle, n, shrinkage)
    order = np.argsort(-np.diag(a), kind="stable")
    H = a.astype(np.float32)
    a = H[np.ix_(order, order)].astype(np.float64)
    D, L = np.zeros(n, np.float32), np.zeros((n, n), np.float32)
    for k in range(n - 1, -1, -1):
        row, pivot = a[k, :k].copy(), a[k, k]
        if not pivot > 0:
            raise ValueError("the Hessian is not positive definite")
        L[k, :k], D[k] = row / pivot, pivot
        a[:k, :k] -= (row / pivot)[:, None] * row
    return Matrix(first, order, D=D, L=L, H=H)


class Change(NamedTuple):
    """A change of a sub-block's scale and min, float32 (n_rows,): struct change in C.

    Attributes:
        step, base: increases of step and base.
        scale, min: new values; of d and dmin in types without integer scales.
    """

    step: np.ndarray
    base: np.ndarray
    scale: np.ndarray
    min: np.ndarray


class _Rows:
    """Some rows, in the columns of one Hessian: struct upstream_rows in C.

    The value of a weight is base + step * level.

    Attributes:
        t, m: layout of the type; factored Hessian.
        blocks: the encoded rows, uint8 (n_rows, n_blocks, block_bytes).
        w: weights, float32 (n_columns, n_rows), like level and e.
        level: the level of each code: the code plus `low`, or its entry in the table of levels.
        e: errors, w minus the values.
        d, dmin: FP16 scales of the block, float32 (n_sub_blocks, n_rows), like the next five.
        scale, min: integers of the sub-block; 0 in types without them.
        step: d * scale, or d without integer scales.
        base: -(dmin * min), or dmin without integer mins, or 0 in types without mins.
        inverse: 1 / step, or 0 where step is 0.
        cost: e^T H e of the current errors, float32 (n_rows,).
    """

    def __init__(self, layout: Layout, matrix: Matrix, weights: np.ndarray, blocks: np.ndarray):
        """Unpack blocks. weights: float32 (n_rows, n). blocks: uint8 (n_rows, n_blocks, block_bytes)."""
        self.t, self.m, self.blocks = layout, matrix, blocks
        self.w = np.ascontiguousarray(weights.T)
        n_rows, n_blocks, flat = len(blocks), blocks.shape[1], blocks.reshape(-1, blocks.shape[2])

        def integers(fields: list[Bits], n: int) -> np.ndarray:
            out = np.zeros((len(flat), n), np.int64)
            for bits in fields:
                bits.read(flat, out)
            return out

        def by_row(values: np.ndarray) -> np.ndarray:
            return np.ascontiguousarray(values.reshape(n_rows, -1).T.astype(np.float32))

        block = self.w.shape[0] // n_blocks
        n_sub = block // layout.sub
        scales_fp16 = [flat[:, start : start + 2].copy().view("<f2").astype(np.float32) for start in layout.fp16_offsets]
        if layout.steps is not None:
            self.d = by_row(layout.steps.values[flat[:, layout.steps.bytes]])
        else:
            self.d = by_row(np.repeat(scales_fp16[0], n_sub, axis=1))
        self.dmin = by_row(np.repeat(scales_fp16[1], n_sub, axis=1)) if layout.has_min else np.zeros_like(self.d)
        scales = integers(layout.scales, n_sub)
        if layout.scales_are_signed:
            scales ^= 128
        self.scale = by_row(scales + (layout.scale_range or (0, 0))[0])
        self.min = by_row(integers(layout.mins, n_sub))
        codes = integers(layout.codes, block)
        codes = FP4_INDICES[codes] if layout.levels is FP4_LEVELS else codes
        self.level = by_row(codes + layout.low if layout.levels is None else layout.levels[codes])
        self.step, self.base, self.inverse = (np.zeros_like(self.d) for _ in range(3))
        for s in range(len(self.d)):
            self.set_step(s)
        self.cost = np.zeros(n_rows, np.float32)
        self.e = self.errors()

    def set_step(self, s: int) -> None:
        """Compute step, base and inverse of sub-block s."""
        has_integers = self.t.scale_range is not None
        self.step[s] = self.d[s] * self.scale[s] if has_integers else self.d[s]
        if self.t.has_min:
            self.base[s] = -(self.dmin[s] * self.min[s]) if has_integers else self.dmin[s]
        is_zero = self.step[s] == 0
        self.inverse[s] = np.where(is_zero, ZERO, ONE / np.where(is_zero, ONE, self.step[s]))

    def errors(self, columns: slice = slice(None)) -> np.ndarray:
        """Compute e for some columns."""
        base, step = (np.repeat(x, self.t.sub, axis=0)[columns] for x in (self.base, self.step))
        return self.w[columns] - (base + step * self.level[columns])

    def nearest(self, v: np.ndarray) -> np.ndarray:
        """Return the levels nearest to v, float32 (n_rows,)."""
        if self.t.levels is not None:
            level = np.full_like(v, self.t.levels[0])
            for below, above in zip(self.t.levels, self.t.levels[1:], strict=False):
                level = np.where(v >= np.float32(0.5) * (below + above), above, level)
            return level
        low, high = np.float32(self.t.low), np.float32(self.t.high)
        v = np.where(v > low, v, low)
        return np.rint(np.where(v < high, v, high))

    def round_scale(self, v: np.ndarray) -> np.ndarray:
        """Return the nearest values of the scale's format, float32."""
        return _round_to_fp16(v) if self.t.steps is None else self.t.steps.round(v)

    def search_steps(self) -> None:
        """Choose the first step of each sub-block by errors that the diagonal of H weights."""
        assert self.t.search is not None
        first, rise = self.t.search
        h = np.diag(self.m.H)
        for s in range(len(self.d)):
            columns = slice(s * self.t.sub, (s + 1) * self.t.sub)
            largest = np.abs(self.w[columns]).max(axis=0)
            best = np.full_like(self.cost, np.finfo(np.float32).max)
            for k in range(STEP_CANDIDATES):
                step = self.round_scale(largest * np.float32(first + k * rise))
                for signed in (step, -step) if self.t.search_negative else (step,):
                    best = self._consider_step(s, self.w[columns], h[columns], signed, best)
            self.set_step(s)

    def _consider_step(self, s: int, weights: np.ndarray, h: np.ndarray, step: np.ndarray, best: np.ndarray) -> np.ndarray:
        """Take a step, or the one that fits its nearest levels best, for sub-block s of the rows where its cost is below `best`; return the least cost."""
        inverse = np.where(step == 0, ZERO, ONE / np.where(step == 0, ONE, step))
        cost, ll, lw = (np.zeros_like(best) for _ in range(3))
        for w, h_column in zip(weights, h, strict=True):
            level = self.nearest(w * inverse)
            e, weighted = w - step * level, h_column * level
            cost += h_column * (e * e)
            ll += weighted * level
            lw += weighted * w
        refit = self.round_scale(np.where(ll > 0, lw / np.where(ll > 0, ll, ONE), step))
        change = refit - step
        refit_cost = cost + change * (ll * change - ((lw - ll * step) + (lw - ll * step)))
        is_better = refit_cost < cost
        step, cost = np.where(is_better, refit, step), np.where(is_better, refit_cost, cost)
        self.d[s] = np.where(cost < best, step, self.d[s])
        return np.where(cost < best, cost, best)

    def decide_codes(self) -> None:
        """Choose codes column by column with error feedback, for the current scales."""
        m, fed = self.m, np.zeros_like(self.w)
        for k, j in enumerate(m.order):
            s, goal = j // self.t.sub, self.w[j].copy()
            for i in range(k):
                goal += m.L[k, i] * fed[i]
            self.level[j] = self.nearest((goal - self.base[s]) * self.inverse[s])
            value = self.base[s] + self.step[s] * self.level[j]
            r = goal - value
            self.e[j] = fed[k] = self.w[j] - value
            self.cost += m.D[k] * (r * r)

    def cost_of_errors(self, e: np.ndarray) -> np.ndarray:
        """Return the cost of errors, float32 (n_rows,)."""
        m, fed = self.m, e[self.m.order]
        cost = np.zeros_like(e[0])
        for k in range(len(fed)):
            r = fed[k].copy()
            for i in range(k):
                r += m.L[k, i] * fed[i]
            cost += m.D[k] * (r * r)
        return cost

    def sweep(self) -> None:
        """Descend over scales and codes, panel by panel of columns. g: H e in the panel."""
        for begin in range(0, len(self.w), SWEEP_PANEL):
            columns = slice(begin, min(begin + SWEEP_PANEL, len(self.w)))
            g = np.zeros((columns.stop - begin, self.w.shape[1]), np.float32)
            for j in range(len(self.w)):
                g += self.m.H[columns, j, None] * self.e[j]
            H = self.m.H[columns, columns]
            if self.t.scale_range is not None:
                self.descend_block(begin, H, g)
            for _ in range(2):
                self.descend_codes(begin, H, g)
                self.descend_codes(begin, H, g)
                self.descend_scales(begin, H, g)
            self.descend_codes(begin, H, g)
            self.e[columns] = self.errors(columns)

    def descend_block(self, begin: int, H: np.ndarray, g: np.ndarray) -> None:
        """Fit the FP16 scales of the block at column `begin`: d times 1 + change_d, dmin times 1 + change_dmin."""
        subs = slice(begin // self.t.sub, begin // self.t.sub + len(g) // self.t.sub)
        values = [np.repeat(self.step[subs], self.t.sub, axis=0) * self.level[begin : begin + len(g)], np.repeat(self.base[subs], self.t.sub, axis=0)]
        products = [np.zeros_like(g), np.zeros_like(g)]
        for value, product in list(zip(values, products, strict=True))[: 2 if self.t.has_min else 1]:
            for j in range(len(g)):
                product += H[:, j, None] * value[j]
        vv, uu, vu, gv, gu = (
            _products(x, y) for x, y in ((values[0], products[0]), (values[1], products[1]), (values[0], products[1]), (values[0], g), (values[1], g))
        )
        d, dmin, det = self.d[subs.start].copy(), self.dmin[subs.start].copy(), vv * uu - vu * vu
        both = (det > np.float32(1e-6) * (vv * uu)) & (dmin != 0) & (d != 0)
        alone, safe = (vv > 0) & (d != 0), np.where(both, det, ONE)
        change_d = np.where(both, (gv * uu - gu * vu) / safe, np.where(alone, gv / np.where(alone, vv, ONE), ZERO))
        change_dmin = np.where(both, (gu * vv - gv * vu) / safe, ZERO)
        new_d, new_dmin = _round_to_fp16(d + d * change_d), _round_to_fp16(dmin + dmin * change_dmin)
        change_d = np.where(d != 0, new_d / np.where(d != 0, d, ONE) - ONE, ZERO)
        change_dmin = np.where(dmin != 0, new_dmin / np.where(dmin != 0, dmin, ONE) - ONE, ZERO)
        cost = change_d * (vv * change_d - (gv + gv) + (vu + vu) * change_dmin) + change_dmin * (uu * change_dmin - (gu + gu))
        better = cost < 0
        self.cost += np.where(better, cost, ZERO)
        self.d[subs], self.dmin[subs] = np.where(better, new_d, d), np.where(better, new_dmin, dmin)
        for s in range(subs.start, subs.stop):
            self.set_step(s)
        g -= np.where(better, change_d, ZERO) * products[0] + np.where(better, change_dmin, ZERO) * products[1]

    def descend_codes(self, begin: int, H: np.ndarray, g: np.ndarray) -> None:
        """Set the code of each column of the panel at `begin` in turn."""
        for i in range(len(g)):
            j, s, diagonal = begin + i, (begin + i) // self.t.sub, H[i, i]
            level = self.nearest(self.level[j] + (g[i] * (ONE / diagonal)) * self.inverse[s])
            moves = (level != self.level[j]) & (self.inverse[s] != 0)
            change = np.where(moves, (level - self.level[j]) * self.step[s], ZERO)
            self.level[j] = np.where(moves, level, self.level[j])
            self.cost += change * (diagonal * change - (g[i] + g[i]))
            g -= H[i][:, None] * change

    def descend_scales(self, begin: int, H: np.ndarray, g: np.ndarray) -> None:
        """Set scale and min of each sub-block of the panel at `begin` in turn."""
        has_integers = self.t.scale_range is not None
        scale, minimum = (self.scale, self.min) if has_integers else (self.d, self.dmin)
        for i0 in range(0, len(g), self.t.sub):
            s, columns = (begin + i0) // self.t.sub, slice(i0, i0 + self.t.sub)
            level = self.level[begin + i0 : begin + i0 + self.t.sub]
            quadratic = _Quadratic.from_levels(H[columns, columns], level, g[columns])
            zero = np.zeros_like(self.cost)
            best_cost, best = zero, Change(zero, zero, scale[s], minimum[s])
            if self.t.scale_range is not None:
                candidates = self._integer_candidates(s, *self.t.scale_range)
            else:
                candidates = self._fp16_candidates(s, quadratic)
            for change, is_allowed in candidates:
                cost = quadratic.cost(change.step, change.base)
                better = is_allowed & (cost < best_cost)
                best_cost = np.where(better, cost, best_cost)
                best = Change(*(np.where(better, new, old) for new, old in zip(change, best, strict=True)))
            scale[s], minimum[s] = best.scale, best.min
            self.set_step(s)
            self.cost += best_cost
            for i in range(i0, i0 + self.t.sub):
                g -= H[i][:, None] * (best.step * self.level[begin + i] + best.base)

    def _integer_candidates(self, s: int, low: int, high: int) -> Iterator[tuple[Change, np.ndarray]]:
        """Yield changes to integers near those of sub-block s, and the rows, bool (n_rows,), where these are in range."""
        min_steps = SCALE_STEPS if self.t.has_min else 0
        for scale_step in range(-SCALE_STEPS, SCALE_STEPS + 1):
            scale, step = self.scale[s] + np.float32(scale_step), np.float32(scale_step) * self.d[s]
            for min_step in range(-min_steps, min_steps + 1):
                minimum, base = self.min[s] + np.float32(min_step), np.float32(-min_step) * self.dmin[s]
                is_allowed = (scale >= low) & (scale <= high) & (minimum >= 0) & (minimum <= self.t.min_high)
                yield Change(step, base, scale, minimum), is_allowed

    def _fp16_candidates(self, s: int, f: _Quadratic) -> Iterator[tuple[Change, np.ndarray]]:
        """Yield one candidate like those of _integer_candidates(): the least-squares d and dmin, rounded to FP16."""
        rise_dmin = np.zeros_like(self.cost)
        if self.t.has_min:
            det = f.ll * f.oo - f.lo * f.lo
            inverse = ONE / np.where(det > 0, det, ONE)
            rise_d = np.where(det > 0, (f.gl * f.oo - f.go * f.lo) * inverse, ZERO)
            rise_dmin = np.where(det > 0, (f.go * f.ll - f.gl * f.lo) * inverse, ZERO)
        else:
            rise_d = np.where(f.ll > 0, f.gl * (ONE / np.where(f.ll > 0, f.ll, ONE)), ZERO)
        scale = self.round_scale(self.d[s] + rise_d)
        minimum = _round_to_fp16(self.dmin[s] + rise_dmin) if self.t.has_min else rise_dmin
        base = minimum - self.dmin[s] if self.t.has_min else rise_dmin
        yield Change(scale - self.d[s], base, scale, minimum), self.d[s] != 0

    def store(self, rows: np.ndarray) -> None:
        """Pack the selected rows, bool (n_rows,), into their blocks."""
        n_rows, n_blocks, block_bytes = self.blocks.shape
        flat = np.zeros((n_rows * n_blocks, block_bytes), np.uint8)
        n_sub = len(self.d) // n_blocks

        def by_block(values: np.ndarray, low: int = 0) -> np.ndarray:
            return values.T.reshape(n_rows * n_blocks, -1).astype(np.int64) - low

        codes = self.level if self.t.levels is None else np.searchsorted(self.t.levels, self.level)
        codes = FP4_CODES[codes] if self.t.levels is FP4_LEVELS else codes
        scales = by_block(self.scale, (self.t.scale_range or (0, 0))[0])
        if self.t.scales_are_signed:
            scales ^= 128
        for fields, integers in (
            (self.t.codes, by_block(codes, self.t.low)), (self.t.scales, scales), (self.t.mins, by_block(self.min))
        ):
            for bits in fields:
                bits.write(integers, flat)
        if self.t.steps is not None:
            steps = self.d.T.reshape(n_rows * n_blocks, -1)
            flat[:, self.t.steps.bytes] = np.searchsorted(self.t.steps.values[: self.t.steps.largest + 1], steps)
        for start, scale in zip(self.t.fp16_offsets, (self.d, self.dmin), strict=False):
            flat[:, start : start + 2] = scale[::n_sub].T.reshape(-1, 1).astype("<f2").view(np.uint8)
        self.blocks[rows] = flat.reshape(self.blocks.shape)[rows]


@dataclass(frozen=True)
class _Quadratic:
    """The cost of a sub-block when its step rises by a and its base by b: a*(ll*a - 2*gl + 2*lo*b) + b*(oo*b - 2*go).

    l are the levels of the sub-block, o as many ones, H its part of the Hessian and g = H e of all errors. Arrays are float32 (n_rows,).
    """

    ll: np.ndarray  # l^T H l
    gl: np.ndarray  # g^T l
    lo: np.ndarray  # l^T H o
    go: np.ndarray  # g^T o
    oo: np.float32  # o^T H o, the same for all rows

    @classmethod
    def from_levels(cls, H: np.ndarray, level: np.ndarray, g: np.ndarray) -> _Quadratic:
        ll, gl, lo, go = (np.zeros_like(level[0]) for _ in range(4))
        oo = ZERO
        for i in range(len(level)):
            product, row_sum = np.zeros_like(ll), ZERO  # element i of H l and of H o
            for k in range(len(level)):
                product += H[i, k] * level[k]
                row_sum += H[i, k]
            ll, lo, oo = ll + level[i] * product, lo + product, oo + row_sum
            gl, go = gl + g[i] * level[i], go + g[i]
        return cls(ll, gl, lo, go, oo)

    def cost(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Return the change of the cost, float32 (n_rows,)."""
        return a * (self.ll * a - (self.gl + self.gl) + (self.lo + self.lo) * b) + b * (self.oo * b - (self.go + self.go))


def _round_to_fp16(v: np.ndarray) -> np.ndarray:
    return np.clip(v, -HALF_MAX, HALF_MAX).astype(np.float16).astype(np.float32)


def _products(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Sum the products of each row of weights in the order of columns."""
    total = np.zeros_like(x[0])
    for x_column, y_column in zip(x, y, strict=True):
        total += x_column * y_column
    return total


def improve(rows: np.ndarray, qtype: GGMLQuantizationType, start: np.ndarray, metric: list[Matrix], sweeps: int) -> np.ndarray:
    """Improve rows that llama.cpp's encoder wrote; upstream_encode().

    Args:
        rows: weights float32 (n_rows, n_per_row).
        qtype: their type.
        start: encoded rows, uint8 (n_rows, row_bytes).
        metric: factored Hessian.
        sweeps: sweeps of coordinate descent.

    Returns:
        uint8 (n_rows, row_bytes) with better codes and scales in the rows that have some.
    """
    block, block_bytes = GGML_QUANT_SIZES[qtype]
    out = start.reshape(len(rows), -1, block_bytes).copy()
    for matrix in metric:
        first, n = matrix.first, len(matrix.order)
        weights = rows[:, first : first + n]
        part = _Rows(LAYOUTS[qtype], matrix, weights, out[:, first // block : (first + n) // block])
        start_errors = part.e.copy()
        if part.t.search is not None:
            part.search_steps()
        part.decide_codes()
        for _ in range(sweeps):
            part.sweep()
        part.store((part.cost_of_errors(start_errors) > part.cost) & np.isfinite(weights).all(axis=1))
    return out.reshape(start.shape)
