"""The numpy references of the trellis types: the code, the encoder, and equality with the C encoder byte for byte."""

import ctypes

import numpy as np
import pytest

from ggml_ext import TYPES
from ggml_ext.quants import reference
from ggml_ext.quants._trellis import MAX_UNITS
from helpers.corpora import SEED, corpora
from helpers.native import BUILD, require_built
from helpers.weights import assert_same_blocks, weighted_blocks, weighted_error_ratio

NAMES = [name for name, info in TYPES.items() if info.trellis_values]
EACH = pytest.mark.parametrize("name", NAMES)
CORPORA = {n: corpora(n) for n in (256, 64)}


@EACH
@pytest.mark.parametrize("corpus", CORPORA[64])
def test_equals_c(lib, name, corpus):
    n = TYPES[name].block_size
    x = CORPORA[n][corpus][: 24 * 256 // n]
    assert_same_blocks(reference(name).quantize_blocks(x), lib.quantize(int(TYPES[name].id), x), f"{name}, {corpus}, seed {SEED}")


@EACH
@pytest.mark.parametrize("kind", ["spread", "zeros", "all zero", "huge"])
@pytest.mark.parametrize("passes", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_equals_c_with_importances(lib, name, kind, passes):
    """One row of many blocks, since an imatrix has a value per column."""
    x, importance = weighted_blocks(kind, 24, decades=2, block_size=TYPES[name].block_size)
    x[3] = 0
    expected = lib.quantize(int(TYPES[name].id), x.reshape(1, -1), imatrix=importance.ravel(), trellis_passes=passes)
    actual = reference(name).quantize_blocks(x, importance, passes=passes)
    assert_same_blocks(actual, expected.reshape(24, -1), f"{name} with importance, {kind}, seed {SEED}")


@pytest.mark.parametrize("name", ["itq4_t", "itq3_t", "itq2_t"])
@pytest.mark.parametrize("known_ends", ["nothing", "before", "after", "both"])
def test_search_equals_c(name, known_ends):
    """Up to the largest weights, whose costs pass 65535 unless they are lowered in time."""
    ctypes.CDLL(str(require_built(BUILD, "libggml-base.so")), mode=ctypes.RTLD_GLOBAL)
    dll = ctypes.CDLL(str(require_built(BUILD, "libggml-ext-trellis.so")))
    trellis, rng, (n_rows, n) = reference(name), np.random.default_rng(SEED), (12, 256)
    x = (rng.standard_normal((n_rows, n)) * trellis.rms * np.geomspace(0.1, 10, n_rows)[:, None]).astype(np.float32)
    x[0], x[1, ::2], x[2] = np.float32(200), np.float32(-200), np.float32(-200)  # clamped to 80
    x[3, n // 2 :], x[4, : n // 2] = np.inf, -np.inf
    states, groups = (rng.integers(0, n_states, n_rows).astype(np.int32) for n_states in (4096, trellis.n_groups))
    before, after = (states if known_ends in ("before", "both") else None), (groups if known_ends in ("after", "both") else None)
    actual = np.empty((n_rows, n), np.uint16)
    pointers = [None if a is None else ctypes.c_void_p(a.ctypes.data) for a in (before, after)]
    dll.trellis_driver_search(trellis.k, ctypes.c_void_p(x.ctypes.data), n_rows, n, *pointers, ctypes.c_void_p(actual.ctypes.data))
    np.testing.assert_array_equal(actual, trellis.search(x, before, after))


@pytest.mark.parametrize(("name", "limit"), [("itq4_t", 0.54), ("itq3_t", 0.54), ("itq2_t", 0.43), ("itq4_t64", 0.72), ("itq3_t64", 0.72),
                                             ("itq2_t64", 0.65)])
def test_importance_lowers_the_weighted_error(lib, name, limit):
    assert weighted_error_ratio(lib, name) < limit  # measured 0.516, 0.411, 0.686, 0.621


@EACH
def test_codes_follow_the_formula(name):
    """The sliding window of 12 bits, written out bit by bit, and the codes that C unpacks."""
    trellis, info = reference(name), TYPES[name]
    k, (values0, values1) = trellis.k, info.trellis_values
    for state in range(4096):
        c = [[state >> k * i + bit & 1 for bit in range(k)] for i in range(12 // k)]  # c[i][bit]: the symbol i steps ago
        if k == 4:
            i0, i1 = [c[0][b] ^ c[2][b] for b in range(4)], c[1]
        elif k == 3:
            window, *others = ([c[i + 1][0], c[i + 1][1], c[i][0], c[i][1]] for i in range(3))
            i0 = [x ^ y ^ z for x, y, z in zip(window, *others, strict=True)]
            i1 = [x ^ c[3 - i][2] for i, x in enumerate(window)]
        else:
            i0, i1 = [c[1][0] ^ c[5][0], c[1][1] ^ c[5][1], c[0][0] ^ c[4][0], c[0][1] ^ c[4][1]], [*c[3], *c[2]]
        q = values0[sum(x << i for i, x in enumerate(i0))] + values1[sum(x << i for i, x in enumerate(i1))]
        assert trellis.codes[state] == q
    assert trellis.codes.max() <= info.unpack_max


@EACH
def test_unpack_equals_c_for_every_state(lib, name):
    """C against numpy, which builds a block's states from its bytes: all 4096 states, all start bytes."""
    trellis, rng = reference(name), np.random.default_rng(SEED)
    n = TYPES[name].block_size
    n_blocks = 4096 * 256 // n
    blocks = rng.integers(0, 256, (n_blocks, TYPES[name].block_bytes), dtype=np.uint8)
    blocks[:, 0] = 60
    blocks[:, 1] = np.arange(n_blocks) & 255
    states = trellis.states(blocks)
    covered = np.zeros((4096, 8), bool)  # each state at each position modulo 8
    covered[states, np.broadcast_to(np.arange(n) % 8, states.shape)] = True
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
    path = rng.integers(0, 1 << k, TYPES[name].block_size)
    state, states = int(rng.integers(256)), []
    for c in path:
        state = (state << k | int(c)) & 4095
        states.append(state)
    blocks = trellis.pack(np.array([states]), np.array([60], np.uint8))
    # the search recovers the values of a path exactly
    values = trellis.values[np.array([states])]
    actual = trellis.search(values)
    np.testing.assert_array_equal(trellis.values[actual], values)
    np.testing.assert_array_equal(trellis.states(blocks), [states])


@pytest.mark.parametrize("name", ["itq3_t", "itq2_t"])
@pytest.mark.parametrize("follows", [False, True])
def test_search_does_not_overflow(name, follows):
    """16-bit costs, normalized every other step, against 64-bit sums that are not."""
    trellis, rng = reference(name), np.random.default_rng(SEED)
    k, groups, n, steps = trellis.k, trellis.n_groups, 12, 256
    x = np.where(rng.random((n, steps)) < 0.5, -1, 1) * rng.choice([20, 63.5, 64, 80, 1e9, np.inf], (n, steps))
    x[:4] = [[80], [-80], [0], [1e30]]
    x[4:8] = np.where(np.arange(steps) // [[1], [2], [3], [5]] % 2, -99, 99)
    x = x.astype(np.float32)
    before = rng.integers(0, 4096, n) if follows else None
    states = trellis.search(x, before)

    unit = trellis.info.trellis_unit
    fixed = np.floor(np.clip(x, -MAX_UNITS, MAX_UNITS).astype(np.float64) * unit + 0.5).astype(np.int64)
    values = (trellis.values * unit).astype(np.int64)
    lowest_cost = np.full((n, groups), 1 << 40)
    if follows:
        lowest_cost[np.arange(n), before % groups] = 0
    else:
        lowest_cost[:, :256] = 0
    for t in range(steps):  # state s is reached from group s >> k and leads to group s % groups
        cost = (fixed[:, t, None] - values) ** 2 >> 16
        lowest_cost = (lowest_cost[:, np.arange(4096) >> k] + cost).reshape(n, 1 << k, groups).min(axis=1)
    assert (lowest_cost.min(axis=1) > 65535).any()
    actual = ((fixed - values[states]) ** 2 >> 16).sum(axis=1)
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
