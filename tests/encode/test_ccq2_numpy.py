"""The numpy reference of CCQ2: the format."""

import numpy as np

from ggml_ext import TYPES
from ggml_ext.quants import BLOCK_SIZE, ccq2
from helpers.corpora import SEED

TYPE_ID = int(TYPES["ccq2"].id)


def test_equal_importances_change_almost_nothing(lib):
    """Equal up to the rounding of the factor: a power of two minus the floor of 1/1024 is not a power of two."""
    x = np.random.default_rng(SEED).standard_normal((8, 1024)).astype(np.float32)
    flat = lib.quantize(TYPE_ID, x, imatrix=np.ones(1024, np.float32))
    assert (flat == lib.quantize(TYPE_ID, x)).mean() > 0.99


def test_all_codes_and_scales_follow_the_formula():
    """All bytes and all 65536 scale words against the format's formula, one weight at a time."""
    info = np.arange(1 << 16)
    blocks = np.zeros((1 << 16, 66), np.uint8)
    blocks[:, 0], blocks[:, 1] = info & 255, info >> 8
    blocks[:, 2:] = (np.arange(64) + 64 * (info[:, None] & 3)).astype(np.uint8)
    weights = ccq2.dequantize_blocks(blocks)
    valid = blocks[:, 0] < 0xF8
    assert np.isfinite(weights[valid]).all() and not np.isfinite(weights[~valid]).all(axis=1).any()
    for block, values in zip(blocks[valid][::97], weights[valid][::97], strict=True):
        exponent, mantissa = block[0] >> 3, block[0] & 7
        d = (1 + mantissa / 8) * 2.0 ** (int(exponent) - 15) if exponent else mantissa / 8 * 2.0**-14
        for j in range(0, BLOCK_SIZE, 5):
            c = 121 * int(block[2 + 32 * (j // 128) + j % 32]) + 1178
            q = c >> 9 - 3 * (j % 128 // 32) & 63
            assert values[j] == d / 256 * (5, 6, 8, 11)[block[1] >> 2 * (j // 64) & 3] * (q - 32)
    assert len(np.unique(blocks[:, 2:])) == 256


def test_neighbouring_codes_share_three_bits():
    """The paper's convolutional code: L = 6 bits per value, S = 3 new ones per step."""
    q = ccq2.CODES
    for k in range(3):
        np.testing.assert_array_equal(q[:, k] & 7, q[:, k + 1] >> 3)
