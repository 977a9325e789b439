"""A step runs under the settings of its capture, or is refused; kernels see autograd as in eager."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from gt_trace import CaptureError, StateMismatchError, load, save, trace_step
from gt_trace.joint import export_joint_graph, partition


def equal(found: Any, wanted: Any) -> bool:
    return all(map(torch.equal, found, wanted))


RECURRENT = {
    "LSTM": lambda: nn.LSTM(4, 5),
    "two directions, batch first": lambda: nn.LSTM(4, 5, 2, bidirectional=True, batch_first=True),
    "without bias": lambda: nn.LSTM(4, 5, bias=False),
    "projected": lambda: nn.LSTM(4, 5, proj_size=3),
    "GRU": lambda: nn.GRU(4, 5),
}


@pytest.mark.parametrize("kind", RECURRENT)
@pytest.mark.parametrize("around", [nullcontext, torch.no_grad, torch.inference_mode])
def test_recurrent_layers_have_the_gradients_of_eager(kind: str, around: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    module, x = RECURRENT[kind](), torch.randn(6, 2, 4)

    def step(x: Tensor) -> list[Tensor]:
        loss = module(x)[0].square().mean()
        return [loss, *torch.autograd.grad(loss, list(module.parameters()))]

    run = trace_step(step, module=module)(x).bind(module)
    with around():
        found = run(x)
    assert equal(found, step(x))
    assert not any(each.requires_grad for each in found)


def test_a_joint_graph_of_a_recurrent_layer_has_the_gradients_of_eager() -> None:
    module, x = nn.LSTM(4, 5), torch.randn(6, 2, 4)
    run = partition(export_joint_graph(module, (x,))).bind(module)
    parameters = list(module.parameters())
    found, wanted = (
        [out, *torch.autograd.grad(out.square().mean(), parameters)]
        for out in (run(x)[0], module(x)[0])
    )
    assert equal(found, wanted)


class Passing(torch.autograd.Function):
    """Runs a module where autograd is disabled, as every forward of such a function does."""

    @staticmethod
    def forward(ctx, module, x):
        return module(x)[0]

    @staticmethod
    def backward(ctx, gradient):
        return None, gradient


def mixed(module: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        without = module(x)[0]
    return module(x)[0] - without


def nested(module: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        module(x)
        with torch.enable_grad():
            inside = module(x)[0]
        without = module(inside)[0]
    return inside + without + module(x)[0]


BOTH_MODES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "no_grad, then grad": mixed,
    "enable_grad in no_grad": nested,
    "function": lambda module, x: module(x)[0] + Passing.apply(module, x),
    "checkpoint": lambda module, x: checkpoint(mixed, module, x, use_reentrant=False),
}


@pytest.mark.parametrize("name", BOTH_MODES)
def test_one_step_runs_a_recurrent_layer_with_autograd_and_without(
    name: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    module, x = nn.LSTM(4, 4), torch.randn(6, 2, 4)
    parameters = list(module.parameters())

    def step(x: Tensor) -> list[Tensor]:
        loss = BOTH_MODES[name](module, x).square().mean()
        return [loss, *torch.autograd.grad(loss, parameters)]

    traced = trace_step(step, module=module)(x)
    run, wanted = traced.bind(module), step(x)
    assert equal(run(x), wanted)
    with torch.no_grad():
        assert equal(run(x), wanted)
    save(traced, tmp_path / "step")
    assert equal(load(tmp_path / "step", module).bind(module)(x), wanted)


def test_a_joint_graph_runs_a_recurrent_layer_with_autograd_and_without() -> None:
    torch.manual_seed(0)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return mixed(self.layer, x)

    module, x = Both(), torch.randn(6, 2, 4)
    run = partition(export_joint_graph(module, (x,))).bind(module)
    found, wanted = (
        [out, *torch.autograd.grad(out.square().mean(), list(module.parameters()))]
        for out in (run(x), module(x))
    )
    assert equal(found, wanted)


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@contextmanager
def slow_attention() -> Iterator[None]:
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.nn.functional.linear else result


SETTINGS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], str]] = {
    "dtype": (
        default_dtype,
        r"default dtype: torch\.float64, and was torch\.float32; set it as it",
    ),
    "device": (lambda: torch.device("meta"), "modes: DeviceContext meta, and was none"),
    "mode": (Doubling, "modes: Doubling, and was none"),
    "deterministic": (deterministic, "deterministic algorithms: True, and was False"),
    "math": (lambda: sdpa_kernel(SDPBackend.MATH), "attention: flash_sdp_enabled: False, and was"),
    "oneDNN": (lambda: torch.backends.mkldnn.flags(enabled=False), "oneDNN: False, and was True"),
    "no_grad": (torch.no_grad, "autograd was enabled, and operators may depend on it; call the"),
    "inference": (torch.inference_mode, "autograd was enabled"),
    "anomaly": (torch.autograd.detect_anomaly, "anomaly mode that checks for nan: True, and was"),
    "saved": (
        lambda: torch.autograd.graph.saved_tensors_hooks(Tensor.bfloat16, Tensor.float),
        "hooks of saved tensors: .*bfloat16.*, and was none",
    ),
    "fast path": (slow_attention, r"fast path of nn\.MultiheadAttention: False, and was True"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_other_settings_than_those_of_the_capture_are_refused(name: str) -> None:
    linear, x = nn.Linear(4, 4), torch.randn(2, 4)
    traced = trace_step(lambda x: linear(x) + torch.full((4,), 0.1), module=linear)(x)
    run = traced.bind(linear)
    context, problem = SETTINGS[name]
    with context(), pytest.raises(StateMismatchError, match=problem):
        run(x)
    assert torch.equal(run(x), linear(x) + 0.1)


@pytest.mark.parametrize("name", ["dtype", "mode", "math", "deterministic", "no_grad"])
def test_a_step_computes_what_eager_does_under_the_settings_of_its_capture(name: str) -> None:
    linear, x = nn.Linear(4, 4), torch.randn(2, 4)

    def step(x: Tensor) -> Tensor:
        return linear(x) + torch.full((4,), 0.1) + torch.pow(2, torch.arange(4.0))

    with SETTINGS[name][0]():
        run = trace_step(step, module=linear)(x).bind(linear)
        found, wanted = run(x), step(x)
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted)


def test_a_step_with_a_backward_runs_where_autograd_is_disabled() -> None:
    linear, x = nn.Linear(4, 4), torch.randn(2, 4)

    def step(x: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(linear(x).square().sum(), list(linear.parameters()))

    run = trace_step(step, module=linear)(x).bind(linear)
    with torch.no_grad():
        found = run(x)
    assert equal(found, step(x))


def attention(*, batch_first: bool = True) -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 8, batch_first=batch_first).eval()


def without_grad(module: nn.Module) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            return module(x)

    return step


def test_attention_that_takes_the_fast_path_in_eager_is_refused() -> None:
    module, x = attention(), torch.randn(2, 3, 4)
    step = without_grad(module)
    with pytest.raises(CaptureError, match=r"(?s)fast path here.*, in step.*set_fastpath_enabled"):
        trace_step(step, module=module)(x)
    with slow_attention():
        run = trace_step(step, module=module)(x).bind(module)
        assert torch.equal(run(x), step(x))
    module.requires_grad_(False)
    with pytest.raises(CaptureError, match="fast path"):
        trace_step(module, module=module)(x)


@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_that_takes_no_fast_path_is_captured(batch_first: bool) -> None:
    module, x = attention(batch_first=batch_first), torch.randn(2, 3, 4)
    step = module if batch_first else without_grad(module)
    run = trace_step(step, module=module)(x).bind(module)
    assert torch.equal(run(x), step(x))


@pytest.mark.parametrize(
    ("mode", "remedy"),
    [
        (torch.inference_mode, r"use torch\.no_grad\(\) instead"),
        (torch.autograd.detect_anomaly, "turn it off, and check what the step returns"),
    ],
)
def test_modes_without_a_trace_are_refused_around_a_capture_and_inside_of_a_step(
    mode: Callable[[], Any], remedy: str
) -> None:
    module, x = nn.Dropout(0.5), torch.randn(4)

    def step(x: Tensor) -> Tensor:
        with mode():
            return module(x)

    with mode(), pytest.raises(CaptureError, match=remedy):
        trace_step(module, module=module)(x)
    with pytest.raises(CaptureError, match=rf"(?s){mode.__name__} is on.*{remedy}.*in step"):
        trace_step(step, module=module)(x)


def test_hooks_of_saved_tensors_that_pytorch_has_change_no_values() -> None:
    linear, x = nn.Linear(4, 4), torch.randn(2, 4)
    run = trace_step(lambda x: linear(x).detach(), module=linear)(x).bind(linear)
    with torch.autograd.graph.save_on_cpu():
        assert torch.equal(run(x), linear(x))
