"""What ``trace_step`` captures, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from trace_models import TiedModel, assert_same, batch, step_of

from gt_trace import CaptureError, ConstantCapturedError, trace_step


@pytest.fixture
def model() -> TiedModel:
    torch.manual_seed(0)
    return TiedModel()


def test_graph_equals_eager_bitwise_on_a_batch_it_has_not_seen(model: TiedModel) -> None:
    step = step_of(model)
    bound = trace_step(step, module=model)(*batch(1)).bind(model)
    for seed in (2, 3):
        assert_same(bound(*batch(seed)), step(*batch(seed)))


def test_tied_parameter_is_one_input_with_two_names(model: TiedModel) -> None:
    traced = trace_step(step_of(model), module=model)(*batch(1))
    names = [(i.name, i.aliases) for i in traced.inputs if i.kind == "parameter"]
    assert names[0] == ("embedding.weight", ("head.weight",))
    assert "head.weight" not in [name for name, _ in names]
    placeholders = traced.graph_module.graph.find_nodes(op="placeholder")
    assert placeholders[0].name == "p_embedding_weight"
    assert placeholders[-1].name == "a_labels"


def test_buffer_updates_happen_at_replay_and_not_at_capture(model: TiedModel) -> None:
    traced = trace_step(step_of(model), module=model)(*batch(1))
    assert model.calls == 0
    bound = traced.bind(model)
    bound(*batch(1))
    bound(*batch(1))
    assert model.calls == 2


def test_capture_leaves_the_model_as_it_was(model: TiedModel) -> None:
    before = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    forwards = [module.forward for module in model.modules()]
    trace_step(step_of(model), module=model)(*batch(1))
    assert {n: id(p) for n, p in model.named_parameters(remove_duplicate=False)} == before
    assert [module.forward for module in model.modules()] == forwards
    assert all("forward" not in vars(module) for module in model.modules())


def test_failed_capture_leaves_the_model_as_it_was(model: TiedModel) -> None:
    weight = model.head.weight

    def broken(tokens: torch.Tensor) -> None:
        model(tokens)
        raise RuntimeError("in the step")

    with pytest.raises(RuntimeError, match="in the step"):
        trace_step(broken, module=model)(batch(1)[0])
    assert model.head.weight is weight
    assert "forward" not in vars(model.head)


def test_dropout_consumes_the_generator_as_eager_does() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))

    def step(x: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        loss = model(x).square().sum()
        return loss, torch.autograd.grad(loss, list(model.parameters()))

    x = torch.randn(4, 8)
    bound = trace_step(step, module=model)(x).bind(model)
    torch.manual_seed(7)
    expected = [step(x), step(x)]
    torch.manual_seed(7)
    for want in expected:
        assert_same(bound(x), want)


def test_closed_over_tensor_is_refused(model: TiedModel) -> None:
    weights = torch.rand(16)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        return (model(tokens) * weights).sum()

    with pytest.raises(ConstantCapturedError) as error:
        trace_step(step, module=model)(batch(1)[0])
    assert str(error.value).startswith(
        "tensors that are neither state nor argument of the step would be frozen into the graph; "
        "register them as buffers, pass them as arguments, or give constants='allow':\n"
        "  torch.float32 [16]"
    )


def test_a_step_whose_model_was_not_given_is_refused_with_how_to_give_it(model: TiedModel) -> None:
    with pytest.raises(ConstantCapturedError) as error:
        trace_step(lambda tokens: model(tokens).sum())(batch(1)[0])
    assert str(error.value).startswith(
        "tensors that are neither state nor argument of the step would be frozen into the graph; "
        "give the model, trace_step(step, module=model), pass them as arguments, or give "
        "constants='allow':\n  torch.float32 ["
    )


def test_closed_over_tensor_is_frozen_where_that_is_allowed(model: TiedModel) -> None:
    weights = torch.rand(16)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        return (model(tokens) * weights).sum()

    tokens, _ = batch(1)
    bound = trace_step(step, module=model, constants="allow")(tokens).bind(model)
    assert torch.equal(bound(tokens), step(tokens))


def test_tensor_literal_is_no_frozen_constant() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor([1.0, 2.0])

    bound = trace_step(step)(torch.ones(2)).bind()
    assert torch.equal(bound(torch.full((2,), 3.0)), torch.tensor([3.0, 6.0]))


def test_step_that_writes_grad_is_refused_with_every_parameter_named() -> None:
    model = nn.Linear(2, 1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss

    with pytest.raises(CaptureError) as error:
        trace_step(step, module=model)(torch.ones(1, 2))
    assert str(error.value) == (
        "the step has side effects:\n"
        "  weight.grad, bias.grad were written, and a replay would lose them; use "
        "torch.autograd.grad and return the gradients, or give the parameters to the optimizer of "
        "the step, or let them require no gradient"
    )


def test_step_that_replaces_a_buffer_is_refused() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count = self.count + 1
            return x * self.count

    model = Counter()
    with pytest.raises(CaptureError) as error:
        trace_step(lambda x: model(x), module=model)(torch.ones(2))
    assert str(error.value) == (
        "the step has side effects:\n"
        "  buffer count was replaced, and a replay would not replace it; update it in place "
        "(copy_, add_)"
    )


def test_argument_that_is_neither_tensor_nor_plain_value_is_refused() -> None:
    def step(x: torch.Tensor, options: dict[str, object]) -> torch.Tensor:
        return x

    with pytest.raises(CaptureError) as error:
        trace_step(step)(torch.ones(2), {"device": torch.device("cpu"), "module": nn.Linear(1, 1)})
    assert str(error.value) == (
        "the step's arguments cannot be captured:\n"
        "  options['device'] is a device; pass tensors, numbers, strings, None or containers of "
        "them, and let the step read other objects by closure\n"
        "  options['module'] is a Linear; pass tensors, numbers, strings, None or containers of "
        "them, and let the step read other objects by closure"
    )


def test_gradient_of_an_argument_can_be_captured() -> None:
    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(x.sin().sum(), [x])

    x = torch.rand(3, requires_grad=True)
    bound = trace_step(step)(x).bind()
    assert torch.equal(bound(x)[0], step(x)[0])


@pytest.mark.parametrize("make", ["sgd", "adamw"])
def test_optimizer_step_is_captured_with_its_state(make: str) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(3)
        model = nn.Linear(4, 4)
        if make == "sgd":
            return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer):  # type: ignore[no-untyped-def]  # a closure for the tracer
        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().sum()
            parameters = list(model.parameters())
            for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                p.grad = g
            optimizer.step()
            return loss

        return step

    x = torch.rand(2, 4)
    eager_model, eager_optimizer = build()
    model, optimizer = build()
    for m, o in ((eager_model, eager_optimizer), (model, optimizer)):
        train_step(m, o)(x)
    bound = trace_step(train_step(model, optimizer), module=model, optimizer=optimizer)(x).bind(
        model, optimizer
    )
    for _ in range(3):
        assert torch.equal(bound(x), train_step(eager_model, eager_optimizer)(x))
    for mine, theirs in zip(model.parameters(), eager_model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        for key, value in eager_optimizer.state[theirs].items():
            assert torch.equal(optimizer.state[mine][key], value)


def test_optimizer_without_state_is_refused() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        parameters = list(model.parameters())
        for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = g
        optimizer.step()
        return loss

    with pytest.raises(CaptureError) as error:
        trace_step(step, module=model, optimizer=optimizer)(torch.ones(1, 2))
    assert str(error.value) == (
        "SGD.step created the state ['momentum_buffer'] during the capture, and a replay would "
        "lose it; run one step, or initialise the state, before capturing"
    )
    assert not optimizer.state
    assert optimizer.param_groups[0]["params"][0] is model.weight


def test_optimizer_without_module_is_refused() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    with pytest.raises(CaptureError, match="an optimizer was given without its module"):
        trace_step(lambda x: x, optimizer=optimizer)(torch.ones(1))


def test_optimizer_of_another_model_is_refused() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    with pytest.raises(CaptureError) as error:
        trace_step(lambda x: x, module=nn.Linear(1, 1), optimizer=optimizer)(torch.ones(1))
    assert str(error.value) == (
        "2 parameters of the SGD are not parameters of the module; build the optimizer from the "
        "module that is captured"
    )


def test_model_on_meta_is_captured_as_if_on_another_device() -> None:
    with torch.device("meta"):
        model = TiedModel()
    on_meta = trace_step(step_of(model), module=model)
    with pytest.raises(RuntimeError, match="device"):
        on_meta(*batch(1))
    traced = trace_step(step_of(model), module=model, meta_device="cpu")(*batch(1))
    assert {t.device.type for t in traced.example_inputs} == {"cpu"}
    real = TiedModel()
    assert_same(traced.bind(real)(*batch(2)), step_of(real)(*batch(2)))


def test_captures_can_share_a_fake_mode():
    module = nn.Linear(4, 4)

    def step(x):
        return module(x).sum()

    first = trace_step(step, module=module)(torch.randn(2, 4))
    second = trace_step(step, module=module, fake_mode=first.fake_mode)(torch.randn(3, 4))
    assert second.fake_mode is first.fake_mode
    assert second.bind(module)(torch.ones(3, 4)) == step(torch.ones(3, 4))
