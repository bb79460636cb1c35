"""ITQ3_S in numpy: the format of ggml_ext/types/itq3_s.h and the encoder of ggml_ext/encode/itq3_s.c.

    w = S H v,   v[j] = d * (q[j] - z),   q[j] in 0..7,   100 bytes: half d, half z, uint8 ql[64], uint8 qh[32]

Source: "ITQ3_S: Interleaved Ternary Quantization - Specialized" for the rotation, the block and d, z; the bit map and
the eight-level encoder are this project's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ._blocks import (
    BLOCK_SIZE,
    HALF_MAX,
    as_blocks,
    load_rotated,
    pack_bits3,
    rotate_back,
    scales_to_bytes,
    scales_to_float32,
    sum_lanes,
    unpack_bits3,
)
from ._levels import ROUNDS, Best, Block
from ._metric import Metric, encode_rows, positions

BLOCK_BYTES = 100
# Starts of the search: scales in standard deviations of the block, centres in units of d from the middle of the codes.
# See encode/itq3_s.c for the choice.
START_SCALES = np.array([0.46, 0.50, 0.54, 0.58, 0.62, 0.66, 0.72], np.float32)
START_SHIFTS = np.array([-0.4, -0.2, 0.0, 0.2, 0.4], np.float32)
N_REFITS = 4
_ZERO, _HALF, _ONE = np.float32(0), np.float32(0.5), np.float32(1)


def unpack(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Unpack the codes, scale and zero point of each block.

    blocks: uint8 (n_blocks, 100). Returns q int8 (n_blocks, 256) in 0..7, d and z float32 (n_blocks,), with rotated
    value = d * (q - z). ValueError for other shapes or dtypes. Any bits are a valid code; d and z may be NaN or Inf.
    """
    blocks = as_blocks(blocks, np.uint8, BLOCK_BYTES)
    q = unpack_bits3(blocks[:, 4:68], blocks[:, 68:])
    return q.astype(np.int8), scales_to_float32(blocks[:, 0:2]), scales_to_float32(blocks[:, 2:4])


def pack(q: np.ndarray, d: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Inverse of unpack. q: uint8 (n_blocks, 256) in 0..7; d, z: float32 (n_blocks,), rounded to half.

    Returns uint8 (n_blocks, 100). ValueError for other shapes or dtypes and for codes above 7.
    """
    ql, qh = pack_bits3(q)
    return np.concatenate([scales_to_bytes(d), scales_to_bytes(z), ql, qh], axis=1)


def dequantize_blocks(blocks: np.ndarray) -> np.ndarray:
    """uint8 (n_blocks, 100) to weights float32 (n_blocks, 256), rotated back. ValueError for other shapes or dtypes."""
    q, d, z = unpack(blocks)
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and Inf scales give NaN weights, as in C
        return rotate_back(d[:, None] * (q.astype(np.float32) - z[:, None]))


def quantize_blocks(
    weights: np.ndarray, importance: np.ndarray | None = None, levels: int = 8, metric: Metric | None = None
) -> np.ndarray:
    """Encode weights float32 (n_blocks, 256) to uint8 (n_blocks, 100), with the same bytes as the C encoder.

    A block with NaN or infinity gets d = z = NaN, which row validation refuses. Values beyond the range of half scales saturate.

    Args:
        weights: rows of complete blocks.
        importance: weights of a row's squared errors, float32 (row_blocks, 256); zeros in a complete block count as ones.
        levels: 8, or 3 for the paper's ternary code, which uses neither importance nor metric.
        metric: Hessian of the rows, in place of importance.

    Raises:
        ValueError: other shapes, dtypes or levels.
    """
    if levels not in (3, 8):
        raise ValueError(f"levels is {levels}, must be 8 or 3")
    with np.errstate(all="ignore"):  # rejected candidates overflow and divide by zero, as in C
        x, finite = load_rotated(weights, BLOCK_SIZE)
        if importance is not None and metric is None:
            metric = Metric.from_importance(as_blocks(importance, np.float32, BLOCK_SIZE).ravel(), BLOCK_SIZE)
        if metric is not None and levels == 8:
            q, d, z = _encode_under_hessian(x, finite, metric)
        else:
            best = _encode_plain(x, levels)
            q, d, z = best.q, best.d, best.z
        d[~finite] = z[~finite] = np.nan
        q[~finite] = 0
    return pack(q, d, z)


def _encode_plain(x: np.ndarray, levels: int) -> _Best:
    stats = _Stats.of(x)
    best = _Best(x, stats.energy)
    if levels == 3:
        _encode_ternary(x, stats, best)
    else:
        _encode_eight_levels(x, stats, best)
    return best


def _levels(d: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Return the levels of stored scales, float32 (n_rows, 8)."""
    return d[:, None] * (np.arange(8, dtype=np.float32) - z[:, None])


def _refit_under_hessian(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fit d and z of least cost under fixed codes; return them rounded to half, and where they are usable. refit_under_hessian() in C."""
    s, sc, scc, sx, sxc = (np.zeros(len(a)) for _ in range(5))
    for k in range(8):
        row, row_c = np.zeros(len(a)), np.zeros(len(a))
        for m in range(8):
            row, row_c = row + a[:, k, m], row_c + a[:, k, m] * m
        s, sc, scc = s + row, sc + row_c, scc + row_c * k
        sx, sxc = sx + b[:, k], sxc + b[:, k] * k
    det = s * scc - sc * sc
    slope = (s * sxc - sc * sx) / det
    offset = (sx - sc * slope) / s
    d, z = slope.astype(np.float32), (-offset / slope).astype(np.float32)
    usable = (det > 0) & (d > 0) & (d <= HALF_MAX) & (np.abs(z) <= HALF_MAX)
    return d.astype(np.float16).astype(np.float32), z.astype(np.float16).astype(np.float32), usable


def _encode_under_hessian(x: np.ndarray, finite: np.ndarray, metric: Metric) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    order = positions(BLOCK_SIZE)
    q, all_d, all_z = np.zeros(x.shape, np.uint8), np.zeros(len(x), np.float32), np.zeros(len(x), np.float32)

    def encode(block_rows: slice, first: int, x: np.ndarray, goal: np.ndarray) -> np.ndarray:
        block = Block(metric, first, x, goal)
        initial = _encode_plain(block.optimum, 8)
        d, z, allowed = initial.d, initial.z, np.ones(len(x), bool)
        best = Best(sum_lanes(block.optimum * block.B_opt), np.zeros((len(x), 8), np.float32), np.zeros(x.shape, np.uint8))
        code, best_d, best_z = block.init_codes(_levels(d, z)), np.zeros_like(d), np.zeros_like(z)
        for _ in range(ROUNDS):
            better = block.improve(_levels(d, z), code, best, allowed)
            best_d[better], best_z[better] = d[better], z[better]
            d, z, usable = _refit_under_hessian(*block.normal_equations(code))
            allowed = allowed & usable
        q[block_rows, order], all_d[block_rows], all_z[block_rows] = best.code, best_d, best_z
        return np.where(finite[block_rows, None], np.take_along_axis(best.level, best.code.astype(np.intp), axis=1), np.float32(0))

    encode_rows(metric, np.where(finite[:, None], x, np.float32(0))[:, order], encode)
    return q, all_d, all_z


@dataclass
class _Stats:
    """Per block, all float32 (n_blocks,); ext_block_stats() of encode/encode.h."""

    min: np.ndarray
    max: np.ndarray
    sum: np.ndarray
    mean: np.ndarray
    energy: np.ndarray  # sum of squares
    sigma: np.ndarray  # population standard deviation

    @classmethod
    def of(cls, x: np.ndarray) -> _Stats:
        def pick(index: np.ndarray) -> np.ndarray:
            return np.take_along_axis(x, index[:, None], axis=1)[:, 0]

        total = sum_lanes(x)
        mean = total * np.float32(1 / BLOCK_SIZE)
        centred = x - mean[:, None]
        return cls(
            # argmin and argmax take the first of equals, as the C comparison does: 0 and -0 give different bytes
            min=pick(x.argmin(axis=1)),
            max=pick(x.argmax(axis=1)),
            sum=total,
            mean=mean,
            energy=sum_lanes(x * x),
            sigma=np.sqrt(sum_lanes(centred * centred) * np.float32(1 / BLOCK_SIZE)),
        )


class _Best:
    """The best codes, d and z so far; starts as the all-zero block, whose squared error is `err`."""

    def __init__(self, x: np.ndarray, err: np.ndarray):
        self.err = err.copy()
        self.d = np.zeros(len(x), np.float32)
        self.z = np.zeros(len(x), np.float32)
        self.q = np.zeros(x.shape, np.uint8)

    def try_scale(self, x: np.ndarray, d: np.ndarray, z: np.ndarray, levels: int, allowed: np.ndarray) -> None:
        """Score d and z as they will be stored, and keep them where they are better and allowed."""
        d, z = (a.astype(np.float16).astype(np.float32) for a in (d, z))
        q = _assign_codes(x, d, z, levels)
        error = x - d[:, None] * (q.astype(np.float32) - z[:, None])
        err = sum_lanes(error * error)
        better = allowed & (err < self.err)
        self.err[better], self.d[better], self.z[better], self.q[better] = err[better], d[better], z[better], q[better]


def _assign_codes(x: np.ndarray, d: np.ndarray, z: np.ndarray, levels: int) -> np.ndarray:
    """Return the code in 0..levels-1 nearest to x/d + z, ties up: uint8 (n_blocks, 256)."""
    inv_d = np.where(d != 0, _ONE / d, _ZERO)
    top = np.float32(levels - 1)
    t = x * inv_d[:, None] + z[:, None]
    t = np.where(t > 0, t, _ZERO)  # also NaN to 0
    t = np.where(t < top, t, top)
    return (t + _HALF).astype(np.uint8)


def _refit(x: np.ndarray, q: np.ndarray, sum_x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fit d and z by least squares under fixed codes; return them, and where they are usable. The last step is float64, as in C."""
    codes = q.astype(np.int32)
    sq, sqq = codes.sum(axis=1), (codes * codes).sum(axis=1)
    det = BLOCK_SIZE * sqq - sq * sq
    qx = sum_lanes(x * q.astype(np.float32)).astype(np.float64)
    sum_x = sum_x.astype(np.float64)
    a = (BLOCK_SIZE * qx - sq * sum_x) / det
    b = (sum_x - a * sq) / BLOCK_SIZE
    d, z = a.astype(np.float32), (-b / a).astype(np.float32)
    return d, z, (det != 0) & (d > 0) & (d <= HALF_MAX) & (np.abs(z) <= HALF_MAX)


def _refine(x: np.ndarray, sum_x: np.ndarray, d: np.ndarray, z: np.ndarray, best: _Best, allowed: np.ndarray) -> None:
    for _ in range(N_REFITS):
        d, z, usable = _refit(x, _assign_codes(x, d, z, 8), sum_x)
        allowed = allowed & usable
    best.try_scale(x, d, z, 8, allowed)


def _encode_eight_levels(x: np.ndarray, s: _Stats, best: _Best) -> None:
    for start in START_SCALES:
        d = start * s.sigma
        for shift in START_SHIFTS:
            _refine(x, s.sum, d, np.float32(3.5) + shift - s.mean / d, best=best, allowed=(d > 0) & (d <= HALF_MAX))
    d = (s.max - s.min) / np.float32(7)
    z = -s.min / d
    allowed = (d > 0) & (d <= HALF_MAX)
    _refine(x, s.sum, d, z, best=best, allowed=allowed)
    best.try_scale(x, d, z, 8, allowed)
    z = np.where(s.max > 0, _ZERO, _ONE)
    best.try_scale(x, np.fmin(np.abs(s.max), HALF_MAX), z, 8, d == 0)


def _encode_ternary(x: np.ndarray, s: _Stats, best: _Best) -> None:
    d = np.fmin(np.float32(0.798) * s.sigma, HALF_MAX)
    stored = d.astype(np.float16).astype(np.float32)
    z = np.where(stored > 0, np.floor(-s.mean / stored + _HALF) + _ONE, _ONE)
    best.err[:] = np.finfo(np.float32).max  # as printed, even where zeros would be closer
    best.try_scale(x, stored, np.fmax(-HALF_MAX, np.fmin(z, HALF_MAX)), 3, np.ones(len(x), bool))
