"""Hessians in the encoders: the factorization against the quadratic form, C against numpy byte for byte, the gain, bad input."""

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
from helpers.hessians import SEED, correlated_hessian, keep_blocks, output_error, pack_triangles, shrink
from helpers.native import BUILD, require_built
from helpers.weights import assert_same_blocks

TRELLIS = [name for name, info in TYPES.items() if info.trellis_values]


def make_metrics(lib, name: str, hessian: np.ndarray, full: bool, segment: int = 32, shrinkage: float = 0.1) -> tuple:
    """Return the metrics of C and numpy."""
    info, packed = TYPES[name], pack_triangles(hessian, full)
    return (lib.metric(int(info.id), len(hessian), packed, full, shrinkage, segment),
            Metric.from_hessian(packed, len(hessian), info.block_size, info.rotated, full, shrinkage, segment))


def numpy_encoder(name: str):
    return reference(name).quantize_blocks


CASES = [  # type, columns, full Hessian, segment
    ("itq3_t", 256, False, 32), ("itq2_t", 512, False, 16), ("itq2_t", 768, True, 32), ("itq3_t", 512, True, 8),
    ("itq3_t64", 320, False, 16), ("itq3_t64", 320, True, 8), ("itq2_t64", 192, True, 32), ("itq2_t64", 64, False, 32),
    ("itq2_t32", 160, False, 32), ("itq3_t32", 160, True, 8), ("itq4_t32", 288, True, 16),
    ("itq1h_t", 256, False, 32), ("itq1_t", 512, False, 16), ("itq1_t", 512, True, 8), ("itq1h_t64", 320, False, 16), ("itq1_t64", 192, True, 32),
    ("itq3_s", 512, True, 8), ("itq3_s", 512, False, 32), ("ditto3", 512, True, 8), ("ditto3", 512, False, 16),
    ("ccq2", 512, True, 8), ("ccq2", 512, False, 32), ("ditto5", 512, True, 8), ("ditto5", 512, False, 16),
]


@pytest.mark.parametrize(("name", "n", "full", "segment"), CASES)
def test_equals_c(lib, name, n, full, segment):
    """18 rows: more than the encoder takes at once."""
    c_metric, numpy_metric = make_metrics(lib, name, correlated_hessian(n, 3 * n), full, segment)
    x = np.random.default_rng(SEED).standard_normal((18, n)).astype(np.float32)
    x[1], x[2, 7] = 0, 100
    x[3, 5] = np.nan
    expected = lib.quantize(int(TYPES[name].id), x, metric=c_metric)
    blocks = x.reshape(-1, TYPES[name].block_size)
    actual = numpy_encoder(name)(blocks, metric=numpy_metric)
    assert_same_blocks(actual, expected.reshape(len(blocks), -1), f"{name}, rows of {n}, full {full}, segment {segment}, seed {SEED}")


@pytest.mark.parametrize("name", ["itq3_t", "q4_k"])
def test_factorization_does_not_depend_on_threads(lib, name):
    """With 1024 columns every panel but the last two uses several threads. A part left out or done twice changes most codes."""
    n, qtype = 1024, int(parse_type(name, "TYPE"))
    hessian, x = pack_triangles(correlated_hessian(n, 3 * n), True), np.random.default_rng(SEED).standard_normal((4, n)).astype(np.float32)
    results = [lib.quantize(qtype, x, imatrix=np.ones(n, np.float32), metric=lib.metric(qtype, n, hessian, True, 0.01, n_threads=threads))
            for threads in (1, 2, 3, 100)]
    assert all(np.array_equal(results[0], other) for other in results[1:])


@settings(max_examples=25, deadline=None)
@given(n=st.sampled_from([64, 128, 160, 256, 288, 320, 512]), full=st.booleans(), segment=st.sampled_from([8, 16, 32]), rotated=st.booleans(),
       seed=st.integers(0, 1 << 20))
def test_segments_add_up_to_the_quadratic_form(n, full, segment, rotated, seed):
    """Against the shrunk Hessian itself and an explicit rotation.

    D, L and the sums over up to n steps are float32, 2^-24 each. With a shrinkage of 0.1 the rows of L stay below sqrt(n/0.1)
    where columns have equal energies, so a residual is accurate to n*2^-24*sqrt(n/0.1) of the errors' magnitude, and its square to twice that.
    """
    block = next(block for block in (256, 64, 32) if n % block == 0)
    hessian = keep_blocks(correlated_hessian(n, 2 * n, seed), full)
    metric = Metric.from_hessian(pack_triangles(hessian, full), n, block, rotated, full, 0.1, segment)
    i = np.arange(block)
    hadamard = np.array([[1 - 2 * (bin(a & b).count("1") & 1) for b in i] for a in i]) / np.sqrt(block)
    rotation = (hadamard * SIGNS[:block] if rotated else np.eye(block))[positions(block)]
    e = np.random.default_rng(seed).standard_normal((3, n)).astype(np.float32)
    steps = (e.reshape(3, -1, block) @ rotation.T).reshape(3, n).astype(np.float32)
    actual = np.zeros(3)
    for first in range(0, n, block):
        start = first // metric.columns * metric.columns
        r = steps[:, first : first + block].copy()
        metric.feed_row(first, steps[:, start:first], r)
        metric.feed_block(first, steps[:, first : first + block], r)
        actual += (r.astype(np.float64) * metric.apply_D(first, r)).sum(axis=1)
    expected = 0.0
    for start in range(0, n, metric.columns):
        part_hessian = hessian[start : start + metric.columns, start : start + metric.columns]
        part = e[:, start : start + metric.columns].astype(np.float64)
        expected = expected + np.einsum("ri,ij,rj->r", part, shrink(part_hessian, 0.1) / np.diag(part_hessian).mean(), part)
    np.testing.assert_allclose(actual, expected, rtol=2 * n * 2**-24 * np.sqrt(n / 0.1))


@pytest.mark.parametrize("name", WEIGHT_TYPES)
def test_hessians_lower_the_output_error(lib, name):
    """None, diagonal, block-diagonal and full Hessian: each improves on the one before.

    With correlations, types below two bits choose scales for models, which raise this error (docs/results/encoders.md).
    """
    n, qtype = 512, int(TYPES[name].id)
    hessian = correlated_hessian(n, 3 * n)
    x = np.random.default_rng(SEED).standard_normal((48, n)).astype(np.float32)

    def error(**options) -> float:
        return output_error(hessian, x - lib.dequantize(qtype, lib.quantize(qtype, x, **options), n)) / output_error(hessian, x)

    errors = [error(), error(imatrix=np.diag(hessian).astype(np.float32)),
              *(error(metric=make_metrics(lib, name, hessian, full)[0]) for full in (False, True))]
    print(name, errors)
    assert TYPES[name].bpw < 2 or errors == sorted(errors, reverse=True)
    assert errors[3] < TYPES[name].hessian_gain * errors[1] and errors[3] < errors[0]


def test_given_codebook_is_kept(lib):
    """DITTO3: the levels stay, codes are selected under the metric, and numpy writes the same. Measured ratio: 0.407."""
    n, qtype = 512, int(TYPES["ditto3"].id)
    hessian = correlated_hessian(n, 3 * n)
    x = np.random.default_rng(SEED).standard_normal((16, n)).astype(np.float32)
    codebook = np.array([-2.1, -1.3, -0.7, -0.25, 0.2, 0.7, 1.3, 2.2], np.float32)
    c_metric, numpy_metric = make_metrics(lib, "ditto3", hessian, True, 8)
    plain, data = (lib.quantize(qtype, x, ditto3_codebook=codebook, metric=m) for m in (None, c_metric))
    blocks = data.reshape(-1, TYPES["ditto3"].block_bytes)
    assert_same_blocks(numpy_encoder("ditto3")(x.reshape(-1, 256), codebook=codebook, metric=numpy_metric), blocks, f"seed {SEED}")
    assert np.array_equal(blocks[:, :10], plain.reshape(blocks.shape)[:, :10])
    errors = [output_error(hessian, x - lib.dequantize(qtype, d, n)) for d in (plain, data)]
    assert errors[1] < 0.42 * errors[0], errors


@pytest.mark.parametrize("name", ["itq3_s", "ccq2", "ditto3", "ditto5"])
def test_extreme_blocks_equal_numpy(lib, name):
    """Constants, single weights, huge and tiny values: the bytes equal numpy's, and finite rows stay finite."""
    n, rng = 512, np.random.default_rng(SEED)
    x = rng.standard_normal((12, n)).astype(np.float32)
    x[0], x[1, :256], x[2, 256:], x[3] = 1, -3, 0, 0
    x[3, 300], x[4], x[5, :256], x[6, 3] = 1, 1e-30 * x[4], 1e30 * x[5, :256], 3e38
    x[7, :256], x[8], x[9, 5] = 1e6 * x[7, :256], np.abs(x[8]), -np.inf
    x[10, 256:] = rng.integers(-1, 2, 256)
    c_metric, numpy_metric = make_metrics(lib, name, correlated_hessian(n, 3 * n), True, 8)
    data = lib.quantize(int(TYPES[name].id), x, metric=c_metric)
    blocks = x.reshape(-1, 256)
    assert_same_blocks(numpy_encoder(name)(blocks, metric=numpy_metric), data.reshape(len(blocks), -1), f"{name}, seed {SEED}")
    values = lib.dequantize(int(TYPES[name].id), data, n)
    assert np.isfinite(np.delete(values, 9, axis=0)).all() and not np.isfinite(values[9, :256]).all()


def test_itq3_s_uses_importances(lib):
    """A diagonal becomes a quadratic form of the rotated block: a smaller weighted error, and the same bytes from numpy.

    Measured: 0.192 of the error without importances. Ternary codes ignore them.
    """
    n, qtype, rng = 512, int(TYPES["itq3_s"].id), np.random.default_rng(SEED)
    x, importance = rng.standard_normal((16, n)).astype(np.float32), rng.lognormal(0, 2, n).astype(np.float32)
    importance[256:300] = 0
    plain, data = lib.quantize(qtype, x), lib.quantize(qtype, x, imatrix=importance)
    blocks = data.reshape(-1, TYPES["itq3_s"].block_bytes)
    assert_same_blocks(numpy_encoder("itq3_s")(x.reshape(-1, 256), importance.reshape(-1, 256)), blocks, f"seed {SEED}")
    errors = [((x - lib.dequantize(qtype, d, n)) ** 2 * importance).sum(dtype=np.float64) for d in (plain, data)]
    assert errors[1] < 0.20 * errors[0], errors
    ternary = [lib.quantize(qtype, x, itq3_levels=3, imatrix=i) for i in (None, importance)]
    assert np.array_equal(*ternary)


def test_segments_of_8_beat_segments_of_32(lib):
    n, qtype = 512, int(TYPES["itq2_t"].id)
    hessian = correlated_hessian(n, 3 * n)
    x = np.random.default_rng(SEED).standard_normal((48, n)).astype(np.float32)
    errors = [output_error(hessian, x - lib.dequantize(qtype, lib.quantize(qtype, x, metric=make_metrics(lib, "itq2_t", hessian, True, s)[0]), n))
              for s in (32, 8)]
    assert errors[1] < errors[0]


def test_scale_of_the_hessian_is_irrelevant(lib):
    """Scaling by a power of two changes no bit."""
    x = np.random.default_rng(SEED).standard_normal((4, 256)).astype(np.float32)
    hessian, qtype = correlated_hessian(256, 600), int(TYPES["itq3_t"].id)
    a, b = (lib.quantize(qtype, x, metric=make_metrics(lib, "itq3_t", hessian * f, False)[0]) for f in (1, 2.0**-40))
    np.testing.assert_array_equal(a, b)


def test_threads_share_a_metric(lib):
    n, qtype = 512, int(TYPES["itq2_t"].id)
    metric = make_metrics(lib, "itq2_t", correlated_hessian(n, 3 * n), True)[0]
    x = np.random.default_rng(SEED).standard_normal((40, n)).astype(np.float32)
    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(lambda i: lib.quantize(qtype, x[i : i + 10], metric=metric), range(0, 40, 10)))
    np.testing.assert_array_equal(np.concatenate(parts), lib.quantize(qtype, x, metric=metric))


def test_dead_inputs_stay_finite(lib):
    """Blocks and single columns of zeros: the floor of the diagonal gives them a small weight."""
    n, qtype = 512, int(TYPES["itq3_t"].id)
    hessian = correlated_hessian(n, 3 * n)
    hessian[:256] = hessian[:, :256] = 0
    hessian[300] = hessian[:, 300] = 0
    x = np.random.default_rng(SEED).standard_normal((4, n)).astype(np.float32)
    for full in (False, True):
        data = lib.quantize(qtype, x, metric=make_metrics(lib, "itq3_t", hessian, full)[0])
        assert np.isfinite(lib.dequantize(qtype, data, n)).all()


@pytest.mark.parametrize("defect", ["nan", "negative", "indefinite"])
def test_hessians_that_are_not_positive_are_refused(lib, defect):
    hessian = correlated_hessian(256, 600)
    if defect == "nan":
        hessian[9, 3] = np.nan
    elif defect == "negative":
        hessian[9, 9] = -1
    else:
        hessian[9, 3] = hessian[3, 9] = 2 * hessian.max()
    for create in (lambda packed: lib.metric(int(TYPES["itq3_t"].id), 256, packed, False, 0.01), lambda packed: Metric.from_hessian(packed, 256, 256, True, False, 0.01)):
        with pytest.raises(ValueError):
            create(pack_triangles(hessian, False))
    with pytest.raises(library.NotPositiveDefinite):
        lib.metric(int(TYPES["itq3_t"].id), 256, pack_triangles(hessian, False), False, 0.01)


def test_arguments_are_checked(lib):
    packed, x = pack_triangles(correlated_hessian(256, 600), False), np.ones((1, 256), np.float32)
    itq3_t, itq2_t = int(TYPES["itq3_t"].id), int(TYPES["itq2_t"].id)
    for arguments in ((itq3_t, 256, packed, False, -0.1), (itq3_t, 256, packed, False, 0.01, 12), (itq3_t, 256, packed, False, 0.01, 32, 0), (itq3_t, 256, packed[1:], False, 0.01),
                (0, 256, packed, False, 0.01), (itq3_t, 64, packed[: 65 * 32], True, 0.01)):
        with pytest.raises(ValueError):
            lib.metric(*arguments)
    metric = lib.metric(itq3_t, 256, packed, False, 0.01)
    with pytest.raises(ValueError):
        lib.quantize(itq2_t, x, metric=metric)
    with pytest.raises(ValueError):
        lib.quantize(itq3_t, np.ones((1, 512), np.float32), metric=metric)


def test_out_of_memory_is_reported_as_such():
    """Whichever allocation fails: one of the metric or one of the four of each of its matrices."""
    ctypes.CDLL(str(require_built(BUILD, "libggml-base.so")), mode=ctypes.RTLD_GLOBAL)
    driver = ctypes.CDLL(str(require_built(BUILD, "libggml-ext-metric.so")))
    hessian = pack_triangles(correlated_hessian(768, 2000), False)
    n_metric, n_matrices = 5, 3 * 4
    actual = [
        driver.metric_driver_status(n, int(TYPES["itq2_t"].id), ctypes.c_int64(768), hessian.ctypes.data_as(ctypes.c_void_p))
        for n in range(n_metric + n_matrices + 2)
    ]
    no_memory, ok = 2, 0  # enum ggml_ext_metric_status
    assert actual == [no_memory] * (n_metric + n_matrices) + [ok, ok]
