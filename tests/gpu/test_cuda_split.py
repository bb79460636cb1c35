"""Activations as two columns (cuda/split.cuh) as host code: the quantizer that a product's activations go through finds the codes of
the first again, so that what is lost is the rounding of the residual.
"""

from __future__ import annotations

from ctypes import c_int64, c_uint

import numpy as np
import pytest

from ggml_ext import TYPES
from helpers.cuda_host import (
    BLOCK_MMQ,
    HAS_MINIMUM,
    ROTATED,
    code_places,
    device,
    integers,
    pointer,
    quantized,
    rotated,
    scales,
    threads,
    type_id,
)

THREADS_BF16, FLOAT_32, HALF_32, HALF_64 = range(4)  # enum split_groups
Q8_0, Q2_K = 8, 10  # of ggml.h: upstream's quantizers


def split(type_number: int, groups: int, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32 (ne3, ne2, ne1, n) to both columns; rows of x and of y lie apart, pairs side by side."""
    ne3, ne2, ne1, n = x.shape
    room = np.full((ne3, ne2, ne1, n + 5), 1e30, np.float32)
    room[..., :n] = x
    y = np.full((ne3, ne2, ne1, 2, n + 3), 77, np.float32)
    s, to = (np.array(a.strides[-2::-1]) // 4 for a in (room, y))
    device().cuda_host_split(type_number, groups, pointer(room), pointer(y), integers((n, ne1, ne2, ne3), c_int64), integers(s, c_int64),
                             integers((to[1], to[2], to[3], to[0]), c_int64))
    assert (y[..., n:] == 77).all()
    return np.ascontiguousarray(y[..., 0, :n]), np.ascontiguousarray(y[..., 1, :n])


def activations(n: int) -> np.ndarray:
    """Of magnitudes for which half scales are normal; outliers, a group of zeros."""
    rng = np.random.default_rng(5)
    x = (rng.standard_normal((2, 3, 4, n)) * 10.0 ** rng.integers(-1, 4, (2, 3, 4, 1))).astype(np.float32)
    x[0, 0, 0, :64] = 0
    x[1, :, :, 7] *= 50
    return x


def through_q8(name: str, x: np.ndarray) -> np.ndarray:
    """What MMVQ multiplies: (..., groups of 32), in the domain and order of the codes."""
    n, y = x.shape[-1], quantized(name, x)
    return (y["qs"][..., code_places(name)].reshape(*x.shape[:-1], -1, 32).astype(np.float64) * scales(y)[..., None])[..., : n // 32, :]


def through_mmq(name: str, x: np.ndarray) -> np.ndarray:
    """What MMQ multiplies, of a rotated type; neighbours."""
    ne3, ne2, ne1, n = x.shape
    ne0 = (n + 511) // 512 * 512
    y = np.zeros((ne3 * ne2, ne0 // 128, ne1), BLOCK_MMQ)
    sizes = map(c_int64, (n, n, n * ne1, n * ne1 * ne2, ne0, ne1, ne2, ne3))
    assert device().cuda_host_quantize_mmq(type_id(name), pointer(x), None, pointer(y), *sizes)
    d = y["ds"].view(np.float16)[..., ::2] if name in HAS_MINIMUM else y["ds"].view(np.float32)
    values = y["qs"].reshape(*y.shape, 4, 32).astype(np.float64) * d[..., None]
    return values.swapaxes(1, 2).reshape(ne3, ne2, ne1, -1, 32)[..., : n // 32, :]


def through_upstream(x: np.ndarray, n: int, keeps_half: bool) -> np.ndarray:
    """As upstream's quantize_q8_1 and quantize_mmq_q8_1 round groups of n."""
    v = x.reshape(*x.shape[:-1], -1, n)
    d = np.abs(v).max(-1, keepdims=True) / np.float32(127)
    with np.errstate(invalid="ignore", divide="ignore"):
        q = np.where(d > 0, np.rint(v * (np.float32(1) / d)), 0)
    return q * (d.astype(np.float16) if keeps_half else d).astype(np.float64)


def assert_precise(pair: tuple[np.ndarray, np.ndarray], x: np.ndarray, through, is_bf16: bool, exact: np.ndarray) -> None:
    """exact: what a product should multiply, float64 (..., groups, values of a group)."""
    y, r = pair
    # A GPU divides with errors of a few 2^-24; scales that are rounded up must not become the next ones by that.
    got = through(y * np.float32(1 + 2.0**-21)) + through(r) / 128
    amax = np.abs(exact).max(-1, keepdims=True)
    # The residual is at most a step, a/127: where scales have 8 bits, amax/d may be 127.99; else a little more than half of one.
    # Rounding it loses half of 1/127 of that, and its scale may be larger by 2^-7 (bfloat16) or 2^-10. Beside it what this test makes
    # of the division, and float32's rounding in the rotation of a whole block, 16 sums of 16.
    step = amax / 127
    of_float = 16 * 2.0**-24 * np.abs(x).max(-1)[..., None, None]
    bound = (step if is_bf16 else 0.63 * step) * (1 + 2.0**-7) / 254 + 2.0**-21 * amax + of_float
    wrong = np.abs(got - exact) > bound
    assert not wrong.any(), f"{wrong.mean():.3f} of the values"
    assert np.abs(got - exact).mean() < np.abs(through(x) - exact).mean() / 50, "no better than 8 bits"


@pytest.mark.parametrize("name, n", [("itq3_s", 768), ("itq3_t", 256), ("ccq2", 512), ("ditto3", 768), ("itq3_t64", 576), ("itq2_t64", 64),
                                     ("ditto5", 512)])
def test_columns_for_mmvq(lib, name, n):
    x = activations(n)
    exact = threads(rotated(lib, name, x).astype(np.float64), TYPES[name].block_size)
    assert_precise(split(type_id(name), THREADS_BF16, x), x, lambda v: through_q8(name, v), True, exact)


@pytest.mark.parametrize("name, n", [(name, 576 if TYPES[name].block_size == 64 else 768) for name in ROTATED])
def test_columns_for_mmq(lib, name, n):
    x = activations(n)
    exact = rotated(lib, name, x).astype(np.float64).reshape(2, 3, 4, -1, 32)
    groups = HALF_32 if name in HAS_MINIMUM else FLOAT_32
    assert_precise(split(type_id(name), groups, x), x, lambda v: through_mmq(name, v), False, exact)


@pytest.mark.parametrize("groups, type_number", [(FLOAT_32, Q8_0), (HALF_32, Q8_0), (HALF_64, Q2_K), (FLOAT_32, type_id("ccq2"))])
@pytest.mark.parametrize("n", (320, 512))
def test_columns_for_upstreams_quantizers(groups, type_number, n):
    x = activations(n)
    size = 64 if groups == HALF_64 else 32
    exact = x.astype(np.float64).reshape(2, 3, 4, -1, size)
    assert_precise(split(type_number, groups, x), x, lambda v: through_upstream(v, size, groups != FLOAT_32), False, exact)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_so(bad):
    x = np.ones((1, 1, 1, 512), np.float32)
    x[..., 300] = bad
    y, r = split(type_id("itq3_s"), THREADS_BF16, x)
    assert np.isfinite(y[..., :256]).all() and np.isfinite(r[..., :256]).all()
    assert not np.isfinite(y[..., 256:]).any()


def test_sums_of_pairs():
    """Strided results, a number of rows that is no multiple of the block of threads."""
    ne = (300, 3, 2, 2)
    rng = np.random.default_rng(6)
    y = rng.standard_normal((2, 2, 3, 2, 300)).astype(np.float32)
    out = np.full((2, 2, 3, 310), 77, np.float32)
    of_y, of_out = (np.array(a.strides[-2::-1]) // 4 for a in (y, out))
    device().cuda_host_add_residuals(pointer(y), pointer(out), integers(ne, c_int64), integers((*of_y[1:], of_y[0]), c_int64),
                                     integers(of_out, c_int64))
    assert np.array_equal(out[..., :300], y[..., 0, :] + y[..., 1, :] / np.float32(128)) and (out[..., 300:] == 77).all()


@pytest.fixture
def last_blocks():
    """Launches run the last eight blocks of a grid's x alone: the rest is only counted."""
    device().cuda_host_run_last_blocks(c_uint(8))
    yield 8
    device().cuda_host_run_last_blocks(c_uint(-1))


@pytest.mark.parametrize("shape", [(1, 1, 65_600), (1, 65_600, 1), (65_600, 1, 1), (20, 41, 80)])
def test_more_rows_than_a_grid_has_in_y_and_z(last_blocks, shape):
    """Columns of a product with 64 results or less, tokens of one with experts; CUDA takes 65,535 there, and more in x."""
    n, rows = 32, int(np.prod(shape)) - last_blocks
    x = np.random.default_rng(7).standard_normal((*shape, n)).astype(np.float32)
    y, r = (a.reshape(-1, n) for a in split(Q8_0, FLOAT_32, x))
    x = x.reshape(-1, n)
    # the residual is 128 times what is left, which is half a step at most
    np.testing.assert_allclose(y[rows:] + r[rows:] / 128, x[rows:], rtol=2.0**-22)
    assert (np.abs(r[rows:]) <= 64.1 * np.abs(x[rows:]).max(-1, keepdims=True) / 127).all() and (y[:rows] == 77).all()

    pairs = np.random.default_rng(8).standard_normal((*shape, 2, n)).astype(np.float32)
    out = np.full((*shape, n), 77, np.float32)
    of_pairs, of_out = (np.array(a.strides[-2::-1]) // 4 for a in (pairs, out))
    device().cuda_host_add_residuals(pointer(pairs), pointer(out), integers((n, *shape[::-1]), c_int64),
                                     integers((*of_pairs[1:], of_pairs[0]), c_int64), integers(of_out, c_int64))
    pairs, out = pairs.reshape(-1, 2, n), out.reshape(-1, n)
    assert np.array_equal(out[rows:], pairs[rows:, 0] + pairs[rows:, 1] / np.float32(128)) and (out[:rows] == 77).all()


def test_experts_of_both_columns():
    ids = np.arange(5 * 40, dtype=np.int32).reshape(5, 40)
    out = np.zeros((10, 33), np.int32)
    device().cuda_host_double_ids(pointer(ids), pointer(out), c_int64(33), c_int64(40), c_int64(5))
    assert np.array_equal(out, np.repeat(ids[:, :33], 2, 0))
