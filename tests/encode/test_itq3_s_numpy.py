"""The numpy reference of ITQ3_S: the format, the rotation, the encoder, and equality with the C encoder byte for byte."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ggml_ext import TYPES
from ggml_ext.quants import BLOCK_SIZE, itq3_s
from helpers.corpora import CORPORA, SEED, rotation
from helpers.weights import assert_same_blocks, relative_mse

TYPE_ID = int(TYPES["itq3_s"].id)
LEVELS = pytest.mark.parametrize("levels", [8, 3])


def test_unpack_follows_the_formula():
    """Against the format's formula, one weight at a time."""
    rng = np.random.default_rng(SEED)
    for code in range(8):
        blocks = rng.integers(0, 256, (BLOCK_SIZE, 100), dtype=np.uint8)
        for j in range(BLOCK_SIZE):
            ql, qh, shift = 4 + 32 * (j // 128) + j % 32, 68 + j % 32, 2 * ((j % 128) // 32)
            blocks[j, ql] = int(blocks[j, ql]) & ~(3 << shift) | (code & 3) << shift
            blocks[j, qh] = int(blocks[j, qh]) & ~(1 << j // 32) | (code >> 2) << j // 32
        q, _, _ = itq3_s.unpack(blocks)
        assert np.array_equal(q.diagonal(), np.full(BLOCK_SIZE, code))


def test_pack_is_the_inverse_of_unpack():
    blocks = np.random.default_rng(SEED).integers(0, 256, (500, 100), dtype=np.uint8)
    blocks[:, 1] &= 0x7B  # finite scales: a NaN's payload may not survive the conversion to float32
    blocks[:, 3] &= 0x7B
    q, d, z = itq3_s.unpack(blocks)
    assert_same_blocks(itq3_s.pack(q.astype(np.uint8), d, z), blocks, f"itq3_s, seed {SEED}")


def test_pack_refuses_codes_above_seven():
    with pytest.raises(ValueError, match="code 8 "):
        itq3_s.pack(np.full((1, BLOCK_SIZE), 8, np.uint8), np.ones(1, np.float32), np.ones(1, np.float32))


def test_dequantize_follows_the_formula():
    blocks = itq3_s.quantize_blocks(CORPORA["gaussian"])
    q, d, z = itq3_s.unpack(blocks)
    v = d[:, None].astype(np.float64) * (q - z[:, None].astype(np.float64))
    # two roundings for v, then eight levels of additions
    bound = 10 * np.finfo(np.float32).eps / 2 * (np.abs(v) @ np.abs(rotation(256)))
    assert (np.abs(itq3_s.dequantize_blocks(blocks) - v @ rotation(256)) <= bound).all()


def test_ternary_uses_three_codes_and_has_the_predicted_error():
    x = CORPORA["gaussian"]
    blocks = itq3_s.quantize_blocks(x, levels=3)
    assert set(np.unique(itq3_s.unpack(blocks)[0])) == {0, 1, 2}
    # d*{-1, 0, 1} with d = 0.798 sigma on a Gaussian, codes rounded to nearest: E[(x - d*q)^2] by numerical integration
    t, step = np.linspace(-8, 8, 200001, retstep=True)
    density = np.exp(-t * t / 2) / np.sqrt(2 * np.pi)
    expected = step * (density * (t - 0.798 * np.clip(np.round(t / 0.798), -1, 1)) ** 2).sum()
    assert relative_mse(itq3_s.dequantize_blocks(blocks), x) == pytest.approx(expected, rel=0.03)


def test_encoder_refuses_other_levels_and_shapes():
    with pytest.raises(ValueError, match="levels is 4"):
        itq3_s.quantize_blocks(CORPORA["zero"], levels=4)
    with pytest.raises(ValueError, match="n_blocks, 256"):
        itq3_s.quantize_blocks(np.zeros((2, 128), np.float32))


def test_non_finite_weights_give_non_finite_scales():
    x = CORPORA["not_finite"]
    _, d, z = itq3_s.unpack(itq3_s.quantize_blocks(x))
    bad = ~np.isfinite(x).all(axis=1)
    assert bad.any() and not bad.all()
    assert np.array_equal(np.isnan(d), bad) and np.array_equal(np.isnan(z), bad)


@pytest.mark.parametrize("corpus", CORPORA)
def test_ternary_equals_c(lib, corpus):
    x = CORPORA[corpus]
    assert_same_blocks(itq3_s.quantize_blocks(x, levels=3), lib.quantize(TYPE_ID, x, itq3_levels=3), f"itq3_s, 3 levels, {corpus}, seed {SEED}")


@LEVELS
@settings(max_examples=150, deadline=None)
@given(
    x=st.one_of(
        arrays(np.float32, (2, BLOCK_SIZE), elements=st.floats(width=32)),
        arrays(np.float32, (2, BLOCK_SIZE), elements=st.floats(-4, 4, width=32)),
        arrays(
            np.float32,
            (2, BLOCK_SIZE),
            elements=st.sampled_from(np.float32([0, -0.0, 1, -1, 2**-14, 65504, 1e-45]).tolist()),
        ),
    )
)
def test_equals_c_on_generated_blocks(lib, levels, x):
    assert_same_blocks(itq3_s.quantize_blocks(x, levels=levels), lib.quantize(TYPE_ID, x, itq3_levels=levels), f"itq3_s, {levels} levels")


def test_c_refuses_other_levels(lib):
    with pytest.raises(ValueError, match="itq3_levels 5"):
        lib.quantize(TYPE_ID, CORPORA["student"], 5)


def test_dequantize_equals_c(lib):
    blocks = np.random.default_rng(SEED).integers(0, 256, (2000, 100), dtype=np.uint8)  # includes NaN and Inf scales
    assert np.array_equal(itq3_s.dequantize_blocks(blocks), lib.dequantize(TYPE_ID, blocks, BLOCK_SIZE), equal_nan=True)


def test_unpack_equals_c(lib):
    blocks = np.random.default_rng(SEED).integers(0, 256, (300, 100), dtype=np.uint8)
    q, d, z = itq3_s.unpack(blocks)
    for i, block in enumerate(blocks):
        c_q, c_scale, c_d, c_z = lib.unpack_block(TYPE_ID, block)
        place = f"itq3_s, seed {SEED}, block {i}: {block.tobytes().hex()}"
        assert np.array_equal(q[i], c_q), place
        assert c_scale[0] == 1, place
        assert np.array_equal([d[i], z[i]], np.float32([c_d, c_z]), equal_nan=True), place


@pytest.mark.parametrize("position", [1, 3], ids=["d", "z"])
@pytest.mark.parametrize("byte", [0x7C, 0x7E, 0xFC])
def test_validation_refuses_non_finite_scales(lib, position, byte):
    blocks = itq3_s.quantize_blocks(CORPORA["gaussian"][:4])
    assert lib.validate(TYPE_ID, blocks)
    blocks[2, position] = byte
    assert not lib.validate(TYPE_ID, blocks)
