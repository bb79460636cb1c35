"""Corrected target weights: the closed form against least squares, and the sums that it uses."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from ggml_ext._encode import correction as _correction
from ggml_ext._encode.correction import LEAST_RIDGE, choose_ridge
from ggml_ext._formats.hessians import SEQUENTIAL_SHRINKAGE
from ggml_ext._native import token_sums
from ggml_ext._native.streams import ChunkArrays, ProductGroup, WeightProduct
from ggml_ext._sequential.sums import Sums, sole_narrow_product

COLUMNS, ROWS, TOKENS = 24, 10, 400
NAMES = ("blk.0.attn_output.weight", "blk.0.other.weight")
BF16 = 2**-7 + 2**-16  # relative error of a product of two factors rounded to BF16, each by at most 2^-8


@pytest.fixture(params=["float32", *(["bf16"] if token_sums.bf16_library() else [])])
def rounding(request, monkeypatch):
    """Return the relative error of the products: those of numpy, and those in BF16 on a CPU that uses them."""
    if request.param == "bf16":
        return BF16
    monkeypatch.setattr(token_sums, "bf16_library", lambda: None)
    return 0


def correction(w, h, d, r, ridge, n_threads=2):
    """Return W' - W."""
    corrected = w.copy()
    with ThreadPoolExecutor(n_threads) as pool:
        _correction.Corrector(h, ridge, pool.map).correct(corrected, d, r)
    return corrected - w


def make_streams(seed: int = 0):
    """Return x, x^, r, r^ and weights, float32."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((TOKENS, COLUMNS)) @ rng.standard_normal((COLUMNS, COLUMNS))
    r = rng.standard_normal((TOKENS, ROWS))
    x_made, r_made = x + 0.3 * rng.standard_normal(x.shape) @ np.diag(x.std(0)), r + 0.5 * x[:, :ROWS] + 0.1 * rng.standard_normal(r.shape)
    return [a.astype(np.float32) for a in (x, x_made, r, r_made, rng.standard_normal((ROWS, COLUMNS)))]


@pytest.mark.parametrize("with_residual", [False, True])
def test_correction_minimizes_the_output_error(with_residual):
    x, x_made, r, r_made, w = make_streams()
    h, d, rest = x_made.T @ x_made, (x - x_made).T @ x_made, (r - r_made).T @ x_made
    corrected = w + correction(w, h, d, rest if with_residual else None, ridge=0)
    expected = x.astype(np.float64) @ w.T + (r - r_made if with_residual else 0)
    best = np.linalg.lstsq(x_made.astype(np.float64), expected, rcond=None)[0].T
    # The sums are float32, each with a relative error of at most TOKENS roundings; the solution's is that times the condition number.
    bound = TOKENS * 2**-24 * np.linalg.cond(h.astype(np.float64)) * np.abs(best).max()
    assert bound < 0.5 * np.abs(best - w).max() and np.abs(corrected - best).max() <= bound


def test_ridge_shrinks_the_correction():
    x, x_made, r, r_made, w = make_streams()
    h, d, rest = x_made.T @ x_made, (x - x_made).T @ x_made, (r - r_made).T @ x_made
    assert not correction(w, h, np.zeros_like(d), np.zeros_like(rest), 0.1).any()
    sizes = [np.abs(correction(w, h, d, rest, ridge=ridge)).sum() for ridge in (0, 0.03, 1, 1e6)]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] < 1e-4 * sizes[0]
    assert not correction(w, np.zeros_like(h), np.zeros_like(d), None, 0.1).any()
    both = correction(w, h, d, None, 0.1) + correction(w, h, np.zeros_like(d), rest, 0.1)
    np.testing.assert_allclose(both, correction(w, h, d, rest, 0.1), rtol=0, atol=1e-5 * np.abs(both).max())  # it is linear; float32


def test_ridge_follows_columns_per_token():
    """With few tokens, whose sums are blended with others, it is that of one token per column."""
    assert choose_ridge(256, 25600) == pytest.approx(2 * choose_ridge(256, 51200)) == pytest.approx(choose_ridge(512, 51200))
    assert choose_ridge(64, 0) == choose_ridge(64, 64) and choose_ridge(64, 1e9) == LEAST_RIDGE


def test_singular_matrix_raises():
    with pytest.raises(np.linalg.LinAlgError):
        h = np.diag([1.0, 0.0])
        correction(np.ones((1, 2), np.float32), h, np.ones((2, 2)), None, ridge=0)


def make_arrays(seed: int) -> ChunkArrays:
    x, x_made, r, r_made, _ = make_streams(seed)
    return ChunkArrays((x, x_made), None, {NAMES[0]: (r, r_made)})


def test_correction_of_several_blocks(monkeypatch):
    """Blocks of the factorization, the last smaller, against one; on more threads the result is the same."""
    x, x_made, r, r_made, w = make_streams()
    h, d = x_made.T @ x_made, (x - x_made).T @ x_made
    results = []
    for panel, n_threads in ((256, 1), (7, 1), (7, 3)):
        monkeypatch.setattr(_correction, "PANEL", panel)
        results.append(correction(w, h, d, None, 0.1, n_threads))
    exact = np.linalg.solve(h + 0.1 * np.trace(h) / COLUMNS * np.eye(COLUMNS), (w @ d).T.astype(np.float64)).T
    for result in results:  # backward error of a Cholesky factorization, times the condition number, at most 1 + COLUMNS/0.1
        np.testing.assert_allclose(result, exact, rtol=0, atol=COLUMNS * 2**-24 * (1 + COLUMNS / 0.1) * np.abs(exact).max())
    assert results[1].tobytes() == results[2].tobytes()


def test_sums_over_chunks_match_numpy(rounding):
    group = ProductGroup(COLUMNS, TOKENS, 0, 0, (WeightProduct(NAMES[0], ROWS, 1.0), WeightProduct(NAMES[1], ROWS, 0.0)))
    assert group.n_bytes(TOKENS) == sum(a.nbytes for pair in (make_arrays(0).x, make_arrays(0).residuals[NAMES[0]]) for a in pair)
    arrays = []
    for n_threads in (1, 3):
        with ThreadPoolExecutor(n_threads) as pool:
            sums = Sums(group, pool)
            for seed in (0, 1):
                sums.add(make_arrays(seed))
            sums.flush()
            arrays.append(sums)
    chunks = [make_streams(seed) for seed in (0, 1)]
    x, x_made, r, r_made = (np.concatenate([c[i] for c in chunks]).astype(np.float64) for i in range(4))
    expected = x_made.T @ x_made, (x - x_made).T @ x_made, (r - r_made).T @ x_made
    for actual, exact in zip((sums.h[0], sums.d[0], sums.r[NAMES[0]]), expected, strict=True):
        # Float32: TOKENS products and two additions, each rounded; and the factors are.
        assert np.abs(actual - exact).max() <= ((TOKENS + 2) * 2**-24 + rounding) * np.abs(x_made).max() * (np.abs(x).max() + np.abs(r).max()) * 2 * TOKENS
        assert np.corrcoef(actual.ravel(), exact.ravel())[0, 1] > 0.999999
    assert sums.counts.tolist() == [2 * TOKENS] and list(sums.r) == [NAMES[0]]
    assert sums.hessian("", "full").shrinkage() == SEQUENTIAL_SHRINKAGE * COLUMNS / (2 * TOKENS)
    for field in ("h", "d", "counts"):
        assert getattr(arrays[0], field).tobytes() == getattr(arrays[1], field).tobytes()


def test_narrow_product_needs_no_d(rounding):
    """W (x - x^) + r - r^ is summed in place of D and R if the matrix has fewer rows than columns."""
    scale, w = 0.5, make_streams()[4]
    groups = [ProductGroup(COLUMNS, TOKENS, 0, 0, (WeightProduct(NAMES[0], rows, scale),)) for rows in (ROWS, COLUMNS)]
    assert [sole_narrow_product(g) for g in groups] == [groups[0].products[0], None]
    with ThreadPoolExecutor(2) as pool:
        both = [Sums(groups[0], pool, weights=weights) for weights in (w, None)]
        for sums in both:
            sums.add(make_arrays(1))
            sums.flush()
    direct, r = (s.residual_sums(groups[0].products[0]) for s in both)
    exact = w @ both[1].d[0] + r
    assert both[0].d is None and both[0].h.tobytes() == both[1].h.tobytes()
    # float32 sums of TOKENS products and of COLUMNS; errors of different tokens are independent, hence the norms
    assert np.linalg.norm(direct - exact) <= (COLUMNS * TOKENS * 2**-24 + 2 * rounding) * np.linalg.norm(exact)


def test_full_buffer_is_computed(rounding, monkeypatch):
    """The sums are the same if they are read and written for each product, and if each call has another view of them."""
    arrays, results = [make_streams(seed)[1] for seed in range(3)], []
    for n_bytes in (token_sums.BUFFER, 1):
        monkeypatch.setattr(token_sums, "BUFFER", n_bytes)
        totals = np.zeros((1, COLUMNS, COLUMNS), np.float32)
        with ThreadPoolExecutor(2) as pool:
            sums = token_sums.TokenSums(pool)
            for x in arrays:
                packed = token_sums.pack(x)
                sums.add(totals[0], packed, packed)
            assert len(sums._products) <= 1
            sums.flush()
        results.append(totals.tobytes())
    assert results[0] == results[1] and totals.any()


@pytest.mark.parametrize(("rows", "columns", "n_tokens"), [(1, 1, 1), (15, 49, 3), (300, 33, 64), (17, 580, 1100)])
def test_sums_of_any_shape(rows, columns, n_tokens, rounding):
    """Rows and columns beside multiples of the kernel's tiles; nothing beside them is written."""
    rng = np.random.default_rng(rows)
    left, right = (rng.standard_normal((n_tokens, n + 5)).astype(np.float32)[:, 2 : n + 2] for n in (rows, columns))
    guarded = np.zeros((rows + 1, columns), np.float32)
    with ThreadPoolExecutor(2) as pool:
        sums = token_sums.TokenSums(pool)
        sums.add(guarded[:-1], token_sums.pack(left), token_sums.pack(right))
        sums.flush()
        transposed = np.zeros_like(guarded[:-1])
        sums.add(transposed, token_sums.pack(left.T, is_transposed=True), token_sums.pack(np.ascontiguousarray(right.T), is_transposed=True))
        sums.flush()
    assert transposed.tobytes() == guarded[:-1].tobytes()
    bound = (rounding + (n_tokens + 1) * 2**-24) * (np.abs(left).T.astype(np.float64) @ np.abs(right))
    assert (np.abs(guarded[:-1] - left.T.astype(np.float64) @ right) <= bound).all() and not guarded[-1].any()


@pytest.mark.parametrize(("own_inputs", "used"), [(False, 2), (True, 2), (True, 1)])
def test_sums_of_experts_match_numpy(own_inputs, used, monkeypatch):
    """own_inputs: each expert of a token has its own input, as ffn_down_exps. A token may have a single expert."""
    rng = np.random.default_rng(2)
    n_tokens, n_experts = 50, 5
    ids = [np.array([rng.permutation(n_experts - 1)[:used] for _ in range(n_tokens)], np.int32) for _ in range(2)]  # the last gets none
    n_inputs = n_tokens * (used if own_inputs else 1)
    x = [rng.standard_normal((n_inputs, 4)).astype(np.float32) for _ in range(2)]
    monkeypatch.setattr(token_sums, "bf16_library", lambda: None)
    with ThreadPoolExecutor(2) as pool:
        sums = Sums(ProductGroup(4, n_inputs, used, n_experts, (WeightProduct("blk.0.ffn_down_exps.weight", 3, 0.0),)), pool)
        sums.add(ChunkArrays(tuple(x), tuple(ids), {}))
        sums.flush()
    h, d, counts = np.zeros((n_experts, 4, 4)), np.zeros((n_experts, 4, 4)), np.zeros(n_experts)
    for token in range(n_tokens):
        for slot, expert in enumerate(ids[1][token]):
            x_made = x[1][token * used + slot if own_inputs else token]
            matches = np.flatnonzero(ids[0][token] == expert)
            row = token if not own_inputs else token * used + matches[0] if matches.size else None
            h[expert] += np.outer(x_made, x_made)
            d[expert] += 0 if row is None else np.outer(x[0][row] - x_made, x_made)
            counts[expert] += 1
    np.testing.assert_allclose(sums.h, h, atol=1e-4)  # 100 products of values below 5, rounded to float32
    np.testing.assert_allclose(sums.d, d, atol=1e-4)
    assert sums.counts.tolist() == counts.tolist() and counts[-1] == 0
    mean = [a.sum(axis=0) / counts.sum() for a in (h, d)]
    for actual, exact in zip(sums.expert_sums(n_experts - 1), mean, strict=True):  # no tokens: the mean of all
        np.testing.assert_allclose(actual, exact, atol=1e-5)
    for actual, own, rest in zip(sums.expert_sums(0), (h[0], d[0]), mean, strict=True):  # 4 columns: the mean counts as 4 tokens
        np.testing.assert_allclose(actual, (own + 4 * rest) / (counts[0] + 4), atol=1e-5)


def test_experts_with_common_sums(rounding):
    """The sums over all tokens, whichever experts they go to, correct each expert as a plain matrix with these inputs."""
    x, x_made, _, _, w = make_streams()
    ids = np.zeros((TOKENS, 2), np.int32) + np.arange(2, dtype=np.int32)
    group = ProductGroup(COLUMNS, TOKENS, 2, 4, (WeightProduct("blk.0.ffn_up_exps.weight", ROWS, 0.0),))
    with ThreadPoolExecutor(2) as pool:
        experts, plain = Sums(group, pool, are_common=True), Sums(replace(group, used=0, experts=0), pool)
        for sums, routes in ((experts, (ids, ids)), (plain, None)):
            sums.add(ChunkArrays((x, x_made), routes, {}))
            sums.flush()
        assert (experts.h.tobytes(), experts.d.tobytes(), experts.counts.tolist()) == (plain.h.tobytes(), plain.d.tobytes(), [TOKENS])
        h, d = plain.expert_sums(0)
        corrector = _correction.Corrector(h, choose_ridge(COLUMNS, TOKENS), pool.map)
        corrector.correct(corrected := w.copy(), d, None)
        both = w + w @ corrector.transform(d)
    change = np.abs(corrected - w).max()
    # two orders of the same products in float32, with the condition number of H + ridge
    assert 0 < np.abs(both - corrected).max() <= COLUMNS * 2**-24 * (1 + COLUMNS / LEAST_RIDGE) * change
