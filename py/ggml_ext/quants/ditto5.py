"""DITTO5 in numpy: the format of ggml_ext/types/ditto5.h and the encoder of ggml_ext/encode/ditto5.c.

    w = S H v,   v[j] = d * (q[j] - 63.5),   q[j] one of 32 values of a codebook for all blocks
    162 bytes: half d, uint8 ql[128], uint8 qh[32]

Source: Ditto, section 3.2, for codebooks; one codebook for all rotated weights, its values and the bit map are this project's.
"""

from __future__ import annotations

import numpy as np

from .._base.types import TYPES
from ._blocks import BLOCK_SIZE, HALF_MAX, as_blocks, load_rotated, rotate_back, scales_to_bytes, scales_to_float32, sum_lanes
from ._levels import ROUNDS, Best, Block
from ._metric import Metric, encode_rows, multiply, positions

INFO = TYPES["ditto5"]
BLOCK_BYTES = INFO.block_bytes
OFFSET = np.float32(INFO.codebook_offset)
UPPER = np.array(INFO.codebook, np.uint8)  # codes of the indices 0 to 15; the sign, 16, takes a code from 127
VALUES = (np.concatenate([127 - UPPER[::-1], UPPER]) - OFFSET).astype(np.float32)  # in ascending order
LEVELS, HALF_LEVELS = len(VALUES), len(UPPER)
N_STEPS = 128  # half units; the midpoints between values are multiples of these
# nearest of VALUES by the half units of a magnitude; ties go to the larger value
NEAREST = HALF_LEVELS + (np.arange(N_STEPS)[:, None] >= VALUES[HALF_LEVELS:-1] + VALUES[HALF_LEVELS + 1 :]).sum(axis=1).astype(np.uint8)
# scales relative to the root mean square: encode/ditto5.c
START_SCALES = np.array([0.037, 0.0395, 0.042, 0.0445, 0.047, 0.0495, 0.052, 0.0545], np.float32)
N_REFITS = 4


def unpack(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """Unpack blocks uint8 (n_blocks, 162) to q int8 (n_blocks, 256), d float32 (n_blocks,) and the offset.

    Rotated value = d * (q - offset). ValueError for other shapes or dtypes. Any bits are valid codes; d may be NaN or infinity.
    """
    blocks = as_blocks(blocks, np.uint8, BLOCK_BYTES)
    # ql bytes: two of four groups of 32, half of the block, lane; nibbles: which of the two groups
    low = blocks[:, 2:130].reshape(-1, 2, 2, 1, 32) >> np.array([0, 4], np.uint8).reshape(2, 1) & 15
    low = low.transpose(0, 2, 1, 3, 4).reshape(-1, BLOCK_SIZE)
    high = (blocks[:, 130:].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8).reshape(8, 1) & 1).reshape(-1, BLOCK_SIZE)
    return (UPPER[low] ^ 127 * high).astype(np.int8), scales_to_float32(blocks[:, 0:2]), OFFSET


def pack(level: np.ndarray, d: np.ndarray) -> np.ndarray:
    """Pack levels uint8 (n_blocks, 256), indices of VALUES, and scales d float32 (n_blocks,), which are rounded to half.

    Returns uint8 (n_blocks, 162). ValueError for other shapes or dtypes and for levels above 31.
    """
    level = as_blocks(level, np.uint8, BLOCK_SIZE)
    if level.size and level.max() >= LEVELS:
        raise ValueError(f"level {level.max()} is not below {LEVELS}")
    negative = level < HALF_LEVELS
    low = np.where(negative, HALF_LEVELS - 1 - level, level - HALF_LEVELS).astype(np.uint8)
    low = low.reshape(-1, 2, 2, 2, 32).transpose(0, 2, 1, 3, 4)  # half of the block, two of four groups, which of the two, lane
    ql = (low[:, :, :, 0] | low[:, :, :, 1] << 4).reshape(-1, 128)
    signs = negative.astype(np.uint8).reshape(-1, 8, 32) << np.arange(8, dtype=np.uint8).reshape(8, 1)
    return np.concatenate([scales_to_bytes(d), ql, np.bitwise_or.reduce(signs, axis=1)], axis=1)


def dequantize_blocks(blocks: np.ndarray) -> np.ndarray:
    """Dequantize uint8 (n_blocks, 162) to unrotated weights float32 (n_blocks, 256). ValueError for other shapes or dtypes."""
    q, d, offset = unpack(blocks)
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and Inf scales give NaN weights, as in C
        return rotate_back(d[:, None] * (q.astype(np.float32) - offset))


def quantize_blocks(weights: np.ndarray, importance: np.ndarray | None = None, metric: Metric | None = None) -> np.ndarray:
    """Encode weights float32 (n_blocks, 256) to uint8 (n_blocks, 162), with the same bytes as the C encoder.

    A block with NaN or infinity gets d = NaN, which row validation refuses. Values beyond the range of half scales saturate.

    Args:
        weights: rows of complete blocks.
        importance: weights of a row's squared errors, float32 (row_blocks, 256); zeros in a complete block count as ones.
        metric: Hessian of the rows, in place of importance.

    Raises:
        ValueError: other shapes or dtypes.
    """
    with np.errstate(all="ignore"):  # candidates overflow and divide by zero, as in C
        x, finite = load_rotated(weights, BLOCK_SIZE)
        if importance is not None and metric is None:
            metric = Metric.from_importance(as_blocks(importance, np.float32, BLOCK_SIZE).ravel(), BLOCK_SIZE)
        if metric is not None:
            level, d = _encode_under_hessian(x, finite, metric)
        else:
            d = _fit_scale(x)
            level = np.where(d[:, None] > 0, _nearest(x, d), 0).astype(np.uint8)
        d[~finite], level[~finite] = np.nan, 0
    return pack(level, d)


def _nearest(x: np.ndarray, d: np.ndarray) -> np.ndarray:
    """Return the levels of the values nearest to x/d; nearest_entry() of encode/ditto5.c."""
    inverse = np.where(d > 0, np.float32(1) / d, np.float32(0))
    steps = np.float32(2) * (np.abs(x) * inverse[:, None])
    k = NEAREST[np.where(steps < N_STEPS - 1, steps, np.float32(N_STEPS - 1)).astype(np.intp)]
    return np.where(x < 0, LEVELS - 1 - k, k)


def _as_scale(d: np.ndarray) -> np.ndarray:
    """Round scales to half."""
    return np.fmin(d, HALF_MAX).astype(np.float16).astype(np.float32)


def _fit_scale(x: np.ndarray) -> np.ndarray:
    """Return the best scale of each block, float32 (n_blocks,) rounded to half; fit_scale() of encode/ditto5.c."""
    best_gain, best_d = np.zeros(len(x), np.float32), np.zeros(len(x), np.float32)

    def try_scale(d: np.ndarray) -> None:
        v = VALUES[_nearest(x, d)]
        sum_xv, sum_vv = sum_lanes(x * v), sum_lanes(v * v)
        s = _as_scale(sum_xv / sum_vv)
        gain = s * (np.float32(2) * sum_xv - s * sum_vv)
        better = gain > best_gain
        best_gain[better], best_d[better] = gain[better], s[better]

    rms = np.sqrt(sum_lanes(x * x) * np.float32(1 / BLOCK_SIZE))
    for start in START_SCALES:
        try_scale(start * rms)
    try_scale(np.abs(x).max(axis=1) / VALUES[-1])
    for _ in range(N_REFITS):
        try_scale(best_d.copy())
    return best_d


def _encode_under_hessian(x: np.ndarray, finite: np.ndarray, metric: Metric) -> tuple[np.ndarray, np.ndarray]:
    """Return levels and scales under a metric; encode_block_under_hessian() of encode/ditto5.c."""
    order = positions(BLOCK_SIZE)
    levels, scales = np.zeros(x.shape, np.uint8), np.zeros(len(x), np.float32)

    def encode(block_rows: slice, first: int, x: np.ndarray, goal: np.ndarray) -> np.ndarray:
        block = Block(metric, first, x, goal)
        d, allowed = _fit_scale(block.optimum), np.ones(len(x), bool)
        best = Best(sum_lanes(block.optimum * block.B_opt), np.zeros((len(x), LEVELS), np.float32), np.zeros(x.shape, np.uint8))
        best_d, code = np.zeros_like(d), block.init_codes(d[:, None] * VALUES)
        for _ in range(ROUNDS):
            allowed = allowed & (d > 0)
            better = block.improve(d[:, None] * VALUES, code, best, allowed)
            best_d[better] = d[better]
            v = VALUES[code]
            d = _as_scale(sum_lanes(v * block.B_opt) / sum_lanes(v * multiply(block.B, v)))
        levels[block_rows, order], scales[block_rows] = best.code, best_d
        return np.where(finite[block_rows, None], best_d[:, None] * VALUES[best.code], np.float32(0))

    encode_rows(metric, np.where(finite[:, None], x, np.float32(0))[:, order], encode)
    return levels, scales
