"""Python that a capture cannot follow: one sentence says what, where in the user's code, and how."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import rnn

from gt_trace import CaptureError, InputMismatchError, trace_step
from gt_trace.joint import export_joint_graph

X = torch.ones(3, 4)
gru = nn.GRU(4, 5, batch_first=True)


@torch.library.custom_op("gt_trace_tests::without_rule", mutates_args=())
def without_rule(x: Tensor) -> Tensor:
    return x * 2


def packs(x: Tensor) -> Tensor:
    return gru(rnn.pack_padded_sequence(x[None], torch.tensor([3]), batch_first=True))[1]


def packs_a_list(x: Tensor) -> Tensor:
    return gru(rnn.pack_sequence([x, x[:2]]))[1]


def validates(x: Tensor) -> Tensor:
    return torch.distributions.Normal(x, 1.0, validate_args=True).rsample()


def formats(x: Tensor) -> str:
    return f"{x.sum():.2f}"


def prints(x: Tensor) -> Tensor:
    print(x)
    return x


def describes(x: Tensor) -> str:
    return str(nn.Parameter(x.clone()))


def stores(x: Tensor) -> Tensor:
    torch.save(x, "/dev/null")
    return x


def rounds(x: Tensor) -> Tensor:
    return round(x.sum())


def makes_a_tensor(x: Tensor) -> Tensor:
    return torch.tensor([x.sum(), 1.0])


def nests(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor([x, x]).sum()


def calls_an_operator(x: Tensor) -> Tensor:
    return without_rule(x)


PACKED = "Lengths of packed sequences are values; pass padded sequences, and mask what lies behind"
VALUE = "the step needs the value of a tensor while it is captured, when tensors have none"
REFUSED: dict[Callable[[Tensor], Any], tuple[str, str]] = {
    packs: (VALUE, PACKED),
    packs_a_list: (VALUE, PACKED),
    validates: (VALUE, "A distribution checks its parameters and values; pass validate_args=False"),
    formats: (VALUE, "return what is to be printed or logged"),
    prints: (VALUE, "return what is to be printed or logged"),
    describes: (VALUE, "return what is to be printed or logged"),
    stores: (VALUE, "return what is to be printed or logged"),
    rounds: (VALUE, "decide outside of the step"),
    makes_a_tensor: (VALUE, "Compute with tensors"),
    nests: ("an operator has no rule for the tensors of a capture", "torch.library.register_fake"),
    calls_an_operator: ("an operator has no rule", "Register one (torch.library.register_fake)"),
}


@pytest.mark.parametrize("step", REFUSED, ids=lambda step: step.__name__)
def test_it_is_refused_with_its_line_and_a_remedy(step: Callable[[Tensor], Any]) -> None:
    with pytest.raises(CaptureError) as caught:
        trace_step(step, module=gru)(X)
    what, remedy = REFUSED[step]
    assert str(caught.value).startswith(what)
    assert f", in {step.__name__}\n" in str(caught.value)
    assert remedy in str(caught.value)


def test_logging_does_not_end_a_capture(caplog: pytest.LogCaptureFixture) -> None:
    def step(x: Tensor) -> Tensor:
        logging.getLogger("gt_trace_tests").warning("x is %s", x)
        return x * 2

    assert torch.equal(trace_step(step)(X).bind()(X), X * 2)
    assert "x is FakeTensor" in caplog.text


@dataclasses.dataclass
class Output:
    loss: Tensor


class Named(NamedTuple):
    loss: Tensor
    count: int


REGISTERED = "return a tuple or a dictionary, or call torch.export.register_dataclass(Output) first"
PLAIN = "return tensors, numbers, strings, None, or tuples, lists and dictionaries of them"


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        (
            lambda x: {"a": [Output(x)]},
            f"result['a'][0] is an Output, a dataclass; {REGISTERED}",
        ),
        (lambda x: (each for each in x), f"result is a generator; {PLAIN}"),
        (lambda x: (x, {x}), f"result[1] is a set; {PLAIN}"),
        (lambda x: (x, gru), f"result[1] is a GRU; {PLAIN}"),
        (lambda x: (x, np.float32(1)), f"result[1] is a float32; {PLAIN}"),
        (lambda x: (x, np.float64(1)), f"result[1] is a float64; {PLAIN}"),
        (lambda x: (x, b"a"), f"result[1] is a bytes; {PLAIN}"),
        (
            lambda x: torch.distributions.Normal(x, 1.0, validate_args=False),
            f"result is a Normal; {PLAIN}",
        ),
    ],
)
@pytest.mark.parametrize("constants", ["error", "allow"])
def test_results_that_no_graph_returns_are_refused(
    step: Callable[[Tensor], Any], problem: str, constants: Any
) -> None:
    with pytest.raises(CaptureError) as caught:
        trace_step(step, constants=constants)(X)
    assert str(caught.value) == f"the step's results cannot be captured:\n  {problem}"


def test_a_joint_graph_refuses_them_too() -> None:
    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return Output(super().forward(x))

    with pytest.raises(CaptureError, match="output is an Output, a dataclass; return a tuple or a"):
        export_joint_graph(Model(4, 4), (X,))


def test_named_tuples_and_registered_dataclasses_are_returned() -> None:
    @dataclasses.dataclass
    class Registered:
        loss: Tensor

    torch.export.register_dataclass(Registered)
    named = trace_step(lambda x: Named(x * 2, 3))(X).bind()(X)
    assert isinstance(named, Named)
    assert torch.equal(named.loss, X * 2)
    found = trace_step(lambda x: Registered(x * 2))(X).bind()(X)
    assert isinstance(found, Registered)
    assert torch.equal(found.loss, X * 2)


def test_modules_that_cannot_be_exchanged_are_refused_by_name() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted, traced = torch.jit.script(nn.Linear(4, 4)), torch.jit.trace(nn.Linear(4, 4), X)
    for inner in (scripted, traced):
        module = nn.Sequential(inner)
        with pytest.raises(CaptureError, match="module 0 is compiled by TorchScript, into which"):
            trace_step(module, module=module)(X)
        with pytest.raises(CaptureError, match="module 0 is compiled by TorchScript, into which"):
            export_joint_graph(module, (X,))
    lazy = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(
        CaptureError, match=r"parameter 0\.weight has no shape yet; call the module"
    ):
        trace_step(lazy, module=lazy)(X)


def test_dynamic_sizes_of_0_and_1_and_unequal_ones_are_refused_by_name() -> None:
    y, z = torch.randn(2, 6, 4), torch.randn(6)
    torch._dynamo.mark_dynamic(y, 1)
    torch._dynamo.mark_dynamic(z, 0)
    run = trace_step(lambda z: z * 2)(z).bind()
    for size in (0, 1):
        with pytest.raises(InputMismatchError, match=f"z dim 0 is {size}; a dynamic dim is captur"):
            run(torch.randn(size))
    run = trace_step(lambda y, z: y.sum((0, 2)) + z)(y, z).bind()
    with pytest.raises(
        InputMismatchError, match="z dim 0 is 4 and y dim 1 is 5: these were one si"
    ):
        run(torch.randn(2, 5, 4), torch.randn(4))
    y = torch.randn(2, 6, 4)
    torch._dynamo.decorators.mark_unbacked(y, 1)
    run = trace_step(lambda y: y * 2)(y).bind()
    for size in (0, 1, 5):
        y = torch.randn(2, size, 4)
        assert torch.equal(run(y), y * 2)
