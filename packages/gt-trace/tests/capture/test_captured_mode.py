"""A captured step runs in the modes of its capture, and refuses every other by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as all_modules
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.hooks import RemovableHandle

from gt_trace import CaptureError, StateMismatchError, TracedStep, trace_step
from gt_trace.joint import export_joint_graph


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))


def captured(module: nn.Module) -> TracedStep:
    def step(x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        loss = module(x).sum()
        parameters = [each for each in module.parameters() if each.requires_grad]
        return loss, torch.autograd.grad(loss, parameters)

    return trace_step(step, module=module)(torch.ones(2, 4))


@pytest.fixture(scope="module")
def step() -> TracedStep:
    return captured(model())


def test_it_records_the_mode_of_every_part(step: TracedStep):
    assert step.training == {"": True, "0": True, "1": True, "2": True}
    module = model()
    module[1].eval()
    assert captured(module).training["1"] is False


def test_a_submodule_that_changed_its_mode_is_refused_until_it_changes_back(step: TracedStep):
    module = model()
    bound = step.bind(module)
    bound(torch.ones(2, 4))
    module[1].eval()
    with pytest.raises(StateMismatchError, match="module 1 is in evaluation mode, and was in trai"):
        bound(torch.ones(2, 4))
    module[1].train()
    bound(torch.ones(2, 4))


def _evaluate(module: nn.Sequential) -> None:
    module.eval()


def _hook(module: nn.Sequential) -> None:
    module[0].register_forward_hook(lambda *_: None)


def _backward_hook(module: nn.Sequential) -> None:
    module.register_full_backward_hook(lambda *_: None)


def _gradient_hook(module: nn.Sequential) -> None:
    module[2].bias.register_hook(lambda gradient: 2 * gradient)


def _freeze(module: nn.Sequential) -> None:
    module[0].weight.requires_grad_(False)


CHANGES = [
    (_evaluate, "the module and all 3 in it are in evaluation mode, and were in training mode"),
    (_hook, "module 0 has 1 hooks, and had 0; those that were there are part of the graph"),
    (_backward_hook, "the module has 1 hooks, and had 0"),
    (_gradient_hook, "parameter 2.bias has a hook by register_hook, which would not run; remove"),
    (_freeze, "parameter 0.weight requires no gradient, and did"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_what_the_graph_would_ignore_is_refused_before_and_after_binding(
    step: TracedStep, change: Callable[[Any], None], message: str
):
    module = model()
    bound = step.bind(module)
    bound(torch.ones(2, 4))
    change(module)
    with pytest.raises(StateMismatchError, match=message):
        bound(torch.ones(2, 4))
    with pytest.raises(StateMismatchError, match=message):
        step.bind(module)


def test_a_hook_that_was_exchanged_for_another_is_refused():
    module = model()
    first = module[0].register_forward_hook(lambda *_: None)
    bound = captured(module).bind(module)
    bound(torch.ones(2, 4))
    first.remove()
    module[0].register_forward_hook(lambda *_: None)
    with pytest.raises(StateMismatchError, match="hooks of modules were replaced by others"):
        bound(torch.ones(2, 4))


def test_every_difference_is_listed(step: TracedStep):
    module = model()
    bound = step.bind(module)
    _evaluate(module)
    _gradient_hook(module)
    with pytest.raises(StateMismatchError) as caught:
        bound(torch.ones(2, 4))
    assert [line.split(",")[0] for line in str(caught.value).splitlines()] == [
        "this is not as it was when it was captured:",
        "  the module and all 3 in it are in evaluation mode",
        "  parameter 2.bias has a hook by register_hook",
    ]


def test_a_module_in_another_mode_than_what_is_in_it_is_told_alone():
    module = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 1))
    bound = captured(module).bind(module)
    module.eval()
    module[1].train()
    with pytest.raises(StateMismatchError) as caught:
        bound(torch.ones(2, 4))
    assert str(caught.value).splitlines()[1:] == [
        "  the module is in evaluation mode, and was in training mode",
        "  module 0 and all 2 in it are in evaluation mode, and were in training mode",
    ]


def test_hooks_of_modules_at_the_capture_are_part_of_the_graph():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    module[0].register_forward_hook(lambda module, args, output: 2 * output)
    module[0].register_full_backward_hook(lambda module, got, given: (3 * got[0],))
    x = torch.randn(2, 4, requires_grad=True)

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        loss = module(x).sum()
        return loss, torch.autograd.grad(loss, x)[0]

    bound = trace_step(step, module=module)(x).bind(module)
    assert all(map(torch.equal, bound(x), step(x)))


def test_a_hook_of_a_parameter_is_refused_at_the_capture():
    module = model()
    _gradient_hook(module)
    with pytest.raises(CaptureError, match=r"loses hooks of parameters:\n  parameter 2.bias has a"):
        captured(module)


def test_a_submodule_that_was_exchanged_is_used_in_the_next_step():
    module = nn.Sequential(nn.Linear(4, 1))
    bound = captured(module).bind(module)
    bound(torch.ones(2, 4))
    module[0] = nn.Linear(4, 1)
    loss, _ = bound(torch.ones(2, 4))
    assert torch.equal(loss, module(torch.ones(2, 4)).sum())
    module[0].eval()
    with pytest.raises(StateMismatchError, match="module 0 is in evaluation mode"):
        bound(torch.ones(2, 4))


def test_a_module_that_was_added_is_refused(step: TracedStep):
    module = model()
    bound = step.bind(module)
    module.append(nn.ReLU())
    with pytest.raises(StateMismatchError, match="module 3 is new"):
        bound(torch.ones(2, 4))


def test_another_autocast_is_refused(step: TracedStep):
    bound = step.bind(model())
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(StateMismatchError, match=r"autocast is on for cpu in torch\.bfloat16"),
    ):
        bound(torch.ones(2, 4))


def test_a_step_captured_under_autocast_computes_what_it_does_eagerly():
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    x = torch.randn(2, 4)

    def step(x: Tensor) -> tuple[Tensor, ...]:
        loss = module(x).square().sum()
        return loss, *torch.autograd.grad(loss, list(module.parameters()))

    with torch.autocast("cpu", torch.bfloat16):
        bound = trace_step(step, module=module)(x).bind(module)
        found, expected = bound(x), step(x)
    assert all(map(torch.equal, found, expected))
    with pytest.raises(StateMismatchError, match=r"is off, and was on for cpu in torch\.bfloat16"):
        bound(x)
    with (
        torch.autocast("cpu", torch.float16),
        pytest.raises(
            StateMismatchError, match=r"on for cpu in torch\.float16, and was on for cpu"
        ),
    ):
        bound(x)


def test_a_mistyped_policy_of_constants_is_refused():
    with pytest.raises(ValueError, match="constants is 'allows'; allowed: 'error' or 'allow'"):
        trace_step(lambda: None, constants="allows")  # type: ignore[arg-type]


class _HooksItself(nn.Module):
    """Doubles what its first layer returns, by a hook that its first call installs too late."""

    def __init__(self, *, each_time: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)
        self.each_time, self.is_hooked = each_time, False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.each_time or not self.is_hooked:
            self.first.register_forward_hook(lambda _module, _args, output: output * 2)
            self.is_hooked = True
        return self.second(hidden)


def test_hooks_that_the_first_call_installs_are_in_the_graph():
    module = _HooksItself()
    bound = captured(module).bind(module)
    x = torch.rand(2, 4)
    loss, gradients = bound(x)
    expected = module(x).sum()
    assert torch.equal(loss, expected)
    for mine, its in zip(
        gradients, torch.autograd.grad(expected, [*module.parameters()]), strict=True
    ):
        assert torch.equal(mine, its)


def test_hooks_that_every_call_installs_are_refused():
    with pytest.raises(CaptureError) as refused:
        captured(_HooksItself(each_time=True))
    assert str(refused.value) == (
        "the step installs other hooks each time that it runs, and a graph has those of its "
        "capture; let it install each once:\n  module first has 2 hooks, and had 1"
    )


class _ReplacesHooks(nn.Module):
    """Doubles what its layer returns, by hooks that each call registers anew."""

    def __init__(self, num_hooks: int = 1) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.num_hooks = num_hooks
        self.handles: list[RemovableHandle] = []

    def double(self, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return output * 2

    def forward(self, x: Tensor) -> Tensor:
        while self.handles:
            self.handles.pop().remove()
        for _ in range(self.num_hooks):
            self.handles.append(self.layer.register_forward_hook(self.double))
        return self.layer(x)


REPLACED = [
    (1, "a hook of module layer was replaced by another"),
    (2, "2 hooks of module layer were replaced by others"),
]


@pytest.mark.parametrize(("num_hooks", "message"), REPLACED)
def test_hooks_that_every_call_replaces_are_refused_each_time(num_hooks: int, message: str):
    module = _ReplacesHooks(num_hooks)
    for _ in range(4):  # a new bound method has the address of the last but one
        with pytest.raises(CaptureError) as refused:
            captured(module)
        assert str(refused.value).splitlines()[1:] == [f"  {message}"]


@pytest.fixture
def handles() -> Iterator[list[RemovableHandle]]:
    """Handles of hooks that are removed when the test is over."""
    held: list[RemovableHandle] = []
    yield held
    for handle in held:
        handle.remove()


def _does_nothing(*_: Any) -> None:
    pass


GLOBAL_HOOKS = [
    (all_modules.register_module_forward_pre_hook, "forward pre-hooks"),
    (all_modules.register_module_forward_hook, "forward hooks"),
    (all_modules.register_module_full_backward_pre_hook, "backward pre-hooks"),
    (all_modules.register_module_full_backward_hook, "backward hooks"),
]


@pytest.mark.parametrize(("register", "kind"), GLOBAL_HOOKS)
def test_global_hooks_are_refused_at_the_capture_and_at_every_run(
    step: TracedStep,
    handles: list[RemovableHandle],
    register: Callable[..., RemovableHandle],
    kind: str,
):
    module = model()
    bound = step.bind(module)
    bound(torch.ones(2, 4))
    handles.append(register(_does_nothing))
    problem = (
        f"  {kind} of all modules: 1, which a replay would not run; remove them, or register them "
        "on modules"
    )
    with pytest.raises(CaptureError) as at_capture:
        captured(module)
    assert str(at_capture.value) == f"a capture refuses global hooks:\n{problem}"
    for refused in (lambda: bound(torch.ones(2, 4)), lambda: step.bind(module)):
        with pytest.raises(StateMismatchError) as at_run:
            refused()
        assert str(at_run.value) == f"this is not as it was when it was captured:\n{problem}"
    handles[0].remove()
    bound(torch.ones(2, 4))


@pytest.mark.parametrize("has_module", [True, False])
def test_global_hooks_that_the_first_call_installs_are_refused(
    handles: list[RemovableHandle], has_module: bool
):
    module = model()

    def step(x: Tensor) -> Tensor:
        if not handles:
            handles.append(all_modules.register_module_forward_hook(_does_nothing))
        return module(x).sum() if has_module else x.sum()

    with pytest.raises(CaptureError, match=r"a capture refuses global hooks:\n  forward hooks of"):
        trace_step(step, module=module if has_module else None)(torch.ones(2, 4))


def test_a_step_may_have_global_hooks_that_it_removes():
    def step(x: Tensor) -> Tensor:
        with all_modules.register_module_forward_hook(lambda _module, _args, output: output * 2):
            return nn.Identity()(x)

    x = torch.rand(3)
    assert torch.equal(trace_step(step)(x).bind()(x), 2 * x)


def test_a_mode_of_torch_that_follows_calls_counts_captures_and_runs(step: TracedStep):
    module = model()
    bound = step.bind(module)
    counts = []
    for run in (lambda: module(torch.ones(2, 4)).sum().backward(), lambda: bound(torch.ones(2, 4))):
        with FlopCounterMode(display=False) as counter:
            run()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
    with FlopCounterMode(display=False):
        assert captured(module).mode == step.mode


def test_a_joint_graph_with_global_hooks_is_refused(handles: list[RemovableHandle]):
    handles.append(all_modules.register_module_forward_hook(_does_nothing))
    with pytest.raises(CaptureError, match="a capture refuses global hooks"):
        export_joint_graph(model(), (torch.ones(2, 4),))


def test_a_joint_graph_has_hooks_that_the_first_call_installs():
    module = _HooksItself()
    graph = export_joint_graph(module, (torch.ones(2, 4),))
    assert graph.mode.num_hooks == {"first": 1}
    assert any(node.target is torch.ops.aten.mul.Tensor for node in graph.graph_module.graph.nodes)
