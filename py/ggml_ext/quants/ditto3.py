"""DITTO3 in numpy: the format of ggml_ext/types/ditto3.h and the encoder of ggml_ext/encode/ditto3.c.

    w[j] = d * ((codebook[index[j]] & 127) - 64),   index[j] in 0..7
    106 bytes: half d, uint8 codebook[8], uint8 ql[64], uint8 qh[32]

Source: Ditto, section 3.2 and pseudocode 1; one codebook per block, as 7-bit integers times a half, and optimal clusters
are this project's.
"""

from __future__ import annotations

import numpy as np

from ._blocks import BLOCK_SIZE, HALF_MAX, as_blocks, pack_bits3, scales_to_bytes, scales_to_float32, unpack_bits3
from ._levels import ROUNDS, Best, Block, solve
from ._metric import UNROTATED_MAX, Metric, encode_rows, positions

BLOCK_BYTES = 106
K = 8
N_STEPS = 10000  # limit of the paper's loop
N_BINS = 1 << 19
BATCH = 256  # blocks whose sums fit in the CPU's cache
OFFSET = 64
TOP = 63  # largest magnitude of a codebook value


def unpack(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Unpack blocks uint8 (n_blocks, 106) to q int8 (n_blocks, 256) and d float32 (n_blocks,), with weight = d * q.

    ValueError for other shapes or dtypes.
    """
    blocks = as_blocks(blocks, np.uint8, BLOCK_BYTES)
    codebook = (blocks[:, 2:10] & 127).astype(np.int8) - np.int8(OFFSET)
    index = unpack_bits3(blocks[:, 10:74], blocks[:, 74:])
    return np.take_along_axis(codebook, index.astype(np.intp), axis=1), scales_to_float32(blocks[:, 0:2])


def dequantize_blocks(blocks: np.ndarray) -> np.ndarray:
    """Dequantize uint8 (n_blocks, 106) to weights float32 (n_blocks, 256). ValueError for other shapes or dtypes."""
    q, d = unpack(blocks)
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and Inf scales give NaN weights, as in C
        return d[:, None] * q.astype(np.float32)


def _means(sum_w: np.ndarray, sum_wx: np.ndarray, bound: np.ndarray, c: np.ndarray) -> None:
    """Set c float64 (n_blocks, 8) to the means of the ranges that have importance; ext_update_centroids() of encode/kmeans.h."""
    w = np.diff(np.take_along_axis(sum_w, bound, axis=1), axis=1)
    wx = np.diff(np.take_along_axis(sum_wx, bound, axis=1), axis=1)
    np.divide(wx, w, out=c, where=w > 0)


def _first_samples(x: np.ndarray, bound: np.ndarray) -> np.ndarray:
    return np.take_along_axis(x, np.minimum(bound[:, :K], x.shape[1] - 1), axis=1).astype(np.float64)


def _cluster_lloyd(x: np.ndarray, sum_w: np.ndarray, sum_wx: np.ndarray, n_steps: int) -> np.ndarray:
    """Cluster by Ditto's pseudocode 1: equal population, then reassign and update; ext_cluster_lloyd() of encode/kmeans.h.

    x: ascending (n_blocks, n). sum_w, sum_wx: float64 (n_blocks, n + 1). Returns ascending float64 (n_blocks, 8).
    """
    n = x.shape[1]
    bound = np.zeros((len(x), K + 1), np.intp)
    bound[:, K] = n
    for k in range(1, K):
        bound[:, k] = _count_below(sum_w[:, :n], sum_w[:, n:] * k / K)
    c = _first_samples(x, bound)
    for _ in range(n_steps + 1):
        _means(sum_w, sum_wx, bound, c)
        middle = 0.5 * (c[:, :-1] + c[:, 1:])
        new = np.stack([_count_below(x, middle[:, k : k + 1]) for k in range(K - 1)], axis=1)
        if np.array_equal(new, bound[:, 1:K]):
            break
        bound[:, 1:K] = new
    return np.sort(c, axis=1)


def _count_below(values: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """Count the values below limit (n_blocks, 1) in each row of ascending values (n_blocks, n): int (n_blocks,)."""
    if len(values) == 1:
        return np.searchsorted(values[0], limit[0])
    return (values < limit).sum(axis=1)


def _search_starts(sum_w: np.ndarray, sum_wx: np.ndarray, below: np.ndarray, only_last: bool) -> tuple[np.ndarray, np.ndarray]:
    """Compute one layer of the dynamic program: best sums and starts, (n_blocks, n + 1); ext_search_starts() of encode/kmeans.h."""
    n_blocks, n = len(sum_w), sum_w.shape[1] - 1
    best, start = np.zeros((n_blocks, n + 1)), np.zeros((n_blocks, n + 1), np.intp)
    ranges = [(n, n, -1, n + 1)] if only_last else [(0, n, -1, n + 1)]
    while ranges:
        lo, hi, left, right = ranges.pop()  # left and right: nearest ends with known starts
        i = (lo + hi) // 2
        first = start[:, left] if left >= 0 else np.zeros(n_blocks, np.intp)
        last = np.minimum(start[:, right] if right <= n else n, i)
        a, b = first.min(), np.max(last) + 1
        w, wx = sum_w[:, i : i + 1] - sum_w[:, a:b], sum_wx[:, i : i + 1] - sum_wx[:, a:b]
        gain = below[:, a:b] + wx * wx / np.where(w > 0, w, 1)
        j = np.arange(a, b)
        gain[(j < first[:, None]) | (j > np.reshape(last, (-1, 1)))] = -1
        start[:, i] = a + gain.argmax(axis=1)  # ties go to the first, as in C
        best[:, i] = np.take_along_axis(gain, start[:, i : i + 1] - a, axis=1)[:, 0]
        if lo < i:
            ranges.append((lo, i - 1, left, i))
        if i < hi:
            ranges.append((i + 1, hi, i, right))
    return best, start


def _cluster_optimal(x: np.ndarray, sum_w: np.ndarray, sum_wx: np.ndarray) -> np.ndarray:
    """Return the clusters of least squared error; ext_cluster_optimal() of encode/kmeans.h. Arguments as for _cluster_lloyd()."""
    n_blocks, n = x.shape
    best = sum_wx * sum_wx / np.where(sum_w > 0, sum_w, 1)  # one cluster begins at sample 0
    starts = []
    for k in range(1, K):
        best, start = _search_starts(sum_w, sum_wx, best, only_last=k == K - 1)
        starts.append(start)
    bound = np.zeros((n_blocks, K + 1), np.intp)
    bound[:, K] = n
    for k in range(K - 1, 0, -1):
        bound[:, k] = np.take_along_axis(starts[k - 1], bound[:, k + 1 :][:, :1], axis=1)[:, 0]
    c = _first_samples(x, bound)
    _means(sum_w, sum_wx, bound, c)
    return c


def _cluster_blocks(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    """Return the centroids float64 (n_blocks, 8) of finite x, float32 (n_blocks, 256); cluster_block() of encode/ditto3.c."""
    order = np.argsort(x, axis=1, kind="stable")
    x = np.take_along_axis(x, order, axis=1)
    weight = np.ones(x.shape) if importance is None else _usable(np.take_along_axis(importance, order, axis=1))
    weight[~(weight > 0).any(axis=1)] = 1
    zero = np.zeros((len(x), 1))
    sum_w = np.concatenate([zero, np.cumsum(weight, axis=1)], axis=1)
    sum_wx = np.concatenate([zero, np.cumsum(weight * x, axis=1)], axis=1)
    return _cluster_optimal(x, sum_w, sum_wx)


def _usable(importance: np.ndarray) -> np.ndarray:
    """Convert importances to float64, invalid ones to 0; ext_importance() of encode/kmeans.h."""
    return np.where((importance > 0) & (importance < np.inf), importance, 0).astype(np.float64)


class Histogram:
    """A histogram of all weights of a tensor, for one codebook; ggml_ext_ditto3_add_rows() and _codebook() of ggml-ext.h.

    Weights with the same sign, exponent and ten upper bits of the mantissa share a bin; F16 and BF16 weights only with equal ones.
    """

    def __init__(self) -> None:
        self.sums = np.zeros((2, N_BINS))  # of importance and of importance * weight

    def add_rows(self, rows: np.ndarray, importance: np.ndarray | None = None) -> None:
        """Add rows float32 (n_rows, n_per_row) with importances float32 (n_per_row,). NaN and infinity are skipped."""
        weight = np.zeros(rows.shape[1]) if importance is None else _usable(importance)
        weight = np.broadcast_to(weight if weight.any() else 1.0, rows.shape)
        finite = np.isfinite(rows)
        x, weight = rows[finite], weight[finite]
        bits = x.view(np.uint32)
        bins = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31)) >> 13
        np.add.at(self.sums[0], bins, weight)  # sequential, in the order of the C loop
        np.add.at(self.sums[1], bins, weight * x)

    def codebook(self) -> np.ndarray:
        """Return ascending centroids float32 (8,) by the paper's loop over the bins. ValueError if nothing was added."""
        w, wx = self.sums[:, self.sums[0] > 0]
        if not len(w):
            raise ValueError("no weights were added")
        sum_w, sum_wx = (np.concatenate([[0.0], np.cumsum(s)])[None] for s in (w, wx))
        return _cluster_lloyd((wx / w)[None], sum_w, sum_wx, N_STEPS)[0].astype(np.float32)


def quantize_blocks(
    weights: np.ndarray, importance: np.ndarray | None = None, codebook: np.ndarray | None = None, metric: Metric | None = None
) -> np.ndarray:
    """Encode weights float32 (n_blocks, 256) to uint8 (n_blocks, 106), with the same bytes as the C encoder.

    A block with NaN or infinity gets d = NaN, which row validation refuses.

    Args:
        weights: rows of complete blocks.
        importance: weights of the squared errors, float32 (n_blocks, 256).
        codebook: finite ascending float32 (8,) for all blocks, from Histogram; None: one codebook per block.
        metric: Hessian of the rows, in place of importance.

    Raises:
        ValueError: other shapes, dtypes or codebooks.
    """
    weights = as_blocks(weights, np.float32, BLOCK_SIZE)
    if importance is not None:
        importance = as_blocks(importance, np.float32, BLOCK_SIZE)
    if codebook is not None:
        codebook = as_blocks(np.asarray(codebook)[None], np.float32, K)
        if not (np.isfinite(codebook).all() and (np.diff(codebook) >= 0).all()):
            raise ValueError(f"codebook {codebook} is not finite and ascending")
    finite = np.isfinite(weights).all(axis=1)
    x = np.where(finite[:, None], weights, np.float32(0))
    if metric is not None:
        d_half, values, index = _encode_under_hessian(x, codebook, metric)
    else:
        d_half, values = _store(_centroids(x, importance, codebook))
        middle = 0.5 * d_half.astype(np.float64)[:, None] * (values[:, :-1].astype(np.float64) + values[:, 1:])
        index = sum((x >= middle[:, k : k + 1]).astype(np.uint8) for k in range(K - 1))
    ql, qh = pack_bits3(index)
    out = np.concatenate([scales_to_bytes(d_half.astype(np.float32)), (values + np.int8(OFFSET)).view(np.uint8), ql, qh], axis=1)
    out[~finite] = 0
    out[~finite, :2] = scales_to_bytes(np.full(1, np.nan, np.float32))
    return out


def _centroids(x: np.ndarray, importance: np.ndarray | None, codebook: np.ndarray | None) -> np.ndarray:
    """Return the codebook's centroids, float32 (1, 8), for all blocks, or the best of each block: float64 (n_blocks, 8)."""
    if codebook is not None:
        return np.repeat(codebook.astype(np.float64), len(x), axis=0)
    c = np.empty((len(x), K))
    for start in range(0, len(x), BATCH):
        part = slice(start, start + BATCH)
        c[part] = _cluster_blocks(x[part], None if importance is None else importance[part])
    return c


def _store(c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Round centroids to scales float16 (n_blocks,) and values int8 (n_blocks, 8); store_codebook() of encode/ditto3.c."""
    top = np.minimum(np.abs(c).max(axis=1) / TOP, np.float64(HALF_MAX))
    d_half = top.astype(np.float32).astype(np.float16)
    d = d_half.astype(np.float64)[:, None]
    values = np.zeros(c.shape)
    np.divide(c, d, out=values, where=d > 0)
    return d_half, np.clip(np.rint(values), -TOP, TOP).astype(np.int8)


def _encode_under_hessian(x: np.ndarray, codebook: np.ndarray | None, metric: Metric) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return scales, values and indices under a metric; encode_block_under_hessian() of encode/ditto3.c."""
    order = positions(BLOCK_SIZE)
    d_half, values, index = np.zeros(len(x), np.float16), np.zeros((len(x), K), np.int8), np.zeros(x.shape, np.uint8)

    def encode(block_rows: slice, first: int, x: np.ndarray, goal: np.ndarray) -> np.ndarray:
        block = Block(metric, first, x, goal)
        c = _centroids(block.optimum, np.broadcast_to(np.diag(block.B), x.shape), codebook)
        best = Best(np.full(len(x), np.inf, np.float32), np.zeros((len(x), K), np.float32), np.zeros(x.shape, np.uint8))
        best_d, best_values, allowed, code = np.zeros(len(x), np.float16), np.zeros((len(x), K), np.int8), np.ones(len(x), bool), None
        for _ in range(ROUNDS if codebook is None else 1):
            d, v = _store(np.where(allowed[:, None], c, 0))
            level = d.astype(np.float32)[:, None] * v.astype(np.float32)
            code = block.init_codes(level) if code is None else code
            better = block.improve(level, code, best, allowed)
            best_d[better], best_values[better] = d[better], v[better]
            c = solve(*block.normal_equations(code), level)
            allowed = allowed & (c[:, :-1] <= c[:, 1:]).all(axis=1)
        d_half[block_rows], values[block_rows], index[block_rows, order] = best_d, best_values, best.code
        return np.take_along_axis(best.level, best.code.astype(np.intp), axis=1)

    with np.errstate(all="ignore"):
        encode_rows(metric, np.clip(x, -UNROTATED_MAX, UNROTATED_MAX)[:, order], encode)
    return d_half, values, index
