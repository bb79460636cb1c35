"""What the numpy references share: the rotation, bit planes, scales of one and two bytes, and sums in the encoders' order."""

from __future__ import annotations

import numpy as np

from .._base.types import ROTATION_SIGNS

BLOCK_SIZE = 256             # of types without a number at the end of the name
BLOCK_SIZES = (256, 64, 32)  # supported by the rotation and the bit planes
LANES = 8   # partial sums of the encoders (ggml_ext/encode/encode.h)
HALF_MAX = np.float32(65504.0)
E5M3_MAX = np.float32(240.0)  # largest one-byte scale
# S as factors, float32 (256,): -1 where the sign flips; shorter blocks take the first ones
SIGNS = 1 - 2 * np.unpackbits(np.frombuffer(ROTATION_SIGNS, np.uint8), bitorder="little").astype(np.float32)


def as_blocks(array: np.ndarray, dtype: np.dtype | type, *widths: int) -> np.ndarray:
    """Return the array C-contiguous. ValueError unless it has that dtype and the shape (n_blocks, one of widths)."""
    array = np.asarray(array)
    if array.dtype != dtype or array.ndim != 2 or array.shape[1] not in widths:
        raise ValueError(
            f"got {array.dtype} of shape {array.shape}, need {np.dtype(dtype)} of shape "
            f"(n_blocks, {' or '.join(map(str, widths))})"
        )
    return np.ascontiguousarray(array)


def fwht(x: np.ndarray) -> np.ndarray:
    """Apply the normalized Walsh-Hadamard transform in Sylvester order, its own inverse, to each row.

    x: float32 (n_blocks, 256, 64 or 32); returns a new array. ValueError for other shapes or dtypes. The order of additions is
    that of ggml_ext/ggml-ext-rotation.h: strides 1, 2, 4, ..., the factor last.
    """
    x = as_blocks(x, np.float32, *BLOCK_SIZES).copy()
    n, stride = x.shape[1], 1
    while stride < n:
        pairs = x.reshape(len(x), n // (2 * stride), 2, stride)
        u, v = pairs[:, :, 0], pairs[:, :, 1]
        difference = u - v
        u += v
        v[...] = difference
        stride *= 2
    x *= np.float32(n**-0.5)
    return x


def rotate(x: np.ndarray) -> np.ndarray:
    """Rotate each row: R x = H S x (ggml_ext/ggml-ext-rotation.h). Arguments as for fwht()."""
    x = as_blocks(x, np.float32, *BLOCK_SIZES)
    return fwht(x * SIGNS[: x.shape[1]])


def rotate_back(x: np.ndarray) -> np.ndarray:
    """Invert rotate(): S H x."""
    x = fwht(x)
    return x * SIGNS[: x.shape[1]]


def sum_lanes(terms: np.ndarray) -> np.ndarray:
    """Sum the rows of float32 (n_blocks, n) in the encoders' order: eight lanes, then a halving tree. Returns (n_blocks,)."""
    n_blocks, n = terms.shape
    steps = terms.reshape(n_blocks, n // LANES, LANES)
    lanes = np.zeros((n_blocks, LANES), np.float32)
    for i in range(n // LANES):
        lanes += steps[:, i]
    width = LANES // 2
    while width > 0:
        lanes = lanes[:, :width] + lanes[:, width:]
        width //= 2
    return lanes[:, 0]


def load_rotated(weights: np.ndarray, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Rotate weights float32 (n_blocks, block_size) and saturate them, as ext_load_rotated() of encode/encode.h.

    Returns float32 of the same shape, and bool (n_blocks,): which blocks are finite.
    """
    weights = as_blocks(weights, np.float32, block_size)
    x = rotate(np.clip(weights, np.float32(-1e30), np.float32(1e30)))
    top = 8 * HALF_MAX
    return np.clip(x, -top, top), np.isfinite(weights).all(axis=1)


def scales_to_float32(raw: np.ndarray) -> np.ndarray:
    """Convert little-endian halves, uint8 (n_blocks, 2), to float32 (n_blocks,)."""
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)[:, 0]


def scales_to_bytes(values: np.ndarray) -> np.ndarray:
    """Round float32 (n_blocks,) to nearest even halves, uint8 (n_blocks, 2)."""
    return values.astype("<f2").view(np.uint8).reshape(-1, 2)


def e5m3_to_float32(d: np.ndarray) -> np.ndarray:
    """Convert one-byte scales (ggml_ext/types/e5m3.h), uint8, to float32; above 0xf7 infinity and NaN."""
    with np.errstate(invalid="ignore"):
        return (d.astype("<u2") << 7).view("<f2").astype(np.float32) * np.float32(1 / 256)


def unpack_bits3(ql: np.ndarray, qh: np.ndarray) -> np.ndarray:
    """Unpack codes 0..7, uint8 (n_blocks, n), from planes uint8 (n_blocks, n/4) and (n_blocks, n/8); types/bits3.h."""
    n_blocks, lanes = qh.shape
    low2 = (ql.reshape(n_blocks, 2, 1, lanes) >> np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)) & 3
    high = (qh.reshape(n_blocks, 1, lanes) >> np.arange(8, dtype=np.uint8).reshape(8, 1)) & 1
    return low2.reshape(n_blocks, 8 * lanes) | high.reshape(n_blocks, 8 * lanes) << 2


def pack_bits3(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Invert unpack_bits3() for uint8 (n_blocks, 256, 64 or 32). ValueError for other shapes or dtypes and for codes above 7."""
    codes = as_blocks(codes, np.uint8, *BLOCK_SIZES)
    if codes.size and codes.max() > 7:
        raise ValueError(f"code {codes.max()} does not fit in three bits")
    n_blocks, n = codes.shape
    lanes = n // 8
    low2 = (codes & 3).reshape(n_blocks, 2, 4, lanes) << np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)
    high = (codes >> 2).reshape(n_blocks, 8, lanes) << np.arange(8, dtype=np.uint8).reshape(8, 1)
    return np.bitwise_or.reduce(low2, axis=2).reshape(n_blocks, n // 4), np.bitwise_or.reduce(high, axis=1)
