"""When microbatches can share gathering and reduction, with the exact text."""

import dataclasses

import pytest
from asked import found, mesh, only

from gt_config import CompileConfig, Violation

ONCE = CompileConfig(accumulation="reduce_once")
SEVERAL = mesh(world=2, dp_shard=2, gradient_accumulation_steps=4)


@pytest.mark.parametrize(
    "degrees",
    [{"dp_shard": 2}, {"dp_replicate": 2}, {"tp": 2}],
    ids=["shards", "replicas", "sequence parallelism"],
)
def test_microbatches_share_what_ranks_do_together(degrees: dict):
    assert found(ONCE, mesh(world=2, gradient_accumulation_steps=4, **degrees)) == ()


def test_one_microbatch_has_nothing_to_share():
    assert only(ONCE, dataclasses.replace(SEVERAL, gradient_accumulation_steps=1)) == Violation(
        flag="--compile.accumulation",
        value="reduce_once",
        allowed="its default 'every_microbatch', since a step has one microbatch and it would do "
        "nothing",
        fix="drop the option, or use a larger --training.global_batch_size",
    )


@pytest.mark.parametrize(
    "topology",
    [
        mesh(world=1, gradient_accumulation_steps=4),
        mesh(world=2, tp=2, sequence_parallel=False, gradient_accumulation_steps=4),
    ],
    ids=["one rank", "whole sequences"],
)
def test_so_have_ranks_that_reduce_nothing(topology):
    assert only(ONCE, topology) == Violation(
        flag="--compile.accumulation",
        value="reduce_once",
        allowed="its default 'every_microbatch', since no parameter is gathered and no gradient "
        "reduced and it would do nothing",
        fix="drop the option, or use several data-parallel ranks",
    )


def test_a_plan_says_when_ranks_communicate():
    planned = dataclasses.replace(ONCE, autoparallel=True)
    assert only(planned, SEVERAL) == Violation(
        flag="--compile.accumulation",
        value="reduce_once",
        allowed="'every_microbatch' with --compile.autoparallel: a plan is the cheapest if every "
        "microbatch gathers and reduces as it says",
        fix="drop one of the two",
    )


def test_microbatches_that_share_have_nothing_for_a_second_group():
    assert only(dataclasses.replace(ONCE, fsdp_second_group=True), SEVERAL) == Violation(
        flag="--compile.fsdp_second_group",
        value=True,
        allowed="False with --compile.accumulation reduce_once: no microbatch both gathers "
        "parameters and reduces gradients",
        fix="leave the flag out, or use --compile.accumulation every_microbatch",
    )


def test_recordings_go_with_it():
    assert found(dataclasses.replace(ONCE, cuda_graphs=True), SEVERAL) == ()
