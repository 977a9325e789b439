"""What a dry run says of memory is what live tensors take, where microbatches reduce once or not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from gt_config import Accumulation, MemoryPolicy
from gt_passes.testing import measure_peak_bytes_of
from gt_pipeline.graph import AccumulatedStep
from gt_trainer.dry_run.dry_run import dry_run
from gt_trainer.dry_run.fake_step import FakeStep, fake_step
from gt_trainer.models.llama3 import llama3_debugmodel
from gt_trainer.startup import StartupClock
from gt_trainer.steps.captured_microbatches import microbatches
from gt_trainer.steps.captured_step import whole_step
from gt_trainer.steps.program import capture_program
from gt_trainer.steps.program_step import accumulate_gradients
from gt_trainer.steps.recipe import Recipe
from gt_trainer.trainer import GraphTrainer

WORLD_SIZE = 8


def configuration(
    accumulation: Accumulation, memory_policy: MemoryPolicy, num_microbatches: int
) -> GraphTrainer.Config:
    """Few tokens, so that parameters and gradients weigh as much as activations."""
    config = llama3_debugmodel()
    config.training.seq_len, config.training.local_batch_size = 64, 1
    config.training.global_batch_size = WORLD_SIZE * num_microbatches
    config.parallelism.data_parallel_shard_degree = WORLD_SIZE
    config.compile = dataclasses.replace(
        config.compile, accumulation=accumulation, memory_policy=memory_policy
    )
    return config


def measured_bytes(config: GraphTrainer.Config, num_microbatches: int) -> int:
    """The most bytes that are alive in a step, run on rank 0 of ranks that answer with anything."""
    with fake_step(config, WORLD_SIZE) as step:
        step.model.to_empty(device="cpu")
        clock = StartupClock()
        recipe = Recipe(options=config.compile)
        # Masks are on meta, where long ones need no memory.
        inputs = pytree.tree_map(
            lambda each: torch.ones_like(each, device="cpu") if each.is_meta else each, step.inputs
        )
        arguments = (step.model, step.loss_fn, *inputs)
        parameters = list(step.model.parameters())

        def run_once() -> object:
            found = accumulated(inputs for _ in range(num_microbatches))
            accumulate_gradients(parameters, found.gradients)
            return None

        def run_each() -> object:
            for _ in range(num_microbatches):
                _, gradients = bound(*inputs)
                accumulate_gradients(parameters, gradients)
                del gradients
            return None

        held = [*_plain(step), *inputs]
        if config.compile.accumulation == "reduce_once":
            report = capture_program(
                microbatches(*arguments, num_microbatches=num_microbatches),
                recipe=recipe,
                clock=clock,
            )
            accumulated = AccumulatedStep(report.program.captured, step.model)
            return measure_peak_bytes_of(run_once, held=held)
        bound = capture_program(
            whole_step(*arguments), recipe=recipe, clock=clock
        ).program.captured.bind(step.model)
        return measure_peak_bytes_of(run_each, held=held)


def _plain(step: FakeStep) -> list[Any]:
    return [
        getattr(each, "_local_tensor", each)
        for each in (*step.model.parameters(), *step.model.buffers())
    ]


@pytest.mark.parametrize(
    ("accumulation", "memory_policy", "num_microbatches"),
    [
        ("every_microbatch", "save_all", 3),
        ("reduce_once", "save_all", 2),
        ("reduce_once", "selective", 3),
    ],
)
def test_a_dry_run_says_what_a_step_holds(
    accumulation: Accumulation, memory_policy: MemoryPolicy, num_microbatches: int
):
    config = configuration(accumulation, memory_policy, num_microbatches)
    simulated = dry_run(config, WORLD_SIZE).simulated
    at_peak = simulated.fullest.peak.bytes_by_part
    estimated = simulated.peak_bytes - at_peak["optimizer state"]
    again = configuration(accumulation, memory_policy, num_microbatches)
    assert estimated == pytest.approx(measured_bytes(again, num_microbatches), rel=0.05)
    if accumulation == "reduce_once":
        whole_bytes = WORLD_SIZE * simulated.facts.parameter_bytes_per_rank
        # The last microbatch lets go of what it has used, such as the embedding.
        assert at_peak["gathered parameters"] == pytest.approx(whole_bytes, rel=0.1)
        assert at_peak["gradients"] == pytest.approx(whole_bytes, rel=0.01)
