"""The knapsack behind the targets: the best choice of all, and what is said where it may not be."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggml_ext._allocation.knapsack import frontier, solve

# whole numbers make ties; the others costs as they are measured
NUMBERS = st.one_of(st.integers(0, 12).map(float), st.floats(1e-6, 30, allow_subnormal=False))
ITEMS = st.lists(st.lists(st.tuples(st.integers(1, 20).map(float), NUMBERS), min_size=1, max_size=5), min_size=1, max_size=6)
TOLERANCE = 1e-9  # of the cost: six floats are added in another order, each rounded to 2^-53


def best_cost(items, limit):
    """By trying all."""
    possible = [c for c in itertools.product(*items) if sum(w for w, _ in c) <= limit]
    return min((sum(cost for _, cost in c) for c in possible), default=None)


@settings(max_examples=300, deadline=None)
@given(ITEMS, st.integers(1, 100).map(float))
def test_it_is_the_best_of_all(items, limit):
    found, best = solve(items, limit), best_cost(items, limit)
    assert (found is None) == (best is None)
    if found is None:
        return
    chosen = [of_item[i] for of_item, i in zip(items, found.picks, strict=True)]
    assert found.weight == sum(w for w, _ in chosen) <= limit
    assert found.cost == pytest.approx(sum(c for _, c in chosen), rel=TOLERANCE)
    assert found.cost == pytest.approx(best, rel=TOLERANCE)
    assert found.gap == 0


@settings(max_examples=100, deadline=None)
@given(ITEMS, st.floats(0.01, 60))
def test_sizes_for_a_limit_of_costs(items, limit):
    """The other way round, limits that are no whole numbers: --target-kld."""
    swapped = [[(cost, weight) for weight, cost in of_item] for of_item in items]
    found, best = solve(swapped, limit), best_cost(swapped, limit)
    assert (found and found.cost) == best


def of_a_model(n_layers):
    """Sizes and costs as of a model: shapes of Llama-3.2-1B, errors that fall by four a bit, a sensitivity for each."""
    rng = np.random.default_rng(5)
    shapes, bpws = (2048 * 2048, 2048 * 512, 2048 * 512, 2048 * 2048, 2048 * 8192, 2048 * 8192, 2048 * 8192), (2.0625, 3.0625, 4.25, 5.5, 8.5)
    return [
        [(n * b / 8, sensitivity * 0.06 * 4 ** (2 - b) * rng.uniform(0.9, 1.1)) for b in bpws]
        for n in shapes * n_layers
        for sensitivity in [np.exp(rng.normal())]
    ]


def test_it_is_quick_and_exact_for_a_large_model():
    items = of_a_model(80)
    limit = 1.4 * sum(min(w for w, _ in of_item) for of_item in items)
    found = solve(items, limit, max_states=5000)  # as many suffice, of 5^560: that is half a second's work; 1000 do not
    assert found.gap == 0 and found.cost == solve(items, limit).cost
    assert found.weight <= limit


def test_the_gap_is_stated_where_states_are_dropped():
    """Sizes without a common factor, as many tensors of different shapes, and room for a few states only."""
    rng = np.random.default_rng(2)
    items = [[(float(rng.integers(1, 10**6)), float(rng.uniform(0.1, 1))) for _ in range(6)] for _ in range(40)]
    limit = 40 * 4e5
    best, short = solve(items, limit), solve(items, limit, max_states=2)
    assert best.gap == 0 and short.gap > 0
    assert best.cost <= short.cost and short.cost * (1 - short.gap) <= best.cost * (1 + TOLERANCE)


def test_a_frontier_has_the_options_that_none_beats():
    weights, costs = np.array([3.0, 1, 2, 2, 4]), np.array([1.0, 5, 4, 3, 1])
    assert frontier(weights, costs).tolist() == [1, 3, 0]
