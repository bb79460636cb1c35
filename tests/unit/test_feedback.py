"""Rows that make up for the errors of rows before them: the closed form against a linear system, the cost, and the order of work."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ggml_ext._encode.feedback import GROUP, SMALLEST, encode_fed, make_rows, order_rows, shrinkage
from ggml_ext._native.streams import ProductGroup, WeightProduct
from ggml_ext._sequential.sums import SINKS, RowSums

ROWS, COLUMNS = 3 * GROUP + 5, 8
STEP = 0.5


def moments(n: int, seed: int = 0) -> np.ndarray:
    """Of gradients of a few directions and some noise."""
    rng = np.random.default_rng(seed)
    g = rng.standard_normal((4 * n, 6)) @ rng.standard_normal((6, n)) + 0.3 * rng.standard_normal((4 * n, n))
    return (g.T @ g).astype(np.float32)


def weights(n: int = ROWS) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((n, COLUMNS)).astype(np.float32)


def encode(rows: np.ndarray) -> np.ndarray:
    return np.round(rows / STEP).astype(np.int8).view(np.uint8)


def decode(data: np.ndarray) -> np.ndarray:
    return data.view(np.int8).astype(np.float32) * STEP


def fed(w: np.ndarray, g: list[np.ndarray], n_tokens: float = 1e4):
    return encode_fed(w, make_rows(g, n_tokens), encode, decode, 1, map)


@pytest.mark.parametrize("at", range(GROUP, ROWS, GROUP))
def test_targets_are_what_later_rows_can_best_go_on_from(at):
    """The errors that are left to choose, of the group and of all rows behind it, at their least cost beside those that are made."""
    w, g, n_tokens = weights(), moments(ROWS).astype(np.float64), 300
    errors = 0.1 * np.random.default_rng(2).standard_normal((ROWS, COLUMNS)).astype(np.float32)
    (rows,) = make_rows([g.astype(np.float32)], n_tokens)
    part = shrinkage(g, n_tokens)
    assert part > SMALLEST
    a = ((1 - part) * g + part * np.trace(g) / ROWS * np.eye(ROWS))[np.ix_(rows.order, rows.order)]
    w = w[rows.order]
    best = -np.linalg.solve(a[at:, at:], a[at:, :at] @ errors[:at])
    wanted = w[at : at + GROUP] - best[:GROUP]
    # float32 of the factor and of sums over `at` rows, as large as the factor's condition lets them become
    bound = at * 2**-23 * np.sqrt(np.linalg.cond(a)) * np.abs(errors).max()
    assert bound < 0.1 * np.abs(best[:GROUP]).max()
    assert np.abs(rows.targets(at, w, errors) - wanted).max() <= bound


def cost(g: np.ndarray, errors: np.ndarray) -> float:
    return float(np.einsum("ij,ik,jk->", g, errors, errors, dtype=np.float64))


def test_it_costs_less():
    w, g = weights(), moments(ROWS)
    data, values = fed(w, [g])
    assert np.array_equal(decode(data), values)
    assert cost(g, w - values) < 0.5 * cost(g, w - decode(encode(w)))


def test_order_of_rows():
    """From the last to the first: what costs least, beside what those behind it make up for."""
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


def test_neighbours_that_are_alike():
    """They make up for each other, though as many as are encoded at once lie side by side."""
    n = 4 * GROUP
    g = np.kron(np.eye(4), np.full((GROUP, GROUP), 0.9)) + np.diag(0.1 + 0.1 * np.random.default_rng(6).random(n))
    w = weights(n)
    _, values = fed(w, [g.astype(np.float32)], n_tokens=1e9)
    assert cost(g, w - values) < 0.5 * cost(g, w - decode(encode(w)))


@pytest.mark.parametrize("sizes", [[ROWS], [GROUP, ROWS, 7], [2 * GROUP] * 4])
def test_parts_of_the_work_do_not_matter(sizes):
    w, g = weights(sum(sizes)), [moments(n, seed) for seed, n in enumerate(sizes)]
    wanted, values = fed(w, g)
    for n_parts in (2, 3, 5, 64):
        with ThreadPoolExecutor(3) as pool:
            assert np.array_equal(encode_fed(w, make_rows(g, 1e4), encode, decode, n_parts, pool.map)[0], wanted)
    first = 0
    for n, of_part in zip(sizes, g, strict=True):  # rows of one part know nothing of another's
        assert np.array_equal(fed(w[first : first + n], [of_part])[1], values[first : first + n])
        first += n


def test_without_gradients_rows_stand_alone():
    w = weights()
    assert np.array_equal(fed(w, [np.zeros((ROWS, ROWS), np.float32)])[0], encode(w))
    assert np.array_equal(fed(w, [moments(ROWS)], n_tokens=0)[0], encode(w))


def test_few_tokens_tell_little():
    """What is kept of a sum is nearer to what many tokens give than the sum, or its diagonal's mean, on average."""
    rng, n, n_tokens = np.random.default_rng(3), 40, 60
    root = rng.standard_normal((n, n)) * np.linspace(0.2, 2, n)
    true = root @ root.T
    distances = np.zeros(3)
    for _ in range(20):
        g = root @ rng.standard_normal((n, n_tokens))
        s = g @ g.T / n_tokens
        flat, part = np.trace(s) / n * np.eye(n), shrinkage(s, n_tokens)
        distances += [((a - true) ** 2).sum() for a in (s, flat, (1 - part) * s + part * flat)]
    assert distances[2] < 0.95 * distances[:2].min()
    assert shrinkage(true, 1e9) < 1e-6 and shrinkage(np.eye(n), 1e9) == 1 == shrinkage(true, 0)
    padded = np.pad(true, (0, 24))
    assert shrinkage(padded, 100) == pytest.approx(shrinkage(true, 100))


def test_sums_of_gradients():
    """Of the rows that know of each other, of all positions but a chunk's first; matrices of experts have none."""
    rng, together = np.random.default_rng(0), 300
    groups = [ProductGroup(8, 10, 0, 0, (WeightProduct("a", 700, 0.0),)), ProductGroup(8, 10, 2, 4, (WeightProduct("experts", 64, 0.0),))]
    g = rng.standard_normal((40, 700)).astype(np.float32)
    g[7] = 0
    assert SINKS == 1
    sums = RowSums(groups, together)
    with ThreadPoolExecutor(2) as pool:
        for chunk in (g[:25], g[25:]):
            sums.add({"a": chunk}, pool)
    assert list(sums.g) == ["a"] and [len(part) for part in sums.g["a"]] == [300, 300, 100]
    for i, part in enumerate(sums.g["a"]):
        u = np.delete(g / np.maximum(np.linalg.norm(g, axis=1, keepdims=True), 1e-30), [0, 7, 25], axis=0)[:, i * together : (i + 1) * together]
        # float32 sums of 40 products, and lengths of 700 squares
        np.testing.assert_allclose(part, u.T.astype(np.float64) @ u, rtol=0, atol=(40 + 700) * 2**-24 * (u**2).sum(axis=0).max())
    assert sums.n_tokens == {"a": 37}
