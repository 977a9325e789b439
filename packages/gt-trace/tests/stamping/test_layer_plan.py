"""Which layers are traced, for every pattern of like layers."""

from __future__ import annotations

import pytest

from gt_trace.stamping.layer_plan import plan_layers
from gt_trace.stamping.report import NotStampable


@pytest.mark.parametrize(
    ("kinds", "kept", "period"),
    [
        ("MMMMM", [0, 1, 3, 4], 1),
        ("MMMMMMMM", [0, 1, 6, 7], 1),
        ("DMMMMMM", [0, 1, 2, 5, 6], 1),
        ("DDMMMMMMT", [0, 1, 2, 3, 6, 7, 8], 1),
        ("ABABABABAB", [0, 1, 2, 3, 6, 7, 8, 9], 2),
        # One layer more than whole periods belongs to the tail.
        ("ABABABABABA", [0, 1, 2, 3, 6, 7, 8, 9, 10], 2),
        # A long run of one kind is worth more than a few periods of two.
        ("ABABABABABMMMMMMMMMM", [*range(12), 18, 19], 1),
    ],
)
def test_as_many_layers_as_possible_are_stamped(kinds: str, kept: list[int], period: int) -> None:
    plan = plan_layers([ord(kind) for kind in kinds])
    assert list(plan.kept) == kept
    assert plan.period == period


def test_one_more_warm_up_traces_two_more_layers() -> None:
    assert list(plan_layers([0] * 9, num_warm_up=2).kept) == [0, 1, 2, 6, 7, 8]


@pytest.mark.parametrize("kinds", ["", "M", "MMMM", "DMMMM", "MMXMM", "ABABABAB"])
def test_too_few_like_layers_are_refused(kinds: str) -> None:
    with pytest.raises(NotStampable) as caught:
        plan_layers([ord(kind) for kind in kinds])
    assert str(caught.value) == (
        f"of {len(kinds)} layers, no more than 4 that are alike repeat in a row"
    )


def test_units_know_their_layers() -> None:
    plan = plan_layers([9, *[0, 1] * 6])
    assert (plan.start, plan.period, plan.num_units) == (1, 2, 6)
    assert (plan.first, plan.last, plan.num_stamped) == (1, 4, 2)
    assert [plan.layer(unit) for unit in range(6)] == [1, 3, 5, 7, 9, 11]
    assert [plan.unit_of(layer) for layer in (0, 1, 2, 3, 12)] == [-1, 0, 0, 1, 5]
    assert [plan.is_interior(layer) for layer in (None, 2, 3, 10, 11)] == [
        False,
        False,
        True,
        True,
        False,
    ]
