"""What is not a product, from nvcc's PTX (tests/ptx): weights as floats, rows by index, activations as two columns (--act-prec f16)."""

from __future__ import annotations

from ctypes import c_int, c_int64, c_size_t, c_void_p

import numpy as np
import pytest

from helpers.cuda_host import DST, as_dst, assert_same, decoded, rotated
from helpers.ptx_products import HAS_MINIMUM, Bench, Weights, columns_of, everywhere, inputs, weights
from ptx.compiled import ARCHITECTURES

THREADS_BF16, FLOAT_32, HALF_32 = range(3)  # enum split_groups

every_type = pytest.mark.parametrize("name,architecture", everywhere())
every_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)


def check(bench: Bench) -> None:
    assert not bench.device.problems()


@every_type
@pytest.mark.parametrize("dst", DST)
def test_weights_as_floats(lib, name, architecture, dst):
    w, bench = weights(lib, name, 5, columns_of(name)), Bench(name, architecture, "others")
    type_id, dtype = DST[dst]
    n = 5 * w.n_columns
    y = bench.device.room(n * np.dtype(dtype).itemsize)
    bench.device.call("ptx_dequantize", c_int(w.type_id), c_void_p(bench.weights(w).data), c_void_p(y), c_int(type_id), c_int64(n))
    assert_same(bench.device.memory.read(y, dtype, (5, w.n_columns)), as_dst(decoded(lib, name, w.blocks[0]), dst), name)
    check(bench)


@every_type
@pytest.mark.parametrize("dst", ["f32", "f16"])
def test_rows_by_index(lib, name, architecture, dst):
    w, bench = weights(lib, name, 5, columns_of(name)), Bench(name, architecture, "others")
    type_id, dtype = DST[dst]
    ids = np.array([4, 0, 4, 2], np.int32)
    x, y = bench.weights(w), bench.device.room(len(ids) * w.n_columns * np.dtype(dtype).itemsize)
    bench.device.call("ptx_get_rows", c_int(w.type_id), c_void_p(x.data), c_void_p(bench.device.buffer(ids)), c_void_p(y), c_int(type_id),
                      c_int64(w.n_columns), c_size_t(x.nb[1]), c_int64(len(ids)))
    assert_same(bench.device.memory.read(y, dtype, (len(ids), w.n_columns)), as_dst(decoded(lib, name, w.blocks[0])[ids], dst), name)
    check(bench)


def split(w: Weights, architecture: str, groups: int, x: np.ndarray) -> np.ndarray:
    """float32 (2 rows a row of x, columns): what 8 bits hold, and 128 times the rest."""
    bench = Bench(w.name, architecture, "others")
    y = bench.device.room(2 * x.nbytes)
    bench.device.call("ptx_split", c_int(w.type_id), c_int(groups), c_void_p(bench.device.buffer(x)), c_void_p(y), c_int64(x.shape[1]), c_int64(len(x)))
    check(bench)
    return bench.device.memory.read(y, np.float32, (2 * len(x), x.shape[1]))


def summed(name: str, architecture: str, y: np.ndarray) -> np.ndarray:
    """Pairs of rows of results as one."""
    bench = Bench(name, architecture, "others")
    out = bench.device.room(y.nbytes // 2)
    bench.device.call("ptx_add_residuals", c_void_p(bench.device.buffer(y)), c_void_p(out), c_int64(y.shape[1]), c_int64(len(y) // 2))
    check(bench)
    return bench.device.memory.read(out, np.float32, (len(y) // 2, y.shape[1]))


@every_type
@pytest.mark.parametrize("tiles", [False, True], ids=["vectors", "tiles"])
def test_doubled_activations(lib, name, architecture, tiles):
    """A product of both columns is that of activations with 16 bits: fifty times as precise as one with 8."""
    w, x = weights(lib, name, 128, columns_of(name)), inputs(2, columns_of(name))  # four columns together: build.py has them
    groups = (HALF_32 if name in HAS_MINIMUM else FLOAT_32) if tiles else THREADS_BF16
    pairs = split(w, architecture, groups, x)

    def product(rows: np.ndarray) -> np.ndarray:
        bench = Bench(name, architecture)
        return bench.tiles(w, rows, 8) if tiles else bench.vectors(w, rows)

    plain, doubled = product(x), summed(name, architecture, product(pairs))
    want = rotated(lib, name, x).astype(np.float64) @ w.product[0].T
    n_better = 50 if not (tiles and name in HAS_MINIMUM) else 5  # there minima and sums of activations are rounded to halves too
    assert np.abs(doubled - want).mean() < np.abs(plain - want).mean() / n_better


@every_architecture
def test_experts_of_both_columns(architecture):
    ids = np.arange(12, dtype=np.int32).reshape(3, 4)[::-1].copy()
    bench = Bench("itq3_t", architecture, "others")
    out = bench.device.room(2 * ids.nbytes)
    bench.device.call("ptx_double_ids", c_void_p(bench.device.buffer(ids)), c_void_p(out), c_int64(4), c_int64(3))
    assert np.array_equal(bench.device.memory.read(out, np.int32, (3, 2, 4)), np.repeat(ids[:, None], 2, axis=1))
    check(bench)
