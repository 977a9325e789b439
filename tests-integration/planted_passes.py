"""Passes with a fault each, for the tests of the fuzzer. They must not be mistaken for ours.

Imported by workers, by name, so that the registry of the test process never hears of them.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from gt_config.graph_kinds import EVERY_GRAPH, GraphKind
from gt_passes import GraphPass, PassContext, PassReport
from gt_passes.registry import register_pass

_aten = torch.ops.aten
_CHANGED = PassReport(changed=True)


@register_pass
@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedDropMore(GraphPass):
    """Every dropout keeps half as many values as it should."""

    name: ClassVar[str] = "planted-drop-more"
    preserves_numerics: ClassVar[bool] = True
    runs_on: ClassVar[frozenset[GraphKind]] = EVERY_GRAPH
    keeps_dataflow: ClassVar[bool] = False  # so that the verifier does not look

    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        draws = [
            node
            for node in graph_module.graph.nodes
            if node.target is torch.ops.aten.bernoulli_.float
        ]
        for node in draws:
            node.update_arg(1, node.args[1] / 2)
        return PassReport(changed=bool(draws))


@register_pass
@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedForgetWait(GraphPass):
    """A collective is read while it runs."""

    name: ClassVar[str] = "planted-forget-wait"
    preserves_numerics: ClassVar[bool] = True
    runs_on: ClassVar[frozenset[GraphKind]] = EVERY_GRAPH

    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        graph = graph_module.graph
        wait = graph.find_nodes(
            op="call_function", target=torch.ops._c10d_functional.wait_tensor.default
        )[-1]
        wait.replace_all_uses_with(wait.args[0])
        graph.erase_node(wait)
        return _CHANGED


@register_pass
@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedRaise(GraphPass):
    """A pass that fails."""

    name: ClassVar[str] = "planted-raise"
    preserves_numerics: ClassVar[bool] = True
    runs_on: ClassVar[frozenset[GraphKind]] = EVERY_GRAPH

    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        raise LookupError("planted")


@register_pass
@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedEndProcess(GraphPass):
    """One rank does not come back."""

    name: ClassVar[str] = "planted-end-process"
    preserves_numerics: ClassVar[bool] = True
    runs_on: ClassVar[frozenset[GraphKind]] = EVERY_GRAPH

    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        if dist.get_rank() == 1:
            os._exit(3)
        return _CHANGED


@register_pass
@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedSwapInOneBucket(GraphPass):
    """Rank 1 puts two equal-shaped gathers into a bucket in the other order than rank 0."""

    name: ClassVar[str] = "planted-swap-in-one-bucket"
    preserves_numerics: ClassVar[bool] = True

    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        graph = graph_module.graph
        gather = torch.ops._c10d_functional.all_gather_into_tensor.default
        pairs = itertools.pairwise(graph.find_nodes(op="call_function", target=gather))
        first, second = next(
            (one, other)
            for one, other in pairs
            if one.meta["val"].shape == other.meta["val"].shape
            and one.args[1:] == other.args[1:]
            and one.meta["val"].dtype is other.meta["val"].dtype
            and other.args[0] < one
        )
        members = [first, second]
        if dist.get_rank() == 1:
            members.reverse()
        num_ranks, group = first.args[1:]

        def call(target: Any, *args: Any) -> Node:
            node = graph.call_function(target, args)
            node.meta = {key: value for key, value in first.meta.items() if key != "val"}
            with context.fake_mode:
                node.meta["val"] = target(*map_arg(args, lambda each: each.meta["val"]))
            return node

        with graph.inserting_before(first):
            parts = [call(_aten.reshape.default, each.args[0], [-1]) for each in members]
            bucket = call(gather, call(_aten.cat.default, parts), num_ranks, group)
            whole = call(torch.ops._c10d_functional.wait_tensor.default, bucket)
            rows = call(_aten.view.default, whole, [num_ranks, 2, -1])
            for index, each in enumerate(members):
                part = call(_aten.select.int, rows, 1, index)
                shape = list(each.meta["val"].shape)
                part = call(_aten.clone.default, call(_aten.reshape.default, part, shape))
                (wait,) = each.users
                wait.replace_all_uses_with(part)
        for each in members:
            (wait,) = each.users
            graph.erase_node(wait)
            graph.erase_node(each)
        return _CHANGED


@register_pass
@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedReorderOneRank(GraphPass):
    """Rank 1 launches its first collective a second time."""

    name: ClassVar[str] = "planted-reorder-one-rank"
    preserves_numerics: ClassVar[bool] = True
    runs_on: ClassVar[frozenset[GraphKind]] = EVERY_GRAPH

    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        if dist.get_rank() != 1:
            return PassReport(changed=False)
        graph = graph_module.graph
        gather = graph.find_nodes(
            op="call_function", target=torch.ops._c10d_functional.all_gather_into_tensor.default
        )[0]
        (wait,) = gather.users
        with graph.inserting_after(wait):
            again = graph.node_copy(gather)
        with graph.inserting_after(again):
            graph.call_function(wait.target, (again,)).meta = dict(wait.meta)
        return _CHANGED
