"""Passes with a fault each, for the tests of the fuzzer. They must not be mistaken for ours.

Imported by workers, by name, so that the registry of the test process never hears of them.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch.fx import GraphModule

from gt_config.graph_kinds import EVERY_GRAPH, GraphKind
from gt_config.numerics import Numerics
from gt_passes import GraphPass, PassContext, PassReport
from gt_passes.analysis.bucket_copies import PACK_BUCKET, UNPACK_BUCKET
from gt_passes.registry import register_pass

_CHANGED = PassReport(changed=True)


@register_pass
@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedDropMore(GraphPass):
    """Every dropout keeps half as many values as it should."""

    name: ClassVar[str] = "planted-drop-more"
    numerics: ClassVar[Numerics] = "bitwise"
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
    numerics: ClassVar[Numerics] = "bitwise"
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
    numerics: ClassVar[Numerics] = "bitwise"
    runs_on: ClassVar[frozenset[GraphKind]] = EVERY_GRAPH

    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        raise LookupError("planted")


@register_pass
@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedEndProcess(GraphPass):
    """One rank does not come back."""

    name: ClassVar[str] = "planted-end-process"
    numerics: ClassVar[Numerics] = "bitwise"
    runs_on: ClassVar[frozenset[GraphKind]] = EVERY_GRAPH

    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        if dist.get_rank() == 1:
            os._exit(3)
        return _CHANGED


@register_pass
@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedSwapInOneBucket(GraphPass):
    """On rank 1, two equal-shaped parameters of a bucket change places, and where they are read."""

    name: ClassVar[str] = "planted-swap-in-one-bucket"
    numerics: ClassVar[Numerics] = "bitwise"
    runs_on: ClassVar[frozenset[GraphKind]] = EVERY_GRAPH

    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        if dist.get_rank() != 1:
            return PassReport(changed=False)
        graph = graph_module.graph
        split = graph.find_nodes(op="call_function", target=UNPACK_BUCKET)[0]
        first = next(
            index
            for index, pair in enumerate(itertools.pairwise(split.args[2]))
            if len({*pair}) == 1
        )
        places = {first: first + 1, first + 1: first}
        for item in tuple(split.users):
            item.update_arg(1, places.get(item.args[1], item.args[1]))
        bucket = split
        while bucket.target is not PACK_BUCKET:
            bucket = bucket.args[0]
        parts = bucket.args[0]
        bucket.update_arg(0, [parts[places.get(index, index)] for index in range(len(parts))])
        return _CHANGED


@register_pass
@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedReorderOneRank(GraphPass):
    """Rank 1 launches its first collective a second time."""

    name: ClassVar[str] = "planted-reorder-one-rank"
    numerics: ClassVar[Numerics] = "bitwise"
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
