"""What a stage hands over stays as it is: no later microbatch, and no later step, changes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stage_models import ACTIVATION, WIDTH, squared_error
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import GraphModule

from gt_pipeline.errors import StageCutError, StageInputError
from gt_pipeline.graph import GraphPipelineStage
from gt_pipeline.runner import MicrobatchInputs
from gt_trace.fsdp import shard
from gt_trace.testing import fake_world

NOTHING = MicrobatchInputs()


def rows() -> Tensor:
    return torch.randn(4, WIDTH)


def middle(module: nn.Module, **options: Any) -> GraphPipelineStage:
    options = {"stage_index": 1, "num_stages": 3, "activations": [ACTIVATION], **options}
    return GraphPipelineStage(module, **options)


class Summing(nn.Module):
    """Returns what it has seen so far, by the names of ``returned``."""

    def __init__(self, returned: str) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.returned = returned

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        updated = self.seen.add_(x.detach().sum(0))
        seen = {
            "the buffer": self.seen,
            "the result of its update": updated,
            "a view of it": self.seen.view(2, WIDTH // 2)[1],
            "a parameter": self.weight.detach(),
        }[self.returned]
        return x * self.weight, seen


RETURNED = ["the buffer", "the result of its update", "a view of it", "a parameter"]


@pytest.mark.parametrize("returned", RETURNED)
def test_state_that_leaves_a_stage_is_a_copy(returned: str) -> None:
    module, eager = Summing(returned), Summing(returned)
    stage = middle(module)
    inputs = [rows() for _ in range(2)]
    found = [stage.forward(number, (x,), NOTHING)[1] for number, x in enumerate(inputs)]
    with torch.no_grad():
        module.weight.add_(1)
        expected = [eager(x)[1].clone() for x in inputs]
    assert all(map(torch.equal, found, expected))
    state = {each.untyped_storage().data_ptr() for each in (module.seen, module.weight)}
    assert not state & {each.untyped_storage().data_ptr() for each in found}


def test_a_loss_that_is_a_buffer_is_a_copy_in_evaluation_too() -> None:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(()))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, self.total.add_(x.detach().sum())

    def loss(output: tuple[Tensor, Tensor], target: Tensor) -> tuple[Tensor, Tensor]:
        return squared_error(output[0], target), output[1]

    module = Running()
    microbatch = MicrobatchInputs(target=rows())
    stage = middle(module, num_stages=2, inputs=microbatch, loss_fn=loss)
    x = rows()
    first, second = (stage.evaluate(number, (x,), microbatch)[1] for number in range(2))
    assert torch.equal(second, module.total)
    assert torch.equal(first, x.sum())
    assert not torch.equal(first, second)


class TwoShifts(nn.Module):
    """The gradients of its parameters are equal, and computed apart."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(WIDTH))
        self.second = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.first + self.second


def share_sums(graph_module: GraphModule, kind: str, context: Any) -> None:
    """What common-subexpression elimination does, in pairs alone."""
    if kind != "OVERLAP_F_B":
        return
    graph = graph_module.graph
    first, second = graph.find_nodes(op="call_function", target=torch.ops.aten.sum.dim_IntList)
    assert first.args[1:] == second.args[1:]
    second.replace_all_uses_with(first)
    graph.erase_node(second)
    graph_module.recompile()


def test_gradients_that_share_memory_in_a_pair_only_are_accumulated_apart() -> None:
    module = TwoShifts()
    stage = middle(module, transform=share_sums)
    gradients = [rows() for _ in range(3)]
    stage.forward(0, (rows(),), NOTHING)
    for number in range(2):
        stage.overlap(
            number + 1,
            (rows(),),
            NOTHING,
            backward_stage=stage,
            backward_kind="FULL_BACKWARD",
            backward_microbatch=number,
            output_gradients=(gradients[number],),
        )
    stage.full_backward(2, (gradients[2],))
    stage.reduce_gradients()
    expected = gradients[0].sum(0) + gradients[1].sum(0) + gradients[2].sum(0)
    assert torch.equal(stage.gradients()["first"], expected)
    assert torch.equal(stage.gradients()["second"], expected)


def test_a_mistyped_kind_of_backward_is_refused() -> None:
    stage = middle(TwoShifts())
    message = "backward_kind is 'full_backward'; allowed: 'FULL_BACKWARD' or 'BACKWARD_INPUT'"
    with pytest.raises(ValueError, match=message):
        stage.prepare_overlap(stage, "full_backward")  # type: ignore[arg-type]


def share_reduced(graph_module: GraphModule, kind: str, context: Any) -> None:
    if kind == "REDUCE_GRAD":
        output = graph_module.graph.output_node()
        first, second = output.args[0]
        assert first is not second
        output.args = ((first, first),)
        graph_module.recompile()


def test_reduced_gradients_that_share_memory_become_gradients_apart() -> None:
    with fake_world(rank=0, world_size=2):
        module = TwoShifts()
        shard(module, init_device_mesh("cpu", (2,), mesh_dim_names=("data",)), mode="replicate")
        stage = middle(module, transform=share_reduced, verify=False)
        stage.unshard()
        stage.forward(0, (rows(),), NOTHING)
        stage.full_backward(0, (rows(),))
        stage.reduce_gradients()
        local = [each.to_local() for each in stage.gradients().values()]
    assert len({each.data_ptr() for each in local}) == 2


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient.mul_(2)


def test_a_backward_that_writes_to_the_gradient_that_arrives_is_refused() -> None:
    class Writing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return _Doubled.apply(x)

    with pytest.raises(StageCutError, match=r"output_gradient .* belongs to another stage: write "):
        middle(Writing())


def test_what_is_returned_beside_the_loss_gets_no_gradient() -> None:
    def loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return squared_error(output, target), output.mean()

    microbatch = MicrobatchInputs(target=rows())
    stage = middle(TwoShifts(), num_stages=2, inputs=microbatch, loss_fn=loss)
    assert [each.requires_grad for each in stage.output_signature] == [True, False]
    stage.forward(0, (rows(),), microbatch)
    (gradient,) = stage.full_backward(0, (torch.ones(()),))
    assert gradient.shape == (4, WIDTH)


def test_an_activation_of_another_dtype_is_refused() -> None:
    stage = middle(TwoShifts())
    message = r"activations\[0\]: torch.float64 \[4, 8\], captured as torch.float32 \[4, 8\]"
    with pytest.raises(StageInputError, match=message):
        stage.forward(0, (rows().double(),), NOTHING)
