"""The predicted collectives of plans, one by one, against what can be counted by hand."""

from __future__ import annotations

import pytest
import torch
from plan_doubles import DDP, FSDP, TENSOR_PARALLEL, plan_by_hand

from gt_autoparallel.plan.placement_plan import PlacementPlan
from gt_autoparallel.plan.prediction import (
    PlannedCollective,
    collective_totals,
    predicted_collectives,
)

WEIGHT = 16 * 16 * 4
ACTIVATION = 8 * 16 * 4


def prediction_text(plan: PlacementPlan) -> str:
    """The totals as lines of text."""
    totals = collective_totals(predicted_collectives(plan))
    if not totals:
        return "no collectives"
    return "\n".join(
        f"{total.count} {total.kind} along {total.axis} ({total.purpose}): "
        f"{total.num_bytes:,} bytes on each rank"
        for total in totals
    )


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        (
            (("dp", 4, DDP),),
            f"2 all_reduce along dp (reduce gradient): {2 * WEIGHT:,} bytes on each rank",
        ),
        (
            (("dp", 4, FSDP),),
            (
                f"2 reduce_scatter along dp (reduce gradient): {2 * WEIGHT:,} bytes on each rank\n"
                f"2 all_gather along dp (unshard): {2 * WEIGHT:,} bytes on each rank"
            ),
        ),
        (
            (("tp", 2, TENSOR_PARALLEL),),
            f"1 all_reduce along tp (activation): {ACTIVATION} bytes on each rank",
        ),
        ((("one", 1, FSDP),), "no collectives"),
    ],
)
def test_what_data_fully_sharded_and_tensor_parallel_plans_launch(axes, text):
    assert prediction_text(plan_by_hand(*axes)) == text


def test_each_collective_says_for_whom_it_runs():
    plan = plan_by_hand(("dp", 2, FSDP), ("tp", 2, TENSOR_PARALLEL))
    collectives = predicted_collectives(plan)
    assert [(each.purpose, each.node, each.parameter) for each in collectives] == [
        ("unshard", "mm0", "layers.0.weight"),
        ("unshard", "p1_share", "layers.1.weight"),
        ("activation", "out", None),
        ("reduce gradient", "g0", "layers.0.weight"),
        ("reduce gradient", "g1", "layers.1.weight"),
    ]
    assert collectives[1] == PlannedCollective(
        kind="all_gather",
        axis="dp",
        num_bytes=WEIGHT // 2,
        dtype=torch.float32,
        purpose="unshard",
        node="p1_share",
        parameter="layers.1.weight",
        phase="forward",
        module="layers.1",
    )


def test_totals_add_up():
    collectives = predicted_collectives(plan_by_hand(("dp", 2, FSDP), ("tp", 2, TENSOR_PARALLEL)))
    totals = collective_totals(collectives)
    assert sum(total.count for total in totals) == len(collectives)
    assert sum(total.num_bytes for total in totals) == sum(c.num_bytes for c in collectives)
