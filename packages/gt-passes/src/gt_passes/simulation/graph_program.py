"""A captured graph as tasks on streams.

Operators run on one compute stream in the graph's order; each process group has a stream of its
own, as torch gives each NCCL communicator one. A collective starts after everything that was issued
to the compute stream before it (its launch records an event there), and a wait makes the compute
stream wait for it. Views cost the host alone. What reads numbers on the host waits for the device.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from gt_passes.simulation.cost_model import CostModel, OpCost
from gt_passes.simulation.operands import OperandReader
from gt_passes.simulation.timeline import Task, Timeline, schedule

__all__ = ["COMPUTE_STREAM", "GraphProgram", "GraphRun"]

COMPUTE_STREAM = "compute"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphRun:
    """A graph on one machine, on paper."""

    timeline: Timeline
    nodes: tuple[Node, ...]
    """The node of each task."""

    costs: tuple[OpCost, ...]
    """Of each task."""


class GraphProgram:
    """The nodes of a graph with what their prices depend on, read once.

    Args:
        graph_module: a captured graph with recorded values. It must not change while this is used.
        cost_model: whose assumptions on sizes hold; any machine can then run the program.
    """

    def __init__(self, graph_module: GraphModule, cost_model: CostModel) -> None:
        reader = OperandReader(cost_model.sizes)
        self._nodes: list[tuple[Node, Hashable]] = [
            (node, cost_model.key(node, reader))
            for node in graph_module.graph.nodes
            if node.op == "call_function"
        ]

    def run(self, cost_model: CostModel) -> GraphRun:
        """Price and schedule every node. Linear in their number."""
        lowering = _Lowering()
        for node, key in self._nodes:
            lowering.add(node, cost_model.cost_of_key(key, node))
        hardware = cost_model.hardware
        replayed = cost_model.host == "cuda_graph"
        timeline = schedule(
            lowering.tasks,
            launch_latency_us=0.0 if replayed else hardware.launch_latency_us,
            sync_us=hardware.host_sync_us,
        )
        return GraphRun(timeline=timeline, nodes=tuple(lowering.nodes), costs=tuple(lowering.costs))


class _Lowering:
    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.nodes: list[Node] = []
        self.costs: list[OpCost] = []
        self._launched: dict[Node, int] = {}
        """From a collective, and what is taken out of its results, to its task."""

        self._last_compute: tuple[int, ...] = ()
        self._pending_host_us = 0.0

    def add(self, node: Node, cost: OpCost) -> None:
        if cost.kind == "none":
            self._pass_on(node)
        elif cost.kind == "view":
            self._pass_on(node)
            self._pending_host_us += cost.host_us
        elif cost.kind == "collective":
            assert cost.collective is not None  # the cost model says so
            stream = f"group {cost.collective.group_name}"
            self._launched[node] = self._append(node, cost, stream, self._last_compute)
        elif cost.kind == "wait":
            launched = (self._launched.get(argument) for argument in node.all_input_nodes)
            self._compute(node, cost, tuple(task for task in launched if task is not None))
        else:
            self._compute(node, cost, ())

    def _compute(self, node: Node, cost: OpCost, waits_for: tuple[int, ...]) -> None:
        self._last_compute = (self._append(node, cost, COMPUTE_STREAM, waits_for),)

    def _append(self, node: Node, cost: OpCost, stream: str, waits_for: tuple[int, ...]) -> int:
        self.tasks.append(
            Task(
                name=node.name,
                stream=stream,
                duration_us=cost.duration_us,
                waits_for=waits_for,
                host_us=self._pending_host_us + cost.host_us,
                blocks_host=cost.blocks_host,
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
