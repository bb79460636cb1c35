"""Solve the multiple-choice knapsack: choose one option per item with the least total cost under a limit of the total weight.

The linear relaxation is solved along the lower convex hulls of the items. It gives a first solution, a lower bound and a price per
unit of weight. An option's reduced cost is how much it raises the lower bound: its cost plus price times weight, minus the smallest such
sum among the options of its item. The slack is the cost of the first solution minus the lower bound. No better solution has options whose
reduced costs exceed the slack, which rules out most options. Dynamic programming over Pareto-optimal states (Nemhauser and Ullmann,
Management Science 15, 1969) searches the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MAX_STATES = 100_000  # per item; beyond, the least promising states are dropped and the solution may not be optimal
ROUNDING = 1e-9  # relative rounding error of summed costs


@dataclass(frozen=True)
class Solution:
    """The chosen options."""

    picks: list[int]  # index of the option of each item
    weight: float
    cost: float
    bound: float  # no solution costs less

    @property
    def gap(self) -> float:
        """Upper bound of the relative cost that a better solution could save; 0 for an optimal solution."""
        return max(0.0, self.cost - self.bound) / self.cost if self.cost > 0 else 0.0


def frontier(weights: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """Return the indices of the Pareto-optimal options, lightest first, without duplicates. int64 (n,)."""
    order = np.lexsort((np.arange(len(weights)), costs, weights))
    best = np.minimum.accumulate(costs[order])
    return order[np.concatenate([[True], best[1:] < best[:-1]])]


def _hull(weights: np.ndarray, costs: np.ndarray) -> list[int]:
    """Return the corners of the lower convex hull of a frontier."""
    corners: list[int] = []
    for i in range(len(weights)):
        while len(corners) > 1:
            a, b = corners[-2:]
            if (costs[a] - costs[b]) * (weights[i] - weights[b]) > (costs[b] - costs[i]) * (weights[b] - weights[a]):
                break
            corners.pop()
        corners.append(i)
    return corners


def solve(items: Sequence[Sequence[tuple[float, float]]], limit: float, max_states: int = MAX_STATES) -> Solution | None:
    """Solve the knapsack; return None if even the lightest options exceed the limit. items: (weight, cost) of each option of each item."""
    tables = [np.array(options, np.float64).reshape(-1, 2).T for options in items]
    frontiers = [frontier(*table) for table in tables]
    tables = [table[:, indices] for table, indices in zip(tables, frontiers, strict=True)]
    lightest = sum(float(table[0, 0]) for table in tables)
    if lightest > limit:
        return None
    picks, price = _solve_relaxation(tables, limit)
    priced = [table[1] + price * table[0] for table in tables]
    reduced_costs = [p - p.min() for p in priced]
    bound = sum(float(p.min()) for p in priced) - price * limit
    cost = sum(float(table[1, i]) for table, i in zip(tables, picks, strict=True))
    slack = cost - bound + ROUNDING * abs(cost)
    remaining = [np.flatnonzero(r <= slack) for r in reduced_costs]
    better, is_exhaustive = _search(tables, remaining, reduced_costs, limit=limit, slack=slack, max_states=max_states)
    if better is not None:
        better_cost = sum(float(table[1, i]) for table, i in zip(tables, better, strict=True))
        picks, cost = (better, better_cost) if better_cost < cost else (picks, cost)
    weight = sum(float(table[0, i]) for table, i in zip(tables, picks, strict=True))
    indices = [int(options[i]) for options, i in zip(frontiers, picks, strict=True)]
    return Solution(indices, weight, cost, cost if is_exhaustive else min(bound, cost))


def _solve_relaxation(tables: list[np.ndarray], limit: float) -> tuple[list[int], float]:
    """Round the relaxed solution down; return its picks and the cost that one more unit of weight would save."""
    steps = []  # (saving per unit of weight, item, from corner, to corner)
    for n, (weights, costs) in enumerate(tables):
        corners = _hull(weights, costs)
        for a, b in zip(corners, corners[1:]):
            steps.append(((costs[a] - costs[b]) / (weights[b] - weights[a]), n, a, b))
    steps.sort(key=lambda step: -step[0])
    picks, used, price = [0] * len(tables), sum(float(t[0, 0]) for t in tables), 0.0
    for saved, n, a, b in steps:
        added = tables[n][0, b] - tables[n][0, a]
        if picks[n] != a:
            continue  # an earlier step of this item did not fit
        if used + added > limit:
            price = price or float(saved)
            continue
        picks[n], used = b, used + added
    return picks, price


def _search(
    tables: list[np.ndarray], remaining: list[np.ndarray], reduced_costs: list[np.ndarray], *, limit: float, slack: float, max_states: int
) -> tuple[list[int] | None, bool]:
    """Search the remaining options. Return the best picks, None if none is within the slack, and whether the search was exhaustive.

    A state is the sum of weights, costs and reduced costs of one option of each item so far. Reduced costs are not negative, so a state beyond
    the slack leads to no better solution.

    Args:
        tables: weights and costs of the options of each item.
        remaining: the options of each item that the bound allows.
        reduced_costs: reduced cost of each option of each item.
        limit: maximum total weight.
        slack: maximum total reduced cost.
        max_states: number of states to keep.
    """
    if any(len(options) == 0 for options in remaining):
        return None, True
    fixed = [n for n in range(len(tables)) if len(remaining[n]) == 1]
    # the items to decide, the one with the widest range of weights first
    order = sorted((n for n in range(len(tables)) if len(remaining[n]) > 1), key=lambda n: -float(np.ptp(tables[n][0, remaining[n]])))
    lightest = sum(float(tables[n][0, remaining[n]].min()) for n in order)  # of the items that are not decided yet
    state_weights = np.array([sum(float(tables[n][0, remaining[n][0]]) for n in fixed)])
    state_costs = np.array([sum(float(tables[n][1, remaining[n][0]]) for n in fixed)])
    state_reduced_costs = np.array([sum(float(reduced_costs[n][remaining[n][0]]) for n in fixed)])
    history: list[tuple[np.ndarray, np.ndarray]] = []  # by item in `order`: previous state and chosen option of each state
    is_exhaustive = True
    for n in order:
        options = remaining[n]
        lightest -= float(tables[n][0, options].min())
        w = (state_weights[:, None] + tables[n][0, options]).ravel()
        c = (state_costs[:, None] + tables[n][1, options]).ravel()
        r = (state_reduced_costs[:, None] + reduced_costs[n][options]).ravel()
        possible = np.flatnonzero((w + lightest <= limit) & (r <= slack))
        possible = possible[frontier(w[possible], c[possible])] if possible.size else possible
        if not possible.size:
            return None, is_exhaustive
        if possible.size > max_states:
            is_exhaustive = False
            possible = np.sort(possible[np.argpartition(r[possible], max_states)[:max_states]])
        state_weights, state_costs, state_reduced_costs = w[possible], c[possible], r[possible]
        history.append(((possible // len(options)).astype(np.int32), (possible % len(options)).astype(np.int16)))
    picks = [int(options[0]) for options in remaining]
    state = int(np.argmin(state_costs))
    for n, (previous, chosen) in zip(reversed(order), reversed(history), strict=True):
        picks[n] = int(remaining[n][chosen[state]])
        state = int(previous[state])
    return picks, is_exhaustive
