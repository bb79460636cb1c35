"""The numpy references of the trellis types: the code, and the search against that in C."""

import ctypes

import numpy as np
import pytest

from ggml_ext import TYPES
from ggml_ext.quants import reference
from ggml_ext.quants._trellis import MAX_UNITS
from helpers.corpora import SEED, corpora
from helpers.native import BUILD, require_built
from helpers.weights import assert_same_blocks, weighted_blocks

NAMES = [name for name, info in TYPES.items() if info.trellis_values]
EACH = pytest.mark.parametrize("name", NAMES)
CORPORA = {n: corpora(n) for n in (256, 64, 32)}


@pytest.mark.slow
@EACH
@pytest.mark.parametrize("kind", ["spread", "zeros", "all zero", "huge"])
def test_three_passes_equal_c(lib, name, kind):
    x, importance = weighted_blocks(kind, 24, decades=2, block_size=TYPES[name].block_size)
    x[3] = 0
    expected = lib.quantize(int(TYPES[name].id), x.reshape(1, -1), imatrix=importance.ravel(), trellis_passes=3)
    actual = reference(name).quantize_blocks(x, importance, passes=3)
    assert_same_blocks(actual, expected.reshape(24, -1), f"{name} with importance, {kind}, seed {SEED}")


def large_weights(n_rows, n):
    """Return weights in units of d with the largest costs, float32 (n_rows, n)."""
    rng = np.random.default_rng(SEED)
    x = np.where(rng.random((n_rows, n)) < 0.5, -1, 1) * rng.choice([20, 63.5, 64, 80, 1e9, np.inf], (n_rows, n))
    x[:4] = [[80], [-80], [0], [1e30]]
    x[4:8] = np.where(np.arange(n) // [[1], [2], [3], [5]] % 2, -99, 99)
    return x.astype(np.float32)


def search_in_c(name, x, before, after):
    """Return what trellis_search() of encode/trellis-search.h does where Trellis.search() has these arguments."""
    ctypes.CDLL(str(require_built(BUILD, "libggml-base.so")), mode=ctypes.RTLD_GLOBAL)
    dll = ctypes.CDLL(str(require_built(BUILD, "libggml-ext-trellis.so")))
    states = np.empty((len(x), x.shape[1] // reference(name).v), np.uint16)
    pointers = [None if a is None else ctypes.c_void_p(a.ctypes.data) for a in (before, after, states)]
    dll.trellis_driver_search(name.encode(), ctypes.c_void_p(x.ctypes.data), *x.shape, *pointers)
    return states


@pytest.mark.parametrize("name", ["itq4_t", "itq3_t", "itq2_t", "itq1h_t", "itq1_t"])
@pytest.mark.parametrize("known_ends", ["nothing", "before", "after", "both"])
def test_search_equals_c(name, known_ends):
    """Up to the largest weights, whose costs pass 65535 unless they are lowered in time."""
    trellis, rng, (n_rows, n) = reference(name), np.random.default_rng(SEED), (24, 256)
    x = (rng.standard_normal((n_rows, n)) * trellis.rms * np.geomspace(0.1, 10, n_rows)[:, None]).astype(np.float32)
    x[0], x[1, ::2], x[2] = np.float32(200), np.float32(-200), np.float32(-200)  # clamped to 80
    x[3, n // 2 :], x[4, : n // 2] = np.inf, -np.inf
    x[12:] = large_weights(12, n)
    states, groups = (rng.integers(0, n_states, n_rows).astype(np.int32) for n_states in (4096, trellis.n_groups))
    before, after = (states if known_ends in ("before", "both") else None), (groups if known_ends in ("after", "both") else None)
    np.testing.assert_array_equal(search_in_c(name, x, before, after), trellis.search(x, before, after))


@EACH
def test_search_of_few_weights_equals_c(name):
    """Eight weights: the end of a block that is encoded in segments of eight. With ITQ1_T four steps do not replace all symbols of a state."""
    trellis, rng = reference(name), np.random.default_rng(SEED)
    x = (rng.standard_normal((200, 8)) * trellis.rms).astype(np.float32)
    for before in (None, rng.integers(0, 4096, len(x)).astype(np.int32)):
        np.testing.assert_array_equal(search_in_c(name, x, before, None), trellis.search(x, before))


def xor(*bits):
    return [sum(column) % 2 for column in zip(*bits, strict=True)]


@EACH
def test_codes_follow_the_formula(name):
    """The sliding window of 12 bits, written out bit by bit, and the codes that C unpacks."""
    trellis, info = reference(name), TYPES[name]
    k, tables = trellis.k, info.trellis_values
    for state in range(4096):
        c = [[state >> k * i + bit & 1 for bit in range(k)] for i in range(12 // k)]  # c[i][bit]: the symbol i steps ago
        pairs = [[*old[:2], *new[:2]] for old, new in zip(c[1:], c)]
        if k == 4:
            i0, i1 = xor(c[0], c[2]), c[1]
        elif k == 3:
            i0, i1 = xor(*pairs), xor(pairs[0], [c[3 - i][2] for i in range(4)])
        else:
            i0, i1 = xor(pairs[0], pairs[4]), pairs[2] if trellis.v == 1 else xor(pairs[0], pairs[2], pairs[4])
        for v, bits in enumerate([i0] if trellis.v == 1 else [i0, xor(pairs[0], pairs[2])]):
            q = tables[2 * v][sum(x << i for i, x in enumerate(bits))] + tables[2 * v + 1][sum(x << i for i, x in enumerate(i1))]
            assert trellis.codes[v, state] == q
    assert trellis.codes.shape == (trellis.v, 4096) and trellis.codes.max() <= info.unpack_max


@EACH
def test_unpack_equals_c_for_every_state(lib, name):
    """C against numpy, which builds a block's states from its bytes: all 4096 states, all start bytes."""
    trellis, rng = reference(name), np.random.default_rng(SEED)
    n_steps = trellis.n_steps
    n_blocks = 4096 * 256 // n_steps
    blocks = rng.integers(0, 256, (n_blocks, TYPES[name].block_bytes), dtype=np.uint8)
    blocks[:, 0] = 60
    blocks[:, 1] = np.arange(n_blocks) & 255
    states = trellis.states(blocks)
    covered = np.zeros((4096, 8), bool)  # each state at each step modulo 8
    covered[states, np.broadcast_to(np.arange(n_steps) % 8, states.shape)] = True
    assert covered.all()
    q, _, _ = trellis.unpack(blocks)
    for block, expected in zip(blocks, q, strict=True):
        np.testing.assert_array_equal(lib.unpack_block(TYPES[name].id, block)[0], expected)


@EACH
def test_pack_is_the_inverse_of_states(name):
    trellis, rng = reference(name), np.random.default_rng(SEED)
    blocks = rng.integers(0, 256, (64, TYPES[name].block_bytes), dtype=np.uint8)
    np.testing.assert_array_equal(trellis.pack(trellis.states(blocks), blocks[:, 0]), blocks)


@EACH
def test_search_finds_an_exact_path(name):
    """A path's own values are recovered without error."""
    trellis = reference(name)
    k, rng = trellis.k, np.random.default_rng(SEED)
    path = rng.integers(0, 1 << k, trellis.n_steps)
    state, states = int(rng.integers(256)), []
    for c in path:
        state = (state << k | int(c)) & 4095
        states.append(state)
    blocks = trellis.pack(np.array([states]), np.array([60], np.uint8))
    # the search recovers the values of a path exactly
    values = trellis.decode(np.array([states]))
    actual = trellis.search(values)
    np.testing.assert_array_equal(trellis.decode(actual), values)
    np.testing.assert_array_equal(trellis.states(blocks), [states])


@pytest.mark.parametrize("name", ["itq3_t", "itq2_t", "itq1h_t", "itq1_t"])
@pytest.mark.parametrize("follows", [False, True])
def test_search_finds_the_cheapest_path(name, follows):
    """Against 64-bit sums, for weights up to the largest ones."""
    trellis, rng = reference(name), np.random.default_rng(SEED)
    k, v, groups, n, n_weights = trellis.k, trellis.v, trellis.n_groups, 12, 256
    x = large_weights(n, n_weights)
    before = rng.integers(0, 4096, n) if follows else None
    states = trellis.search(x, before)

    unit = trellis.info.trellis_unit
    fixed = np.floor(np.clip(x, -MAX_UNITS, MAX_UNITS).astype(np.float64) * unit + 0.5).astype(np.int64)
    fixed, values = fixed.reshape(n, n_weights // v, v), (trellis.values * unit).astype(np.int64)
    lowest_cost = np.full((n, groups), 1 << 40)
    if follows:
        lowest_cost[np.arange(n), before % groups] = 0
    else:
        lowest_cost[:, :256] = 0
    for t in range(n_weights // v):  # state s is reached from group s >> k and leads to group s % groups
        cost = ((fixed[:, t, :, None] - values) ** 2 >> 16).sum(axis=1)
        lowest_cost = (lowest_cost[:, np.arange(4096) >> k] + cost).reshape(n, 1 << k, groups).min(axis=1)
    assert (lowest_cost.min(axis=1) > 65535).any()
    actual = ((fixed - values.T[states]) ** 2 >> 16).sum(axis=(1, 2))
    np.testing.assert_array_equal(actual, lowest_cost.min(axis=1))
    np.testing.assert_array_equal(states[:, 1:] >> k, states[:, :-1] % groups)
    assert ((states[:, 0] >> k == before % groups) if follows else (states[:, 0] >> k < 256)).all()


@pytest.mark.slow
@EACH
def test_equals_c_beyond_the_search_range(lib, name):
    """Rotated weights far beyond the code's values, where the search clamps them."""
    n, rng = TYPES[name].block_size, np.random.default_rng(SEED)
    rotated = rng.standard_normal((32, n)).astype(np.float32)
    rotated[np.arange(32), rng.integers(0, n, 32)] = np.geomspace(3, 3000, 32) * np.where(np.arange(32) % 2, -1, 1)
    x, importance = lib.rotate_back(rotated), rng.random(32 * n).astype(np.float32)
    type_id, blocks = int(TYPES[name].id), reference(name).quantize_blocks(x)
    assert_same_blocks(blocks, lib.quantize(type_id, x), f"{name}, seed {SEED}")
    assert_same_blocks(reference(name).quantize_blocks(x, importance.reshape(32, n)),
                       lib.quantize(type_id, x.reshape(1, -1), imatrix=importance).reshape(32, -1), f"{name} with importance, seed {SEED}")


@EACH
def test_more_passes_are_never_worse(lib, name):
    """For bell-shaped blocks; others may reach better scales with fewer passes."""
    n = TYPES[name].block_size
    x = np.random.default_rng(SEED).standard_normal((64, n)).astype(np.float32)
    errors = []
    for passes in (1, 2, 3, 6):
        y = lib.dequantize(int(TYPES[name].id), lib.quantize(int(TYPES[name].id), x, trellis_passes=passes), n)
        errors.append(((y - x).astype(np.float64) ** 2).sum(axis=1))
    print(name, [float(e.sum() / (x.astype(np.float64) ** 2).sum()) for e in errors])
    for a, b in zip(errors, errors[1:]):
        bell = b <= reference(name).gaussian_nmse_limit * (x.astype(np.float64) ** 2).sum(axis=1)
        assert (bell | (b <= a * (1 + 1e-5))).all() and bell.mean() > 0.9  # the encoder compares float32 sums of rotated errors
