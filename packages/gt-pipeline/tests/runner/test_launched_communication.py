"""Gathers and reductions run behind computation; only the first and the last have none to hide in."""

from __future__ import annotations

import pytest
from launched_cases import gathers_within, log_named, log_replicas

from gt_pipeline.runner.step_program import reduction_points
from gt_pipeline.schedules.actions import parse_action
from gt_trace.testing import GlooWorkers

_ACTIONS = [*map(parse_action, ("2B0", "2REDUCE_GRAD", "1I0", "1I1", "1W0", "1W1"))]


_FIRST_GATHER = ("all_gather_into_tensor", False)  # at the step's very start


@pytest.mark.parametrize("name", ["ZBVZeroBubble", "DualPipeV"])
def test_reductions_of_a_v_but_the_last_run_behind_computation(
    four: GlooWorkers, name: str
) -> None:
    for waited, num_forgotten in four.run(log_named, name):
        assert num_forgotten == 0
        assert waited == [
            _FIRST_GATHER,
            ("all_gather_into_tensor", True),
            ("reduce_scatter_tensor", False),  # of the stage that ends last, in the drain
            ("reduce_scatter_tensor", True),
        ]


def test_a_reduction_over_replicas_is_launched_while_others_compute(four: GlooWorkers) -> None:
    for waited, num_forgotten in four.run(log_replicas):
        assert num_forgotten == 0
        assert waited == [
            _FIRST_GATHER,
            ("all_gather_into_tensor", True),
            ("reduce_scatter_tensor", True),  # of stage 1, among shards
            ("reduce_scatter_tensor", False),  # of stage 0, in the drain
            ("all_reduce", False),
            ("all_reduce", True),  # of stage 1, among replicas
        ]


_NUM_BLOCK = 6
"""Parameters of a stage that has nothing but its block: a norm's and two products', with biases."""


def test_stages_are_gathered_as_far_as_bytes_allow(four: GlooWorkers) -> None:
    """Rank 0 has stages 0 and 2, rank 1 has 1 and 3: both, or one for each half of its forwards
    and backwards."""
    block = 4 * (2 * 16 + 16 * 48 + 48 + 48 * 16 + 16)
    for rank, (sizes, num_gathers) in enumerate(four.run(gathers_within, 2)):
        assert sizes[0 if rank >= 2 else 1] == block
        assert num_gathers == 2 * _NUM_BLOCK + 1
    for _, num_gathers in four.run(gathers_within, 1):
        assert num_gathers > 2 * _NUM_BLOCK + 1


@pytest.mark.parametrize(
    ("num_parts", "expected"),
    [
        (1, {}),  # nothing is reduced
        (2, {}),  # launched, and waited for at the end
        (3, {3: (2,)}),
        (4, {3: (2,), 4: (2,)}),
        (5, {2: (2,), 3: (2,), 4: (2,)}),
    ],
)
def test_a_reduction_goes_on_at_even_distances(
    num_parts: int, expected: dict[int, tuple[int, ...]]
) -> None:
    assert reduction_points(_ACTIONS, {2: num_parts}) == expected


def test_behind_the_last_computation_all_that_is_left_runs_at_the_end() -> None:
    actions = [*_ACTIONS, parse_action("0REDUCE_GRAD"), parse_action("0RESHARD")]
    assert reduction_points(actions, {0: 3, 2: 2}) == {}


def test_two_reductions_may_go_on_at_one_place() -> None:
    actions = [*map(parse_action, ("2REDUCE_GRAD", "1REDUCE_GRAD", "0B0"))]
    assert reduction_points(actions, {1: 3, 2: 3}) == {2: (2, 1)}
