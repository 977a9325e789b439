"""The division of modules by cost."""

from __future__ import annotations

import math
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gt_pipeline.errors import StageLayoutError
from gt_pipeline.split import module_names_by_cost


def test_the_costliest_stage_costs_as_little_as_it_can():
    costs = {"embed": 1, "a": 4, "b": 4, "c": 4, "d": 4, "head": 7}
    assert module_names_by_cost(costs, num_stages=3) == (
        ("embed", "a", "b"),
        ("c", "d"),
        ("head",),
    )


def test_stages_beside_the_costliest_one_are_even():
    costs = {"a": 1, "b": 1, "c": 1, "d": 1, "e": 9}
    assert module_names_by_cost(costs, num_stages=3) == (("a", "b"), ("c", "d"), ("e",))


def test_of_equal_divisions_the_one_with_larger_first_stages_is_taken():
    costs = {"a": 1, "b": 1, "c": 1}
    assert module_names_by_cost(costs, num_stages=2) == (("a", "b"), ("c",))


def test_names_for_every_stage_are_added_to_each():
    assert module_names_by_cost({"a": 1, "b": 1}, num_stages=2, every_stage=["rotary"]) == (
        ("a", "rotary"),
        ("b", "rotary"),
    )


def test_modules_that_cost_nothing_still_fill_every_stage():
    assert module_names_by_cost({"a": 0, "b": 0, "c": 0}, num_stages=3) == (("a",), ("b",), ("c",))


@settings(deadline=None)
@given(costs=st.lists(st.integers(0, 20), min_size=1, max_size=9), data=st.data())
def test_no_other_division_is_better(costs: list[int], data: st.DataObject):
    num_stages = data.draw(st.integers(1, len(costs)))
    named = {f"m{index}": cost for index, cost in enumerate(costs)}
    stages = module_names_by_cost(named, num_stages=num_stages)
    assert [name for stage in stages for name in stage] == list(named)
    assert len(stages) == num_stages
    assert all(stages)
    found = max(sum(named[name] for name in stage) for stage in stages)
    best = min(
        max(sum(costs[start:end]) for start, end in pairwise((0, *cuts, len(costs))))
        for cuts in combinations(range(1, len(costs)), num_stages - 1)
    )
    assert found == best


@settings(deadline=None)
@given(costs=st.lists(st.floats(0, 1e6), min_size=1, max_size=40), data=st.data())
def test_measured_costs_that_are_no_integers_divide_too(costs: list[float], data: st.DataObject):
    num_stages = data.draw(st.integers(1, len(costs)))
    named = {f"m{index}": cost for index, cost in enumerate(costs)}
    stages = module_names_by_cost(named, num_stages=num_stages)
    assert [name for stage in stages for name in stage] == list(named)
    largest = max(sum(named[name] for name in stage) for stage in stages)
    assert largest <= sum(costs) / num_stages + max(costs) + 1e-6 * sum(costs)


def test_refuses_costs_that_are_none_and_more_stages_than_modules():
    with pytest.raises(StageLayoutError) as caught:
        module_names_by_cost(
            {"a": -1.0, "b": math.nan, "c": math.inf}, num_stages=4, every_stage=["a"]
        )
    assert str(caught.value) == (
        "3 modules in 4 stages:\n"
        "  - cost of 'a' is -1.0, must be a finite number of at least 0\n"
        "  - cost of 'b' is nan, must be a finite number of at least 0\n"
        "  - cost of 'c' is inf, must be a finite number of at least 0\n"
        "  - 'a' is on every stage and has a cost\n"
        "  - each stage needs a module: at most 3 stages"
    )
    with pytest.raises(StageLayoutError, match="num_stages is 0, must be at least 1"):
        module_names_by_cost({"a": 1}, num_stages=0)
