"""What may be computed a second time, with the reason where it may not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from pass_graphs import capture, collectives, node_of, unshard
from torch.fx import GraphModule

from gt_passes.analysis.storages import Storages
from gt_passes.memory_policy.recomputability import Recomputability, operator_name
from gt_trace.annotate import phase

X = torch.ones(4, 4)


def forward_and_backward(forward: Callable[[torch.Tensor], torch.Tensor]) -> GraphModule:
    """A graph whose backward reads what the forward makes."""

    def step(x):
        with phase("forward"):
            y = forward(x)
        with phase("backward"):
            return y.sin()

    return capture(step, X.clone())


def reason(graph_module: GraphModule, name: str, **options: bool) -> str | None:
    storages = Storages(graph_module)
    (storage,) = set(storages.of(node_of(graph_module, name)))
    return Recomputability(storages, **options).reason_against(storage)


def test_pure_operators_may_run_again():
    graph_module = forward_and_backward(lambda x: (x.cos() @ x).view(16))
    assert reason(graph_module, "cos") is None
    assert reason(graph_module, "view") is None  # as that of the product
    storages = Storages(graph_module)
    recomputability = Recomputability(storages)
    (product,) = storages.of(node_of(graph_module, "mm"))
    makers = [storages.maker[source].name for source in recomputability.sources(product)]
    assert makers == ["cos", "x_1"]


def test_a_chain_in_place_may_run_again_as_a_whole():
    graph_module = forward_and_backward(lambda x: x.cos().add_(1).mul_(x.exp()))
    assert reason(graph_module, "cos") is None
    storages = Storages(graph_module)
    recomputability = Recomputability(storages)
    (storage,) = storages.of(node_of(graph_module, "cos"))
    assert [node.name for node in recomputability.making(storage)] == ["cos", "add_", "mul_"]
    makers = [storages.maker[source].name for source in recomputability.sources(storage)]
    assert makers == ["x_1", "exp"]  # the second is made in the middle of the chain


@pytest.mark.parametrize(
    ("forward", "name", "expected"),
    [
        (lambda x: x, "x_1", "it is an input or a constant"),
        (lambda x: torch.rand_like(x), "rand_like", "it draws random numbers"),
        (lambda x: x.cos().bernoulli_(), "cos", "bernoulli_: it draws random numbers"),
        (lambda x: x.sort()[0], "getitem", "it decides between equals"),
        (lambda x: x.topk(2)[0], "getitem", "it decides between equals"),
    ],
)
def test_cannot_run_again(forward, name: str, expected: str):
    assert reason(forward_and_backward(forward), name) == expected


def test_cannot_run_again_if_only_it_knows_its_size():
    graph_module = forward_and_backward(lambda x: x.cos())
    node_of(graph_module, "cos").meta["unbacked_bindings"] = {"u0": ()}
    assert reason(graph_module, "cos") == "only it knows the size of its result"


def test_cannot_write_again_to_what_others_have_read():
    def forward(x):
        y = x.cos()
        z = y.exp()
        return y.add_(z)

    assert_expected_inline(
        str(reason(forward_and_backward(forward), "cos")),
        """add_ writes to memory that others read before""",
    )


def test_cannot_read_again_what_is_written_to_later():
    def forward(x):
        y = x.cos()
        x.add_(1)
        return y

    graph_module = forward_and_backward(forward)
    assert_expected_inline(
        str(reason(graph_module, "cos")),
        """it is computed from memory that add_ writes to later""",
    )


def test_may_read_again_what_only_the_optimizer_writes_to():
    def step(x):
        with phase("forward"):
            y = x.cos()
        with phase("backward"):
            z = y.sin()
        with phase("optimizer"):
            x.add_(1)
        return z

    assert reason(capture(step, X.clone()), "cos") is None


def test_collectives_run_again_where_that_is_asked_for(one_rank_group):
    def forward(x):
        return collectives.wait_tensor(collectives.all_reduce(x.cos(), "sum", one_rank_group))

    graph_module = forward_and_backward(forward)
    assert reason(graph_module, "wait_tensor") == "it is a collective"
    assert reason(graph_module, "wait_tensor", recompute_collectives=True) is None


def test_cannot_gather_a_parameter_again(one_rank_group):
    graph_module = forward_and_backward(lambda x: unshard(x, group=one_rank_group).cos())
    for allowed in (False, True):
        found = reason(graph_module, "wait_tensor", recompute_collectives=allowed)
        assert found == "it is part of a collective of FSDP"


def test_operators_have_names_without_overloads():
    graph_module = forward_and_backward(lambda x: x @ x)
    assert operator_name(node_of(graph_module, "mm")) == "aten.mm"
