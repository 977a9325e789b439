"""Python that a capture cannot follow: one sentence says what, where in the user's code, and how."""

from __future__ import annotations

import copy
import dataclasses
import logging
import pickle
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.utils import rnn

from gt_trace import CaptureError, InputMismatchError, trace_step
from gt_trace.joint import export_joint_graph, partition
from gt_trace.testing import fake_world

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


def nests_jagged(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor([x[:2], x[2:]], layout=torch.jagged).values()


def multiplies_sparse(x: Tensor) -> Tensor:
    return torch.sparse.mm(COMPRESSED, x)


def differentiates_forward(x: Tensor) -> Any:
    def differentiates_forward(x: Tensor) -> Tensor:
        return nn.functional.linear(x, gru.weight_ih_l0, gru.bias_ih_l0)

    return torch.autograd.functional.jacobian(
        differentiates_forward, x, vectorize=True, strategy="forward-mode"
    )


def calls_a_captured_step(x: Tensor) -> Any:
    return CAPTURED(x)


def calls_an_operator(x: Tensor) -> Tensor:
    return without_rule(x)


def pads(x: Tensor) -> Tensor:
    return nn.functional.pad(x, (0, x[0, 0].long()))


def splits(x: Tensor) -> Any:
    return torch.tensor_split(x, x[0, :2].long())


def reads_a_version(x: Tensor) -> Tensor:
    return x * gru.weight_ih_l0._version


def written(write: Callable[[Tensor, Tensor], Any]) -> Callable[[Tensor], Tensor]:
    """Return a step that reads the number of a literal after it was written."""

    def step(x: Tensor) -> Tensor:
        literal = torch.tensor(0.0)
        write(literal, x.mean())
        return x * (2 if literal.item() > 0 else 3)

    return step


LITERALS = [
    written(lambda literal, mean: literal.view(1).add_(mean)),
    written(lambda literal, mean: torch._foreach_add_([literal], [mean])),
    written(lambda literal, mean: literal.data.copy_(mean)),
    written(lambda literal, mean: literal.view(1).__setitem__(0, mean)),
    written(lambda literal, _: literal.view(1).uniform_()),
]

COMPRESSED = torch.eye(3).to_sparse_csr()
CAPTURED = trace_step(lambda x: x * 2)(X).bind()
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
    pads: (VALUE, "Compute with tensors"),
    splits: (VALUE, "Compute with tensors"),
    reads_a_version: ("the step reads how often a tensor was written (Tensor._version)", ""),
    **dict.fromkeys(LITERALS, (VALUE, "Compute with tensors")),
    nests_jagged: ("the step makes a nested tensor, whose sizes are values", "Pass padded"),
    multiplies_sparse: ("the step reads a sparse tensor from outside", "Pass its dense parts"),
    differentiates_forward: ("a Jacobian by forward mode mixes tensors", "Use torch.func.jacfwd"),
    calls_a_captured_step: ("a captured step is called inside of a step that is being", ""),
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


def test_numbers_of_literals_that_numbers_were_added_to_are_constants() -> None:
    step = written(lambda literal, _: literal.view(1).add_(2))
    assert torch.equal(trace_step(step)(X).bind()(X), X * 2)


def test_a_dynamic_size_where_an_operator_takes_numbers_is_refused() -> None:
    def step(x: Tensor) -> Tensor:
        return nn.functional.pad(x, (0, 0, 0, -x.shape[0] % 8))

    x = torch.ones(9, 4)
    torch._dynamo.mark_dynamic(x, 0)
    with pytest.raises(
        CaptureError, match=r"(?s)takes numbers where the step.*Do not mark the dim"
    ):
        trace_step(step)(x)


def test_a_captured_step_is_copied_and_not_pickled() -> None:
    assert torch.equal(copy.deepcopy(CAPTURED)(X), X * 2)
    for each in (CAPTURED, CAPTURED.step):
        with pytest.raises(TypeError, match="cannot be pickled; store it by gt_trace"):
            pickle.dumps(each)


COLLECTIVES: list[Callable[[Tensor], Any]] = [
    distributed.all_reduce,
    lambda x: distributed.broadcast(x, 0),
    lambda x: distributed.all_gather([torch.empty_like(x)] * 2, x),
    lambda x: distributed.all_reduce(x, async_op=True).wait(),
    lambda x: distributed.all_gather_object([None, None], {"loss": 1.0}),
    lambda x: distributed.barrier(),
]


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_collectives_of_eager_execution_are_refused_by_name_and_line(collective: Any) -> None:
    def step(x: Tensor) -> Tensor:
        y = x * 2
        collective(y)
        return y

    with (
        fake_world(rank=0, world_size=2),
        pytest.raises(CaptureError, match="calls a collective of eager execution") as error,
    ):
        trace_step(step)(X)
    assert "test_refused_python.py" in str(error.value)
    assert "_functional_collectives" in str(error.value)


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


linear = nn.Linear(4, 4)


def converts(x: Tensor) -> Tensor:
    return linear.double()(x.double())


def assigns(x: Tensor) -> Tensor:
    linear.load_state_dict({"weight": x[:1] * torch.ones(4, 4), "bias": x[0]}, assign=True)
    return linear(x)


def swaps_tensors(x: Tensor) -> Tensor:
    torch.utils.swap_tensors(linear.weight, nn.Parameter(torch.ones(4, 4)))
    return linear(x)


def exchanges(x: Tensor) -> Tensor:
    linear.weight = linear.weight * 2
    return linear(x)


@pytest.mark.parametrize("step", [converts, swaps_tensors, exchanges])
def test_replaced_tensors_of_a_module_are_refused_with_their_line(
    step: Callable[[Tensor], Any],
) -> None:
    wanted = r"(?s)replaces tensors or their memory.*in (\w+)\n.*linear.*Write the new values in pl"
    with pytest.raises(CaptureError, match=wanted):
        trace_step(step, module=linear)(X)
    assert linear.weight.dtype == torch.float32


def test_a_state_that_is_loaded_by_assignment_is_refused_by_its_names() -> None:
    wanted = r"parameter weight was replaced, .*\n  parameter bias was replaced, and a replay would"
    with pytest.raises(CaptureError, match=wanted):
        trace_step(assigns, module=linear)(X)
    assert linear.weight.dtype == torch.float32


def test_a_tensor_and_a_module_may_be_copied_by_deepcopy() -> None:
    assert torch.equal(trace_step(lambda x: copy.deepcopy(x) * 2)(X).bind()(X), X * 2)

    class Copying(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return nn.Linear.forward(copy.deepcopy(self), x)

    model = Copying(4, 4)
    run = partition(export_joint_graph(model, (X,))).bind(model)
    assert torch.equal(run(X), model(X))


BOUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "floats": lambda x: x.clone().random_(2, 9),
    "whole numbers": lambda x: x.long().random_(-3, 5),
    "transposed": lambda x: x.clone().t().random_(2, 9),
    "a slice": lambda x: torch.cat([x, x.repeat(1, 2)[:, 1:5].random_(2, 9)]),
    "one bound": lambda x: x.clone().random_(7) + x.clone().random_(),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_random_numbers_between_bounds_are_those_of_eager(name: str) -> None:
    run = trace_step(BOUNDED[name])(X).bind()
    torch.manual_seed(0)
    found = [run(X), torch.rand(3)]
    torch.manual_seed(0)
    assert all(map(torch.equal, found, [BOUNDED[name](X), torch.rand(3)]))


def test_a_joint_graph_draws_between_bounds() -> None:
    class Drawing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * torch.empty_like(x).random_(2, 9)

    module = Drawing(4, 4)
    run = partition(export_joint_graph(module, (X,))).bind(module)
    torch.manual_seed(0)
    found = run(X)
    torch.manual_seed(0)
    assert torch.equal(found, module(X))


def test_random_numbers_from_one_bound_on_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"(?s)cannot call random_.*None\).*Give both bounds"):
        trace_step(lambda x: x.long().random_(2, None))(X)


OLD_PARAMETRIZATIONS = [nn.utils.weight_norm, nn.utils.spectral_norm]


@pytest.mark.parametrize("old", OLD_PARAMETRIZATIONS)
def test_old_parametrizations_are_refused_and_the_new_ones_are_those_of_eager(old: Any) -> None:
    torch.manual_seed(0)
    module = old(nn.Linear(4, 4))
    wanted = rf"became another tensor.*; use torch\.nn\.utils\.parametrizations\.{old.__name__}"
    with pytest.raises(CaptureError, match=wanted):
        trace_step(lambda x: module(x).detach(), module=module)(X)
    new = getattr(nn.utils.parametrizations, old.__name__)(nn.Linear(4, 4))
    again = copy.deepcopy(new)

    def step_of(module: nn.Module) -> Callable[[Tensor], list[Tensor]]:
        def step(x: Tensor) -> list[Tensor]:
            loss = module(x).square().mean()
            return [loss, *torch.autograd.grad(loss, list(module.parameters()))]

        return step

    run, wanted_step = trace_step(step_of(new), module=new)(X).bind(new), step_of(again)
    for _ in range(2):  # power iterations of spectral norms go on
        assert all(map(torch.equal, run(X), wanted_step(X)))


def test_an_exchanged_module_is_another_one_of_its_kind() -> None:
    pair = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})

    def step(x: Tensor) -> Tensor:
        pair["a"], pair["b"] = pair["b"], pair["a"]
        return pair["a"](x)

    with pytest.raises(CaptureError, match=r"module\.a was a Linear, and became another Linear"):
        trace_step(step, module=pair)(X)


def test_counters_of_executed_code_have_a_name() -> None:
    names: dict[str, Any] = {"n": 0}
    exec("def count():\n global n\n n += 1\n return n", names)
    count = names["count"]
    with pytest.raises(CaptureError, match=r"executed code\.n was 0, and became 1"):
        trace_step(lambda x: x * count())(X)


def test_an_equal_constant_is_listed_once() -> None:
    table = torch.ones(4)
    with pytest.raises(CaptureError) as caught:
        trace_step(lambda x: x * table + x * table.exp() + table)(X)
    assert str(caught.value).count("torch.float32 [4]") == 1
