"""What a dry run says of the hardware: tokens, time, memory, each labelled."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils

from gt_passes.simulation import h100_sxm, optimizer_step_us
from gt_trace import trace_step
from gt_trace.fsdp import shard
from gt_trainer.dry_run.simulate_steps import group_labels, simulate_graphs
from gt_trainer.dry_run.simulated_step import SimulatedStep
from gt_trainer.dry_run.step_facts import StepFacts
from gt_trainer.dry_run.step_over_time import memory_over_step, step_timeline
from gt_trainer.steps.captured_step import WholeStepProgram

WORLD_SIZE = 8
FACTS = StepFacts(
    num_gpus=WORLD_SIZE,
    tokens=WORLD_SIZE * 64,
    num_microbatches=1,
    flops_per_token=6 * 2 * 512 * 512,
    num_parameters_per_rank=2 * 512 * 512 // WORLD_SIZE,
    parameter_bytes_per_rank=4 * 2 * 512 * 512 // WORLD_SIZE,
    clips_gradients=True,
)


@pytest.fixture(scope="module")
def traced():
    """A sharded step of two linear layers on 8 ranks that do not exist, and their mesh."""
    dist_utils.init_fake_mode(WORLD_SIZE)
    try:
        dims = ParallelDims(
            dp_replicate=1,
            dp_shard=WORLD_SIZE,
            cp=1,
            tp=1,
            pp=1,
            ep=1,
            world_size=WORLD_SIZE,
            spmd_backend="partial_dtensor",
        )
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False))
        shard(model, dims.get_mesh("fsdp"), mode="shard")

        def step(x):
            loss = model(x).sum()
            return loss, torch.autograd.grad(loss, list(model.parameters()))

        x = torch.ones(64, 512, device="meta")
        yield trace_step(step, module=model, meta_device="cpu")(x), dims
    finally:
        dist.destroy_process_group()


def run(traced, facts: StepFacts = FACTS, **options: object) -> SimulatedStep:
    step, dims = traced
    return simulate_graphs(
        WholeStepProgram(step).graphs, facts, labels=group_labels(dims), **options
    )


def test_a_step_is_its_graph_and_its_optimizer(traced):
    found = run(traced)
    optimizer_us = optimizer_step_us(FACTS.num_parameters_per_rank, h100_sxm())
    assert found.step_us == pytest.approx(found.graph.step_us + optimizer_us)
    assert found.tokens_per_second_per_gpu == pytest.approx(1e6 * 64 / found.step_us)
    expected = found.tokens_per_second_per_gpu * FACTS.flops_per_token / 989.4e12
    assert found.mfu == pytest.approx(expected)


def test_its_timeline_has_a_row_for_computation_and_each_kind_of_communication(traced):
    found = run(traced)
    timeline = step_timeline(found)
    computation, *others = timeline.rows
    assert computation.name == "computation"
    assert {each.kind for each in computation.bars} == {"forward", "backward", "optimizer"}
    assert {each.name for each in others} == {each.purpose for each in found.by_purpose}
    assert max(each.end_us for each in computation.bars) == timeline.end_us
    assert timeline.end_us == pytest.approx(found.step_us)
    assert timeline.what == "a step, on any rank: all do alike"


def test_microbatches_run_the_graph_again_and_keep_gradients(traced):
    once = run(traced)
    twice = run(traced, replace(FACTS, num_microbatches=2, tokens=2 * FACTS.tokens))
    assert twice.step_us == pytest.approx(2 * once.step_us - once.optimizer_us)
    assert twice.peak_bytes == once.peak_bytes + FACTS.parameter_bytes_per_rank
    held = twice.fullest.peak.bytes_by_part
    assert held["accumulated gradients"] == FACTS.parameter_bytes_per_rank
    assert sum(held.values()) == twice.peak_bytes
    assert "2 microbatches, " in str(twice)
    counts = {total.purpose: total.count for total in once.by_purpose}
    assert {total.purpose: total.count for total in twice.by_purpose} == {
        purpose: 2 * count for purpose, count in counts.items()
    }


def test_memory_includes_the_state_of_the_optimizer(traced):
    found = run(traced)
    state_bytes = found.fullest.peak.bytes_by_part["optimizer state"]
    assert state_bytes == 2 * FACTS.parameter_bytes_per_rank
    assert found.peak_bytes == found.graph.memory.peak_bytes + state_bytes
    assert max(each.num_bytes for each in memory_over_step(found).moments) == found.peak_bytes
    (line,) = [line for line in str(found).splitlines() if "peak memory" in line]
    assert "parameters and buffers" in line
    assert "optimizer state" in line


def test_collectives_are_told_by_what_they_are_for(traced):
    purposes = {total.purpose for total in run(traced).graph.by_purpose}
    assert purposes == {"FSDP unshard", "FSDP reduce_grad"}


def test_every_line_stands_under_a_heading_that_says_simulated(traced):
    lines = str(run(traced, attention_note="captured otherwise")).splitlines()
    assert lines[0] == (
        "Simulated on 8 H100 SXM, by a model of the hardware: nothing here was measured"
    )
    names = [line[2:18].strip() for line in lines[1:]]
    assert names == [
        *("step", "throughput", "made of", "exposed", "exposed"),
        *("peak memory", "sensitivity", "attention"),
    ]
    assert "simulated; with ±30% of compute" in str(run(traced))


def test_what_does_not_fit_says_so(traced):
    small = replace(h100_sxm(), hbm_capacity_bytes=2**20)
    assert "DOES NOT FIT" in str(run(traced, hardware=small))
    assert "DOES NOT FIT" not in str(run(traced))


def test_the_trace_is_written_where_it_is_asked_for(traced, tmp_path: Path):
    path = tmp_path / "step.json"
    found = run(traced, trace_path=path)
    assert json.loads(path.read_text())["otherData"]["simulated"] is True
    assert str(path) in str(found)
    assert "trace" not in str(run(traced))
