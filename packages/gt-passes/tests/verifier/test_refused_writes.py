"""A write that only its kernel would refuse is found before it runs."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from gt_passes import Verifier
from gt_passes.analysis.node_calls import arguments_of

aten = torch.ops.aten


def captured(function) -> GraphModule:
    return make_fx(function, tracing_mode="fake")(torch.ones(4, 1))


def problems(graph_module: GraphModule) -> str:
    return "\n".join(map(str, Verifier().verify(graph_module).problems))


def test_a_write_where_elements_share_memory_is_found():
    graph_module = captured(lambda x: x.expand(4, 3).relu())
    (relu,) = graph_module.graph.find_nodes(op="call_function", target=aten.relu.default)
    relu.target = aten.relu_.default
    relu.meta["val"] = relu.args[0].meta["val"]
    assert_expected_inline(
        problems(graph_module),
        """\
[refused writes] node relu (aten.relu_.default)
it writes to expand, of which elements share memory
expected a tensor whose elements each have memory of their own
got      shape [4, 3], stride [1, 0], dtype torch.float32, device cpu""",
    )


@pytest.mark.parametrize(
    "write",
    [
        lambda x, mask: x.masked_fill_(mask, 0.0),
        lambda x, mask: x.index_put_((torch.tensor([0]),), torch.zeros(())),
        lambda x, mask: x.index_fill_(0, torch.tensor([0]), 0.0),
        lambda x, mask: x.fill_(1.0),
        lambda x, mask: x.zero_(),
        lambda x, mask: x.tril_(),
        lambda x, mask: x.triu_(),
        lambda x, mask: x.t_(),
    ],
)
def test_a_write_whose_kernel_takes_it_is_right(write):
    def step(x, mask):
        return write(x.clone().expand(4, 3), mask)

    x, mask = torch.ones(4, 1), torch.zeros(4, 3, dtype=torch.bool)
    step(x, mask)  # it runs
    assert problems(make_fx(step, tracing_mode="fake")(x, mask)) == ""


WHOLE = torch.ones(3, dtype=torch.int64)
HALVES = torch.full((3,), 0.5)


def written(operator, *arguments: torch.Tensor | float) -> GraphModule:
    """A step that writes to whole numbers; a tensor among the arguments is an input of it."""

    def step(x, other):
        y = x + 1
        operator(y, *(other if isinstance(each, torch.Tensor) else each for each in arguments))
        return y

    (*_, other) = arguments
    return make_fx(step, tracing_mode="fake")(WHOLE, other)


@pytest.mark.parametrize(
    ("operator", "arguments"),
    [(aten.mul_.Tensor, (1.5,)), (aten.addcmul_.default, (HALVES, HALVES))],
)
def test_a_write_of_another_kind_of_number_is_found(operator, arguments):
    with pytest.raises(RuntimeError, match="can't be cast"):
        operator(WHOLE.clone(), *arguments)
    graph_module = written(operator, *arguments)
    (node,) = graph_module.graph.find_nodes(op="call_function", target=operator)
    whole = f"""\
[refused writes] node {node.name} ({operator})
it writes torch.float32 to add, which cannot hold it
expected a tensor to which torch.float32 is converted
got      shape [3], stride [1], dtype torch.int64, device cpu"""
    assert problems(graph_module) == whole
    node.kwargs = arguments_of(node)
    node.args = ()
    assert problems(graph_module) == whole


def test_a_write_that_an_operator_refuses_without_writing_is_found():
    def step(x):
        y = x.clone()
        aten.sub_.Tensor(y, x)
        return y

    booleans = torch.ones(3, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="Subtraction, the `-` operator"):
        step(booleans)
    (_, message, got) = problems(make_fx(step, tracing_mode="fake")(booleans)).splitlines()
    assert message.startswith("its operator refuses to write to clone: Subtraction, the `-` oper")
    assert got == "got      shape [3], stride [1], dtype torch.bool, device cpu"


def test_a_write_of_types_that_promotion_does_not_know_is_right():
    def step(x, y):
        return x.clone().add_(y)

    inputs = torch.ones(3, dtype=torch.complex64), torch.ones(()).to(torch.float8_e4m3fn)
    step(*inputs)  # it runs
    assert problems(make_fx(step, tracing_mode="fake")(*inputs)) == ""


def test_a_write_of_what_has_no_value_is_only_told_so():
    graph_module = written(aten.mul_.Tensor, 2)
    (add,) = graph_module.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    del add.meta["val"]
    assert "refused writes" not in problems(graph_module)


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_nothing_is_asked_of_operators_that_are_not_of_aten(error):
    def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
        if len(x) < 2:
            raise error("of two rows or more")
        return x * factor

    def scale_(x: torch.Tensor, factor: float) -> None:
        x.copy_(scale(x, factor))

    with torch.library._scoped_library("gt_refused_writes", "FRAGMENT") as library:
        for schema, function in (
            ("scale(Tensor x, float factor) -> Tensor", scale),
            ("scale_(Tensor(a!) x, float factor) -> ()", scale_),
        ):
            library.define(schema, tags=torch.Tag.pointwise)
            library.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")

        def step(x):
            y = x.clone()
            torch.ops.gt_refused_writes.scale_(y, 2.0)
            return y

        step(torch.ones(2, 3))  # it runs
        assert problems(make_fx(step, tracing_mode="fake")(torch.ones(2, 3))) == ""


@pytest.mark.parametrize(
    ("operator", "arguments"),
    [
        (aten.mul_.Tensor, (2,)),
        (aten.mul_.Tensor, (torch.ones((), dtype=torch.int32),)),
        (aten.copy_.default, (HALVES,)),
        (aten.fill_.Scalar, (1.5,)),
    ],
)
def test_a_write_that_is_converted_is_right(operator, arguments):
    operator(WHOLE.clone(), *arguments)  # it runs
    assert problems(written(operator, *arguments)) == ""


def test_a_write_to_memory_of_its_own_is_right():
    assert problems(captured(lambda x: x.clone().add_(1.0).expand(4, 3).sum())) == ""
    # A dimension of one has no second element, whatever its stride.
    assert problems(captured(lambda x: x[:1].clone().as_strided((1, 1), (0, 0)).add_(1.0))) == ""
