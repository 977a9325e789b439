"""The recipe on steps that gt-trace captured and sharded: counts on a fake world, bits on gloo."""

from __future__ import annotations

import torch
from sharded_step_cases import (
    capture_two_microbatches,
    outputs_before_and_after,
    outputs_before_and_after_buckets,
    run_recipe,
)

from gt_passes import Verifier
from gt_trace.fsdp import MixedPrecision
from gt_trace.graph_text import collective_counts
from gt_trace.testing import GlooWorkers, fake_world


def test_each_parameter_is_gathered_once_and_every_gradient_still_reduced():
    with fake_world(rank=3, world_size=8):
        precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        step, _, _ = capture_two_microbatches(precision)
        before = collective_counts(step.graph_module)
        report = run_recipe(step)
        after = collective_counts(step.graph_module)
    assert before["all_gather_into_tensor"] == 2 * 3
    assert after["all_gather_into_tensor"] == 3
    assert after["reduce_scatter_tensor"] == before["reduce_scatter_tensor"]
    assert report.unverified == ()
    assert not Verifier().verify(step.graph_module).problems


def test_every_rank_gets_the_same_program():
    programs = []
    for rank in (0, 5):
        with fake_world(rank=rank, world_size=8):
            step, _, _ = capture_two_microbatches()
            run_recipe(step)
            programs.append(
                [(node.name, str(node.target)) for node in step.graph_module.graph.nodes]
            )
    assert programs[0] == programs[1]


def test_loss_and_gradients_keep_every_bit_on_two_ranks():
    with GlooWorkers(2) as workers:
        for case in (outputs_before_and_after, outputs_before_and_after_buckets):
            for before, after in workers.run(case):
                assert len(before) == len(after) == 4
                assert all(map(torch.equal, before, after))
