"""DITTO3 in numpy: the format of ggml_ext/types/ditto3.h and the encoder of ggml_ext/encode/ditto3.c.

    w[j] = d * ((codebook[index[j]] & 127) - 64),   index[j] in 0..7
    106 bytes: half d, uint8 codebook[8], uint8 ql[64], uint8 qh[32]

Source: Ditto, section 3.2 and pseudocode 1; a codebook a block, as 7-bit integers times a half, is ours.
"""

from __future__ import annotations

import numpy as np

from . import BLOCK_SIZE, HALF_MAX, as_blocks, pack_bits3, scales_to_bytes, scales_to_float32, unpack_bits3

BLOCK_BYTES = 106
K = 8
N_STEPS = 60
OFFSET = 64
TOP = 63  # largest magnitude of a codebook value


def unpack(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values of the codebook, and scales.

    blocks: uint8 (n_blocks, 106). Returns q int8 (n_blocks, 256) and d float32 (n_blocks,), with weight = d * q.
    ValueError for other shapes or dtypes.
    """
    blocks = as_blocks(blocks, np.uint8, BLOCK_BYTES)
    codebook = (blocks[:, 2:10] & 127).astype(np.int8) - np.int8(OFFSET)
    index = unpack_bits3(blocks[:, 10:74], blocks[:, 74:])
    return np.take_along_axis(codebook, index.astype(np.intp), axis=1), scales_to_float32(blocks[:, 0:2])


def dequantize_blocks(blocks: np.ndarray) -> np.ndarray:
    """uint8 (n_blocks, 106) to weights float32 (n_blocks, 256). ValueError for other shapes or dtypes."""
    q, d = unpack(blocks)
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and Inf scales give NaN weights, as in C
        return d[:, None] * q.astype(np.float32)


def _cluster(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Centroids float64 (n_blocks, 8) of sorted x float32 (n_blocks, 256); cluster() of encode/ditto3.c."""
    zero = np.zeros((len(x), 1))
    weight = weight.astype(np.float64)
    sum_w = np.concatenate([zero, np.cumsum(weight, axis=1)], axis=1)
    sum_wx = np.concatenate([zero, np.cumsum(weight * x, axis=1)], axis=1)
    bound = np.tile(np.arange(K + 1) * BLOCK_SIZE // K, (len(x), 1))
    c = np.take_along_axis(x, bound[:, :K], axis=1).astype(np.float64)
    for _ in range(N_STEPS + 1):
        w = np.diff(np.take_along_axis(sum_w, bound, axis=1), axis=1)
        wx = np.diff(np.take_along_axis(sum_wx, bound, axis=1), axis=1)
        np.divide(wx, w, out=c, where=w > 0)
        middle = 0.5 * (c[:, :-1] + c[:, 1:])
        new = np.stack([(x < middle[:, k : k + 1]).sum(axis=1) for k in range(K - 1)], axis=1)
        if np.array_equal(new, bound[:, 1:K]):
            break
        bound[:, 1:K] = new
    return c


def quantize_blocks(weights: np.ndarray, importance: np.ndarray | None = None) -> np.ndarray:
    """Weights float32 (n_blocks, 256) to uint8 (n_blocks, 106), byte for byte what the C encoder writes.

    importance: float32 (n_blocks, 256), weights of the squared errors, or None. A block with NaN or Inf gets d = NaN,
    which row validation refuses. ValueError for other shapes or dtypes.
    """
    weights = as_blocks(weights, np.float32, BLOCK_SIZE)
    importance = np.ones_like(weights) if importance is None else as_blocks(importance, np.float32, BLOCK_SIZE)
    finite = np.isfinite(weights).all(axis=1)
    x = np.where(finite[:, None], weights, np.float32(0))
    order = np.argsort(x, axis=1, kind="stable")
    c = _cluster(np.take_along_axis(x, order, axis=1), np.take_along_axis(importance, order, axis=1))

    top = np.minimum(np.abs(c).max(axis=1) / TOP, np.float64(HALF_MAX))
    d_half = top.astype(np.float32).astype(np.float16)
    d = d_half.astype(np.float64)[:, None]
    codebook = np.zeros(c.shape)
    np.divide(c, d, out=codebook, where=d > 0)
    codebook = np.sort(np.clip(np.rint(codebook), -TOP, TOP).astype(np.int8), axis=1)
    middle = 0.5 * d * (codebook[:, :-1].astype(np.float64) + codebook[:, 1:])
    index = sum((x >= middle[:, k : k + 1]).astype(np.uint8) for k in range(K - 1))
    ql, qh = pack_bits3(index)
    out = np.concatenate([scales_to_bytes(d_half.astype(np.float32)), (codebook + np.int8(OFFSET)).view(np.uint8), ql, qh], axis=1)
    out[~finite] = 0
    out[~finite, :2] = scales_to_bytes(np.full(1, np.nan, np.float32))
    return out
