"""What a step sees of tensors and modules while it is captured: what it sees in eager execution."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gt_trace import CaptureError, InputMismatchError, trace_step
from gt_trace.joint import export_joint_graph, partition

STORAGE = torch.ones(12).untyped_storage()

Compute = Callable[["Reading", Tensor], Tensor]


class Gain(nn.Parameter):
    """A parameter with a method."""

    def doubled(self) -> Tensor:
        return self * 2


class Tagged(Tensor):
    """A tensor whose operators return tensors of its class."""


class Doubling(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Reading(nn.Module):
    """A layer whose parameters have attributes; its forward is ``compute``."""

    def __init__(self, compute: Compute) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.gain = Gain(torch.rand(4))
        self.shift = nn.Buffer(torch.ones(4))
        self.compute = compute
        weight: Any = self.layer.weight
        weight.scale, weight.seen = 3.0, []

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)

    def times(self, factor: float, x: Tensor) -> Tensor:
        scaled: Tensor = self.layer(x) * factor * self.gain
        return scaled


def is_a_parameter(model: Reading, x: Tensor) -> Tensor:
    return model.times(2.0 if isinstance(model.layer.weight, nn.Parameter) else 1.0, x)


def is_a_buffer(model: Reading, x: Tensor) -> Tensor:
    return model.times(2.0 if isinstance(model.shift, nn.Buffer) else 1.0, x)


def reads_an_attribute(model: Reading, x: Tensor) -> Tensor:
    return model.times(getattr(model.layer.weight, "scale", 1.0), x)


def calls_a_method_of_a_parameter(model: Reading, x: Tensor) -> Tensor:
    return model.layer(x) * model.gain.doubled()  # type: ignore[no-any-return]  # nn.Module's


def compares_types(model: Reading, x: Tensor) -> Tensor:
    kinds = [type(x), type(model.layer(x)), type(model.layer.weight), type(model.gain)]
    assert type(nn.Linear) is type
    assert isinstance(nn.Linear, type)
    return model.times(2.0 if kinds == [Tensor, Tensor, nn.Parameter, Gain] else 1.0, x)


def names_types(model: Reading, x: Tensor) -> Tensor:
    return model.times(len(type(x).__name__ + type(model.layer.weight).__name__), x)


def asks_for_leaves(model: Reading, x: Tensor) -> Tensor:
    return model.times(2.0 if model.layer.weight.is_leaf and x.is_leaf else 1.0, x)


def changes_a_deep_copy(model: Reading, x: Tensor) -> Tensor:
    copied = copy.deepcopy(model.layer)
    with torch.no_grad():
        copied.weight.mul_(2)
    return model.times(1.0, x) + copied(x)


def changes_a_shallow_copy(model: Reading, x: Tensor) -> Tensor:
    copied = copy.copy(model.layer)
    copied._parameters = {**copied._parameters, "bias": None}
    return model.times(1.0, x) + copied(x)


def changes_a_class(model: Reading, x: Tensor) -> Tensor:
    model.layer.__class__ = Doubling
    result = model.times(1.0, x)
    model.layer.__class__ = nn.Linear
    return result


def copies_a_parameter_of_a_class(model: Reading, x: Tensor) -> Tensor:
    return model.times(2.0 if type(copy.deepcopy(model.gain)) is Gain else 1.0, x)


def copies_memory_that_is_shared(model: Reading, x: Tensor) -> Tensor:
    whole = model.times(1.0, x).detach()
    copied, part = copy.deepcopy([whole, whole[1]])
    part.add_(1)
    return model.times(1.0, x) + copied


SEEING: list[Compute] = [
    is_a_parameter,
    is_a_buffer,
    reads_an_attribute,
    calls_a_method_of_a_parameter,
    compares_types,
    names_types,
    asks_for_leaves,
    changes_a_deep_copy,
    changes_a_shallow_copy,
    changes_a_class,
    copies_a_parameter_of_a_class,
    copies_memory_that_is_shared,
]


def stepping(model: Reading) -> Callable[[Tensor], Any]:
    return differentiating(model, model)


def differentiating(run: Callable[[Tensor], Any], model: Reading) -> Callable[[Tensor], Any]:
    parameters = list(model.parameters())

    def step(x: Tensor) -> Any:
        result = run(x)
        return result, torch.autograd.grad(result.square().mean(), parameters)

    return step


def captured_as_step(model: Reading, x: Tensor) -> Callable[[Tensor], Any]:
    return trace_step(stepping(model), module=model)(x).bind(model)


def captured_jointly(model: Reading, x: Tensor) -> Callable[[Tensor], Any]:
    return differentiating(partition(export_joint_graph(model, (x,))).bind(model), model)


@pytest.mark.parametrize("capture", [captured_as_step, captured_jointly])
@pytest.mark.parametrize("compute", SEEING, ids=lambda compute: compute.__name__)
def test_a_capture_sees_what_eager_execution_sees(
    compute: Compute, capture: Callable[[Reading, Tensor], Callable[[Tensor], Any]]
) -> None:
    model, x = Reading(compute), torch.rand(3, 4)
    (expected, gradients), names = stepping(model)(x), dict(vars(model.layer))
    result, found = capture(model, x)(x)
    assert torch.equal(result, expected)
    assert all(map(torch.equal, found, gradients))
    assert vars(model.layer).keys() == names.keys()
    assert type(model.gain) is Gain
    assert "type" not in globals()


def counts_in_an_attribute(model: Reading, x: Tensor) -> Tensor:
    weight: Any = model.layer.weight
    weight.scale += 1
    return model.times(weight.scale, x)


def deletes_an_attribute(model: Reading, x: Tensor) -> Tensor:
    weight: Any = model.layer.weight
    del weight.scale
    return model.times(1.0, x)


def fills_a_list_of_an_attribute(model: Reading, x: Tensor) -> Tensor:
    seen: Any = model.layer.weight.seen  # type: ignore[attr-defined]  # set by a user
    seen.append(1)
    return model.times(len(seen), x)


def converts(model: Reading, x: Tensor) -> Tensor:
    model.layer.double()
    return model.times(1.0, x)


def exchanges(model: Reading, x: Tensor) -> Tensor:
    torch.utils.swap_tensors(model.layer.weight, x * 1)
    return model.times(1.0, x)


def loads_by_assignment(model: Reading, x: Tensor) -> Tensor:
    result = model.times(1.0, x)
    copied = {name: each * 2 for name, each in model.layer.state_dict().items()}
    model.layer.load_state_dict(copied, assign=True)
    return result


def sets_a_storage(model: Reading, x: Tensor) -> Tensor:
    return model.times(1.0, (x * 1).set_(STORAGE, 0, (3, 4), (4, 1)))


def shares_memory(model: Reading, x: Tensor) -> Tensor:
    model.share_memory()
    return model.times(1.0, x)


def registers_a_parameter(model: Reading, x: Tensor) -> Tensor:
    model.register_parameter("new", nn.Parameter(torch.ones(4)))
    return model.times(1.0, x)


def copies_a_tensor(model: Reading, x: Tensor) -> Tensor:
    return model.times(1.0, copy.copy(x))


REFUSED: dict[Compute, str] = {
    counts_in_an_attribute: r"parameter layer\.weight\.scale was 3\.0, and became 4\.0; count in",
    deletes_an_attribute: r"parameter layer\.weight\.scale was 3\.0, and is gone; count in a buff",
    fills_a_list_of_an_attribute: r"module\.layer\.weight\.seen\[0\] is new: 1",
    converts: r"replaces tensors or their memory.*swap.*\n.*in converts\n.*double\(\)\nWrite the",
    exchanges: r"replaces tensors or their memory.*swap.*\n.*in exchanges\n.*swap_tensors.*\nWrite",
    loads_by_assignment: r"parameter layer\.weight was replaced, and a replay would not replace it",
    sets_a_storage: r"replaces tensors or their memory.*torage.*\n.*in sets_a_storage\n.*\nWrite",
    shares_memory: r"replaces tensors or their memory.*_share_fd_.*\n.*in shares_memory\n.*\nWrite",
    registers_a_parameter: r"module\.new is new: a tensor of shape \[4\]",
    copies_a_tensor: r"needs the value of a tensor.*__reduce_ex__.*\n.*in copies_a_tensor\n",
}


@pytest.mark.parametrize("compute", REFUSED, ids=lambda compute: compute.__name__)
def test_what_a_replay_would_lose_is_refused_by_its_line(compute: Compute) -> None:
    model = Reading(compute)
    with pytest.raises(CaptureError, match=REFUSED[compute]):
        captured_as_step(model, torch.rand(3, 4))
    weight: Any = model.layer.weight
    assert (weight.scale, weight.seen, weight.dtype) == (3.0, [], torch.float32)
    assert "new" not in model._parameters


def test_a_change_through_the_live_parameter_is_noticed_and_undone() -> None:
    model = nn.Linear(4, 4)
    live: Any = model.weight
    live.count = 0

    def step(x: Tensor) -> Tensor:
        live.count += 1
        return model(x) * live.count  # type: ignore[no-any-return]  # nn.Module's

    with pytest.raises(CaptureError, match=r"module\.weight\.count was 0, and became 1"):
        trace_step(step, module=model)(torch.ones(2, 4))
    assert live.count == 0


def test_tensors_that_have_no_stand_in_are_refused() -> None:
    model: Any = nn.Linear(4, 4)
    model.register_buffer("mark", torch.ones(4).as_subclass(Tagged))
    model.weight.constant = 1
    with pytest.raises(CaptureError) as error:
        trace_step(lambda x: model(x), module=model)(torch.ones(2, 4))
    assert str(error.value) == (
        "the step's state cannot be captured:\n  "
        "parameter weight has an attribute 'constant', a name that the tensors of a trace use; set "
        "another\n  "
        "buffer mark is a Tagged, whose own behavior the graph would lose; pass "
        ".as_subclass(torch.Tensor)"
    )


def test_attributes_of_arguments_are_compared_at_each_call() -> None:
    def example(scale: float) -> Tensor:
        x: Any = torch.ones(2)
        x.scale = scale
        return x  # type: ignore[no-any-return]  # an attribute was set on it

    run = trace_step(lambda x: x * getattr(x, "scale", 1.0))(example(2.0)).bind()
    assert torch.equal(run(example(2.0)), torch.full((2,), 2.0))
    with pytest.raises(InputMismatchError, match=r"x: has the attributes \{'scale': 3\.0\}, captu"):
        run(example(3.0))
    with pytest.raises(InputMismatchError, match=r"x: has the attributes \{\}, captured with \{'s"):
        run(torch.ones(2))
    plain = trace_step(lambda x: x * getattr(x, "scale", 1.0))(torch.ones(2)).bind()
    with pytest.raises(
        InputMismatchError, match=r"captured with \{\}; set the captured ones, or c"
    ):
        plain(example(3.0))


def test_arguments_that_are_one_tensor_are_one_at_each_call() -> None:
    def step(x: Tensor, y: Tensor) -> Tensor:
        return x * 2 if x is y else x + y

    one, other = torch.ones(2), torch.ones(2)
    same = trace_step(step)(one, one).bind()
    assert torch.equal(same(other, other), step(other, other))
    with pytest.raises(InputMismatchError, match="y is not x, as captured; pass the same tensor"):
        same(one, other)
    different = trace_step(step)(one, other).bind()
    with pytest.raises(InputMismatchError, match=r"y is the same tensor as x; pass \.clone\(\)"):
        different(one, one)


def test_an_argument_that_is_a_buffer_is_that_buffer_at_each_call() -> None:
    model = nn.BatchNorm1d(4)
    run = trace_step(lambda x: x * (2 if x is model.running_mean else 1), module=model)(
        torch.ones(4)
    ).bind(model)
    with pytest.raises(InputMismatchError, match="x is the same tensor as running_mean of the m"):
        run(model.running_mean)


def test_a_gradient_from_before_the_capture_is_not_read() -> None:
    model = nn.Linear(4, 4)
    model.weight.grad = torch.ones(4, 4)
    step = trace_step(lambda x: model(x) * (model.weight.grad is None), module=model)
    with pytest.raises(
        CaptureError, match=r"reads \.grad of parameter weight, which has a gradient"
    ):
        step(torch.ones(2, 4))
    model.weight.grad = None
    step(torch.ones(2, 4))
