"""Passes that do to a graph what a test asks for, and what the verifier says of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from pass_graphs import node_of, run_pass
from torch.fx import GraphModule, Node

from gt_config.graph_kinds import EVERY_GRAPH, GraphKind
from gt_config.numerics import Numerics
from gt_passes import ChangeBounds, GraphPass, PassContext, PassReport, VerificationError

aten = torch.ops.aten
X = torch.ones(4, 6)
Edit = Callable[[GraphModule], None]


@dataclass(frozen=True, kw_only=True)
class EditGraph(GraphPass):
    """Does whatever a test asks for."""

    name: ClassVar[str] = "edit-graph"
    numerics: ClassVar[Numerics] = "approximate"
    runs_on: ClassVar[frozenset[GraphKind]] = EVERY_GRAPH

    edit: Edit
    allowed: ChangeBounds = field(default_factory=ChangeBounds)

    @property
    def bounds(self) -> ChangeBounds:
        return self.allowed

    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        self.edit(graph_module)
        return PassReport(changed=True)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


@dataclass(frozen=True, kw_only=True, repr=False)
class ReplaceOperators(EditGraph):
    """May change the dataflow, and take more memory."""

    name: ClassVar[str] = "replace-operators"
    keeps_dataflow: ClassVar[bool] = False

    allowed: ChangeBounds = field(default_factory=lambda: ChangeBounds(peak_memory_growth=None))


def problems_of(graph_module: GraphModule, edit: Edit, **options: object) -> str:
    """What the verifier says after a pass that did ``edit``; empty for nothing."""
    try:
        run_pass(ReplaceOperators(edit=edit, **options), graph_module)
    except VerificationError as error:
        return "\n".join(map(str, error.problems))
    return ""


def move(name: str, *, after: str) -> Edit:
    return lambda graph_module: node_of(graph_module, after).append(node_of(graph_module, name))


def call_after(graph_module: GraphModule, place: Node, target: object, *args: object) -> Node:
    with graph_module.graph.inserting_after(place):
        node = graph_module.graph.call_function(target, args)
    node.meta["val"] = place.meta["val"]
    return node


def updated_buffer(x: torch.Tensor, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
    before = buffer.cos()
    buffer.copy_(x)
    buffer.mul_(2)
    return before, buffer.sin()
