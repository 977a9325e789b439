"""What is read off a stage's graphs is what the stage holds when it runs."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from stage_models import ACTIVATION, Block, CountingBlock, squared_error
from torch import Tensor, nn

from gt_pipeline.estimates import StageMemory
from gt_pipeline.graph import GraphPipelineStage
from gt_pipeline.runner import MicrobatchInputs

_BLOCK = 512


def stage_of(module: nn.Module) -> GraphPipelineStage:
    return GraphPipelineStage(module, stage_index=1, num_stages=3, activations=[ACTIVATION])


def held(tensors: Iterable[Tensor], besides: Iterable[Tensor] = ()) -> int:
    """Bytes in blocks of the allocator, each piece of memory once."""
    known = {each.untyped_storage().data_ptr() for each in besides}
    sizes = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in tensors
        if each.untyped_storage().data_ptr() not in known
    }
    return sum(-(-size // _BLOCK) * _BLOCK for size in sizes.values())


@pytest.mark.parametrize("new_module", [Block, CountingBlock])
def test_a_stage_holds_between_actions_what_was_estimated(new_module: type[Block]) -> None:
    module = new_module()
    stage = stage_of(module)
    memory = StageMemory.of(stage)
    state = [*module.parameters(), *module.buffers()]
    assert memory.state_bytes == held(state)
    assert memory.parameter_bytes == held(module.parameters())
    assert memory.num_parameters == sum(each.numel() for each in module.parameters())
    activation, gradient = torch.randn(4, 8), torch.randn(4, 8)
    stage.forward(0, (activation,), MicrobatchInputs())
    assert memory.saved_bytes == held(stage._saved[0], besides=state)
    stage.backward_input(0, (gradient,))
    assert memory.between_bytes == held(stage._between[0], besides=state)
    stage.backward_weight(0)
    assert memory.accumulated_bytes == held(stage._gradients.sums._sums)
    stage.reduce_gradients()
    assert memory.reduced_bytes == held(stage.gradients().values())
    assert memory.gathered_bytes == 0  # nothing is sharded
    assert memory.entering_bytes == memory.leaving_bytes == held([activation])


def test_an_action_frees_what_it_takes_for_the_last_time() -> None:
    stage = stage_of(nn.Sequential(*(Block(hidden=64) for _ in range(8))))
    memory = StageMemory.of(stage)
    backward = memory.actions["FULL_BACKWARD"]
    # Gradients of all parameters are made while what was saved is freed bit by bit: with both held
    # to the end, an action would take what it makes and more.
    made = memory.accumulated_bytes + memory.entering_bytes  # gradients of the input too
    assert 0 < backward.extra_bytes < made
    assert memory.actions["FORWARD"].extra_bytes >= memory.saved_bytes - memory.entering_bytes


def test_the_stage_with_the_loss_sends_no_activation() -> None:
    stage = GraphPipelineStage(
        Block(),
        stage_index=2,
        num_stages=3,
        activations=[ACTIVATION],
        inputs=MicrobatchInputs(target=torch.randn(4, 8)),
        loss_fn=squared_error,
    )
    memory = StageMemory.of(stage)
    assert memory.leaving_bytes == _BLOCK  # the loss
    assert memory.actions["FORWARD"].num_unsized == 0
