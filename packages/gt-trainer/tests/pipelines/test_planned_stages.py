"""What the stages of a pipeline are planned with, and what neighbours agree on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from gt_autoparallel import MeshShape, Microbatches
from gt_pipeline.schedules import schedule_of
from gt_trainer.models import llama3, qwen3
from gt_trainer.pipelines.pipeline_plan import PipelinePlan, pipeline_plan
from gt_trainer.pipelines.planned_stages import (
    demands_of_stage,
    microbatches_of,
    stage_batch,
    stage_budget_bytes,
    stage_loss_bytes,
)
from gt_trainer.pipelines.split_model import cut_stages
from gt_trainer.placement.planned_mesh import local_token_shape, token_layout

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def mesh(**sizes: int) -> MeshShape:
    return MeshShape(names=tuple(sizes), sizes=tuple(sizes.values()))


def stages(module: Any, function: str) -> tuple[PipelinePlan, dict[int, Any], Any]:
    """A debug model on two pipeline ranks: its plan, its stages, its configuration."""
    config = getattr(module, function)()
    config.parallelism.pipeline_parallel_degree = 2
    config.parallelism.pipeline_parallel_microbatch_size = 2
    config.training.local_batch_size = 8
    model_config = copy.deepcopy(config.model_spec.model)
    with torch.device("meta"):
        model = model_config.build()
    plan = pipeline_plan(
        config.parallelism, num_layers=len(model_config.layers), local_batch_size=8
    )
    return plan, cut_stages(model, plan, range(plan.schedule.num_stages)), config


@pytest.mark.parametrize(
    ("axes", "seq_len", "layout", "local"),
    [
        (mesh(fsdp=4), 32, (S0,), (2, 32, 8)),
        (mesh(tp=2, fsdp=4), 32, (S1, S0), (2, 16, 8)),
        (mesh(tp=2, dp_replicate=2, fsdp=2), 33, (R, S0, S0), (2, 33, 8)),
        (mesh(ep=2, efsdp=2), 32, (S0, S0), (2, 32, 8)),
    ],
)
def test_hidden_states_are_cut_by_samples_and_sequence(
    axes: MeshShape, seq_len: int, layout: tuple[object, ...], local: tuple[int, ...]
) -> None:
    assert token_layout(axes, seq_len) == layout
    assert local_token_shape(axes, seq_len, num_samples=2, width=8) == local


def test_stages_agree_on_what_they_pass_on() -> None:
    _, parts, config = stages(llama3, "llama3_debugmodel")
    axes = mesh(tp=2, fsdp=4)
    first, last = (
        demands_of_stage(
            parts[index],
            index,
            experts="any",
            mesh=axes,
            seq_len=config.training.seq_len,
            is_tied=False,
        )
        for index in (0, 1)
    )
    assert first.inputs == {"*": (R, S0)}
    assert first.outputs == {"output": (S1, S0)}
    assert last.inputs == {"*": (R, S0), "tokens": (S1, S0)}
    assert last.outputs == {"output": (S1, S0)}
    assert first.parameters == last.parameters == {}


def test_both_ends_of_a_tied_weight_lie_alike() -> None:
    _, parts, config = stages(qwen3, "qwen3_debugmodel")
    found = [
        demands_of_stage(
            part,
            index,
            experts="any",
            mesh=mesh(tp=2, fsdp=3),
            seq_len=config.training.seq_len,
            is_tied=True,
        ).parameters
        for index, part in parts.items()
    ]
    # 2,048 rows are no multiple of 6.
    assert found == [{"tok_embeddings.weight": (S0, R)}, {"lm_head.weight": (S0, R)}]


def test_a_stage_takes_a_microbatch_of_all_ranks() -> None:
    _, parts, config = stages(llama3, "llama3_debugmodel")
    length, axes = config.training.seq_len, mesh(tp=2, fsdp=4)
    first, last = (
        stage_batch(parts[index], index, config.training, axes, microbatch_size=2)
        for index in (0, 1)
    )
    (tokens,), (hidden,) = first.inputs, last.inputs
    assert (tokens.shape, tokens.dtype, tokens.requires_grad) == ((8, length), torch.int64, False)
    assert hidden.shape == (8, length, config.model_spec.model.dim)
    assert hidden.requires_grad
    assert first.kwargs["positions"].shape == last.kwargs["positions"].shape == (8, length)
    assert config.training.local_batch_size == 8


@pytest.mark.parametrize(
    ("name", "num_stages", "live", "budget"),
    [("1F1B", 2, 2, 100), ("Interleaved1F1B", 4, 3, 50), ("GPipe", 2, 6, 100)],
)
def test_a_schedule_says_what_is_live_and_how_stages_share_a_rank(
    name: str, num_stages: int, live: int, budget: int
) -> None:
    schedule = schedule_of(name, num_ranks=2, num_stages=num_stages, num_microbatches=6)
    plan = PipelinePlan(schedule=schedule, names_per_stage=((),) * num_stages)
    num_graphs = num_stages // 2
    assert microbatches_of(plan) == Microbatches(
        num_in_step=6, num_live=live, num_graphs=num_graphs
    )
    assert 100 * plan.memory_share(0) == budget


def test_stages_leave_room_for_what_they_receive_and_the_last_one_knows_its_loss() -> None:
    plan, parts, config = stages(llama3, "llama3_debugmodel")
    axes, length = mesh(tp=2, fsdp=4), config.training.seq_len
    config.training.mixed_precision_param = "bfloat16"
    first, last = (
        stage_budget_bytes(2**30, parts[i], i, plan, config.training, axes, microbatch_size=2)
        for i in (0, 1)
    )
    assert first == 2**30
    model = config.model_spec.model
    tokens = 2 * length // 2  # of a rank
    received = 2 * tokens * model.dim
    first_chunk = 8 * 2 + 7 * 2 + 4  # logits, copies of the other chunks, and its own in float32
    of_loss = tokens * model.vocab_size * first_chunk // 8
    assert last == 2**30 - microbatches_of(plan).num_live * received
    assert stage_budget_bytes(1, parts[1], 1, plan, config.training, axes, microbatch_size=2) == 1
    assert [
        stage_loss_bytes(parts[i], i, plan, config.training, axes, microbatch_size=2)
        for i in (0, 1)
    ] == [0, of_loss]
