"""Tied embeddings on the first and last stage: one gradient, summed in the declared order."""

from __future__ import annotations

import pytest
import torch
from runner_cases import TIED, schedule, train_tied
from torch import Tensor, nn
from toy_pipeline import toy, train_in_one_process

from gt_pipeline.errors import RunnerSetupError
from gt_pipeline.runner.shared_parameters import SharedMember, find_members
from gt_pipeline.split import SharedGroup
from gt_trace.testing import GlooWorkers

_V_SCHEDULES = ("ZBVZeroBubble", "DualPipeV")


def _untied(num_stages: int) -> dict[str, Tensor]:
    """Gradients of both uses of the embedding, apart, as one process computes them."""
    model = toy(num_stages, tied=True)
    assert model.head is not None
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return train_in_one_process(num_stages, model=model).gradients


@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", *_V_SCHEDULES])
def test_both_copies_get_the_sum_in_declared_order_to_the_bit(four: GlooWorkers, name: str) -> None:
    apart = _untied(schedule(name).num_stages)
    expected = apart["embedding.weight"] + apart["head.weight"]
    gradients: dict[str, Tensor] = {}
    for of_rank in four.run(train_tied, name, False):
        gradients |= of_rank
    assert torch.equal(gradients.pop("embedding.weight"), expected)
    assert torch.equal(gradients.pop("head.weight"), expected)
    # A head with its own values would have changed every gradient.
    assert all(torch.equal(gradient, apart[name]) for name, gradient in gradients.items())


@pytest.mark.parametrize("name", _V_SCHEDULES)
def test_one_parameter_of_two_stages_gets_the_sum_once(four: GlooWorkers, name: str) -> None:
    apart = _untied(schedule(name).num_stages)
    gradients = four.run(train_tied, name, True)[0]
    expected = apart["embedding.weight"] + apart["head.weight"]
    assert torch.equal(gradients["embedding.weight"], expected)
    assert torch.equal(gradients["head.weight"], expected)


def test_the_sum_is_the_tied_models_gradient_but_for_the_order_of_summation() -> None:
    apart = _untied(4)
    tied = train_in_one_process(4, model=toy(4, tied=True)).gradients["embedding.weight"]
    torch.testing.assert_close(apart["embedding.weight"] + apart["head.weight"], tied)


def test_members_stand_in_the_order_of_names_then_stages() -> None:
    (members,) = find_members(
        [SharedGroup(("b", "a"))], {0: ["a"], 1: ["b", "c"], 2: ["a", "b"]}, {0: 5, 1: 6, 2: 5}
    )
    assert members == (
        SharedMember(name="b", stage=1, rank=6),
        SharedMember(name="b", stage=2, rank=5),
        SharedMember(name="a", stage=0, rank=5),
        SharedMember(name="a", stage=2, rank=5),
    )


def test_refuses_a_group_whose_parameter_is_on_no_stage() -> None:
    with pytest.raises(RunnerSetupError) as caught:
        find_members([TIED], {0: ["embedding.weight"]}, {0: 0})
    assert str(caught.value) == (
        "this pipeline cannot run:\n"
        "  - shared group ('embedding.weight', 'head.weight'): no stage has a parameter 'head.weight'"
    )
