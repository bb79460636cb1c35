"""Activations as two columns (cuda/split.cuh), compiled as host code.

A product's quantizer recovers the codes of the first column, so that only the rounding of the residual is lost.
"""

from __future__ import annotations

from ctypes import c_int64, c_uint

import numpy as np
import pytest

from ggml_ext import TYPES
from helpers.blocks import rotate_for, type_id
from helpers.cuda_host import (
    BLOCK_MMQ,
    HAS_MINIMUM,
    ROTATED,
    c_array,
    code_positions,
    device,
    pointer,
    quantize_q8,
    scales,
    split_by_thread,
)

THREADS_BF16, FLOAT_32, HALF_32, HALF_64 = range(4)  # enum split_groups
Q8_0, Q2_K = 8, 10  # ggml_type of upstream's quantizers


def split(type_number: int, groups: int, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split float32 (ne3, ne2, ne1, n) into both columns; rows of x and y have gaps, pairs are adjacent."""
    ne3, ne2, ne1, n = x.shape
    buffer = np.full((ne3, ne2, ne1, n + 5), 1e30, np.float32)
    buffer[..., :n] = x
    y = np.full((ne3, ne2, ne1, 2, n + 3), 77, np.float32)
    x_strides, y_strides = (np.array(a.strides[-2::-1]) // 4 for a in (buffer, y))
    device().cuda_host_split(type_number, groups, pointer(buffer), pointer(y), c_array((n, ne1, ne2, ne3), c_int64), c_array(x_strides, c_int64),
                             c_array((y_strides[1], y_strides[2], y_strides[3], y_strides[0]), c_int64))
    assert (y[..., n:] == 77).all()
    return np.ascontiguousarray(y[..., 0, :n]), np.ascontiguousarray(y[..., 1, :n])


def activations(n: int) -> np.ndarray:
    """Return activations for which half scales are normal, with outliers and a group of zeros."""
    rng = np.random.default_rng(5)
    x = (rng.standard_normal((2, 3, 4, n)) * 10.0 ** rng.integers(-1, 4, (2, 3, 4, 1))).astype(np.float32)
    x[0, 0, 0, :64] = 0
    x[1, :, :, 7] *= 50
    return x


def apply_q8(name: str, x: np.ndarray) -> np.ndarray:
    """Return what MMVQ multiplies: (..., groups of 32), in the domain and order of the codes."""
    n, y = x.shape[-1], quantize_q8(name, x)
    return (y["qs"][..., code_positions(name)].reshape(*x.shape[:-1], -1, 32).astype(np.float64) * scales(y)[..., None])[..., : n // 32, :]


def apply_mmq(name: str, x: np.ndarray) -> np.ndarray:
    """Return what MMQ multiplies for a rotated type, in groups of 32 neighbours."""
    ne3, ne2, ne1, n = x.shape
    ne0 = (n + 511) // 512 * 512
    y = np.zeros((ne3 * ne2, ne0 // 128, ne1), BLOCK_MMQ)
    sizes = map(c_int64, (n, n, n * ne1, n * ne1 * ne2, ne0, ne1, ne2, ne3))
    assert device().cuda_host_quantize_mmq(type_id(name), pointer(x), None, pointer(y), *sizes)
    d = y["ds"].view(np.float16)[..., ::2] if name in HAS_MINIMUM else y["ds"].view(np.float32)
    values = y["qs"].reshape(*y.shape, 4, 32).astype(np.float64) * d[..., None]
    return values.swapaxes(1, 2).reshape(ne3, ne2, ne1, -1, 32)[..., : n // 32, :]


def apply_upstream(x: np.ndarray, n: int, keeps_half: bool) -> np.ndarray:
    """Round groups of n as upstream's quantize_q8_1 and quantize_mmq_q8_1 do."""
    v = x.reshape(*x.shape[:-1], -1, n)
    d = np.abs(v).max(-1, keepdims=True) / np.float32(127)
    with np.errstate(invalid="ignore", divide="ignore"):
        q = np.where(d > 0, np.rint(v * (np.float32(1) / d)), 0)
    return q * (d.astype(np.float16) if keeps_half else d).astype(np.float64)


def assert_precise(pair: tuple[np.ndarray, np.ndarray], x: np.ndarray, quantize, is_bf16: bool, exact: np.ndarray) -> None:
    """exact: what a product should multiply, float64 (..., groups, values per group)."""
    y, r = pair
    # a GPU divides with errors of a few 2^-24, which must not change scales that are rounded up
    actual = quantize(y * np.float32(1 + 2.0**-21)) + quantize(r) / 128
    amax = np.abs(exact).max(-1, keepdims=True)
    # The residual is at most a step, a/127: amax/d may be 127.99 where scales have 8 bits, else it is little more than half a step. Rounding it
    # loses half of 1/127 of that, and its scale may grow by 2^-7 (bfloat16) or 2^-10. To that come the division above and the float32 rounding
    # of a block's rotation, 16 sums of 16.
    step = amax / 127
    float_rounding = 16 * 2.0**-24 * np.abs(x).max(-1)[..., None, None]
    bound = (step if is_bf16 else 0.63 * step) * (1 + 2.0**-7) / 254 + 2.0**-21 * amax + float_rounding
    wrong = np.abs(actual - exact) > bound
    assert not wrong.any(), f"{wrong.mean():.3f} of the values"
    assert np.abs(actual - exact).mean() < np.abs(quantize(x) - exact).mean() / 50, "no better than 8 bits"


@pytest.mark.parametrize("name, n", [("itq3_s", 768), ("itq3_t", 256), ("ccq2", 512), ("ditto3", 768), ("itq3_t64", 576), ("itq2_t64", 64), ("itq2_t32", 160),
                                     ("ditto5", 512)])
def test_two_columns_are_precise_in_mmvq(lib, name, n):
    x = activations(n)
    exact = split_by_thread(rotate_for(lib, name, x).astype(np.float64), TYPES[name].block_size)
    assert_precise(split(type_id(name), THREADS_BF16, x), x, lambda v: apply_q8(name, v), True, exact)


@pytest.mark.parametrize("name, n", [(name, {256: 768, 64: 576, 32: 544}[TYPES[name].block_size]) for name in ROTATED])
def test_two_columns_are_precise_in_mmq(lib, name, n):
    x = activations(n)
    exact = rotate_for(lib, name, x).astype(np.float64).reshape(2, 3, 4, -1, 32)
    groups = HALF_32 if name in HAS_MINIMUM else FLOAT_32
    assert_precise(split(type_id(name), groups, x), x, lambda v: apply_mmq(name, v), False, exact)


@pytest.mark.parametrize("groups, type_number", [(FLOAT_32, Q8_0), (HALF_32, Q8_0), (HALF_64, Q2_K), (FLOAT_32, type_id("ccq2"))])
@pytest.mark.parametrize("n", (320, 512))
def test_two_columns_are_precise_in_upstreams_quantizers(groups, type_number, n):
    x = activations(n)
    size = 64 if groups == HALF_64 else 32
    exact = x.astype(np.float64).reshape(2, 3, 4, -1, size)
    assert_precise(split(type_number, groups, x), x, lambda v: apply_upstream(v, size, groups != FLOAT_32), False, exact)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_activations_stay_non_finite(bad):
    x = np.ones((1, 1, 1, 512), np.float32)
    x[..., 300] = bad
    y, r = split(type_id("itq3_s"), THREADS_BF16, x)
    assert np.isfinite(y[..., :256]).all() and np.isfinite(r[..., :256]).all()
    assert not np.isfinite(y[..., 256:]).any()


def test_pairs_are_added():
    """Strided results; the number of rows is not a multiple of the thread block."""
    ne = (300, 3, 2, 2)
    rng = np.random.default_rng(6)
    y = rng.standard_normal((2, 2, 3, 2, 300)).astype(np.float32)
    out = np.full((2, 2, 3, 310), 77, np.float32)
    y_strides, out_strides = (np.array(a.strides[-2::-1]) // 4 for a in (y, out))
    device().cuda_host_add_residuals(pointer(y), pointer(out), c_array(ne, c_int64), c_array((*y_strides[1:], y_strides[0]), c_int64),
                                     c_array(out_strides, c_int64))
    assert np.array_equal(out[..., :300], y[..., 0, :] + y[..., 1, :] / np.float32(128)) and (out[..., 300:] == 77).all()


@pytest.fixture
def last_blocks():
    """Run only the last eight blocks of a grid in x; the others are counted."""
    device().cuda_host_run_last_blocks(c_uint(8))
    yield 8
    device().cuda_host_run_last_blocks(c_uint(-1))


@pytest.mark.parametrize("shape", [(1, 1, 65_600), (1, 65_600, 1), (65_600, 1, 1), (20, 41, 80)])
def test_rows_beyond_the_grid_limits_in_y_and_z(last_blocks, shape):
    """Columns of products with at most 64 results, or tokens with experts. CUDA limits y and z to 65,535, but not x."""
    n, rows = 32, int(np.prod(shape)) - last_blocks
    x = np.random.default_rng(7).standard_normal((*shape, n)).astype(np.float32)
    y, r = (a.reshape(-1, n) for a in split(Q8_0, FLOAT_32, x))
    x = x.reshape(-1, n)
    # the residual is 128 times the remainder, which is at most half a step
    np.testing.assert_allclose(y[rows:] + r[rows:] / 128, x[rows:], rtol=2.0**-22)
    assert (np.abs(r[rows:]) <= 64.1 * np.abs(x[rows:]).max(-1, keepdims=True) / 127).all() and (y[:rows] == 77).all()

    pairs = np.random.default_rng(8).standard_normal((*shape, 2, n)).astype(np.float32)
    out = np.full((*shape, n), 77, np.float32)
    pair_strides, out_strides = (np.array(a.strides[-2::-1]) // 4 for a in (pairs, out))
    device().cuda_host_add_residuals(pointer(pairs), pointer(out), c_array((n, *shape[::-1]), c_int64),
                                     c_array((*pair_strides[1:], pair_strides[0]), c_int64), c_array(out_strides, c_int64))
    pairs, out = pairs.reshape(-1, 2, n), out.reshape(-1, n)
    assert np.array_equal(out[rows:], pairs[rows:, 0] + pairs[rows:, 1] / np.float32(128)) and (out[:rows] == 77).all()


def test_expert_ids_are_doubled():
    ids = np.arange(5 * 40, dtype=np.int32).reshape(5, 40)
    out = np.zeros((10, 33), np.int32)
    device().cuda_host_double_ids(pointer(ids), pointer(out), c_int64(33), c_int64(40), c_int64(5))
    assert np.array_equal(out, np.repeat(ids[:, :33], 2, 0))
