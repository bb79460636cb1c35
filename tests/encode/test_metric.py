"""Second moments in the encoders: the factorization against the form itself, C against numpy byte for byte, what it gains, bad input."""

import ctypes
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggml_ext import TYPES, WEIGHT_TYPES
from ggml_ext._formats.tensor_types import parse_type
from ggml_ext._native import library
from ggml_ext.quants import SIGNS, reference
from ggml_ext.quants._metric import Metric, positions
from helpers.forms import SEED, correlated, cost, masked, triangles
from helpers.native import BUILD, built
from helpers.weights import assert_same_blocks

TRELLIS = [name for name, info in TYPES.items() if info.trellis_values]


def metrics(lib, name: str, moments: np.ndarray, whole: bool, segment: int = 32, damping: float = 0.01) -> tuple:
    """That of C and that of numpy."""
    info, t = TYPES[name], triangles(moments, whole)
    return (lib.metric(int(info.id), len(moments), t, whole, damping, segment),
            Metric.of_moments(t, len(moments), info.block_size, info.rotated, whole, damping, segment))


def in_numpy(name: str):
    return reference(name).quantize_blocks


CASES = [  # type, columns, whole matrices, segment
    ("itq3_t", 256, False, 32), ("itq2_t", 512, False, 16), ("itq2_t", 768, True, 32), ("itq3_t", 512, True, 8),
    ("itq3_t64", 320, False, 16), ("itq3_t64", 320, True, 8), ("itq2_t64", 192, True, 32), ("itq2_t64", 64, False, 32),
    ("itq3_s", 512, True, 8), ("itq3_s", 512, False, 32), ("ditto3", 512, True, 8), ("ditto3", 512, False, 16),
    ("ccq2", 512, True, 8), ("ccq2", 512, False, 32), ("ditto5", 512, True, 8), ("ditto5", 512, False, 16),
]


@pytest.mark.parametrize(("name", "n", "whole", "segment"), CASES)
def test_same_bytes_as_c(lib, name, n, whole, segment):
    """18 rows: more than go through a row's blocks together."""
    of_c, of_numpy = metrics(lib, name, correlated(n, 3 * n), whole, segment)
    x = np.random.default_rng(SEED).standard_normal((18, n)).astype(np.float32)
    x[1], x[2, 7] = 0, 100
    x[3, 5] = np.nan
    expected = lib.quantize(int(TYPES[name].id), x, metric=of_c)
    blocks = x.reshape(-1, TYPES[name].block_size)
    actual = in_numpy(name)(blocks, metric=of_numpy)
    assert_same_blocks(actual, expected.reshape(len(blocks), -1), f"{name}, rows of {n}, whole {whole}, segment {segment}, seed {SEED}")


@pytest.mark.parametrize("name", ["itq3_t", "q4_k"])
def test_threads_do_not_matter(lib, name):
    """1024 columns: every panel but the last two is worth several threads. A part that is left out or done twice changes most codes."""
    n, qtype = 1024, int(parse_type(name, "TYPE"))
    moments, x = triangles(correlated(n, 3 * n), True), np.random.default_rng(SEED).standard_normal((4, n)).astype(np.float32)
    made = [lib.quantize(qtype, x, imatrix=np.ones(n, np.float32), metric=lib.metric(qtype, n, moments, True, 0.01, n_threads=threads))
            for threads in (1, 2, 3, 100)]
    assert all(np.array_equal(made[0], other) for other in made[1:])


@settings(max_examples=25, deadline=None)
@given(n=st.sampled_from([64, 128, 256, 320, 512]), whole=st.booleans(), segment=st.sampled_from([8, 16, 32]), rotated=st.booleans(),
       seed=st.integers(0, 1 << 20))
def test_the_segments_add_up_to_the_form(n, whole, segment, rotated, seed):
    """Against the damped matrix itself and an explicit rotation.

    Forms and gains are float32, 2^-24 each, and so are the sums over up to n steps; with damping 0.1 the gains' rows stay below
    sqrt(n/0.1), so that a residual is good to n*2^-24*sqrt(n/0.1) of the errors' size, twice that in the square.
    """
    block = 64 if n % 256 else 256
    moments = masked(correlated(n, 2 * n, seed), whole)
    metric = Metric.of_moments(triangles(moments, whole), n, block, rotated, whole, 0.1, segment)
    i = np.arange(block)
    hadamard = np.array([[1 - 2 * (bin(a & b).count("1") & 1) for b in i] for a in i]) / np.sqrt(block)
    turn = (hadamard * SIGNS[:block] if rotated else np.eye(block))[positions(block)]
    e = np.random.default_rng(seed).standard_normal((3, n)).astype(np.float32)
    steps = (e.reshape(3, -1, block) @ turn.T).reshape(3, n).astype(np.float32)
    found = np.zeros(3)
    for first in range(0, n, block):
        start = first // metric.columns * metric.columns
        r = steps[:, first : first + block].copy()
        metric.feed_row(first, steps[:, start:first], r)
        metric.feed_block(first, steps[:, first : first + block], r)
        found += (r.astype(np.float64) * metric.apply_forms(first, r)).sum(axis=1)
    expected = 0.0
    for start in range(0, n, metric.columns):
        own = moments[start : start + metric.columns, start : start + metric.columns]
        mean = np.trace(own) / len(own)
        part = e[:, start : start + metric.columns].astype(np.float64)
        expected = expected + np.einsum("ri,ij,rj->r", part, own / mean + 0.1 * np.eye(len(own)), part)
    np.testing.assert_allclose(found, expected, rtol=2 * n * 2**-24 * np.sqrt(n / 0.1))


@pytest.mark.parametrize("name", WEIGHT_TYPES)
def test_moments_lower_the_error_of_outputs(lib, name):
    """None, the diagonal, blocks, whole matrices: each better than the one before."""
    n, qtype = 512, int(TYPES[name].id)
    moments = correlated(n, 3 * n)
    x = np.random.default_rng(SEED).standard_normal((48, n)).astype(np.float32)

    def error(**how) -> float:
        return cost(moments, x - lib.dequantize(qtype, lib.quantize(qtype, x, **how), n)) / cost(moments, x)

    errors = [error(), error(imatrix=np.diag(moments).astype(np.float32)),
              *(error(metric=metrics(lib, name, moments, whole)[0]) for whole in (False, True))]
    print(name, errors)
    assert errors == sorted(errors, reverse=True) and errors[3] < TYPES[name].moments_gain * errors[1]


def test_one_codebook_for_all_blocks(lib):
    """DITTO3: its levels stay, codes are chosen under the metric, and numpy writes the same. Measured 0.407."""
    n, qtype = 512, int(TYPES["ditto3"].id)
    moments = correlated(n, 3 * n)
    x = np.random.default_rng(SEED).standard_normal((16, n)).astype(np.float32)
    codebook = np.array([-2.1, -1.3, -0.7, -0.25, 0.2, 0.7, 1.3, 2.2], np.float32)
    of_c, of_numpy = metrics(lib, "ditto3", moments, True, 8)
    plain, data = (lib.quantize(qtype, x, ditto3_codebook=codebook, metric=m) for m in (None, of_c))
    blocks = data.reshape(-1, TYPES["ditto3"].block_bytes)
    assert_same_blocks(in_numpy("ditto3")(x.reshape(-1, 256), codebook=codebook, metric=of_numpy), blocks, f"seed {SEED}")
    assert np.array_equal(blocks[:, :10], plain.reshape(blocks.shape)[:, :10])
    errors = [cost(moments, x - lib.dequantize(qtype, d, n)) for d in (plain, data)]
    assert errors[1] < 0.42 * errors[0], errors


@pytest.mark.parametrize("name", ["itq3_s", "ccq2", "ditto3", "ditto5"])
def test_odd_blocks(lib, name):
    """Constants, single weights, huge and tiny ones beside others in a row: the same bytes as numpy, and nothing that is not finite."""
    n, rng = 512, np.random.default_rng(SEED)
    x = rng.standard_normal((12, n)).astype(np.float32)
    x[0], x[1, :256], x[2, 256:], x[3] = 1, -3, 0, 0
    x[3, 300], x[4], x[5, :256], x[6, 3] = 1, 1e-30 * x[4], 1e30 * x[5, :256], 3e38
    x[7, :256], x[8], x[9, 5] = 1e6 * x[7, :256], np.abs(x[8]), -np.inf
    x[10, 256:] = rng.integers(-1, 2, 256)
    of_c, of_numpy = metrics(lib, name, correlated(n, 3 * n), True, 8)
    data = lib.quantize(int(TYPES[name].id), x, metric=of_c)
    blocks = x.reshape(-1, 256)
    assert_same_blocks(in_numpy(name)(blocks, metric=of_numpy), data.reshape(len(blocks), -1), f"{name}, seed {SEED}")
    values = lib.dequantize(int(TYPES[name].id), data, n)
    assert np.isfinite(np.delete(values, 9, axis=0)).all() and not np.isfinite(values[9, :256]).all()


def test_importances_of_itq3_s(lib):
    """A diagonal becomes a form of the rotated block: less weighted error, the same bytes from numpy, and no importance is one.

    Measured: 0.192 of the error without.
    """
    n, qtype, rng = 512, int(TYPES["itq3_s"].id), np.random.default_rng(SEED)
    x, importance = rng.standard_normal((16, n)).astype(np.float32), rng.lognormal(0, 2, n).astype(np.float32)
    importance[256:300] = 0
    plain, data = lib.quantize(qtype, x), lib.quantize(qtype, x, imatrix=importance)
    blocks = data.reshape(-1, TYPES["itq3_s"].block_bytes)
    assert_same_blocks(in_numpy("itq3_s")(x.reshape(-1, 256), importance.reshape(-1, 256)), blocks, f"seed {SEED}")
    errors = [((x - lib.dequantize(qtype, d, n)) ** 2 * importance).sum(dtype=np.float64) for d in (plain, data)]
    assert errors[1] < 0.20 * errors[0], errors
    ternary = [lib.quantize(qtype, x, itq3_levels=3, imatrix=i) for i in (None, importance)]
    assert np.array_equal(*ternary)


def test_segments_of_eight_are_better_than_of_32(lib):
    n, qtype = 512, int(TYPES["itq2_t"].id)
    moments = correlated(n, 3 * n)
    x = np.random.default_rng(SEED).standard_normal((48, n)).astype(np.float32)
    errors = [cost(moments, x - lib.dequantize(qtype, lib.quantize(qtype, x, metric=metrics(lib, "itq2_t", moments, True, s)[0]), n))
              for s in (32, 8)]
    assert errors[1] < errors[0]


def test_scale_does_not_matter(lib):
    """A power of two leaves every bit as it is."""
    x = np.random.default_rng(SEED).standard_normal((4, 256)).astype(np.float32)
    moments, qtype = correlated(256, 600), int(TYPES["itq3_t"].id)
    a, b = (lib.quantize(qtype, x, metric=metrics(lib, "itq3_t", moments * f, False)[0]) for f in (1, 2.0**-40))
    np.testing.assert_array_equal(a, b)


def test_threads_share_one(lib):
    n, qtype = 512, int(TYPES["itq2_t"].id)
    metric = metrics(lib, "itq2_t", correlated(n, 3 * n), True)[0]
    x = np.random.default_rng(SEED).standard_normal((40, n)).astype(np.float32)
    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(lambda i: lib.quantize(qtype, x[i : i + 10], metric=metric), range(0, 40, 10)))
    np.testing.assert_array_equal(np.concatenate(parts), lib.quantize(qtype, x, metric=metric))


def test_inputs_that_are_always_zero(lib):
    """Whole blocks of them, and single ones: damping makes them count a little."""
    n, qtype = 512, int(TYPES["itq3_t"].id)
    moments = correlated(n, 3 * n)
    moments[:256] = moments[:, :256] = 0
    moments[300] = moments[:, 300] = 0
    x = np.random.default_rng(SEED).standard_normal((4, n)).astype(np.float32)
    for whole in (False, True):
        data = lib.quantize(qtype, x, metric=metrics(lib, "itq3_t", moments, whole)[0])
        assert np.isfinite(lib.dequantize(qtype, data, n)).all()


@pytest.mark.parametrize(("what", "error"), [("nan", library.NotPositiveDefinite), ("negative", library.NotPositiveDefinite), ("indefinite", library.NotPositiveDefinite)])
def test_matrices_that_are_none(lib, what, error):
    moments = correlated(256, 600)
    if what == "nan":
        moments[9, 3] = np.nan
    elif what == "negative":
        moments[9, 9] = -1
    else:
        moments[9, 3] = moments[3, 9] = 2 * moments.max()
    for make in (lambda t: lib.metric(int(TYPES["itq3_t"].id), 256, t, False, 0.01), lambda t: Metric.of_moments(t, 256, 256, True, False, 0.01)):
        with pytest.raises(ValueError):
            make(triangles(moments, False))
    with pytest.raises(error):
        lib.metric(int(TYPES["itq3_t"].id), 256, triangles(moments, False), False, 0.01)


def test_arguments_are_checked(lib):
    t, x = triangles(correlated(256, 600), False), np.ones((1, 256), np.float32)
    itq3_t, itq2_t = int(TYPES["itq3_t"].id), int(TYPES["itq2_t"].id)
    for bad in ((itq3_t, 256, t, False, 0.0), (itq3_t, 256, t, False, 0.01, 12), (itq3_t, 256, t, False, 0.01, 32, 0), (itq3_t, 256, t[1:], False, 0.01),
                (0, 256, t, False, 0.01), (itq3_t, 64, t[: 65 * 32], True, 0.01)):
        with pytest.raises(ValueError):
            lib.metric(*bad)
    metric = lib.metric(itq3_t, 256, t, False, 0.01)
    with pytest.raises(ValueError):
        lib.quantize(itq2_t, x, metric=metric)
    with pytest.raises(ValueError):
        lib.quantize(itq3_t, np.ones((1, 512), np.float32), metric=metric)


def test_memory_that_runs_out_is_no_damaged_matrix():
    """Whichever allocation fails: one of the metric itself, or one of the four of each of its matrices."""
    ctypes.CDLL(str(built(BUILD, "libggml-base.so")), mode=ctypes.RTLD_GLOBAL)
    driver = ctypes.CDLL(str(built(BUILD, "libggml-ext-metric.so")))
    moments = triangles(correlated(768, 2000), False)
    of_metric, of_matrices = 5, 3 * 4
    found = [
        driver.metric_driver_status(n, int(TYPES["itq2_t"].id), ctypes.c_int64(768), moments.ctypes.data_as(ctypes.c_void_p))
        for n in range(of_metric + of_matrices + 2)
    ]
    no_memory, ok = 2, 0  # of enum ggml_ext_metric_status
    assert found == [no_memory] * (of_metric + of_matrices) + [ok, ok]
