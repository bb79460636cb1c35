"""The numpy reference of DITTO3: the format and the encoder."""

import numpy as np

from ggml_ext.quants import BLOCK_SIZE, ditto3
from helpers.corpora import SEED


def test_the_papers_example_is_reproduced():
    """Section 3.2: well separated groups of weights become their means. Here eight groups of 32 weights."""
    centres = np.arange(8, dtype=np.float32) * 4 - 14
    x = np.repeat(centres, 32) + np.tile(np.float32([-0.25, 0.25]), 128)
    blocks = ditto3.quantize_blocks(x[None])
    q, d = ditto3.unpack(blocks)
    # d and the codebook round the means by at most half a step of 14/63, and d itself by 2^-11 of them
    np.testing.assert_allclose((d[:, None] * q).ravel(), np.repeat(centres, 32), atol=14 / 63 / 2 + 14 * 2.0**-11)


def test_unpack_follows_the_formula():
    """Against the format's formula, one weight at a time."""
    rng = np.random.default_rng(SEED)
    blocks = rng.integers(0, 256, (20, 106), dtype=np.uint8)
    q, _ = ditto3.unpack(blocks)
    for block, values in zip(blocks, q, strict=True):
        codebook, ql, qh = (block[2:10] & 127).astype(int) - 64, block[10:74], block[74:]
        for j in range(BLOCK_SIZE):
            low2 = ql[32 * (j // 128) + j % 32] >> 2 * ((j % 128) // 32) & 3
            assert values[j] == codebook[low2 | (qh[j % 32] >> (j // 32) & 1) << 2]
