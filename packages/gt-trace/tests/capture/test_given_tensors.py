"""Steps that change more of a tensor than its values: other memory, shape, attributes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from trace_models import assert_same

from gt_trace import CaptureError, trace_step
from gt_trace.joint import export_joint_graph
from gt_trace.stamping import trace_step_by_stamping

Change = Callable[["Changing", Tensor], Tensor]


class Changing(nn.Module):
    """Two layers; its forward is ``change``."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self, x)

    def body(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.second(self.first(x)) * self.scale
        return scaled


def normalizes(model: Changing, x: Tensor) -> Tensor:
    model.first.weight.data = normalize(model.first.weight.data, dim=1)
    return model.body(x)


def assigns_at_the_end(model: Changing, x: Tensor) -> Tensor:
    result = model.body(x)
    model.first.weight.data = model.first.weight.data * 0.9
    return result


def decays_a_buffer(model: Changing, x: Tensor) -> Tensor:
    model.scale.data = model.scale * 0.5
    return model.body(x)


def ties(model: Changing, x: Tensor) -> Tensor:
    model.second.weight.data = model.first.weight.data
    return model.body(x)


def copies_a_vector(model: Changing, x: Tensor) -> Tensor:
    weights = [model.first.weight, model.second.weight]
    vector_to_parameters(parameters_to_vector(weights) * 0.5, weights)
    return model.body(x)


def assigns_to_what_it_computed(model: Changing, x: Tensor) -> Tensor:
    hidden = model.first(x)
    hidden.data = hidden.data * 3
    return model.second(hidden)  # type: ignore[no-any-return]  # nn.Module's


def assigns_to_its_argument(model: Changing, x: Tensor) -> Tensor:
    x.data = x.data * 2
    return model.body(x)


def catches_the_refusal(model: Changing, x: Tensor) -> Tensor:
    with contextlib.suppress(ValueError):
        model.first.weight.data = normalize(model.first.weight.data, dim=1)
    return model.body(x)


ASSIGNING: dict[Change, str] = {
    normalizes: "parameter first.weight",
    assigns_at_the_end: "parameter first.weight",
    decays_a_buffer: "buffer scale",
    ties: "parameter second.weight",
    copies_a_vector: "parameter first.weight",
    assigns_to_what_it_computed: "a tensor of shape [3, 4]",
    assigns_to_its_argument: "argument x",
    catches_the_refusal: "parameter first.weight",
}


def captured_as_step(model: Changing) -> Any:
    return trace_step(lambda x: model(x).sum(), module=model)(torch.ones(3, 4))


def captured_jointly(model: Changing) -> Any:
    return export_joint_graph(model, (torch.ones(3, 4),))


@pytest.mark.parametrize("capture", [captured_as_step, captured_jointly])
@pytest.mark.parametrize("change", ASSIGNING, ids=lambda change: change.__name__)
def test_assignment_to_data_is_refused_with_its_line(
    change: Change, capture: Callable[[Changing], Any]
) -> None:
    model = Changing(change)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CaptureError) as error:
        capture(model)
    first, file, line, remedy = str(error.value).splitlines()
    assert first == f"{ASSIGNING[change]} is given other memory by an assignment to its .data:"
    assert __file__ in file
    assert change.__name__ in file
    assert "data" in line or "vector_to_parameters" in line
    assert remedy == (
        "A graph would go on with the old memory; write the new values in place (with "
        "torch.no_grad(): tensor.copy_(values)), or assign outside of the step"
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_assignment_in_a_layer_is_refused_when_layers_are_replicated() -> None:
    model = nn.Sequential(*(Changing(normalizes) for _ in range(6)))
    with pytest.raises(CaptureError, match=r"parameter 0\.first\.weight is given other memory"):
        trace_step_by_stamping(lambda x: model(x).sum(), module=model)(torch.ones(3, 4))


def test_optimizer_that_assigns_data_is_refused() -> None:
    model = nn.Linear(4, 4)

    class Assigning(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data = parameter.data - group["lr"] * parameter.grad

    optimizer = Assigning(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        optimizer.zero_grad()
        return loss

    with pytest.raises(CaptureError, match=r"parameter weight is given other memory"):
        trace_step(step, module=model, optimizer=optimizer)(torch.ones(3, 4))


def test_data_of_a_module_outside_is_refused_and_stays_as_it_was() -> None:
    student, teacher = nn.Linear(4, 4), nn.Linear(4, 4)
    held = teacher.weight.data.clone()

    def step(x: Tensor) -> Tensor:
        teacher.weight.data = student.weight.data * 0.1
        loss: Tensor = student(x).sum()
        return loss

    with pytest.raises(CaptureError, match=r"a tensor of shape \[4, 4\] is given other memory"):
        trace_step(step, module=student)(torch.ones(3, 4))
    assert torch.equal(teacher.weight, held)


def writes_in_place(model: Changing, x: Tensor) -> Tensor:
    model.first.weight.data.copy_(normalize(model.first.weight.data, dim=1))
    model.second.weight.data[0] = 0.5
    model.second.bias.data.clamp_(-0.1, 0.1)
    return model.body(x)


def assigns_its_own_data(model: Changing, x: Tensor) -> Tensor:
    model.first.weight.data = model.first.weight.data
    return model.body(x)


def freezes_for_a_while(model: Changing, x: Tensor) -> Tensor:
    model.second.requires_grad_(False)
    result = model.body(x)
    model.second.requires_grad_(True)
    return result


@pytest.mark.parametrize("change", [writes_in_place, assigns_its_own_data, freezes_for_a_while])
def test_what_changes_values_alone_is_captured(change: Change) -> None:
    results = []
    for captured in (False, True):
        model = Changing(change)

        def step(x: Tensor, model: Changing = model) -> Any:
            loss = model(x).square().mean()
            return loss, torch.autograd.grad(loss, [*model.first.parameters()])

        run = trace_step(step, module=model)(torch.ones(3, 4)).bind(model) if captured else step
        steps = [run(torch.full((3, 4), 0.5)) for _ in range(2)]
        results.append([*steps, (steps[0][0], list(model.parameters()))])
    for eager, replayed in zip(*results, strict=True):
        assert_same(replayed, eager)


def other_memory(model: Changing, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.first.weight.set_(normalize(model.first.weight, dim=1))  # type: ignore[call-overload]  # takes a tensor
    return model.body(x)


def other_shape(model: Changing, x: Tensor) -> Tensor:
    result = model.body(x)
    x.resize_(2, 4)
    model.scale.unsqueeze_(0)
    return result


def other_attribute(model: Changing, x: Tensor) -> Tensor:
    model.first.weight.num_calls = 1  # type: ignore[assignment]  # an attribute of its own
    return model.body(x)


def frozen(model: Changing, x: Tensor) -> Tensor:
    result = model.body(x)
    model.second.bias.requires_grad_(False)
    return result


def attached(model: Changing, x: Tensor) -> Tensor:
    model.scale.mul_(0.9).add_(model.first.bias)
    return model.second(model.first(x))  # type: ignore[no-any-return]  # nn.Module's


LOST: dict[Change, list[str]] = {
    other_memory: ["parameter first.weight was given other memory, another shape or dtype; write"],
    other_shape: ["buffer scale was given other memory", "argument x was given other memory"],
    other_attribute: [
        "parameter first.weight was given the attribute num_calls; keep it on a module instead"
    ],
    attached: [
        "buffer scale requires a gradient after the step, since it was updated from a tensor"
    ],
    frozen: ["parameter second.bias.requires_grad is False, and was True; set it back in the step"],
}


@pytest.mark.parametrize("change", LOST, ids=lambda change: change.__name__)
def test_changes_of_a_tensor_that_a_replay_would_lose_are_refused(change: Change) -> None:
    with pytest.raises(CaptureError) as error:
        captured_as_step(Changing(change))
    first, *problems = str(error.value).splitlines()
    assert first == "the step changes tensors in a way that a replay would lose:"
    assert len(problems) == len(LOST[change])
    assert all(each in problem for each, problem in zip(LOST[change], problems, strict=True))


def test_gradient_that_is_written_to_an_argument_is_refused() -> None:
    def step(x: Tensor) -> Tensor:
        loss = x.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        return loss

    with pytest.raises(CaptureError, match=r"the \.grad of argument x was written; use torch\.aut"):
        trace_step(step)(torch.ones(3, requires_grad=True))


def without_torch_functions(x: Tensor) -> Tensor:
    local = x.detach().clone()
    with torch._C.DisableTorchFunction():  # type: ignore[attr-defined]
        local.data = x * 3
    return local


class AssigningBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        local = gradient.clone()
        local.data = gradient * 3
        return local


def hooked(x: Tensor) -> Tensor:
    y = x * 1

    def hook(gradient: Tensor) -> Tensor:
        local = gradient.clone()
        local.data = gradient * 3
        return local

    y.register_hook(hook)
    return y


def caught(x: Tensor) -> Tensor:
    try:
        x.clone().data = x * 3
    except CaptureError:
        return x
    return x * 2


UNSEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "no torch functions": without_torch_functions,
    "a backward": AssigningBackward.apply,
    "a hook": hooked,
    "caught": caught,
}


@pytest.mark.parametrize("name", UNSEEN)
@pytest.mark.parametrize("capture", ["step", "joint"])
def test_assignments_that_no_torch_function_mode_sees_are_refused(name: str, capture: str) -> None:
    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return UNSEEN[name](super().forward(x))

    model, x = Model(4, 4), torch.randn(3, 4)

    def step(x: Tensor) -> Any:
        return torch.autograd.grad(model(x).sum(), list(model.parameters()))

    captures: dict[str, Callable[[], object]] = {
        "step": lambda: trace_step(step, module=model)(x),
        "joint": lambda: export_joint_graph(model, (x,)),
    }
    wanted = r"(?s)a tensor of shape \[3, 4\] is given other memory.*data = "
    with pytest.raises(CaptureError, match=wanted):
        captures[capture]()
    assert "data" not in vars(torch.Tensor)
