"""A step that changes settings of PyTorch is refused where a kernel reads them, and only there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, backends, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gt_trace import CaptureError, trace_step
from gt_trace.joint import export_joint_graph

TINY = 2.0**-1022


@contextmanager
def changed(read: Callable[[], Any], write: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def default_dtype(dtype: torch.dtype = torch.float64) -> AbstractContextManager[None]:
    return changed(torch.get_default_dtype, torch.set_default_dtype, dtype)


def deterministic() -> AbstractContextManager[None]:
    return changed(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    )


def threads() -> AbstractContextManager[None]:
    return changed(torch.get_num_threads, torch.set_num_threads, 7)


def denormals() -> AbstractContextManager[None]:
    return changed(lambda: TINY / 2 == 0, torch.set_flush_denormal, True)


def precision() -> AbstractContextManager[None]:
    return changed(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium")


def one_dnn(**flags: Any) -> AbstractContextManager[None]:
    return backends.mkldnn.flags(**flags)


CONTEXTS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], str]] = {
    "deterministic": (deterministic, "deterministic algorithms: True, and was False"),
    "oneDNN": (lambda: one_dnn(enabled=False), "oneDNN: False, and was True"),
    "deterministic oneDNN": (
        lambda: one_dnn(enabled=True, deterministic=True),
        "deterministic oneDNN: True, and was False",
    ),
    "denormals": (denormals, "flushing of denormal numbers: True, and was False"),
    "threads": (threads, r"number of threads: \d+, and was \d+"),
    "precision": (precision, r"float32 precision of mkldnn matmul: \w+, and was \w+"),
    "cuDNN": (
        lambda: backends.cudnn.flags(enabled=True, benchmark=True),
        "benchmarks of cuDNN: True, and was False",
    ),
}


class Settings(nn.Module):
    """Computes one layer under other settings, and another one after them."""

    def __init__(self, context: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.first, self.second, self.context = nn.Linear(4, 4), nn.Linear(4, 4), context

    def forward(self, x: Tensor) -> Tensor:
        with self.context():
            x = self.first(x)  # the line of the change
        return self.second(x)


@pytest.mark.parametrize("name", CONTEXTS)
def test_an_operator_under_a_changed_setting_is_refused_by_its_line(name: str) -> None:
    context, problem = CONTEXTS[name]
    module, x = Settings(context), torch.randn(2, 4)
    wanted = (
        rf"(?s)changes a setting that aten\.(add)?mm\.default reads whenever it runs.*{problem}.*"
        r"the line of the change\nSet it outside of the step, before the capture"
    )
    with pytest.raises(CaptureError, match=wanted):
        trace_step(lambda x: module(x).detach(), module=module)(x)
    with context():  # set outside
        run = trace_step(lambda x: module(x).detach(), module=module)(x).bind(module)
        assert torch.equal(run(x), module(x))


def test_joint_graphs_and_backwards_are_refused_too() -> None:
    with pytest.raises(CaptureError, match="oneDNN: False, and was True"):
        export_joint_graph(Settings(CONTEXTS["oneDNN"][0]), (torch.randn(2, 4),))

    class InBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            with denormals():
                return gradient * 2

    linear, x = nn.Linear(4, 4), torch.randn(2, 4)

    def step(x: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(InBackward.apply(linear(x)).sum(), list(linear.parameters()))

    with pytest.raises(CaptureError, match=r"aten\.mul\.Tensor reads whenever it runs"):
        trace_step(step, module=linear)(x)


def test_a_step_that_catches_the_refusal_is_refused() -> None:
    def step(x: Tensor) -> Tensor:
        try:
            with denormals():
                return x * 2
        except CaptureError:
            return x + 1

    with pytest.raises(CaptureError, match="flushing of denormal numbers"):
        trace_step(step)(torch.ones(2))


DEPENDENT: dict[str, Callable[[Tensor], Any]] = {
    "a tensor without a dtype": lambda x: x * torch.ones(4),
    "a quotient of whole numbers": lambda x: (x > 0).sum() / 3,
    "a function of whole numbers": lambda x: torch.sigmoid((x > 0).long()),
    "a comparison with a number": lambda x: (x > 0).sum() > 1.5,
    "random numbers": lambda x: x + torch.rand(4),
}
INDEPENDENT: dict[str, Callable[[Tensor], Any]] = {
    "a tensor with a dtype": lambda x: x * torch.ones(4, dtype=torch.float32),
    "values in a list": lambda x: x * torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "whole numbers": lambda x: x * torch.arange(4) + (x > 0).sum(0),
    "numbers and a tensor": lambda x: (x * 1.5).clamp(min=0.1) / 3 + x.mean().sqrt() * 2j,
    "a cast": lambda x: (x > 0).to(torch.float64) * 1.5,
}


@pytest.mark.parametrize("name", DEPENDENT)
def test_another_default_dtype_is_refused_where_an_operator_reads_it(name: str) -> None:
    def step(x: Tensor) -> Any:
        with default_dtype():
            return DEPENDENT[name](x)

    wanted = "default dtype: torch.float64, and was torch.float32.*makes numbers its dtype"
    with pytest.raises(CaptureError, match=f"(?s){wanted}"):
        trace_step(step)(torch.randn(2, 4))


@pytest.mark.parametrize("name", INDEPENDENT)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_default_dtype_is_captured_where_no_operator_reads_it(
    name: str, dtype: torch.dtype
) -> None:
    def step(x: Tensor) -> Any:
        with torch.device("cpu"), default_dtype(dtype):
            return INDEPENDENT[name](x)

    x = torch.randn(2, 4).abs()
    found, wanted = trace_step(step)(x).bind()(x), step(x)
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted)


def test_settings_that_only_python_reads_are_part_of_the_graph() -> None:
    def step(x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return nn.functional.scaled_dot_product_attention(x, x, x)

    x = torch.randn(2, 2, 5, 4)
    assert torch.equal(trace_step(step)(x).bind()(x), step(x))


LEFT: dict[str, tuple[Callable[[], Any], str]] = {
    "dtype": (lambda: torch.set_default_dtype(torch.float64), "default dtype: torch.float64"),
    "deterministic": (lambda: torch.use_deterministic_algorithms(True), "deterministic algorithms"),
    "grad mode": (lambda: torch.set_grad_enabled(False), "autograd: False, and was True"),
    "autocast": (lambda: torch.set_autocast_enabled("cpu", True), "autocast: .*bfloat16"),
    "device": (lambda: torch.set_default_device("cpu"), "modes: DeviceContext cpu"),
    "fast path": (lambda: backends.mha.set_fastpath_enabled(False), "fast path of nn"),
    "attention": (lambda: backends.cuda.enable_flash_sdp(False), "flash_sdp_enabled: False"),
}


@pytest.mark.parametrize(
    ("name", "capture"), [*((name, "step") for name in LEFT), ("dtype", "joint")]
)
def test_a_setting_that_a_step_leaves_changed_is_refused_and_set_back(
    name: str, capture: str
) -> None:
    change, problem = LEFT[name]

    class Changing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            change()
            return x

    module, x = Changing(4, 4), torch.randn(2, 4)
    captures: dict[str, Callable[[], object]] = {
        "step": lambda: trace_step(lambda x: module(x).detach(), module=module)(x),
        "joint": lambda: export_joint_graph(module, (x,)),
    }
    with pytest.raises(CaptureError, match=f"(?s)leaves settings changed.*{problem}.*Set them"):
        captures[capture]()
    linear = nn.Linear(4, 4)
    run = trace_step(lambda x: linear(x), module=linear)(x).bind(linear)
    assert run(x).dtype == torch.float32
    assert torch.equal(run(x), linear(x))
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert not torch.are_deterministic_algorithms_enabled()
    assert backends.cuda.flash_sdp_enabled()


def test_settings_are_set_back_if_the_step_fails() -> None:
    def step(x: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64)
        raise KeyError("a bug of the user")

    with pytest.raises(KeyError, match="a bug of the user"):
        trace_step(step)(torch.ones(2))
    assert torch.get_default_dtype() is torch.float32
