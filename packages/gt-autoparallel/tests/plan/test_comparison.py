"""Two plans side by side: what differs is named, what does not is left out."""

from __future__ import annotations

from plan_doubles import DDP, FSDP, R, plan_by_hand

from gt_autoparallel.plan.comparison import compare


def test_ddp_and_fsdp_differ_in_parameters_gathers_and_memory():
    ddp, fsdp = plan_by_hand(("dp", 4, DDP)), plan_by_hand(("dp", 4, FSDP))
    comparison = compare(ddp, fsdp)
    assert not comparison.is_same_placement
    assert comparison.nodes == ()
    assert str(comparison) == (
        f"cost of a step: {ddp.objective_us:,.1f} us -> {fsdp.objective_us:,.1f} us (+1.07%), simulated\n"
        "parameters of a rank: 2,048 -> 512 bytes (-1,536)\n"
        "gradients of a rank: 2,048 -> 512 bytes (-1,536)\n"
        "optimizer state of a rank: 4,096 -> 1,024 bytes (-3,072)\n"
        "saved activations of a rank: 128 -> 1,152 bytes (+1,024)\n"
        "gradients of a rank that are to come in the backward: 0 -> 256 bytes (+256)\n"
        "gradients of a rank that are to come at a reduction: 0 -> 256 bytes (+256)\n"
        "reduce gradient: all_reduce along dp: 2 -> 0 launches, 2,048 -> 0 bytes\n"
        "reduce gradient: reduce_scatter along dp: 0 -> 2 launches, 0 -> 2,048 bytes\n"
        "unshard: all_gather along dp: 0 -> 2 launches, 0 -> 2,048 bytes\n"
        "parameter layers.0.weight: R -> S(0)\n"
        "parameter layers.1.weight: R -> S(1)\n"
    )


def test_a_plan_does_not_differ_from_itself():
    plan = plan_by_hand(("dp", 4, FSDP))
    comparison = compare(plan, plan)
    assert comparison.is_same_placement
    assert str(comparison).endswith("(+0.00%), simulated\nevery tensor is placed the same\n")


def test_activations_that_move_are_named_and_meshes_may_differ():
    sharded = plan_by_hand(("dp", 4, FSDP))
    other = plan_by_hand(("dp", 4, {**FSDP, "x_share": R}))
    assert "node x_share: S(0) -> R" in str(compare(sharded, other))
    wide = plan_by_hand(("dp", 2, FSDP), ("more", 2, FSDP | {"p0": R}))
    assert "parameter layers.0.weight: S(0) -> S(0) R" in str(compare(sharded, wide))
