"""A dry run captures with the input preparers of the trainer whose configuration it is given."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from gt_trace import InputPreparer, TraceInputs
from gt_trainer.dry_run.captured_dry_step import capture_divided, capture_dry_step
from gt_trainer.dry_run.fake_pipeline import planned_pipeline
from gt_trainer.dry_run.fake_step import fake_ranks, fake_step, meta_model
from gt_trainer.launcher import run_in_child
from gt_trainer.models import llama3
from gt_trainer.trainer import GraphTrainer

REMAINDER = torch.ops.aten.remainder.Scalar


class ShiftTokens(InputPreparer):
    def inside_trace(self, inputs: TraceInputs) -> TraceInputs:
        tokens, *others = inputs.args
        if tokens is not None:
            tokens = (tokens + 1) % 2048
        return TraceInputs(args=(tokens, *others), kwargs=inputs.kwargs)


class PreparingTrainer(GraphTrainer):
    @dataclass(kw_only=True, slots=True)
    class Config(GraphTrainer.Config):
        pass

    @classmethod
    def input_preparers(cls, config: GraphTrainer.Config) -> Sequence[InputPreparer]:
        return (ShiftTokens(),)


def config(**parallelism: Any) -> GraphTrainer.Config:
    base = llama3.llama3_debugmodel()
    base.model_spec.model.layers = base.model_spec.model.layers[:2]
    base.training.seq_len, base.training.local_batch_size = 32, 2
    base.parallelism = dataclasses.replace(base.parallelism, **parallelism)
    fields = {each.name: getattr(base, each.name) for each in dataclasses.fields(base)}
    return PreparingTrainer.Config(**fields)


def num_prepared(graph_module: torch.fx.GraphModule) -> int:
    return len(graph_module.graph.find_nodes(op="call_function", target=REMAINDER))


def _captured() -> list[int]:
    whole = config()
    reduced_once = config()
    reduced_once.training.global_batch_size = 4
    reduced_once.compile = dataclasses.replace(reduced_once.compile, accumulation="reduce_once")
    found = []
    for each in (whole, reduced_once):
        with fake_step(each, 1) as step:
            (report,) = capture_dry_step(each, step).reports
        traced = report.program.captured if each is whole else report.program.captured.traced
        found.append(num_prepared(traced.graph_module))
    stages = config(pipeline_parallel_degree=2, pipeline_parallel_schedule="1F1B")
    with fake_ranks(2):
        pipeline = capture_divided(stages, meta_model(stages, 2), planned_pipeline(stages))
        found += [num_prepared(each.actions["FORWARD"].graph_module) for each in pipeline.stages]
    return found


@pytest.mark.slow
def test_every_form_of_capture_in_a_dry_run_prepares_its_inputs():
    assert run_in_child(_captured, timeout_seconds=300) == [1, 1, 1, 0]
