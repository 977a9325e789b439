"""In which order a placed model runs its nodes: parameters late, gradients at once.

The planned graph has sources first and sinks last. Run so, every parameter would be gathered before
the first layer, and every gradient would wait, whole, for the last. Here a parameter is cast and
shared (hence gathered) right before the first node that computes with it, and a gradient is reduced
right after it is there, as in a hand-placed model; passes then prefetch and bucket within bounds.
"""

from __future__ import annotations

from gt_autoparallel.graph.parameter_chains import gradient_chains, parameter_chains
from gt_autoparallel.graph.placement_graph import NodePhase, PlacementGraph, PlacementNode


def execution_order(graph: PlacementGraph) -> tuple[int, ...]:
    """Indices of all nodes: forward, then backward; operands come before those that take them."""
    return _Order(graph).run()


class _Order:
    def __init__(self, graph: PlacementGraph) -> None:
        self._graph = graph
        self._chains = parameter_chains(graph)
        self._reductions = gradient_chains(graph)
        self._order: list[int] = []
        self._done: set[int] = set()
        self._consumers: dict[int, list[PlacementNode]] = {}
        for use in graph.uses:
            consumer = graph.nodes[use.consumer]
            self._consumers.setdefault(use.value.node, []).append(consumer)

    def run(self) -> tuple[int, ...]:
        phases: tuple[NodePhase, ...] = ("forward", "backward")
        for phase in phases:
            nodes = [node for node in self._graph.nodes if node.phase == phase]
            for node in nodes:
                if not self._is_late(node):
                    self._run(node)
            for node in nodes:  # of the forward, what only the backward reads
                self._run(node)
        return tuple(self._order)

    def _is_late(self, node: PlacementNode) -> bool:
        """Whether a node passes on a parameter, and so waits for whoever computes with it."""
        if node.kind == "parameter" or not node.operands:
            return False
        if node.index in self._chains:
            return True
        return node.kind == "share" and node.operands[0].node in self._chains

    def _run(self, node: PlacementNode) -> None:
        if node.index in self._done:
            return
        for value in node.operands:
            producer = self._graph.nodes[value.node]
            if self._is_late(producer):
                self._run(producer)
        self._done.add(node.index)
        self._order.append(node.index)
        for consumer in self._consumers.get(node.index, ()):
            if consumer.index in self._reductions:
                self._run(consumer)
