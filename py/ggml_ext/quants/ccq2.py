"""CCQ2 in numpy: the format of ggml_ext/types/ccq2.h and the encoder of ggml_ext/encode/ccq2-block.h and ccq2.c.

    c = 121*qs[i] + 1178,   q[j] = c >> 9 - 3*k & 63,   w[j] = d * m[index] * (q[j] - 32)
    66 bytes: uint8 d (E5M3), uint8 scales (four 2-bit indices), uint8 qs[64]

Source: CCQ, the (6, 4, 3) code and its cluster (section 3.3), scale update (equation 4); the 16 bits of scales are this project's.
"""

from __future__ import annotations

import numpy as np

from ._blocks import BLOCK_SIZE, as_blocks, e5m3_to_float32, sum_lanes
from ._levels import Block, solve
from ._metric import UNROTATED_MAX, Metric, encode_rows, multiply, positions

BLOCK_BYTES = 66
ALPHA, BETA, OFFSET = 121, 1178, 32
SCALES = np.array([5, 6, 8, 11])
N_GROUPS, GROUP = 4, 64
FIRST_GUESS, N_REFITS, SUPER_STEPS = 0.0625, 2, 2
X_MAX = np.float32(8e4)
D_END = 0xF8  # from here on halves are Inf or NaN
N_CANDIDATES = 14
N_BYTES, BYTE_SWEEPS, N_ROUNDS = 64, 4, 2  # under a metric
CHUNK = 128   # blocks per pass; the errors of all codes take 8 MB

# q of all bytes, int (256, 4)
CODES = (ALPHA * np.arange(256)[:, None] + BETA) >> np.array([9, 6, 3, 0]) & 63
V = (CODES - OFFSET).astype(np.float32)
V2 = V * V
PAIRS = [(k, m) for k in range(4) for m in range(k, 4)]
GROUP_OF_STEP = np.arange(BLOCK_SIZE) % 8 // 2


def _by_byte(x: np.ndarray) -> np.ndarray:
    """Reorder (n_blocks, 256) by weight to (n_blocks, 2, 32, 4): half, byte of the half, weight of the byte."""
    return x.reshape(-1, 2, 4, 32).transpose(0, 1, 3, 2)


def _by_weight(x: np.ndarray) -> np.ndarray:
    """Invert _by_byte()."""
    return x.reshape(-1, 2, 32, 4).transpose(0, 1, 3, 2).reshape(-1, BLOCK_SIZE)


def unpack(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Unpack blocks uint8 (n_blocks, 66) to q uint8 (n_blocks, 256) in 0..63, scale int (n_blocks, 4) and d float32 (n_blocks,).

    Weight = d * scale[j / 64] * (q - 32). ValueError for other shapes or dtypes.
    """
    blocks = as_blocks(blocks, np.uint8, BLOCK_BYTES)
    q = _by_weight(CODES.astype(np.uint8)[blocks[:, 2:]])
    return q, SCALES[blocks[:, 1:2] >> np.arange(0, 8, 2, dtype=np.uint8) & 3], e5m3_to_float32(blocks[:, 0])


def dequantize_blocks(blocks: np.ndarray) -> np.ndarray:
    """Dequantize uint8 (n_blocks, 66) to weights float32 (n_blocks, 256). ValueError for other shapes or dtypes."""
    q, scale, d = unpack(blocks)
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and Inf scales give NaN weights, as in C
        s = np.repeat(d[:, None] * scale.astype(np.float32), GROUP, axis=1)
        return s * (q.astype(np.float32) - np.float32(OFFSET))


def _group_sums(x: np.ndarray) -> np.ndarray:
    """Sum float64 (n_blocks, 256) over groups, in the order of the weights: (n_blocks, 4)."""
    return np.cumsum(x.reshape(-1, N_GROUPS, GROUP), axis=2)[:, :, -1]


class _Block:
    """Some blocks with their best scales and codes so far: struct block and struct best of encode/ccq2-block.h."""

    def __init__(self, x: np.ndarray, importance: np.ndarray | None):
        n = len(x)
        importance = np.zeros_like(x) if importance is None else importance
        total = np.cumsum(importance.astype(np.float64), axis=1)[:, -1:]
        weighted = (total > 0) & (total <= np.finfo(np.float32).max)
        floor = (total * (1.0 / BLOCK_SIZE / 1024)).astype(np.float32)
        self.x = np.clip(x, -X_MAX, X_MAX)
        self.w = np.where(weighted, importance + floor, np.float32(1))
        self.wx = self.w * self.x
        self.best_d, self.best_scales = np.zeros(n, np.int64), np.zeros((n, N_GROUPS), np.int64)
        self.best_qs = np.zeros((n, 2, 32), np.uint8)
        energy = _group_sums(self.wx.astype(np.float64) * self.x)
        self.error = np.stack([energy[:, 0] + energy[:, 1], energy[:, 2] + energy[:, 3]], axis=1)
        self.weight_sums, self.energy = _group_sums(self.w.astype(np.float64)), energy

    def search(self, d: np.ndarray, scales: np.ndarray, half: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the best codes of a half, uint8 (n, 32), and their squared error (n,); search() of encode/ccq2-block.h."""
        s = e5m3_to_float32(d)[:, None] * SCALES[scales[:, 2 * half : 2 * half + 2]].astype(np.float32)
        s = np.repeat(s, 2, axis=1)[:, None]
        w, x, wx = (_by_byte(a)[:, half] for a in (self.w, self.x, self.wx))
        f = s * s * w
        a = np.float32(-2) * s * wx
        energy = wx * x
        energy = energy[..., 0] + energy[..., 1] + energy[..., 2] + energy[..., 3]
        e = f[..., :1] * V2[:, 0]
        for k in range(1, 4):
            e += f[..., k : k + 1] * V2[:, k]
        for k in range(4):
            e += a[..., k : k + 1] * V[:, k]
        codes = np.argmin(e, axis=2)
        least = np.take_along_axis(e, codes[..., None], axis=2)[..., 0]
        return codes.astype(np.uint8), np.cumsum((least + energy).astype(np.float64), axis=1)[:, -1]

    def consider(self, d: np.ndarray, scales: np.ndarray, qs: np.ndarray, halves: tuple[int, ...],
                 where: np.ndarray | bool = True) -> np.ndarray:
        """Search the codes of some halves under scales and store them where they are better; returns the codes (n, 2, 32)."""
        error, qs, where = self.error.copy(), qs.copy(), where & (d > 0)
        for half in halves:
            codes, error[:, half] = self.search(d, scales, half)
            qs[where, half] = codes[where]
        better = where & (error[:, 0] + error[:, 1] < self.error[:, 0] + self.error[:, 1])
        self.best_d[better], self.best_scales[better] = d[better], scales[better]
        self.best_qs[better], self.error[better] = qs[better], error[better]
        return qs


def _round_groups(want: np.ndarray, den: np.ndarray, d: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices (n, 4) of the group scales nearest to `want` under d, and the sums of den*(s - want)^2 (n,)."""
    s = e5m3_to_float32(d).astype(np.float64)[:, None, None] * SCALES
    e = (s - want[:, :, None]) ** 2
    index = np.argmin(e, axis=2)
    terms = den * np.take_along_axis(e, index[..., None], axis=2)[..., 0]
    return index, np.cumsum(terms, axis=1)[:, -1]


def _first_super_scale(want: np.ndarray) -> np.ndarray:
    """Return the first of N_CANDIDATES super scales, int (n,); first_super_scale() of encode/ccq2-block.h."""
    top = np.maximum(want.max(axis=1), 0)
    table = e5m3_to_float32(np.arange(D_END - 1)).astype(np.float64) * 12.5
    return (table < top[:, None]).sum(axis=1)


def _round_scales(want: np.ndarray, den: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the super scale (n,) and indices (n, 4) of least sum; round_scales() of encode/ccq2-block.h."""
    first = _first_super_scale(want)
    best_d, best_index, least = np.zeros(len(want), np.int64), np.zeros(want.shape, np.int64), np.full(len(want), np.inf)
    for i in range(N_CANDIDATES):
        d = first + i
        index, total = _round_groups(want, den, np.minimum(d, D_END - 1))
        better = (total < least) & (d < D_END)
        best_d[better], best_index[better], least[better] = d[better], index[better], total[better]
    return best_d, best_index


def _encode(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    b = _Block(x, importance)
    want, den = FIRST_GUESS * np.sqrt(b.energy / b.weight_sums), b.weight_sums
    qs = np.zeros((len(x), 2, 32), np.uint8)
    for _ in range(N_REFITS + 1):
        d, scales = _round_scales(want, den)
        qs = b.consider(d, scales, qs, (0, 1))
        v, v2 = (_by_weight(table[qs]).astype(np.float64) for table in (V, V2))
        num, den = _group_sums(b.wx.astype(np.float64) * v), _group_sums(b.w.astype(np.float64) * v2)
        want = np.zeros_like(num)
        np.divide(num, den, out=want, where=(num > 0) & (den > 0))
    middle = b.best_d.copy()
    for step in range(-SUPER_STEPS, SUPER_STEPS + 1):
        d = middle + step
        valid = (d > 0) & (d < D_END) & (step != 0)
        d = np.where(valid, d, 0)
        b.consider(d, _round_groups(want, den, d)[0], b.best_qs, (0, 1), valid)
    for g in range(N_GROUPS):
        index = b.best_scales[:, g].copy()
        for m in (index - 1, index + 1):
            scales = b.best_scales.copy()
            valid = (m >= 0) & (m < 4)
            scales[valid, g] = m[valid]
            b.consider(b.best_d.copy(), scales, b.best_qs, (g // 2,), valid)
    packed = (b.best_scales << np.arange(0, 8, 2)).sum(axis=1)
    return np.concatenate([b.best_d[:, None], packed[:, None], b.best_qs.reshape(-1, 64)], axis=1).astype(np.uint8)


def _norms(H: np.ndarray, n: int, s: np.ndarray) -> np.ndarray:
    """Return v^T H v for each code in each of n bytes, under group scales s (n_rows, 4): float32 (n_rows, n, 256)."""
    norms = np.zeros((len(s), n, 256), np.float32)
    for p in range(n):
        for k, m in PAIRS:
            factor = np.float32(2 if m > k else 1) * (s[:, 2 * (p % 2) + k // 2] * s[:, 2 * (p % 2) + m // 2] * H[4 * p + k, 4 * p + m])
            norms[:, p] += factor[:, None] * (V[:, k] * V[:, m])
    return norms


def _descend_bytes(H: np.ndarray, s: np.ndarray, is_initial: bool, code: np.ndarray, v: np.ndarray, g: np.ndarray) -> None:
    """Improve codes by coordinate descent over bytes, in place; descend_bytes() of encode/ccq2.c.

    Args:
        H: the Hessian of the steps.
        s: scales of the groups, float32 (n_rows, 4).
        is_initial: `v` are the goals, and the first sweep sets every byte.
        code: uint8 (n_rows, bytes).
        v: the decoded weights, by step.
        g: H (optimum - v), by step.
    """
    norms = _norms(H, code.shape[1], s)
    for sweep in range(BYTE_SWEEPS):
        changed = False
        for p in range(code.shape[1]):
            columns = slice(4 * p, 4 * p + 4)
            e = norms[:, p].copy()
            for k in range(4):
                gradient = g[:, 4 * p + k].copy()
                for m in range(4):
                    gradient += H[4 * p + k, 4 * p + m] * v[:, 4 * p + m]
                e += (np.float32(-2) * s[:, 2 * (p % 2) + k // 2] * gradient)[:, None] * V[:, k]
            best = e.argmin(axis=1)
            moves = (best != code[:, p]) | (is_initial and sweep == 0)
            if moves.any():
                values = s[moves][:, 2 * (p % 2) + np.array([0, 0, 1, 1])] * V[best[moves]]
                change = values - v[moves, columns]
                moved_g = g[moves]
                for k in range(4):
                    moved_g -= H[4 * p + k] * change[:, k, None]
                g[moves], v[moves, columns], code[moves, p], changed = moved_g, values, best[moves], True
        if not changed:
            return


def _init_bytes(block: Block, s: np.ndarray) -> np.ndarray:
    """Return first codes uint8 (n_rows, 64) by step; init_bytes() of encode/ccq2.c."""
    metric, S = block.metric, block.metric.segment
    v, errors, code = block.goal.copy(), np.zeros_like(block.x), np.zeros((len(s), N_BYTES), np.uint8)
    for f in range(0, BLOCK_SIZE, S):
        columns = slice(f, f + S)
        metric.feed_segment(block.first, f, errors, v)
        D = metric.D[block.first + f : block.first + f + S]
        _descend_bytes(D, s, True, code=code[:, f // 4 : (f + S) // 4], v=v[:, columns], g=np.zeros((len(s), S), np.float32))
        errors[:, columns] = block.x[:, columns] - v[:, columns]
    return code


def _fit_groups(block: Block, q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the quadratic form a (n_rows, 4, 4) and the optimal scales (n_rows, 4), float64, of fixed codes q; fit_groups() in C."""
    sums = np.zeros((len(q), N_GROUPS, BLOCK_SIZE), np.float32)
    a, b = np.zeros((len(q), N_GROUPS, N_GROUPS)), np.zeros((len(q), N_GROUPS))
    for j, g in enumerate(GROUP_OF_STEP):
        sums[:, g] += block.B[j] * q[:, j, None]
    wide = q.astype(np.float64)
    for j, g in enumerate(GROUP_OF_STEP):
        a[:, g] += wide[:, j, None] * sums[:, :, j]
        b[:, g] += wide[:, j] * block.B_opt[:, j]
    return a, solve(a.copy(), b, np.zeros_like(b))


def _round_groups_under_hessian(a: np.ndarray, want: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Round scales under the quadratic form a to super scales (n,), 0 if all scales are 0, and indices (n, 4).

    round_groups_under_hessian() of encode/ccq2.c.
    """
    first, n = _first_super_scale(want), len(want)
    best_d, best_scales, least = np.zeros(n, np.int64), np.zeros((n, N_GROUPS), np.int64), np.full(n, np.inf)
    for i in range(N_CANDIDATES):
        d = np.minimum(first + i, D_END - 1)
        offers = e5m3_to_float32(d).astype(np.float64)[:, None, None] * SCALES - want[:, :, None]
        off, scales, cost = np.zeros_like(want), np.zeros((n, N_GROUPS), np.int64), np.zeros(n)
        for _ in range(3):
            for g in range(N_GROUPS):
                aim = np.zeros(n)
                for h in range(N_GROUPS):
                    if h != g:
                        aim -= a[:, g, h] * off[:, h]
                aim = np.where(a[:, g, g] > 0, aim / a[:, g, g], 0)
                scales[:, g] = ((offers[:, g] - aim[:, None]) ** 2).argmin(axis=1)
                off[:, g] = np.take_along_axis(offers[:, g], scales[:, g, None], axis=1)[:, 0]
        for g in range(N_GROUPS):
            for h in range(N_GROUPS):
                cost += off[:, g] * a[:, g, h] * off[:, h]
        better = (cost < least) & (first + i < D_END)
        best_d[better], best_scales[better], least[better] = d[better], scales[better], cost[better]
    return best_d, best_scales


def _encode_under_hessian(x: np.ndarray, metric: Metric) -> np.ndarray:
    """Encode under a metric to uint8 (n_blocks, 66); encode_block_under_hessian() of encode/ccq2.c."""
    order = positions(BLOCK_SIZE)
    out = np.zeros((len(x), BLOCK_BYTES), np.uint8)

    def encode(block_rows: slice, first: int, x: np.ndarray, goal: np.ndarray) -> np.ndarray:
        block, n = Block(metric, first, x, goal), len(x)
        by_position = np.empty_like(x)
        by_position[:, order] = block.optimum
        weight = np.empty(BLOCK_SIZE, np.float32)
        weight[order] = np.diag(block.B)
        plain = _encode_plain(by_position, np.broadcast_to(weight, x.shape))
        d, scales = plain[:, 0].astype(np.int64), plain[:, 1:2] >> np.arange(0, 8, 2, dtype=np.uint8) & 3
        least, best, best_v, code = sum_lanes(block.optimum * block.B_opt), np.zeros((n, BLOCK_BYTES), np.uint8), np.zeros_like(x), None
        allowed = d > 0
        for _ in range(N_ROUNDS):
            s = e5m3_to_float32(d)[:, None] * SCALES[scales].astype(np.float32)
            code = _init_bytes(block, s) if code is None else code
            v = s[:, GROUP_OF_STEP] * V[code].reshape(x.shape)
            g = multiply(block.B, block.optimum - v)
            _descend_bytes(block.B, s, False, code=code, v=v, g=g)
            cost = sum_lanes((block.optimum - v) * g)
            better = allowed & (cost < least)
            least[better], best_v[better] = cost[better], v[better]
            packed = np.concatenate([d[:, None], (scales.astype(np.int64) << np.arange(0, 8, 2)).sum(axis=1)[:, None],
                                     code.reshape(n, 32, 2).transpose(0, 2, 1).reshape(n, N_BYTES)], axis=1)
            best[better] = packed[better]
            a, want = _fit_groups(block, V[code].reshape(x.shape))
            d, scales = _round_groups_under_hessian(a, want)
            allowed = allowed & (d > 0)
        out[block_rows] = best
        return best_v

    with np.errstate(all="ignore"):
        encode_rows(metric, np.clip(x, -UNROTATED_MAX, UNROTATED_MAX)[:, order], encode)
    return out


def _encode_plain(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    out = np.zeros((len(x), BLOCK_BYTES), np.uint8)
    for i in range(0, len(x), CHUNK):
        out[i : i + CHUNK] = _encode(x[i : i + CHUNK], None if importance is None else importance[i : i + CHUNK])
    return out


def quantize_blocks(weights: np.ndarray, importance: np.ndarray | None = None, metric: Metric | None = None) -> np.ndarray:
    """Encode weights float32 (n_blocks, 256) to uint8 (n_blocks, 66), with the same bytes as the C encoder.

    importance: weights of the squared errors, float32 (n_blocks, 256). metric: Hessian of the rows, in place of importance. A block
    with NaN or infinity gets d = 0xff, which row validation refuses. ValueError for other shapes or dtypes.
    """
    weights = as_blocks(weights, np.float32, BLOCK_SIZE)
    if importance is not None:
        importance = as_blocks(importance, np.float32, BLOCK_SIZE)
    finite = np.isfinite(weights).all(axis=1)
    x = np.where(finite[:, None], weights, np.float32(0))
    out = _encode_plain(x, importance) if metric is None else _encode_under_hessian(x, metric)
    out[~finite] = 0
    out[~finite, 0] = 0xFF
    return out
