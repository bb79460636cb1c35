"""numpy references of the weight types, one module a type, and what they share.

A module <type>.py supplies, on arrays shaped (n_blocks, block_size) or (n_blocks, block_bytes):
    unpack(blocks)                        the unpack contract: codes, scale and offset
    dequantize_blocks(blocks)             weights
    quantize_blocks(weights, importance)  blocks, the same bytes as the C encoder ggml_ext/encode/<type>.c; importance
                                          may be left out, and further options of the type follow

Floating point follows the C sources operation by operation: IEEE float32, one order of sums, no fused operations.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import numpy as np

from .._types import ROTATION_SIGNS

BLOCK_SIZE = 256
LANES = 8   # partial sums of the encoders (ggml_ext/encode/encode.h)
HALF_MAX = np.float32(65504.0)
E5M3_MAX = np.float32(240.0)  # largest scale of one byte
# S as factors, float32 (256,): -1 where the sign flips
SIGNS = 1 - 2 * np.unpackbits(np.frombuffer(ROTATION_SIGNS, np.uint8), bitorder="little").astype(np.float32)


def reference(type_name: str) -> ModuleType:
    """The module of a weight type, by its lower-case name."""
    return importlib.import_module(f"{__name__}.{type_name}")


def as_blocks(array: np.ndarray, dtype: np.dtype | type, width: int) -> np.ndarray:
    """`array` as a C-contiguous (n_blocks, width) array of dtype; raises ValueError for any other shape or dtype."""
    array = np.asarray(array)
    if array.dtype != dtype or array.ndim != 2 or array.shape[1] != width:
        raise ValueError(
            f"got {array.dtype} of shape {array.shape}, need {np.dtype(dtype)} of shape (n_blocks, {width})"
        )
    return np.ascontiguousarray(array)


def fwht(x: np.ndarray) -> np.ndarray:
    """Normalised 256-point Walsh-Hadamard transform in Sylvester order of each row; its own inverse.

    x: float32 (n_blocks, 256); returns a new array of the same shape and dtype. ValueError for other shapes or dtypes.
    The order of additions is that of ggml_ext/ggml-ext-rotation.h: butterflies at strides 1, 2, ... 128, the factor last.
    """
    x = as_blocks(x, np.float32, BLOCK_SIZE).copy()
    stride = 1
    while stride < BLOCK_SIZE:
        pairs = x.reshape(-1, BLOCK_SIZE // (2 * stride), 2, stride)
        u, v = pairs[:, :, 0], pairs[:, :, 1]
        difference = u - v
        u += v
        v[...] = difference
        stride *= 2
    x *= np.float32(1 / 16)  # 1 / sqrt(256), exact
    return x


def rotate(x: np.ndarray) -> np.ndarray:
    """R x = H S x of each row, float32 (n_blocks, 256) as a new array; see ggml_ext/ggml-ext-rotation.h. ValueError as fwht()."""
    return fwht(as_blocks(x, np.float32, BLOCK_SIZE) * SIGNS)


def rotate_back(x: np.ndarray) -> np.ndarray:
    """The inverse of rotate(), S H x."""
    return fwht(x) * SIGNS


def sum_lanes(terms: np.ndarray) -> np.ndarray:
    """Row sums of float32 (n_blocks, 256) in the encoders' order: eight lanes, then a halving tree. Returns (n_blocks,)."""
    steps = terms.reshape(-1, BLOCK_SIZE // LANES, LANES)
    lanes = np.zeros((steps.shape[0], LANES), np.float32)
    for i in range(steps.shape[1]):
        lanes += steps[:, i]
    width = LANES // 2
    while width > 0:
        lanes = lanes[:, :width] + lanes[:, width:]
        width //= 2
    return lanes[:, 0]


def load_rotated(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rotated blocks as the encoders see them, and which blocks are free of NaN and Inf.

    weights: float32 (n_blocks, 256). Returns float32 of the same shape, saturated as ext_load_rotated() of
    encode/encode.h does, and bool (n_blocks,).
    """
    weights = as_blocks(weights, np.float32, BLOCK_SIZE)
    x = rotate(np.clip(weights, np.float32(-1e30), np.float32(1e30)))
    top = 8 * HALF_MAX
    return np.clip(x, -top, top), np.isfinite(weights).all(axis=1)


def scales_to_float32(raw: np.ndarray) -> np.ndarray:
    """uint8 (n_blocks, 2) holding one little-endian half each, as float32 (n_blocks,)."""
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)[:, 0]


def scales_to_bytes(values: np.ndarray) -> np.ndarray:
    """float32 (n_blocks,) rounded to half, to nearest even, as uint8 (n_blocks, 2)."""
    return values.astype("<f2").view(np.uint8).reshape(-1, 2)


def e5m3_to_float32(d: np.ndarray) -> np.ndarray:
    """uint8 of any shape, scales of one byte (ggml_ext/types/e5m3.h), as float32 of that shape; above 0xf7 Inf and NaN."""
    with np.errstate(invalid="ignore"):
        return (d.astype("<u2") << 7).view("<f2").astype(np.float32) * np.float32(1 / 256)


def unpack_bits3(ql: np.ndarray, qh: np.ndarray) -> np.ndarray:
    """Codes uint8 (n_blocks, 256) in 0..7 from their planes, uint8 (n_blocks, 64) and (n_blocks, 32); types/bits3.h."""
    low2 = (ql.reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)) & 3
    high = (qh.reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8).reshape(8, 1)) & 1
    return low2.reshape(-1, BLOCK_SIZE) | high.reshape(-1, BLOCK_SIZE) << 2


def pack_bits3(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Inverse of unpack_bits3: uint8 (n_blocks, 256). ValueError for other shapes or dtypes and for codes above 7."""
    codes = as_blocks(codes, np.uint8, BLOCK_SIZE)
    if codes.size and codes.max() > 7:
        raise ValueError(f"code {codes.max()} does not fit in three bits")
    low2 = (codes & 3).reshape(-1, 2, 4, 32) << np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)
    high = (codes >> 2).reshape(-1, 8, 32) << np.arange(8, dtype=np.uint8).reshape(8, 1)
    return np.bitwise_or.reduce(low2, axis=2).reshape(-1, 64), np.bitwise_or.reduce(high, axis=1)
