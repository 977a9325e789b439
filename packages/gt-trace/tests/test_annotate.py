"""Annotations reach the nodes they should, survive into backward, and come off again."""

from __future__ import annotations

import copy
from types import MethodType

import pytest
import torch
from torch import nn
from torch.fx import Graph
from trace_models import TiedModel, batch, step_of

from gt_config.node_keys import (
    EpExchangeAnnotation,
    EpRegionAnnotation,
    FsdpCollectiveAnnotation,
    ModuleAnnotation,
)
from gt_trace import (
    annotate,
    annotate_method,
    module_fqn,
    phase_of,
    read_annotation,
    trace_step,
    write_annotation,
)
from gt_trace.annotate import annotate_modules
from gt_trace.node_metadata import is_backward, remove_annotation


def test_every_module_is_found_in_forward_and_in_backward() -> None:
    model = TiedModel()
    graph = trace_step(step_of(model), module=model)(*batch(1)).graph_module.graph
    forward = {module_fqn(n) for n in graph.nodes if phase_of(n) == "forward"}
    backward = {module_fqn(n) for n in graph.nodes if phase_of(n) == "backward"}
    leaves = {"embedding", "head"} | {
        f"blocks.{i}.{name}" for i in (0, 1) for name in ("norm", "up", "down")
    }
    assert leaves <= forward
    assert leaves <= backward
    # The residual add belongs to the block itself.
    assert {"blocks.0", "blocks.1"} <= forward


def test_phases_are_forward_loss_and_backward_in_this_order() -> None:
    model = TiedModel()
    graph = trace_step(step_of(model), module=model)(*batch(1)).graph_module.graph
    phases = [phase_of(n) for n in graph.nodes if n.op == "call_function"]
    seen = list(dict.fromkeys(phases))
    assert seen == ["forward", "loss", "backward"]
    assert {n.target for n in graph.nodes if phase_of(n) == "loss"} >= {
        torch.ops.aten.nll_loss_forward.default
    }
    assert all(is_backward(n) == (phase_of(n) == "backward") for n in graph.nodes if n.meta)


def test_method_annotation_survives_into_backward_and_is_undone() -> None:
    class Router:
        def dispatch(self, x: torch.Tensor) -> torch.Tensor:
            return self.exchange(x.sin())

        def exchange(self, x: torch.Tensor) -> torch.Tensor:
            return x.cos()

    router = Router()
    region = EpRegionAnnotation(kind="dispatch")
    exchange = EpExchangeAnnotation(kind="token_exchange")

    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(router.dispatch(x).sum(), [x])

    x = torch.rand(3, requires_grad=True)
    with (
        annotate_method(router, "dispatch", region),
        annotate_method(router, "exchange", exchange),
    ):
        graph = trace_step(step)(x).graph_module.graph
    assert vars(router) == {}
    marked = [n for n in graph.nodes if read_annotation(n, EpRegionAnnotation) == region]
    # d(cos(sin x)) = -sin(sin x) * cos x: the nodes of both functions, both ways.
    assert {is_backward(n) for n in marked} == {True, False}
    inner = {n for n in marked if read_annotation(n, EpExchangeAnnotation) == exchange}
    assert {n.target for n in inner if not is_backward(n)} == {torch.ops.aten.cos.default}
    assert torch.ops.aten.sin.default in {n.target for n in inner if is_backward(n)}


def test_unknown_method_is_an_error_that_lists_those_that_exist() -> None:
    class Router:
        def dispatch(self) -> None: ...

    with pytest.raises(AttributeError) as error:
        annotate_method(Router(), "dispatched", EpRegionAnnotation(kind="dispatch"))
    assert str(error.value) == "Router has no method 'dispatched' to annotate; it has ['dispatch']"


def test_cannot_undo_under_a_later_wrapper() -> None:
    layer = nn.Linear(1, 1)
    first = annotate_method(layer, "forward", ModuleAnnotation(fqn="a"))
    second = annotate_method(layer, "forward", ModuleAnnotation(fqn="b"))
    with pytest.raises(RuntimeError, match=r"Linear\.forward was wrapped again"):
        first.undo()
    second.undo()


def test_can_undo_in_reverse_order_and_twice() -> None:
    layer = nn.Linear(1, 1)
    handles = [annotate_method(layer, "forward", ModuleAnnotation(fqn=name)) for name in "ab"]
    for handle in reversed(handles):
        handle.undo()
        handle.undo()
    assert "forward" not in vars(layer)


def test_prefix_names_the_root_of_a_part() -> None:
    layer = nn.Linear(2, 2)
    with annotate_modules(layer, prefix="layers.3"):
        graph = trace_step(lambda x: layer(x), constants="allow")(torch.ones(1, 2)).graph_module
    assert {module_fqn(n) for n in graph.graph.nodes if n.op == "call_function"} == {"layers.3"}


def test_unshard_annotation_turns_into_reduce_grad_in_backward() -> None:
    unshard = FsdpCollectiveAnnotation(kind="unshard", parameter_names=("w",), mesh_axis="dp")

    def step(w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with annotate(unshard):
            gathered = w.to(torch.float64)
        return torch.autograd.grad(gathered.sin().sum(), [w])

    graph = trace_step(step)(torch.rand(3, requires_grad=True)).graph_module.graph
    kinds = {
        (n.target, found.kind)
        for n in graph.nodes
        if (found := read_annotation(n, FsdpCollectiveAnnotation)) is not None
    }
    cast = torch.ops.aten._to_copy.default
    assert kinds == {(cast, "unshard"), (cast, "reduce_grad")}


def test_unshard_that_checkpointing_runs_again_in_backward_stays_an_unshard() -> None:
    unshard = FsdpCollectiveAnnotation(kind="unshard", parameter_names=("w",), mesh_axis="dp")

    def block(w: torch.Tensor) -> torch.Tensor:
        with annotate(unshard):
            gathered = w.to(torch.float64)
        return gathered.sin()

    def step(w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.utils.checkpoint.checkpoint(block, w, use_reentrant=False)
        return torch.autograd.grad(y.sum(), [w])

    graph = trace_step(step)(torch.rand(3, requires_grad=True)).graph_module.graph
    kinds = [
        (found.kind, is_backward(n))
        for n in graph.nodes
        if (found := read_annotation(n, FsdpCollectiveAnnotation)) is not None
    ]
    assert kinds == [("unshard", False), ("unshard", True), ("reduce_grad", True)]


def test_annotations_of_a_node_can_be_written_read_and_removed() -> None:
    node = Graph().placeholder("x")
    assert read_annotation(node, ModuleAnnotation) is None
    write_annotation(node, ModuleAnnotation(fqn="a"))
    write_annotation(node, EpRegionAnnotation(kind="compute"))
    write_annotation(node, ModuleAnnotation(fqn="b"))
    assert read_annotation(node, ModuleAnnotation) == ModuleAnnotation(fqn="b")
    remove_annotation(node, ModuleAnnotation)
    assert read_annotation(node, ModuleAnnotation) is None
    assert read_annotation(node, EpRegionAnnotation) == EpRegionAnnotation(kind="compute")


def test_a_deep_copy_of_an_annotated_object_runs_its_own_patched_method() -> None:
    layer = nn.Linear(2, 2)
    layer.forward = MethodType(lambda self, x: x * self.weight, layer)  # type: ignore[method-assign]
    with annotate_method(layer, "forward", ModuleAnnotation(fqn="a")):
        copied = copy.deepcopy(layer)
    assert vars(copied)["forward"].__self__ is copied
    assert vars(layer)["forward"].__self__ is layer
