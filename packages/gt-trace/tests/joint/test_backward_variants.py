"""Gradients that arrive in another layout than traced, or not at all: the bits are autograd's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gt_trace import CaptureError, InputMismatchError
from gt_trace.joint import export_joint_graph, partition

Loss = Callable[[Any], torch.Tensor]


class Heads(nn.Module):
    """Applies a function to what three linear layers compute of one hidden tensor."""

    def __init__(self, outputs: Callable[..., Any] = lambda h, a, b: (h, a, b)) -> None:
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.outputs = outputs

    def forward(self, x: torch.Tensor) -> Any:
        hidden = torch.tanh(self.trunk(x))
        return self.outputs(hidden, self.a(hidden), self.b(hidden))


class Summed(torch.autograd.Function):
    """Two results whose gradients its backward adds itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return a * 2 + b * 3


def gradients(module: nn.Module, call: Callable[..., Any], x: torch.Tensor, loss: Loss) -> Any:
    module.zero_grad()
    x.grad = None
    loss(call(x)).backward()
    return [each.grad for each in (*module.parameters(), x)]


def assert_same_bits(mine: Sequence[Any], theirs: Sequence[Any], what: object = None) -> None:
    for one, other in zip(mine, theirs, strict=True):
        assert (one is None) == (other is None), what
        if one is not None:
            # As integers, so that -0.0 and NaN count.
            assert torch.equal(one.view(torch.int32), other.view(torch.int32)), what
            assert one.stride() == other.stride(), what


def sum_of(*names: Any) -> Loss:
    return lambda outputs: torch.stack([outputs[name].square().sum() for name in names]).sum()


CASES: dict[str, Callable[..., Any]] = {
    "heads": lambda h, a, b: (h, a, b),
    "one of another": lambda h, a, b: (a, a * b, b.exp()),
    "infinite where unused": lambda h, a, b: (a, (h - h).log() * torch.inf, h * -0.0),
    "chunks": lambda h, a, b: h.chunk(2, -1),
    "unbound": lambda h, a, b: tuple(each * 1 for each in a.unbind(-1)),
    "split": lambda h, a, b: (*(each.exp() for each in a.split([1, 3], -1)), b),
    "integers and detached": lambda h, a, b: (a, b.argmax(-1), h.detach(), b),
    "one tensor twice": lambda h, a, b: (a, h, h, b),
}


@pytest.mark.parametrize("name", CASES)
def test_parameters_behind_unused_outputs_get_the_gradients_of_eager(name: str) -> None:
    torch.manual_seed(0)
    module, x = Heads(CASES[name]), torch.randn(6, 4, requires_grad=True)
    bound = partition(export_joint_graph(module, (x,))).bind(module)
    usable = [index for index, each in enumerate(module(x)) if each.requires_grad]
    for used in itertools.chain(*(itertools.combinations(usable, n) for n in (1, 2, 3))):
        mine, theirs = (gradients(module, call, x, sum_of(*used)) for call in (bound, module))
        assert_same_bits(mine, theirs, used)


def test_weight_decay_leaves_an_unused_head_where_it_is() -> None:
    module, x = Heads(), torch.randn(3, 4)
    before = module.b.weight.detach().clone()
    optimizer = torch.optim.AdamW(module.parameters(), weight_decay=0.1)
    partition(export_joint_graph(module, (x,))).bind(module)(x)[1].sum().backward()
    optimizer.step()
    assert module.b.weight.grad is None
    assert torch.equal(module.b.weight, before)


def test_an_output_returned_twice_is_one_tensor() -> None:
    module, x = Heads(lambda h, a, b: {"last": h, "all": (a, h)}), torch.randn(3, 4)
    outputs = partition(export_joint_graph(module, (x,))).bind(module)(x)
    assert outputs["last"] is outputs["all"][1]


def test_a_function_that_adds_its_gradients_itself_is_refused_where_one_is_missing() -> None:
    module, x = Heads(lambda h, a, b: Summed.apply(h)), torch.randn(3, 4)
    bound = partition(export_joint_graph(module, (x,))).bind(module)
    mine, theirs = (gradients(module, call, x, sum_of(0, 1)) for call in (bound, module))
    assert_same_bits(mine, theirs)
    with pytest.raises(InputMismatchError) as error:
        bound(x)[0].sum().backward()
    assert str(error.value) == (
        "some outputs got no gradient, and mul_3 (aten.mul.Tensor) belongs to the backward of a "
        "function with several results, some of them unused. What autograd computes there is "
        "unknown. Use all outputs in the loss, or detach the unused ones in the module"
    )


def test_outputs_that_are_views_of_each_other_are_refused() -> None:
    module = Heads(lambda h, a, b: (h, h.view(-1)))
    with pytest.raises(CaptureError) as error:
        export_joint_graph(module, (torch.randn(3, 4),))
    assert str(error.value) == (
        "the module's outputs cannot be captured:\n"
        "  output[1] is a view of another output, or of the same tensor as another output, and "
        "its gradient would be lost; return a copy (.clone())"
    )


class Activated(nn.Module):
    def __init__(self, layout: Callable[..., Any], activation: Callable[..., Any]) -> None:
        super().__init__()
        self.linear, self.layout, self.activation = nn.Linear(96, 96), layout, activation

    def forward(self, x: torch.Tensor) -> Any:
        return self.activation(self.layout(self.linear(x)))


def _weights(y: torch.Tensor) -> torch.Tensor:
    return torch.linspace(0, 1, y.numel()).view(y.shape)


LAYOUTS: dict[str, Callable[..., Any]] = {
    "plain": lambda x: x,
    "transposed": lambda x: x.transpose(-1, -2),
    "sliced": lambda x: x[:, ::2],
    "expanded": lambda x: x[:1].expand(6, *x.shape[1:]),
    "permuted": lambda x: x.view(4, -1, x.shape[-1]).permute(1, 2, 0),
    "channels last": lambda x: x.view(4, 25, 8, 12).permute(0, 3, 1, 2),
}
LOSSES: dict[str, Loss] = {
    "sum": lambda y: y.sum(),
    "mean": lambda y: y.mean(),
    "weighted": lambda y: (y * _weights(y)).sum(),
    "transposed": lambda y: (y.transpose(0, -1) * _weights(y.transpose(0, -1))).sum(),
    "flat": lambda y: (y.reshape(-1) * _weights(y.reshape(-1))).sum(),
    "sliced": lambda y: y[..., 1:].square().sum(),
    "of logarithms": lambda y: F.log_softmax(y, -1)[..., 0].sum(),
}
ACTIVATIONS: dict[str, Callable[..., Any]] = {
    **{each: getattr(F, each) for each in ("softplus", "elu", "gelu", "silu", "mish")},
    "tanh": torch.tanh,
    "softmax": lambda x: F.softmax(x, -1),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "product": lambda x: x @ x.transpose(-1, -2),
    "sum": lambda x: x.sum(0),
    "as_strided": lambda x: (x * 2).contiguous().as_strided((20, 8), (1, 20)),
    "written": lambda x: _written((x * 2).mT),
}


def _written(x: torch.Tensor) -> torch.Tensor:
    x.detach().mul_(0.5)
    return x * 1


def assert_same_in_all_losses(layout: str, activation: str) -> None:
    torch.manual_seed(0)
    module, x = Activated(LAYOUTS[layout], ACTIVATIONS[activation]), torch.randn(100, 96)
    bound = partition(export_joint_graph(module, (x,))).bind(module)
    for name, loss in LOSSES.items():
        mine, theirs = (gradients(module, call, x, loss) for call in (bound, module))
        assert_same_bits(mine, theirs, name)


@pytest.mark.parametrize(
    ("layout", "activation"),
    [("plain", "softplus"), ("transposed", "gelu"), ("permuted", "silu"), ("transposed", "tanh")],
)
def test_gradients_arrive_in_the_layout_that_the_loss_gives(layout: str, activation: str) -> None:
    assert_same_in_all_losses(layout, activation)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_and_layout_and_loss(layout: str, activation: str) -> None:
    assert_same_in_all_losses(layout, activation)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", ["as_strided", "written"])
def test_fixed_strides_of_memory_that_the_backward_makes_take_any_layout(
    layout: str, activation: str
) -> None:
    assert_same_in_all_losses(layout, activation)


def _written_after_it_was_unfolded(hidden: torch.Tensor) -> torch.Tensor:
    base = hidden * 2
    view = base.unfold(1, 2, 1)
    base.add_(1)
    return view * 2


def test_a_gradient_in_another_layout_of_a_backward_with_fixed_strides_is_refused() -> None:
    module = Heads(lambda h, a, b: _written_after_it_was_unfolded(h))
    x = torch.randn(3, 4)
    parts = partition(export_joint_graph(module, (x,)))
    if not any("as_strided" in str(node.target) for node in parts.backward.graph.nodes):
        pytest.skip("this version of PyTorch reads no fixed strides here")
    with pytest.raises(InputMismatchError, match="reads it by fixed strides"):
        parts.bind(module)(x).sum().backward()
