"""Gradients of views whose memory is written later: those of eager execution, with its strides."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gt_trace import CaptureError, trace_step
from gt_trace.capture.written_views import WrittenViews
from gt_trace.joint import export_joint_graph, partition


def _by_detach(x: Tensor) -> Tensor:
    view = (x.mT * 2).mT
    view.detach().mul_(0.5)
    return view


def _by_another_view(x: Tensor) -> Tensor:
    base = x * 2
    view, other = base.transpose(0, -1), base[1:]
    with torch.no_grad():
        other.mul_(0.5)
    return view.transpose(0, -1)


def _by_itself(x: Tensor) -> Tensor:
    view = (x * 2).permute(2, 0, 1)
    view.mul_(0.5)
    return view * view.sigmoid()


def _by_its_base(x: Tensor) -> Tensor:
    base = x * 2
    view = base.unfold(1, 2, 1)
    base.add_(1)
    return view * 2


def _by_a_function_of_nn(x: Tensor) -> Tensor:
    view = (x * 2).transpose(1, 2)
    return functional.relu(view, inplace=True) * view


def _by_assignment(x: Tensor) -> Tensor:
    view = (x * 2).transpose(1, 2)
    view[0] = 1.0
    return torch.cat([view, view.sin()])


def _in_a_list(x: Tensor) -> Tensor:
    view = (x * 2).mT
    view.detach().mul_(0.5)
    return torch.stack([view, view])


def _twice(x: Tensor) -> Tensor:
    view = (x * 2).mT
    view.detach().mul_(0.5)
    first = view * 2
    view.mul_(3)
    return first + view


def _with_a_hook(x: Tensor) -> Tensor:
    view = (x * 2).mT
    view.detach().mul_(0.5)
    view.register_hook(lambda gradient: gradient * 2)
    return view * 2


def _with_the_gradient_of_the_view(x: Tensor) -> Tensor:
    view = (x * 2).mT
    view.detach().mul_(0.5)
    (gradient,) = torch.autograd.grad((view**3).sum(), view, create_graph=True)
    return gradient + view


def _in_a_checkpoint(x: Tensor) -> Tensor:
    result: Tensor = checkpoint(_by_detach, x, use_reentrant=False)
    return result


def _of_complex_numbers(x: Tensor) -> Tensor:
    view = torch.view_as_real(x * (1 + 1j))
    view.detach().mul_(0.5)
    return view


def _of_one_part(x: Tensor) -> Tensor:
    numbers = x * (1 + 1j)
    part = numbers.imag
    part.mul_(2)
    return part * numbers.real


class _Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * x.cos()


def _in_a_function(x: Tensor) -> Tensor:
    return _Sine.apply(_by_detach(x))  # type: ignore[no-any-return]


def _in_a_function_in_a_checkpoint(x: Tensor) -> Tensor:
    def inside(x: Tensor) -> Tensor:
        view = _by_detach(x)
        return _Sine.apply(view) * view  # type: ignore[no-any-return]

    result: Tensor = checkpoint(inside, x, use_reentrant=False)
    return result


def _whose_base_has_other_sizes(x: Tensor) -> Tensor:
    base = x * 2
    view = base[1]
    base.unsqueeze_(0)
    base.add_(1)
    return view * 2


_WRITES = [
    *(_by_detach, _by_another_view, _by_itself, _by_its_base, _by_a_function_of_nn),
    *(_by_assignment, _in_a_list, _twice, _with_the_gradient_of_the_view),
    # Eager execution ends in a segmentation fault with older versions.
    *([_with_a_hook] if torch.__version__ >= (2, 15) else []),
    *(_in_a_checkpoint, _of_complex_numbers, _of_one_part),
    *(_in_a_function, _in_a_function_in_a_checkpoint, _whose_base_has_other_sizes),
]


class _Model(nn.Module):
    def __init__(self, write: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.write = nn.Parameter(torch.randn(5, 7)), write

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = x @ self.weight
        return hidden, self.write(hidden).contiguous().abs().pow(1.5).sum()


def _bits(tensors: Any) -> list[Any]:
    return [(each.stride(), each.tolist()) for each in tensors]


@pytest.mark.parametrize("write", _WRITES, ids=lambda write: write.__name__)
@pytest.mark.parametrize("seed", range(3))
def test_gradients_have_the_bits_and_strides_of_eager(
    write: Callable[[Tensor], Tensor], seed: int
) -> None:
    torch.manual_seed(seed)
    model, x = _Model(write), torch.randn(3, 4, 5)

    def step(x: Tensor) -> list[Tensor]:
        hidden, loss = model(x)
        gradients = torch.autograd.grad(loss, [hidden, *model.parameters()])
        return [loss.detach(), gradients[0].sum(1), *gradients]

    bound = trace_step(step, module=model)(torch.randn(3, 4, 5)).bind(model)
    assert _bits(bound(x)) == _bits(step(x))


@pytest.mark.parametrize("write", _WRITES[:3], ids=lambda write: write.__name__)
def test_joint_graphs_have_them_too(write: Callable[[Tensor], Tensor]) -> None:
    model, x = _Model(write), torch.randn(33, 4, 5)
    _, loss = partition(export_joint_graph(model, (x,))).bind(model)(x)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    expected = torch.autograd.grad(model(x)[1], list(model.parameters()))
    assert _bits(gradients) == _bits(expected)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: torch.view_as_real((x * (1 + 1j)).mT),
        lambda x: (x * (1 + 1j)).imag.mT,
        lambda x: torch.view_as_complex(torch.view_as_real(x * (1 + 1j)).clone())[0].conj(),
    ],
)
def test_written_views_of_views_of_complex_numbers_are_refused(
    view: Callable[[Tensor], Tensor],
) -> None:
    def write(x: Tensor) -> Tensor:
        made = view(x)
        with torch.no_grad():
            made.mul_(2)
        return made.abs()

    model = _Model(write)
    with pytest.raises(CaptureError, match=r"written since.*real part[\s\S]*made\.abs\(\)"):
        trace_step(lambda x: model(x)[1].detach(), module=model)(torch.randn(3, 4, 5))


_apply_from_outside = _Sine.apply


@pytest.mark.parametrize(
    ("use", "told"),
    [
        (torch.vmap(lambda row: row * 2), "torch.vmap or torch.func is given"),
        (lambda view: torch.func.vjp(torch.sin, view)[0], "torch.vmap or torch.func is given"),
        (_apply_from_outside, "an autograd.Function, by an `apply` from outside"),
    ],
)
def test_written_views_whose_user_holds_the_view_itself_are_refused(
    use: Callable[[Tensor], Tensor], told: str
) -> None:
    model, x = _Model(lambda x: use(_by_detach(x))), torch.randn(3, 4, 5)

    def step(x: Tensor) -> Any:
        return torch.autograd.grad(model(x)[1], list(model.parameters()))

    with pytest.raises(CaptureError, match=rf"{told}[\s\S]*memory was written[\s\S]*clone\(\)"):
        trace_step(step, module=model)(x)
    model.write = lambda x: use(_by_detach(x).clone())
    assert _bits(trace_step(step, module=model)(x).bind(model)(x)) == _bits(step(x))


def test_an_apply_that_a_library_has_replaced_is_called_and_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = vars(torch.autograd.Function)["apply"]
    calls = []

    class Counted:
        def __get__(self, instance: Any, cls: Any) -> Any:
            calls.append(cls)
            return own.__get__(instance, cls)

    counted = Counted()
    monkeypatch.setattr(torch.autograd.Function, "apply", counted)
    trace_step(lambda x: _Sine.apply(x).detach())(torch.ones(3))
    assert vars(torch.autograd.Function)["apply"] is counted
    assert _Sine in calls


def test_an_apply_from_outside_equals_the_one_of_the_step() -> None:
    factors = {_Sine.apply: 3.0}

    def step(x: Tensor) -> Tensor:
        is_same = _apply_from_outside == _Sine.apply and _Sine.apply == _Sine.apply
        return _Sine.apply(x * factors.get(_Sine.apply, 1.0) * (2 if is_same else 5)).detach()  # type: ignore[no-any-return]

    x = torch.ones(3)
    assert trace_step(step)(x).bind()(x).tolist() == step(x).tolist()


def test_a_function_sees_the_attributes_of_a_written_view() -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Tensor:
            return x * x.scale  # type: ignore[no-any-return]

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return gradients[0]

    def scaled(x: Tensor) -> Tensor:
        view: Any = _by_detach(x)
        view.scale = 2.0
        first = Scaled.apply(view)
        view.scale = 3.0
        return first + Scaled.apply(view)  # type: ignore[no-any-return]

    model, x = _Model(scaled), torch.randn(3, 4, 5)

    def step(x: Tensor) -> Any:
        return torch.autograd.grad(model(x)[1], list(model.parameters()))

    assert _bits(trace_step(step, module=model)(x).bind(model)(x)) == _bits(step(x))


def test_functions_whose_decorator_an_autograd_function_has_too_may_read_written_views() -> None:
    class WithoutGradient(torch.autograd.Function):
        @staticmethod
        @torch.no_grad()
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return gradients[0]

    @torch.no_grad()
    def largest(x: Tensor) -> Tensor:
        return x.abs().max()

    model, x = _Model(lambda x: (view := _by_detach(x)) / largest(view)), torch.randn(3, 4, 5)

    def step(x: Tensor) -> Any:
        return torch.autograd.grad(model(x)[1], list(model.parameters()))

    assert _bits(trace_step(step, module=model)(x).bind(model)(x)) == _bits(step(x))
    assert WithoutGradient.apply(x).shape == x.shape


def test_functions_are_as_before_after_captures_in_two_threads() -> None:
    apply = vars(torch.autograd.Function)["apply"]
    has_begun, may_end = threading.Event(), threading.Event()

    def second() -> None:
        with WrittenViews().in_functions():
            has_begun.set()
            assert may_end.wait(60)

    with ThreadPoolExecutor(1) as threads:
        with WrittenViews().in_functions():
            running = threads.submit(second)
            assert has_begun.wait(60)
            assert vars(torch.autograd.Function)["apply"] is not apply
        assert vars(torch.autograd.Function)["apply"] is not apply
        assert _Sine.apply(torch.zeros(1)).tolist() == [0.0]
        may_end.set()
        running.result()
    assert vars(torch.autograd.Function)["apply"] is apply


def test_errors_of_views_that_may_not_be_written_are_those_of_eager() -> None:
    weight = nn.Parameter(torch.ones(4))

    def step(x: Tensor) -> Tensor:
        base = x * weight
        first, _ = base.chunk(2)
        base.mul_(2)
        return first.sum()

    with pytest.raises(RuntimeError, match="is a view and its base") as eager:
        step(torch.ones(4))
    with pytest.raises(RuntimeError) as captured:
        trace_step(step)(torch.ones(4))
    assert str(captured.value).splitlines()[0][:80] == str(eager.value).splitlines()[0][:80]


def _written(x: Tensor) -> Tensor:
    base = x * 2
    view = base.transpose(0, 1).contiguous().view(-1)
    view.view(3, -1).detach().mul_(0.5)
    return view


@pytest.mark.parametrize(
    "same",
    [
        lambda view: view.contiguous(),
        lambda view: view.float(),
        lambda view: view.to(torch.float32),
        lambda view: functional.relu(view, inplace=True),
    ],
)
def test_functions_that_return_their_argument_return_the_steps_tensor(
    same: Callable[[Tensor], Tensor],
) -> None:
    weight, x = nn.Parameter(torch.randn(4, 5)), torch.randn(3, 4)

    def step(x: Tensor) -> list[Tensor]:
        view = _written(x @ weight)
        factor = 2 if same(view) is view else 3
        loss = (view * factor).sum()
        return [loss.detach(), *torch.autograd.grad(loss, [weight])]

    model = nn.Module()
    model.weight = weight
    assert _bits(trace_step(step, module=model)(x).bind(model)(x)) == _bits(step(x))


def test_views_that_may_not_be_differentiated_may_be_asked_for_their_shape() -> None:
    model, x = nn.Linear(4, 6), torch.randn(3, 4)

    def step(x: Tensor) -> list[Tensor]:
        with torch.no_grad():
            row = model.weight[0]
            model.weight.mul_(1.0)
        first, _ = (model(x) * 2).chunk(2)
        first.detach().mul_(2)
        size = row.shape[0] + row.numel() + first.dim() + first.detach().size(0)
        loss = (model(x) * size).sum() + row.detach().sum()
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

    assert _bits(trace_step(step, module=model)(x).bind(model)(x)) == _bits(step(x))


def test_functional_gradients_of_written_views_are_captured() -> None:
    weight, x = nn.Parameter(torch.randn(4, 5)), torch.randn(3, 4)

    def inside(x: Tensor) -> Tensor:
        view = (x * 2).mT
        view.mul_(2)
        return (view * view).sum()

    def step(x: Tensor) -> list[Tensor]:
        return [torch.func.grad(inside)(x @ weight.detach())]

    model = nn.Module()
    model.weight = weight
    assert _bits(trace_step(step, module=model)(x).bind(model)(x)) == _bits(step(x))


def test_retained_gradient_of_a_view_that_is_written_afterwards_is_refused() -> None:
    model, x = nn.Linear(4, 5), torch.randn(3, 4)

    def step(x: Tensor) -> Any:
        view = (model(x) * 2)[:, 1:]
        view.retain_grad()
        view.relu_()
        view.cos().sum().backward()
        return view.grad

    with pytest.raises(CaptureError, match=r"retains the gradient of a view[\s\S]*view\.cos\(\)"):
        trace_step(step, module=model)(x)
