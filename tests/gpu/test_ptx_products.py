"""Products of every type, from nvcc's PTX for each architecture, launched by upstream's host code (tests/ptx).

Every launch must have no problems: addresses, alignment, races, lanes, griddepcontrol, uninitialized memory.
"""

from __future__ import annotations

import numpy as np
import pytest

from helpers.blocks import TYPE_NAMES
from helpers.ptx_products import (
    ALLOWED_PROBLEMS,
    ProductRunner,
    Weights,
    expected_product,
    expected_tiled_product,
    random_inputs,
    random_weights,
    read_units,
    row_length,
    type_architecture_params,
)
from helpers.type_kinds import TYPE_KINDS
from ptx.compiled import FULL, MAIN, RAGGED, STOCK, TENSOR_CORES, all_tiles_on

SWIGLU = 2  # ggml_glu_op
PROGRAMMATIC = ("90", "120")  # architectures with programmatic dependent launch
# The number of rows is a multiple of four, a thread block's: upstream's MMVQ reads past the last row (docs/maintaining/upstream-bugs.md).
nightly = pytest.mark.nightly  # compiled only by tests/ptx/build.py --nightly
every_type = pytest.mark.parametrize("name,architecture", [*type_architecture_params(), *type_architecture_params(STOCK, (MAIN,))])


def assert_no_problems(runner: ProductRunner, *allowed: tuple[str, str]) -> None:
    problems = {key: text for key, text in runner.device.problems().items() if key not in allowed}
    assert not problems, problems


def assert_within(actual: np.ndarray, expected: np.ndarray, bound: np.ndarray) -> None:
    worst = np.max(np.abs(actual - expected) / bound)
    assert worst <= 1, worst


@every_type
@pytest.mark.parametrize("n,k", [(1, 512), (1, 4096), (2, 1024), (8, 1024), *(pytest.param(n, 1024, marks=nightly) for n in (3, 4, 5, 6, 7))],
                         ids=["short-row", "1", "2", "8", *"34567"])
def test_vectors_match_the_reference(lib, name, architecture, n, k):
    runner = check_vectors(lib, name, architecture, n, 36 if k == 512 else 8, k)
    assert [launch.grid.programmatic for launch in runner.device.launches] == [architecture in PROGRAMMATIC] * 2


def check_vectors(lib, name, architecture, n, n_rows, k) -> ProductRunner:
    w = random_weights(lib, name, n_rows, row_length(name, k))
    runner, x = ProductRunner(name, architecture), random_inputs(n, w.n_columns)
    actual = runner.multiply_vectors(w, x)
    y = runner.activations(w, n)
    y.check(lib, name, x)
    assert_within(actual, *expected_product(w, 0, y))
    assert_no_problems(runner)
    return runner


@pytest.mark.parametrize("n", [1, 2, 8])
@pytest.mark.parametrize("k,n_warps", [(0, 1), (1024, 2), (2048, 3), (3072, 4), (4096, 3), (6144, 4), (9216, 2)])
@pytest.mark.parametrize("name", TYPE_KINDS)
def test_few_warps_of_vectors_are_idle(lib, name, k, n_warps, n):
    """A warp multiplies 1024 weights per iteration. Upstream has at most two warps for more than four columns, and another kernel from 4096 on."""
    launch = check_vectors(lib, name, MAIN, n, 4, k).find_launch("mul_mat_vec_q")
    assert launch.grid.threads == (32, min(n_warps, 2) if n > 4 else n_warps, 1)


def silu(gate: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return gate / (1 + np.exp(-gate))


@every_type
@pytest.mark.parametrize("k", [2048, 4096])
def test_fused_products_match_the_reference(lib, name, architecture, k):
    """Two products in one kernel, with biases: y = (x W + b) silu(x G + c). Rows from 4096 weights on have another kernel."""
    n_rows = 12
    w, rng = random_weights(lib, name, n_rows, row_length(name, k)), np.random.default_rng(1)
    gate = Weights(name, w.blocks[:, ::-1], w.product[:, ::-1], w.magnitude[:, ::-1])
    bias, gate_bias = rng.standard_normal((2, n_rows)).astype(np.float32)
    runner, x = ProductRunner(name, architecture), random_inputs(1, w.n_columns)
    actual = runner.multiply_vectors(w, x, fusion={"glu": SWIGLU, "gate": gate, "bias": bias, "gate_bias": gate_bias})
    y = runner.activations(w, 1)
    (up, up_bound), (gate_value, gate_bound) = expected_product(w, 0, y), expected_product(gate, 0, y)
    up, gate_value = up + bias, gate_value + gate_bias
    # silu's slope is at most 1.1; exponential, sum and division are approximate in the last two bits
    bound = up_bound * np.abs(silu(gate_value)) + np.abs(up) * (1.1 * gate_bound + 2.0**-20 * np.abs(gate_value)) + 2.0**-22 * np.abs(up * silu(gate_value))
    assert_within(actual, up * silu(gate_value), bound + 1e-6)
    assert_no_problems(runner)


@every_type
@pytest.mark.parametrize("n_tokens", [1, 3])
def test_experts_match_the_reference(lib, name, architecture, n_tokens):
    w, n_used = random_weights(lib, name, 20, row_length(name), 3), 2
    ids = np.array([[2, 0], [1, 2], [0, 1]], np.int32)[:n_tokens]
    x = random_inputs(n_tokens * n_used, w.n_columns)
    runner = ProductRunner(name, architecture)
    actual = runner.multiply_vectors(w, x.reshape(n_tokens, n_used, -1), ids)
    y = runner.activations(w, n_tokens * n_used)
    y.check(lib, name, x)
    for token, slot in np.ndindex(ids.shape):
        expected, bound = expected_product(w, ids[token, slot], y.rows([n_used * token + slot]))
        assert_within(actual[token, slot], expected[0], bound[0])
    assert_no_problems(runner)


@every_type
@pytest.mark.parametrize("n_rows", [128, 100], ids=["full", "ragged"])
def test_tiles_match_the_reference(lib, name, architecture, n_rows):
    check_tiles(lib, name, architecture, n_rows, 5, 8)


@pytest.mark.parametrize("name,architecture", [*type_architecture_params(architectures=TENSOR_CORES), *type_architecture_params(STOCK, (MAIN,))])
def test_large_tiles_match_the_reference(lib, name, architecture):
    check_tiles(lib, name, architecture, 256, 125, 128)


def check_tiles(lib, name, architecture, n_rows, n, tile, unit=None):
    w = random_weights(lib, name, n_rows, row_length(name))
    runner, x = ProductRunner(name, architecture, unit), random_inputs(n, w.n_columns)
    actual = runner.multiply_tiles(w, x, tile)
    y = runner.activations(w, n)
    if name in TYPE_NAMES:
        y.check(lib, name, x)
    assert_within(actual, *expected_tiled_product(w, 0, y))
    assert_no_problems(runner, *ALLOWED_PROBLEMS)
    return runner


TILES = [pytest.param(name, a, full, tile, marks=[] if a in all_tiles_on(name, nightly=False) else nightly,
                      id=f"{name}-sm_{a}-{'full' if full else 'ragged'}-{tile}")
         for name in TYPE_NAMES for a in all_tiles_on(name, nightly=True) for full, columns in ((True, FULL), (False, RAGGED)) for tile in columns]


@pytest.mark.parametrize("name,architecture,full,tile", TILES)
def test_every_tile_matches_the_reference(lib, name, architecture, full, tile):
    if architecture not in read_units().get(f"{name}-tiles", {"architectures": ()})["architectures"]:
        pytest.skip(f"the tiles of {name} are not compiled for sm_{architecture}: make nightly does it")
    runner = check_tiles(lib, name, architecture, 128 if full else 100, tile - 3, tile, f"{name}-tiles")
    assert runner.find_launch("fixup")  # one tile on three multiprocessors


@every_type
@pytest.mark.parametrize("broadcast", [False, True], ids=["own", "shared"])
def test_experts_in_tiles_match_the_reference(lib, name, architecture, broadcast):
    """Tokens sorted by expert; activations that all experts of a token share are quantized once and scattered."""
    w, n_used, n_tokens = random_weights(lib, name, 128, row_length(name), 3), 2, 7
    ids = np.stack([np.random.default_rng(i).permutation(3)[:n_used] for i in range(n_tokens)]).astype(np.int32)
    x = random_inputs(n_tokens * (1 if broadcast else n_used), w.n_columns).reshape(n_tokens, -1, w.n_columns)
    runner = ProductRunner(name, architecture)
    actual = runner.multiply_tiles(w, x, 8, ids)
    # columns are ordered by expert
    order = [divmod(int(i), n_used) for i in np.argsort(ids.reshape(-1), kind="stable")]
    y = runner.activations(w, n_tokens * n_used)
    if name in TYPE_NAMES:
        y.check(lib, name, np.stack([x[token, 0 if broadcast else slot] for token, slot in order]))
    for column, (token, slot) in enumerate(order):
        expected, bound = expected_tiled_product(w, ids[token, slot], y.rows([column]))
        assert_within(actual[token, slot], expected[0], bound[0])
    assert_no_problems(runner, *ALLOWED_PROBLEMS)


@pytest.mark.parametrize("architecture", ["75", "90"])
@pytest.mark.parametrize("name", ["itq3_s", "itq2_t64"])
@pytest.mark.parametrize("n_rows,n", [(128, 5), (100, 5)])
def test_uninitialized_memory_does_not_reach_the_results(lib, name, architecture, n_rows, n):
    """Noise in memory that nobody wrote does not change the results of tiles or vectors."""
    w = random_weights(lib, name, n_rows, row_length(name))
    results = [(runner.multiply_tiles(w, random_inputs(n, w.n_columns), 8), runner.multiply_vectors(w, random_inputs(2, w.n_columns)))
               for runner in (ProductRunner(name, architecture, seed=seed) for seed in (1, 2))]
    assert all(np.array_equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("name", ["itq3_t", "itq3_s", "ccq2"])
def test_approximate_instructions_stay_within_the_bounds(lib, name):
    """Division and reciprocal may err in the last bit on a GPU."""
    w = random_weights(lib, name, 128, row_length(name))
    x = random_inputs(5, w.n_columns)
    vectors_runner, tiles_runner = (ProductRunner(name, "90", approximation=True) for _ in range(2))
    for runner, actual, bound in ((vectors_runner, vectors_runner.multiply_vectors(w, x[:2]), expected_product), (tiles_runner, tiles_runner.multiply_tiles(w, x, 8), expected_tiled_product)):
        y = runner.activations(w, len(actual))
        y.check(lib, name, x[:len(actual)])
        assert_within(actual, *bound(w, 0, y))
