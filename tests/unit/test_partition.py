"""The parts of --part."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from ggml_ext._plan.partition import balance


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.data())
def test_the_largest_part_is_as_small_as_possible(works, data):
    n_parts = data.draw(st.integers(1, len(works)))

    def largest(starts):
        return max(sum(works[first:last]) for first, last in itertools.pairwise(starts))

    starts = balance(works, n_parts)
    assert starts[0] == 0 and starts[-1] == len(works) and len(starts) == n_parts + 1
    assert all(first < last for first, last in itertools.pairwise(starts))
    every = ((0, *inner, len(works)) for inner in itertools.combinations(range(1, len(works)), n_parts - 1))
    assert largest(starts) == min(map(largest, every))
