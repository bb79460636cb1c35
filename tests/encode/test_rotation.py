"""The rotation (signs and a Walsh-Hadamard transform of 256, 64 or 32 points) and its activation types."""

from __future__ import annotations

import numpy as np
import pytest

from ggml_ext.quants import _blocks as quants
from helpers import native
from helpers.corpora import rotation
from helpers.native import F32_U, ISAS, kernels

SIZES = pytest.mark.parametrize("n", [256, 64, 32])


@SIZES
def test_rotation_equals_its_matrix(lib, n):
    """log2(n) stages round: each output errs by at most log2(n) u sum|x_j|/sqrt(n), u = 2^-24."""
    x = np.random.default_rng(1).standard_normal((50, n)).astype(np.float32)
    bound = np.log2(n) * F32_U * np.abs(x.astype(np.float64)).sum(1, keepdims=True) / np.sqrt(n)
    assert (np.abs(lib.rotate(x) - x.astype(np.float64) @ rotation(n).T) <= bound).all()
    assert (np.abs(lib.rotate_back(x) - x.astype(np.float64) @ rotation(n)) <= bound).all()


@SIZES
def test_rotation_of_unit_vectors_is_exact(lib, n):
    np.testing.assert_array_equal(lib.rotate(np.eye(n, dtype=np.float32)), rotation(n).T.astype(np.float32))
    np.testing.assert_array_equal(lib.rotate_back(np.eye(n, dtype=np.float32)), rotation(n).astype(np.float32))


@pytest.mark.parametrize("n", [256, 64])
def test_rotation_is_orthogonal(lib, n):
    """Sums of n integers below 1000 and the factor are exact in float32, so there is no tolerance."""
    x, y = np.random.default_rng(2).integers(-1000, 1000, (2, 64, n)).astype(np.float32)
    rx, ry = lib.rotate(x), lib.rotate(y)
    np.testing.assert_array_equal(lib.rotate_back(rx), x)
    np.testing.assert_array_equal(lib.rotate(lib.rotate_back(x)), x)
    np.testing.assert_array_equal((rx.astype(np.float64) * ry).sum(1), (x.astype(np.float64) * y).sum(1))


@SIZES
def test_numpy_rotation_equals_c(lib, n):
    x = np.random.default_rng(3).standard_normal((50, n)).astype(np.float32)
    x[0, ::3] = 0  # zeros of both signs
    for numpy_function, c_function in ((quants.rotate, lib.rotate), (quants.rotate_back, lib.rotate_back)):
        np.testing.assert_array_equal(numpy_function(x).view(np.uint32), c_function(x).view(np.uint32))


BAD_BLOCKS = [np.zeros(256, np.float32), np.zeros((1, 255), np.float32), np.zeros((2, 512), np.float32),
              np.zeros((2, 128), np.float32), np.zeros((2, 256)), np.zeros((2, 64)), np.zeros((2, 32))]


@pytest.mark.parametrize("x", BAD_BLOCKS, ids=lambda x: f"{x.shape}-{x.dtype}")
@pytest.mark.parametrize("function", [quants.fwht, quants.rotate, quants.rotate_back])
def test_numpy_rotation_refuses_other_shapes_and_dtypes(function, x):
    with pytest.raises(ValueError, match="need float32"):
        function(x)


def activation_rows() -> np.ndarray:
    rng = np.random.default_rng(4)
    extreme = np.zeros((9, 512), np.float32)
    extreme[6, [5, 300]] = np.nan, 1
    extreme[7, 40] = np.inf
    extreme[8] = -3e38               # finite, but its rotation is not
    extreme[1, 3] = 1e-38            # its rotation is subnormal
    extreme[2] = np.tile(quants.SIGNS, 2)  # its rotation has a single nonzero value
    extreme[3, :256] = 3e30
    extreme[4] = rng.standard_normal(512) * 1e-42
    extreme[5, ::2] = -7.5
    # exact after rotation: the largest is 127, so codes are the values themselves, and all others are ties
    ties = rng.integers(-127, 127, (2, 256)).astype(np.float32) + np.float32(0.5)
    ties[:, 9] = 127
    random = rng.standard_normal((40, 512)) * 10.0 ** rng.integers(-6, 6, (40, 1))
    return np.concatenate([extreme, random, quants.rotate_back(ties).reshape(1, 512)]).astype(np.float32)


@pytest.mark.parametrize("isa", [*ISAS, "native"])
@pytest.mark.parametrize("activation", ["q8_kr", "q8_kr64", "q8_kr32"])
def test_fused_quantization_equals_the_reference(isa, activation):
    for n in {"q8_kr": [512], "q8_kr64": [512, 448, 384, 320, 64], "q8_kr32": [512, 480, 320, 288, 160, 32]}[activation]:
        rows = activation_rows()[:, :n]
        actual, expected = kernels(isa).quantize_rotated(rows, activation), native.quantize_reference(rows, activation)
        for field in expected.dtype.names:
            np.testing.assert_array_equal(actual[field], expected[field], err_msg=f"{field} on {isa}, rows of {n}")


def test_non_finite_activations_give_nan():
    """As in float: NaN or Inf must not become an ordinary number."""
    q = native.quantize_reference(activation_rows()[6:9])
    np.testing.assert_array_equal(np.isnan(q["d"]), [[True, False], [True, False], [True, True]])
    assert not q["qs"][np.isnan(q["d"])].any()


def test_q8_kr_reference_is_accurate(lib):
    """d is the largest rotated magnitude over 127, codes err by half a step, bsums are sums of codes."""
    rows = activation_rows()[9:]
    q = native.quantize_reference(rows)
    codes = native.codes_and_scales(q, rows.shape[1], "q8_kr")[0].reshape(*q.shape, 256)
    rotated = lib.rotate(np.ascontiguousarray(rows.reshape(-1, 256))).reshape(*q.shape, 256).astype(np.float64)
    np.testing.assert_array_equal(q["d"], (np.abs(rotated).max(-1).astype(np.float32) / np.float32(127)))
    d = q["d"][..., None].astype(np.float64)
    # half a step, plus the roundings of 127/amax, amax/127 and the product: at most 127 * 3 u steps
    assert (np.abs(codes * d - rotated) <= d * (0.5 + 127 * 3 * F32_U)).all()
    np.testing.assert_array_equal(q["bsums"], q["qs"].reshape(*q.shape, 16, 16).sum(-1))


@pytest.mark.parametrize("block", [64, 32])
def test_q8_kr_of_short_blocks_is_accurate(lib, block):
    """Like Q8_KR, with blocks of 64 or 32 in groups of 256 under one scale and zeros after the end of a row."""
    rows = np.ascontiguousarray(activation_rows()[9:, :448])
    q = native.quantize_reference(rows, f"q8_kr{block}")
    rotated = lib.rotate(rows.reshape(-1, block)).reshape(len(rows), 448).astype(np.float64)
    codes, d = native.codes_and_scales(q, 448, f"q8_kr{block}")
    largest = np.stack([np.abs(rotated[:, :256]).max(1), np.abs(rotated[:, 256:]).max(1)], axis=1).astype(np.float32)
    np.testing.assert_array_equal(q["d"], np.repeat((largest / np.float32(127))[..., None], 4, axis=-1))
    assert (np.abs(codes * d - rotated) <= d * (0.5 + 127 * 3 * F32_U)).all()
    np.testing.assert_array_equal(q["sum"], q["qs"].sum((-3, -1)))
    assert not q["qs"][:, 1, :, 192 // block :].any()
