"""nvcc's PTX (tests/ptx) of all but products: dequantization, get_rows, activations as two columns (--act-prec f16)."""

from __future__ import annotations

from ctypes import c_int, c_int64, c_size_t, c_void_p

import numpy as np
import pytest

from helpers.blocks import dequantize_blocks, rotate_for
from helpers.cuda_host import DST, assert_same_bits, to_dst
from helpers.ptx_products import HAS_MINIMUM, ProductRunner, Weights, random_inputs, random_weights, row_length, type_architecture_params
from ptx.compiled import ARCHITECTURES

THREADS_BF16, FLOAT_32, HALF_32 = range(3)  # enum split_groups

every_type = pytest.mark.parametrize("name,architecture", type_architecture_params())
every_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)


def assert_no_problems(runner: ProductRunner) -> None:
    assert not runner.device.problems()


@every_type
@pytest.mark.parametrize("dst", DST)
def test_dequantization_is_bit_equal(lib, name, architecture, dst):
    w, runner = random_weights(lib, name, 5, row_length(name)), ProductRunner(name, architecture, "others")
    type_id, dtype = DST[dst]
    n = 5 * w.n_columns
    y = runner.device.allocate(n * np.dtype(dtype).itemsize)
    runner.device.call("ptx_dequantize", c_int(w.type_id), c_void_p(runner.weights(w).data), c_void_p(y), c_int(type_id), c_int64(n))
    assert_same_bits(runner.device.memory.read(y, dtype, (5, w.n_columns)), to_dst(dequantize_blocks(lib, name, w.blocks[0]), dst), name)
    assert_no_problems(runner)


@every_type
@pytest.mark.parametrize("dst", ["f32", "f16"])
def test_get_rows_is_bit_equal(lib, name, architecture, dst):
    w, runner = random_weights(lib, name, 5, row_length(name)), ProductRunner(name, architecture, "others")
    type_id, dtype = DST[dst]
    ids = np.array([4, 0, 4, 2], np.int32)
    x, y = runner.weights(w), runner.device.allocate(len(ids) * w.n_columns * np.dtype(dtype).itemsize)
    runner.device.call("ptx_get_rows", c_int(w.type_id), c_void_p(x.data), c_void_p(runner.device.buffer(ids)), c_void_p(y), c_int(type_id),
                      c_int64(w.n_columns), c_size_t(x.nb[1]), c_int64(len(ids)))
    assert_same_bits(runner.device.memory.read(y, dtype, (len(ids), w.n_columns)), to_dst(dequantize_blocks(lib, name, w.blocks[0])[ids], dst), name)
    assert_no_problems(runner)


def split(w: Weights, architecture: str, groups: int, x: np.ndarray) -> np.ndarray:
    """Split each row of x into what 8 bits hold and 128 times the rest: float32 (2 * rows, columns)."""
    runner = ProductRunner(w.name, architecture, "others")
    y = runner.device.allocate(2 * x.nbytes)
    runner.device.call("ptx_split", c_int(w.type_id), c_int(groups), c_void_p(runner.device.buffer(x)), c_void_p(y), c_int64(x.shape[1]), c_int64(len(x)))
    assert_no_problems(runner)
    return runner.device.memory.read(y, np.float32, (2 * len(x), x.shape[1]))


def add_pairs(name: str, architecture: str, y: np.ndarray) -> np.ndarray:
    """Add pairs of result rows."""
    runner = ProductRunner(name, architecture, "others")
    out = runner.device.allocate(y.nbytes // 2)
    runner.device.call("ptx_add_residuals", c_void_p(runner.device.buffer(y)), c_void_p(out), c_int64(y.shape[1]), c_int64(len(y) // 2))
    assert_no_problems(runner)
    return runner.device.memory.read(out, np.float32, (len(y) // 2, y.shape[1]))


@every_type
@pytest.mark.parametrize("tiles", [False, True], ids=["vectors", "tiles"])
def test_two_columns_are_more_precise(lib, name, architecture, tiles):
    """Both columns together are as good as 16-bit activations: fifty times as precise as 8 bits."""
    w, x = random_weights(lib, name, 128, row_length(name)), random_inputs(2, row_length(name))  # four columns, which build.py compiles
    groups = (HALF_32 if name in HAS_MINIMUM else FLOAT_32) if tiles else THREADS_BF16
    pairs = split(w, architecture, groups, x)

    def multiply(rows: np.ndarray) -> np.ndarray:
        runner = ProductRunner(name, architecture)
        return runner.multiply_tiles(w, rows, 8) if tiles else runner.multiply_vectors(w, rows)

    plain, doubled = multiply(x), add_pairs(name, architecture, multiply(pairs))
    expected = rotate_for(lib, name, x).astype(np.float64) @ w.product[0].T
    n_better = 50 if not (tiles and name in HAS_MINIMUM) else 5  # minima and sums are rounded to half there
    assert np.abs(doubled - expected).mean() < np.abs(plain - expected).mean() / n_better


@every_architecture
def test_expert_ids_are_doubled(architecture):
    ids = np.arange(12, dtype=np.int32).reshape(3, 4)[::-1].copy()
    runner = ProductRunner("itq3_t", architecture, "others")
    out = runner.device.allocate(2 * ids.nbytes)
    runner.device.call("ptx_double_ids", c_void_p(runner.device.buffer(ids)), c_void_p(out), c_int64(4), c_int64(3))
    assert np.array_equal(runner.device.memory.read(out, np.int32, (3, 2, 4)), np.repeat(ids[:, None], 2, axis=1))
    assert_no_problems(runner)
