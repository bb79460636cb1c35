"""The knapsack of the targets: the best choice, and the stated gap if it may not be the best."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggml_ext._allocation.knapsack import frontier, solve

# Integers make ties; the other costs look like measured ones.
NUMBERS = st.one_of(st.integers(0, 12).map(float), st.floats(1e-6, 30, allow_subnormal=False))
ITEMS = st.lists(st.lists(st.tuples(st.integers(1, 20).map(float), NUMBERS), min_size=1, max_size=5), min_size=1, max_size=6)
TOLERANCE = 1e-9  # relative: six floats are added in another order, each rounded to 2^-53


def best_cost(items, limit):
    """Find the lowest cost by trying all choices."""
    possible = [c for c in itertools.product(*items) if sum(w for w, _ in c) <= limit]
    return min((sum(cost for _, cost in c) for c in possible), default=None)


@settings(max_examples=300, deadline=None)
@given(ITEMS, st.integers(1, 100).map(float))
def test_solution_is_optimal(items, limit):
    solution, best = solve(items, limit), best_cost(items, limit)
    assert (solution is None) == (best is None)
    if solution is None:
        return
    chosen = [of_item[i] for of_item, i in zip(items, solution.picks, strict=True)]
    assert solution.weight == sum(w for w, _ in chosen) <= limit
    assert solution.cost == pytest.approx(sum(c for _, c in chosen), rel=TOLERANCE)
    assert solution.cost == pytest.approx(best, rel=TOLERANCE)
    assert solution.gap == 0


@settings(max_examples=100, deadline=None)
@given(ITEMS, st.floats(0.01, 60))
def test_smallest_size_under_a_cost_limit(items, limit):
    """Swaps sizes and costs, with fractional limits, as --target-kld does."""
    swapped = [[(cost, weight) for weight, cost in of_item] for of_item in items]
    solution, best = solve(swapped, limit), best_cost(swapped, limit)
    assert (solution and solution.cost) == best


def make_model_items(n_layers):
    """Return sizes and costs as of a model: Llama-3.2-1B's shapes, errors that fall by four per bit, a sensitivity for each tensor."""
    rng = np.random.default_rng(5)
    shapes, bpws = (2048 * 2048, 2048 * 512, 2048 * 512, 2048 * 2048, 2048 * 8192, 2048 * 8192, 2048 * 8192), (2.0625, 3.0625, 4.25, 5.5, 8.5)
    return [
        [(n * b / 8, sensitivity * 0.06 * 4 ** (2 - b) * rng.uniform(0.9, 1.1)) for b in bpws]
        for n in shapes * n_layers
        for sensitivity in [np.exp(rng.normal())]
    ]


def test_large_model_is_solved_quickly_and_exactly():
    items = make_model_items(80)
    limit = 1.4 * sum(min(w for w, _ in of_item) for of_item in items)
    solution = solve(items, limit, max_states=5000)  # 5000 of 5^560 states suffice, half a second; 1000 do not
    assert solution.gap == 0 and solution.cost == solve(items, limit).cost
    assert solution.weight <= limit


def test_dropped_states_give_a_gap():
    """Sizes without a common factor, as of many different shapes, and room for few states."""
    rng = np.random.default_rng(2)
    items = [[(float(rng.integers(1, 10**6)), float(rng.uniform(0.1, 1))) for _ in range(6)] for _ in range(40)]
    limit = 40 * 4e5
    best, short = solve(items, limit), solve(items, limit, max_states=2)
    assert best.gap == 0 and short.gap > 0
    assert best.cost <= short.cost and short.cost * (1 - short.gap) <= best.cost * (1 + TOLERANCE)


def test_frontier_has_only_undominated_options():
    weights, costs = np.array([3.0, 1, 2, 2, 4]), np.array([1.0, 5, 4, 3, 1])
    assert frontier(weights, costs).tolist() == [1, 3, 0]
