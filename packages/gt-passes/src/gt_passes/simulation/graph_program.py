"""A captured graph as tasks on streams.

Operators run on one compute stream in the graph's order; each process group has a stream of its
own, as torch gives each NCCL communicator one. A collective starts after everything that was issued
to the compute stream before it (its launch records an event there), and a wait makes the compute
stream wait for it. Views cost the host alone. Copies to host memory and back that are waited for
share one stream. A compiled region runs its body, fused (``compiled_region``); a piece that is
replayed as a CUDA graph runs its body for one launch by the host.

Where the host reads a number of a CUDA tensor, it waits for the device. Of a copy in host memory it
does not: a copy has waited. A graph that was captured on a CPU for a run on a GPU says neither.
There numbers of one tensor that are read in a row are assumed to be copied to the host together, as
``tolist`` of such a copy reads them: the first one waits. Another tensor is another copy.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch.fx import GraphModule, Node

from gt_passes._torch_internals import value_of
from gt_passes.analysis.host_copies import is_host_copy
from gt_passes.analysis.outlined_region import OutlinedRegion, region_inputs, region_of
from gt_passes.cuda_graphs.cuda_graph_replay import ReplayedPiece
from gt_passes.simulation.compiled_region import FusedKernel, compiled_kernels
from gt_passes.simulation.cost_model import CostModel, OpCost
from gt_passes.simulation.operands import OperandReader
from gt_passes.simulation.timeline import Task, Timeline, schedule
from gt_passes.simulation.work import is_view_node

COMPUTE_STREAM = "compute"
COPY_STREAM = "copies to and from the host"

_Launch = Literal["eager", "replay", "replayed"]
"""Launched by the host on its own; the start of a CUDA graph; a part of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphRun:
    """A graph on one machine, on paper."""

    timeline: Timeline
    nodes: tuple[Node, ...]
    """The node of each task."""

    graph_nodes: tuple[Node, ...]
    """The same, but of a task inside of a region the node that calls the region."""

    costs: tuple[OpCost, ...]
    """The cost of each task."""


class GraphProgram:
    """The nodes of a graph with what their prices depend on, read once.

    Args:
        graph_module: a captured graph with recorded values. It must not change while this is used.
        cost_model: whose assumptions on sizes hold; any machine can then run the program.
    """

    def __init__(self, graph_module: GraphModule, cost_model: CostModel) -> None:
        self._reader = OperandReader(cost_model.sizes)
        self._steps: list[_Step | _Alias] = []
        self._priced: dict[Hashable, _Priced] = {}
        """By key: keys are deep, so that to look one up for each node and machine is dear."""

        self._read(graph_module, cost_model, "eager")

    def run(self, cost_model: CostModel) -> GraphRun:
        """Price and schedule every node. Linear in their number."""
        lowering = _Lowering()
        costs = [cost_model.cost_of_key(each.key, each.node) for each in self._priced.values()]
        for step in self._steps:
            if isinstance(step, _Alias):
                lowering.alias(step.node, step.stands_for)
            else:
                lowering.add(step.node, step.graph_node, step.cost(cost_model, costs))
        hardware = cost_model.hardware
        replayed = cost_model.host == "cuda_graph"
        timeline = schedule(
            lowering.tasks,
            launch_latency_us=0.0 if replayed else hardware.launch_latency_us,
            sync_us=hardware.host_sync_us,
        )
        return GraphRun(
            timeline=timeline,
            nodes=tuple(lowering.nodes),
            graph_nodes=tuple(lowering.graph_nodes),
            costs=tuple(lowering.costs),
        )

    def _read(
        self,
        graph_module: GraphModule,
        cost_model: CostModel,
        launch: _Launch,
        inside: Node | None = None,
    ) -> None:
        for node in graph_module.graph.nodes:
            region = region_of(node)
            if region is None:
                self._add(node, inside or node, cost_model, launch)
            else:
                self._read_region(node, inside or node, region, cost_model, launch)

    def _read_region(
        self,
        call: Node,
        outermost: Node,
        region: OutlinedRegion,
        cost_model: CostModel,
        launch: _Launch,
    ) -> None:
        placeholders = region.body.graph.find_nodes(op="placeholder")
        self._steps += map(_Alias, placeholders, region_inputs(call))
        if isinstance(region.runner, ReplayedPiece):
            self._steps.append(_Step(call, outermost, None, 0, "replay"))
            self._read(region.body, cost_model, "replayed", outermost)
        else:
            for kernel in compiled_kernels(region.body, cost_model, self._reader):
                self._add(kernel, outermost, cost_model, launch)
        (output,) = region.body.graph.find_nodes(op="output")
        (results,) = output.args
        assert isinstance(results, (tuple, list))  # OutlinedRegion asks for it
        for item in call.users:
            position = item.args[1] if item.target is operator.getitem else None
            result = results[position] if isinstance(position, int) else None
            if isinstance(result, Node):
                self._steps.append(_Alias(item, result))

    def _add(
        self, kernel: Node | FusedKernel, graph_node: Node, cost_model: CostModel, launch: _Launch
    ) -> None:
        if isinstance(kernel, FusedKernel):
            step = _Step(kernel.node, graph_node, None, kernel.moved_bytes, launch)
            self._steps.append(step)
        elif kernel.op == "call_function":
            key = cost_model.key(kernel, self._reader)
            priced = self._priced.setdefault(key, _Priced(key, kernel, len(self._priced)))
            self._steps.append(_Step(kernel, graph_node, priced.number, 0, launch))


class _Alias(NamedTuple):
    """A node that is another one, across the border of a region."""

    node: Node
    stands_for: Node


class _Priced(NamedTuple):
    """All that a price depends on, and the first of the nodes that have it."""

    key: Hashable
    node: Node
    number: int


class _Step(NamedTuple):
    """One kernel, or the start of a CUDA graph."""

    node: Node
    graph_node: Node
    """As in ``GraphRun.graph_nodes``."""

    number: int | None
    """Of its price; None for a fused kernel, whose bytes are its price."""

    moved_bytes: int
    launch: _Launch

    def cost(self, cost_model: CostModel, costs: Sequence[OpCost]) -> OpCost:
        """``costs`` are those of all numbers."""
        if self.launch == "replay":
            return cost_model.replay_launch
        if self.number is None:
            cost = cost_model.memory_bound_cost(self.moved_bytes)
        else:
            cost = costs[self.number]
        return cost_model.replayed(cost) if self.launch == "replayed" else cost


class _Lowering:
    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.nodes: list[Node] = []
        self.graph_nodes: list[Node] = []
        self.costs: list[OpCost] = []
        self._launched: dict[Node, int] = {}
        """From a collective or copy, and what is taken out of its results, to its task."""

        self._last_compute: tuple[int, ...] = ()
        self._last_read: Node | None = None
        """The tensor of which the host read a number, if the compute stream did nothing since."""

        self._copied: set[Node] = set()
        """Copies between the memories of host and device."""

        self._pending_host_us = 0.0

    def alias(self, node: Node, stands_for: Node) -> None:
        """What waits for ``node`` waits for what ``stands_for`` launched, if it launched anything.

        A body serves every call of its region, so what it stood for before is forgotten.
        """
        self._launched.pop(node, None)
        if stands_for in self._launched:
            self._launched[node] = self._launched[stands_for]

    def add(self, node: Node, graph_node: Node, cost: OpCost) -> None:
        """Make the task of a node, if it is one."""
        num_tasks = len(self.tasks)
        self._add(node, cost)
        self.graph_nodes += [graph_node] * (len(self.tasks) - num_tasks)

    def _add(self, node: Node, cost: OpCost) -> None:
        if cost.kind == "none":
            self._pass_on(node)
        elif cost.kind == "view":
            self._pass_on(node)
            self._pending_host_us += cost.host_us
        elif cost.kind == "host_scalar" and self._is_known(_read_tensor(node)):
            self._pending_host_us += cost.host_us
        elif cost.kind == "collective":
            assert cost.collective is not None  # the cost model says so
            stream = f"group {cost.collective.group_name}"
            self._launched[node] = self._append(node, cost, stream, self._last_compute)
        elif cost.kind == "host_copy" and is_host_copy(node):
            self._launched[node] = self._append(node, cost, COPY_STREAM, self._last_compute)
        elif cost.kind == "wait":
            launched = (self._launched.get(argument) for argument in node.all_input_nodes)
            self._compute(node, cost, tuple(task for task in launched if task is not None))
        else:
            self._compute(node, cost, ())

    def _is_known(self, tensor: Node) -> bool:
        """Whether the host has the numbers of a tensor, and waits for nothing to read one."""
        value = value_of(tensor)
        assert isinstance(value, torch.Tensor)  # a number was read of it
        is_read = tensor in self._copied or tensor is self._last_read
        return value.device.type == "cpu" and is_read

    def _compute(self, node: Node, cost: OpCost, waits_for: tuple[int, ...]) -> None:
        self._last_compute = (self._append(node, cost, COMPUTE_STREAM, waits_for),)
        self._last_read = _read_tensor(node) if cost.kind == "host_scalar" else None
        if cost.kind == "host_copy":
            self._copied.add(node)

    def _append(self, node: Node, cost: OpCost, stream: str, waits_for: tuple[int, ...]) -> int:
        self.tasks.append(
            Task(
                name=node.name,
                stream=stream,
                duration_us=cost.duration_us,
                waits_for=waits_for,
                host_us=self._pending_host_us + cost.host_us,
                blocks_host=cost.blocks_host,
                needs=cost.needs,
                takes=cost.takes,
            )
        )
        self.nodes.append(node)
        self.costs.append(cost)
        self._pending_host_us = 0.0
        return len(self.tasks) - 1

    def _pass_on(self, node: Node) -> None:
        """Items of a collective's results, and views of them, are still what it writes."""
        for argument in node.all_input_nodes:
            if argument in self._launched:
                self._launched[node] = self._launched[argument]


def _read_tensor(node: Node) -> Node:
    """The tensor of which a node reads a number on the host, whatever it was viewed as for that."""
    (tensor,) = node.all_input_nodes
    while is_view_node(tensor):
        (viewed, *_) = tensor.all_input_nodes
        if tensor.target is operator.getitem and not is_view_node(viewed):
            break  # one of several results, which are tensors of their own
        tensor = viewed
    return tensor
