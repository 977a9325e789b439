"""Steps that hold live parameters of the module from before they were captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trace_models import TiedModel, assert_same, batch

from gt_trace import CaptureError, ConstantCapturedError, trace_step
from gt_trace.joint import export_joint_graph, partition
from gt_trace.stamping import trace_step_by_stamping


@pytest.fixture
def model() -> TiedModel:
    torch.manual_seed(0)
    return TiedModel()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


@pytest.mark.parametrize("allow_unused", [None, True])
def test_gradients_of_parameters_listed_outside_of_the_step_are_those_of_eager(
    model: TiedModel, allow_unused: bool | None
) -> None:
    parameters = list(model.parameters())

    def step(tokens: Tensor, labels: Tensor) -> Any:
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        return loss, torch.autograd.grad(loss, parameters, allow_unused=allow_unused)

    bound = trace_step(step, module=model)(*batch(1)).bind(model)
    assert_same(bound(*batch(2)), step(*batch(2)))


def test_parameter_and_buffer_read_outside_of_the_step_are_inputs_and_no_constants() -> None:
    model = nn.BatchNorm1d(3)
    weight, mean = model.weight, model.running_mean
    assert mean is not None

    def step(x: Tensor) -> Any:
        return (x * weight + mean).sum(), torch.autograd.grad((x * weight).sum(), [weight])

    bound = trace_step(step, module=model)(torch.ones(2, 3)).bind(model)
    mean.add_(1)
    assert_same(bound(torch.ones(2, 3)), step(torch.ones(2, 3)))


def test_optimizer_gets_the_gradients_that_are_put_on_parameters_listed_outside() -> None:
    def built() -> tuple[nn.Module, Callable[[Tensor], Tensor], torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parameters = list(model.parameters())

        def step(x: Tensor) -> Tensor:
            loss = model(x).square().sum()
            for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                p.grad = g
            optimizer.step()
            return loss

        return model, step, optimizer

    x = torch.rand(2, 4)
    model, step, optimizer = built()
    eager_model, eager_step, _ = built()
    bound = trace_step(step, module=model, optimizer=optimizer)(x).bind(model, optimizer)
    for _ in range(2):
        assert torch.equal(bound(x), eager_step(x))
    assert torch.equal(model.weight, eager_model.weight)


def test_grad_written_on_a_parameter_from_outside_is_refused_and_the_live_one_left_alone() -> None:
    model = nn.Linear(2, 1, bias=False)
    weight = model.weight

    def step(x: Tensor) -> Tensor:
        loss = model(x).sum()
        (weight.grad,) = torch.autograd.grad(loss, [weight])
        return loss

    with pytest.raises(CaptureError, match=r"weight\.grad was written, and a replay would lose it"):
        trace_step(step, module=model)(torch.ones(1, 2))
    assert weight.grad is None


@pytest.mark.parametrize("allow_unused", [None, True])
@pytest.mark.parametrize("backward", [False, True])
def test_live_parameter_that_reaches_an_autograd_function_is_refused_by_name(
    model: TiedModel, allow_unused: bool | None, backward: bool
) -> None:
    weight = model.head.weight

    def step(tokens: Tensor) -> Any:
        loss = (model.blocks[0](Doubled.apply(weight)[tokens])).sum()
        if backward:
            loss.backward()
        return torch.autograd.grad(loss, list(model.parameters()), allow_unused=allow_unused)

    with pytest.raises(CaptureError) as error:
        trace_step(step, module=model)(batch(1)[0])
    assert str(error.value) == (
        "gradients would be lost: the step differentiates with respect to tensors of the module "
        "that it does not read from the module while it runs, but holds a view of from before, or "
        "passes to an autograd.Function from outside; read them from the module inside the step:\n"
        "  parameter embedding.weight"
    )
    assert weight.grad is None


def test_view_that_was_made_before_the_trace_is_refused_by_name() -> None:
    model = nn.Linear(3, 2)
    transposed, detached = model.weight.t(), model.bias.detach()
    x = torch.ones(1, 3)

    def differentiated(x: Tensor) -> Any:
        loss = (x @ transposed).sum()
        return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)

    with pytest.raises(CaptureError, match=r"gradients would be lost.*\n  parameter weight$"):
        trace_step(differentiated, module=model, constants="allow")(x)
    with pytest.raises(ConstantCapturedError) as error:
        trace_step(lambda x: x @ model.weight.t() + detached, module=model)(x)
    assert (
        "torch.float32 [2], the memory of parameter bias, which the step must read from the module"
        in str(error.value)
    )


def test_joint_graph_of_a_module_that_keeps_its_parameters_in_a_list() -> None:
    class Keeping(nn.Module):
        def __init__(self, double: bool) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 2, bias=False)
            self.kept = [self.inner.weight]
            self.double = double

        def forward(self, x: Tensor) -> Tensor:
            weight = self.kept[0]
            return x @ (Doubled.apply(weight) if self.double else weight).t()

    model, x = Keeping(False), torch.rand(4, 3)
    captured = partition(export_joint_graph(model, (x,)), partitioner="min_cut").bind(model)
    captured(x).square().sum().backward()
    found = model.inner.weight.grad
    model.zero_grad()
    model(x).square().sum().backward()
    assert found is not None
    assert model.inner.weight.grad is not None
    assert torch.equal(found, model.inner.weight.grad)
    with pytest.raises(CaptureError, match=r"gradients would be lost.*\n  parameter inner\.w"):
        export_joint_graph(Keeping(True), (x,))


@pytest.mark.parametrize("allow_unused", [None, True])
def test_layers_of_a_step_that_lists_parameters_outside_are_all_traced(
    allow_unused: bool | None,
) -> None:
    layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(8))
    model = nn.ModuleDict({"layers": layers})
    parameters = list(model.parameters())

    def step(x: Tensor) -> Any:
        for layer in layers:
            x = layer(x).relu()
        loss = x.sum()
        return loss, torch.autograd.grad(loss, parameters, allow_unused=allow_unused)

    captured = trace_step_by_stamping(step, module=model)(torch.rand(2, 4))
    assert str(captured.report) == (
        "all 8 layers traced: the step needs all 8 layers, as a loop over their numbers does: with "
        "4, the step fails with CaptureError: layers.2.weight is read from outside of the module; "
        "read parameters from the module inside the step"
    )
    x = torch.rand(2, 4)
    assert_same(captured.step.bind(model)(x), step(x))
