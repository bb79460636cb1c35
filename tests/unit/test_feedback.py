"""Error feedback between rows: the closed form against a linear system, the cost, and the order of work."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ggml_ext._encode.feedback import GROUP, LEAST_DAMPING, encode_with_row_feedback, make_row_spans, oas_weight, order_rows
from ggml_ext._native import token_sums
from ggml_ext._native.streams import ProductGroup, WeightProduct
from ggml_ext._sequential.sums import SINKS, RowSums

ROWS, COLUMNS = 3 * GROUP + 5, 8
STEP = 0.5


def make_moments(n: int, seed: int = 0) -> np.ndarray:
    """Return moments of gradients with a few main directions and noise."""
    rng = np.random.default_rng(seed)
    g = rng.standard_normal((4 * n, 6)) @ rng.standard_normal((6, n)) + 0.3 * rng.standard_normal((4 * n, n))
    return (g.T @ g).astype(np.float32)


def make_weights(n: int = ROWS) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((n, COLUMNS)).astype(np.float32)


def encode(rows: np.ndarray) -> np.ndarray:
    return np.round(rows / STEP).astype(np.int8).view(np.uint8)


def decode(data: np.ndarray) -> np.ndarray:
    return data.view(np.int8).astype(np.float32) * STEP


def encode_with_feedback(w: np.ndarray, g: list[np.ndarray], n_tokens: float = 1e4):
    return encode_with_row_feedback(w, make_row_spans(g, n_tokens, map), encode, decode, 1, map)


@pytest.mark.parametrize("start", range(GROUP, ROWS, GROUP))
def test_targets_minimize_the_cost_of_later_rows(start):
    """The errors of the group and all later rows have the least cost, given the errors of earlier rows."""
    w, g, n_tokens = make_weights(), make_moments(ROWS).astype(np.float64), 300
    errors = 0.1 * np.random.default_rng(2).standard_normal((ROWS, COLUMNS)).astype(np.float32)
    (rows,) = make_row_spans([g.astype(np.float32)], n_tokens, map)
    part = oas_weight(g, n_tokens)
    assert part > LEAST_DAMPING
    a = ((1 - part) * g + part * np.trace(g) / ROWS * np.eye(ROWS))[np.ix_(rows.order, rows.order)]
    w = w[rows.order]
    best = -np.linalg.solve(a[start:, start:], a[start:, :start] @ errors[:start])
    expected = w[start : start + GROUP] - best[:GROUP]
    # The factor is float32, as are sums over `start` rows; errors grow with the condition number.
    bound = start * 2**-23 * np.sqrt(np.linalg.cond(a)) * np.abs(errors).max()
    assert bound < 0.1 * np.abs(best[:GROUP]).max()
    assert np.abs(rows.corrected_rows(start, w, errors) - expected).max() <= bound


def compute_cost(g: np.ndarray, errors: np.ndarray) -> float:
    return float(np.einsum("ij,ik,jk->", g, errors, errors, dtype=np.float64))


def test_feedback_reduces_the_cost():
    w, g = make_weights(), make_moments(ROWS)
    data = encode_with_feedback(w, [g])
    values = decode(data)
    assert np.array_equal(decode(data), values)
    assert compute_cost(g, w - values) < 0.5 * compute_cost(g, w - decode(encode(w)))


def test_rows_are_ordered_by_cost():
    """Built from the last row to the first: the one with the least remaining cost comes last."""
    rng, n = np.random.default_rng(5), 2 * GROUP + 3
    root = rng.standard_normal((n, n))
    g = root @ root.T
    order = list(order_rows(g))
    assert sorted(order) == list(range(n))
    while order:
        last = order[(len(order) - 1) // GROUP * GROUP :]
        rest = [i for i in order if i not in last]
        behind = [i for i in range(n) if i not in order]
        costs = {i: 1 / np.linalg.inv(g[np.ix_([i, *behind], [i, *behind])])[0, 0] for i in order}
        assert max(costs[i] for i in last) <= min((costs[i] for i in rest), default=np.inf)
        order = rest


def test_similar_neighbours_compensate_each_other():
    """Rows that are encoded at once are spread, so that neighbours are not in one group."""
    n = 4 * GROUP
    g = np.kron(np.eye(4), np.full((GROUP, GROUP), 0.9)) + np.diag(0.1 + 0.1 * np.random.default_rng(6).random(n))
    w = make_weights(n)
    values = decode(encode_with_feedback(w, [g.astype(np.float32)], n_tokens=1e9))
    assert compute_cost(g, w - values) < 0.5 * compute_cost(g, w - decode(encode(w)))


@pytest.mark.parametrize("sizes", [[ROWS], [GROUP, ROWS, 7], [2 * GROUP] * 4])
def test_splitting_the_rows_leaves_the_bytes_unchanged(sizes):
    w, g = make_weights(sum(sizes)), [make_moments(n, seed) for seed, n in enumerate(sizes)]
    expected = encode_with_feedback(w, g)
    for n_threads in (2, 3, 5, 64):
        with ThreadPoolExecutor(3) as pool:
            assert np.array_equal(encode_with_row_feedback(w, make_row_spans(g, 1e4, map), encode, decode, n_threads, pool.map), expected)
    first = 0
    for n, g_part in zip(sizes, g, strict=True):  # rows of different parts are independent
        assert np.array_equal(encode_with_feedback(w[first : first + n], [g_part]), expected[first : first + n])
        first += n


def test_rounding_of_unequal_rows_is_damped():
    """A few rows have most of G, as in the input projections of state-space models, and G has fewer tokens than rows."""
    rng = np.random.default_rng(0)
    directions = rng.standard_normal((2, 300)) * np.where(np.arange(300) < 40, 1, 1e-3)
    g = (directions.T @ directions).astype(np.float32)
    g = (g / (np.trace(g) / len(g))).astype(np.float16).astype(np.float32)
    damped = g + LEAST_DAMPING * np.eye(len(g))
    with pytest.raises(np.linalg.LinAlgError):
        np.linalg.cholesky(damped)
    (span,) = make_row_spans([g], 1e9, map)
    assert sorted(span.order) == list(range(300)) and np.isfinite(span.factor).all()


def test_rows_without_gradients_are_independent():
    w = make_weights()
    assert np.array_equal(encode_with_feedback(w, [np.zeros((ROWS, ROWS), np.float32)]), encode(w))
    assert np.array_equal(encode_with_feedback(w, [make_moments(ROWS)], n_tokens=0), encode(w))


def test_shrinkage_helps_with_few_tokens():
    """The shrunk sum is closer on average to that of many tokens than the sum or its mean diagonal."""
    rng, n, n_tokens = np.random.default_rng(3), 40, 60
    root = rng.standard_normal((n, n)) * np.linspace(0.2, 2, n)
    true = root @ root.T
    distances = np.zeros(3)
    for _ in range(20):
        g = root @ rng.standard_normal((n, n_tokens))
        s = g @ g.T / n_tokens
        flat, part = np.trace(s) / n * np.eye(n), oas_weight(s, n_tokens)
        distances += [((a - true) ** 2).sum() for a in (s, flat, (1 - part) * s + part * flat)]
    assert distances[2] < 0.95 * distances[:2].min()
    assert oas_weight(true, 1e9) < 1e-6 and oas_weight(np.eye(n), 1e9) == 1 == oas_weight(true, 0)
    padded = np.pad(true, (0, 24))
    assert oas_weight(padded, 100) == pytest.approx(oas_weight(true, 100))


def test_gradient_sums_match_numpy(monkeypatch):
    """Sums cover dependent rows and all positions but the first of a chunk; experts have none."""
    rng, n_rows = np.random.default_rng(0), 300
    groups = [ProductGroup(8, 10, 0, 0, (WeightProduct("a", 700, 0.0),)), ProductGroup(8, 10, 2, 4, (WeightProduct("experts", 64, 0.0),))]
    g = rng.standard_normal((40, 700)).astype(np.float32)
    g[7] = 0
    assert SINKS == 1
    monkeypatch.setattr(token_sums, "bf16_library", lambda: None)
    with ThreadPoolExecutor(2) as pool:
        sums = RowSums(groups, n_rows, pool)
        for chunk in (g[:25], g[25:]):
            sums.add({"a": chunk})
        sums.flush()
    assert list(sums.g) == ["a"] and [len(part) for part in sums.g["a"]] == [300, 300, 100]
    for i, part in enumerate(sums.g["a"]):
        u = np.delete(g / np.maximum(np.linalg.norm(g, axis=1, keepdims=True), 1e-30), [0, 7, 25], axis=0)[:, i * n_rows : (i + 1) * n_rows]
        # Float32 sums of 40 products, and norms of 700 squares.
        np.testing.assert_allclose(part, u.T.astype(np.float64) @ u, rtol=0, atol=(40 + 700) * 2**-24 * (u**2).sum(axis=0).max())
    assert sums.n_tokens == {"a": 37}
