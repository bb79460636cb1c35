"""Products of every type, from the PTX that nvcc makes for each architecture, launched by upstream's own host code (tests/ptx).

Every launch is asserted to be without problems: addresses, alignment, races, lanes, griddepcontrol, bytes that nobody wrote.
"""

from __future__ import annotations

import numpy as np
import pytest

from helpers.blocks import TYPE_NAMES
from helpers.ptx_products import BY_DESIGN, Bench, Weights, columns_of, everywhere, exact, exact_in_tiles, inputs, units, weights
from ptx.compiled import MAIN, RAGGED, STOCK, TENSOR_CORES, WHOLE, all_tiles_on

SWIGLU = 2  # ggml_glu_op
PROGRAMMATIC = ("90", "120")  # launches may begin before the one ahead has ended
# Rows are multiples of what a block of threads takes, four: upstream's MMVQ reads those behind the last one (docs/maintaining/upstream-bugs.md).
nightly = pytest.mark.nightly  # what only tests/ptx/build.py --nightly compiles
every_type = pytest.mark.parametrize("name,architecture", [*everywhere(), *everywhere(STOCK, (MAIN,))])


def check(bench: Bench, *allowed: tuple[str, str]) -> None:
    problems = {key: text for key, text in bench.device.problems().items() if key not in allowed}
    assert not problems, problems


def close(got: np.ndarray, want: np.ndarray, bound: np.ndarray) -> None:
    worst = np.max(np.abs(got - want) / bound)
    assert worst <= 1, worst


@every_type
@pytest.mark.parametrize("n,long", [(1, False), (1, True), (2, False), (8, False), *(pytest.param(n, False, marks=nightly) for n in (3, 4, 5, 6, 7))],
                         ids=["short-row", "1", "2", "8", *"34567"])
def test_vectors(lib, name, architecture, n, long):
    w = weights(lib, name, 6 if long else 36, columns_of(name, long))
    bench, x = Bench(name, architecture), inputs(n, w.n_columns)
    got = bench.vectors(w, x)
    y = bench.activations(w, n)
    y.check(lib, name, x)
    close(got, *exact(w, 0, y))
    check(bench)
    assert [done.programmatic for done in bench.device.launches] == [architecture in PROGRAMMATIC] * 2


def swiglu(gate: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return gate / (1 + np.exp(-gate))


@every_type
def test_fused(lib, name, architecture):
    """Two products in one kernel, with biases: y = (x W + b) silu(x G + c)."""
    w, rng = weights(lib, name, 36, columns_of(name)), np.random.default_rng(1)
    gate = Weights(name, w.blocks[:, ::-1], w.product[:, ::-1], w.magnitude[:, ::-1])
    bias, gate_bias = rng.standard_normal((2, 36)).astype(np.float32)
    bench, x = Bench(name, architecture), inputs(1, w.n_columns)
    got = bench.vectors(w, x, fusion={"glu": SWIGLU, "gate": gate, "bias": bias, "gate_bias": gate_bias})
    y = bench.activations(w, 1)
    (up, up_bound), (through, through_bound) = exact(w, 0, y), exact(gate, 0, y)
    up, through = up + bias, through + gate_bias
    # silu's slope is at most 1.1; its exponential, sum and division are approximate in the last two bits
    bound = up_bound * np.abs(swiglu(through)) + np.abs(up) * (1.1 * through_bound + 2.0**-20 * np.abs(through)) + 2.0**-22 * np.abs(up * swiglu(through))
    close(got, up * swiglu(through), bound + 1e-6)
    check(bench)


@every_type
@pytest.mark.parametrize("n_tokens", [1, 3])
def test_experts(lib, name, architecture, n_tokens):
    w, n_used = weights(lib, name, 20, columns_of(name), 3), 2
    ids = np.array([[2, 0], [1, 2], [0, 1]], np.int32)[:n_tokens]
    x = inputs(n_tokens * n_used, w.n_columns)
    bench = Bench(name, architecture)
    got = bench.vectors(w, x.reshape(n_tokens, n_used, -1), ids)
    y = bench.activations(w, n_tokens * n_used)
    y.check(lib, name, x)
    for token, slot in np.ndindex(ids.shape):
        want, bound = exact(w, ids[token, slot], y.rows([n_used * token + slot]))
        close(got[token, slot], want[0], bound[0])
    check(bench)


@every_type
@pytest.mark.parametrize("n_rows", [128, 100], ids=["whole", "ragged"])
def test_tiles(lib, name, architecture, n_rows):
    tiles(lib, name, architecture, n_rows, 5, 8)


@pytest.mark.parametrize("name,architecture", [*everywhere(architectures=TENSOR_CORES), *everywhere(STOCK, (MAIN,))])
def test_large_tiles(lib, name, architecture):
    tiles(lib, name, architecture, 256, 125, 128)


def tiles(lib, name, architecture, n_rows, n, tile, unit=None):
    w = weights(lib, name, n_rows, columns_of(name))
    bench, x = Bench(name, architecture, unit), inputs(n, w.n_columns)
    got = bench.tiles(w, x, tile)
    y = bench.activations(w, n)
    if name in TYPE_NAMES:
        y.check(lib, name, x)
    close(got, *exact_in_tiles(w, 0, y))
    check(bench, *BY_DESIGN)
    return bench


TILES = [pytest.param(name, a, whole, tile, marks=[] if a in all_tiles_on(name, nightly=False) else nightly,
                      id=f"{name}-sm_{a}-{'whole' if whole else 'ragged'}-{tile}")
         for name in TYPE_NAMES for a in all_tiles_on(name, nightly=True) for whole, tiles_of in ((True, WHOLE), (False, RAGGED)) for tile in tiles_of]


@pytest.mark.parametrize("name,architecture,whole,tile", TILES)
def test_every_tile(lib, name, architecture, whole, tile):
    if architecture not in units().get(f"{name}-tiles", {"architectures": ()})["architectures"]:
        pytest.skip(f"the tiles of {name} are not compiled for sm_{architecture}: make nightly does it")
    bench = tiles(lib, name, architecture, 128 if whole else 100, tile - 3, tile, f"{name}-tiles")
    assert bench.launched("fixup")  # one tile and three multiprocessors


@every_type
@pytest.mark.parametrize("broadcast", [False, True], ids=["own", "shared"])
def test_experts_in_tiles(lib, name, architecture, broadcast):
    """Tokens sorted by expert; where all experts of a token share its activations, they are quantised once and scattered."""
    w, n_used, n_tokens = weights(lib, name, 128, columns_of(name), 3), 2, 7
    ids = np.stack([np.random.default_rng(i).permutation(3)[:n_used] for i in range(n_tokens)]).astype(np.int32)
    x = inputs(n_tokens * (1 if broadcast else n_used), w.n_columns).reshape(n_tokens, -1, w.n_columns)
    bench = Bench(name, architecture)
    got = bench.tiles(w, x, 8, ids)
    # columns lie in the order of experts
    order = [divmod(int(i), n_used) for i in np.argsort(ids.reshape(-1), kind="stable")]
    y = bench.activations(w, n_tokens * n_used)
    if name in TYPE_NAMES:
        y.check(lib, name, np.stack([x[token, 0 if broadcast else slot] for token, slot in order]))
    for column, (token, slot) in enumerate(order):
        want, bound = exact_in_tiles(w, ids[token, slot], y.rows([column]))
        close(got[token, slot], want[0], bound[0])
    check(bench, *BY_DESIGN)


@pytest.mark.parametrize("architecture", ["75", "90"])
@pytest.mark.parametrize("name", ["itq3_s", "itq2_t64"])
@pytest.mark.parametrize("n_rows,n", [(128, 5), (100, 5)])
def test_noise(lib, name, architecture, n_rows, n):
    """What was in memory that nobody wrote does not reach the results of tiles, nor of vectors."""
    w = weights(lib, name, n_rows, columns_of(name))
    results = [(bench.tiles(w, inputs(n, w.n_columns), 8), bench.vectors(w, inputs(2, w.n_columns)))
               for bench in (Bench(name, architecture, seed=seed) for seed in (1, 2))]
    assert all(np.array_equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("name", ["itq3_t", "itq3_s", "ccq2"])
def test_approximate_instructions(lib, name):
    """Divisions and reciprocals that are off in the last bit, as a GPU may have them, keep products within their bounds."""
    w = weights(lib, name, 128, columns_of(name))
    x = inputs(5, w.n_columns)
    vectors, of_tiles = (Bench(name, "90", approximation=True) for _ in range(2))
    for bench, got, bound in ((vectors, vectors.vectors(w, x[:2]), exact), (of_tiles, of_tiles.tiles(w, x, 8), exact_in_tiles)):
        y = bench.activations(w, len(got))
        y.check(lib, name, x[:len(got)])
        close(got, *bound(w, 0, y))
