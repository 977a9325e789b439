"""What keeps two copies of a weight one, as far as one process can show it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torchtitan.components.optimizer.utils import (
    get_flat_optim_state_dict,
    load_flat_optim_state_dict,
)
from torchtitan.config import ParallelismConfig

from gt_pipeline.runner.shared_parameters import SharedMember, SharedParameter
from gt_trainer.decoder.tied_stages import EMBEDDING, PROJECTION
from gt_trainer.pipelines.pipeline_plan import pipeline_plan
from gt_trainer.pipelines.tied_weight import (
    TiedSchedule,
    _call_by_embedding,
    _members,
    _Part,
)


class Stage(nn.Module):
    """One end of a tied model, or both."""

    def __init__(self, *, embeds: bool, projects: bool) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(3, 2) if embeds else None
        self.norm = nn.LayerNorm(2) if projects else None
        self.lm_head = nn.Linear(2, 3, bias=False) if projects else None


def optimizers_of(*parts: nn.Module) -> list[torch.optim.Optimizer]:
    made = []
    for part in parts:
        named = [*part.named_parameters()]
        for _, parameter in named:
            parameter.grad = torch.ones_like(parameter)
        group = {"params": [p for _, p in named], "param_names": [n for n, _ in named]}
        made.append(torch.optim.AdamW([group]))
        made[-1].step()
        _call_by_embedding(made[-1])
    return made


def test_an_optimizer_calls_the_projection_as_the_whole_models_does():
    first, last = Stage(embeds=True, projects=False), Stage(embeds=False, projects=True)
    keys = [get_flat_optim_state_dict(each) for each in optimizers_of(first, last)]
    assert f"state.{EMBEDDING}.exp_avg" in keys[0].keys() & keys[1].keys()
    assert "state.norm.weight.exp_avg" in keys[1]
    assert not any(PROJECTION in key for each in keys for key in each)


def test_two_stages_of_one_rank_load_one_state_and_keep_two():
    parts = Stage(embeds=True, projects=False), Stage(embeds=False, projects=True)
    first, last = optimizers_of(*parts)
    saved = get_flat_optim_state_dict(first) | get_flat_optim_state_dict(last)
    for each in (first, last):
        load_flat_optim_state_dict(each, saved)
    assert parts[0].tok_embeddings is not None
    assert parts[1].lm_head is not None
    one = first.state[parts[0].tok_embeddings.weight]
    other = last.state[parts[1].lm_head.weight]
    for key in ("step", "exp_avg", "exp_avg_sq"):
        assert torch.equal(one[key], other[key])
        assert one[key].data_ptr() != other[key].data_ptr()
    first.step()
    assert not torch.equal(one["step"], other["step"])


def test_eager_stages_add_the_sum_of_a_step_to_what_earlier_steps_left():
    parts = {0: Stage(embeds=True, projects=False), 1: Stage(embeds=False, projects=True)}
    weights = {0: parts[0].get_parameter(EMBEDDING), 1: parts[1].get_parameter(PROJECTION)}
    members = [
        SharedMember(name=PROJECTION, stage=1, rank=0),
        SharedMember(name=EMBEDDING, stage=0, rank=0),
    ]
    copies = SharedParameter(members, {i: _Part(part) for i, part in parts.items()}, None)

    def step(**gradients: float) -> None:
        for index, value in enumerate(gradients.values()):
            assert weights[index].grad is None  # what a step computes does not mix with earlier
            weights[index].grad = torch.full((3, 2), value)
        norm = parts[1].norm
        assert norm is not None
        norm.weight.grad = torch.ones(2)

    runtime: Any = SimpleNamespace(step=step)
    schedule = TiedSchedule(runtime, parts, [copies])
    schedule.step(embedding=1.0, projection=10.0)
    assert [w.grad.unique().item() for w in weights.values() if w.grad is not None] == [11, 11]
    schedule.step(embedding=2.0, projection=20.0)
    assert [w.grad.unique().item() for w in weights.values() if w.grad is not None] == [33, 33]
    assert weights[0].grad is not weights[1].grad


@pytest.mark.parametrize(
    ("schedule", "stages", "ranks"),
    [
        ("1F1B", (1, 0), (5, 2)),
        ("Interleaved1F1B", (3, 0), (5, 2)),
        ("ZBVZeroBubble", (3, 0), (2, 2)),
    ],
)
def test_copies_are_on_the_last_stage_and_the_first(
    schedule: str, stages: tuple[int, int], ranks: tuple[int, int]
):
    plan = pipeline_plan(
        ParallelismConfig(pipeline_parallel_degree=2, pipeline_parallel_schedule=schedule),
        num_layers=4,
        local_batch_size=4,
    )
    (members,) = _members(plan, [2, 5])
    assert [each.name for each in members] == [PROJECTION, EMBEDDING]
    assert tuple(each.stage for each in members) == stages
    assert tuple(each.rank for each in members) == ranks
