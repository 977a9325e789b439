"""The graph of one kind of action of one stage, its inputs and outputs by name."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from gt_config.node_keys import PipelineAction
from gt_pipeline.graph.slots import Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionGraph:
    """One action's graph: a function of plain tensors, and of sizes that depend on data.

    Passes edit ``graph_module`` in place and leave inputs and outputs as they are.
    """

    kind: PipelineAction
    stage_index: int
    graph_module: GraphModule
    inputs: tuple[Slot, ...]
    """What each placeholder is; those that are the same for every microbatch come first."""

    outputs: tuple[Slot, ...]

    @property
    def num_static(self) -> int:
        """Leading inputs that are the same for every microbatch."""
        return sum(slot.is_static for slot in self.inputs)

    @property
    def static_inputs(self) -> tuple[Slot, ...]:
        """The leading inputs that are the same for every microbatch."""
        return self.inputs[: self.num_static]

    @property
    def is_empty(self) -> bool:
        """Whether it computes nothing, and only hands inputs on."""
        ops = {node.op for node in self.graph_module.graph.nodes}
        return ops <= {"placeholder", "output"}

    def result_nodes(self) -> tuple[Node, ...]:
        """The node of each output."""
        values: Any = self.graph_module.graph.output_node().args[0]
        return tuple(values)


def copied(action: ActionGraph) -> ActionGraph:
    """The action with a graph of its own; nodes keep their names."""
    source = action.graph_module
    graph = copy.deepcopy(source.graph)
    return dataclasses.replace(action, graph_module=GraphModule(source, graph))


def extract(
    source: GraphModule,
    nodes: Sequence[Node],
    *,
    inputs: Mapping[Slot, Node],
    outputs: Sequence[Node],
) -> GraphModule:
    """A graph of copies of some nodes of another one, which are in execution order.

    ``inputs`` are nodes of the source that it takes instead of computing them; of ``outputs``, one
    node may stand there twice.
    """
    graph = Graph()
    copies: dict[Node, Node] = {}
    for slot, node in inputs.items():
        placeholder = graph.placeholder(slot.placeholder_name)
        placeholder.target = placeholder.name
        placeholder.meta = {"val": node.meta.get("val")}
        copies[node] = placeholder

    def copy_of(node: Node) -> Node:
        if node not in copies and node.op == "get_attr":
            copies[node] = graph.node_copy(node)
        return copies[node]

    for node in nodes:
        copies[node] = graph.node_copy(node, copy_of)
    graph.output(tuple(copy_of(node) for node in outputs))
    return GraphModule(source, graph)


def append_graph(
    graph: Graph, attributes: torch.nn.Module, action: ActionGraph, made: dict[Slot, Node]
) -> None:
    """Copy an action's graph to the end of another one, and its attributes, under new names.

    ``made`` has the nodes of ``graph`` that the action takes, by slot; what it gives is added.
    """
    source = action.graph_module
    placeholders = source.graph.find_nodes(op="placeholder")
    copies = dict(zip(placeholders, (made[slot] for slot in action.inputs), strict=True))
    for node in source.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if node.op == "get_attr":
            name = _free_name(attributes, str(node.target).replace(".", "_"))
            setattr(attributes, name, getattr(source, str(node.target)))
            copies[node].target = name
    for slot, result in zip(action.outputs, action.result_nodes(), strict=True):
        made[slot] = copies[result]


def _free_name(attributes: torch.nn.Module, name: str) -> str:
    free, number = name, 0
    while hasattr(attributes, free):
        number += 1
        free = f"{name}_{number}"
    return free
