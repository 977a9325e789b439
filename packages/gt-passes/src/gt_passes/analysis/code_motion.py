"""What may be moved in a graph, and how far: the rules that every pass which reorders shares.

A node may be moved when all that it does is to make its result out of its arguments, from memory
that nobody writes to. Nothing is moved across a barrier: a node of which not all effects are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch.fx import Graph, Node

from gt_passes.analysis.aliasing import AliasClasses
from gt_passes.analysis.collectives import is_collective
from gt_passes.analysis.fsdp_collective import fsdp_collective
from gt_passes.analysis.operator_effects import draws_random_numbers, is_barrier


class CodeMotion:
    """Positions, barriers and memory of a graph, as it was when this was built.

    Positions are not updated when nodes move. Questions about what to move look at where nodes
    stand now, those that an earlier answer moved or made among them.
    """

    def __init__(self, graph: Graph) -> None:
        self.position: dict[Node, int] = {}
        """Where each node stands in the original order."""

        self._num_barriers: list[int] = []
        self._barriers: list[Node] = []
        self._aliases = AliasClasses(graph)
        for position, node in enumerate(graph.nodes):
            self.position[node] = position
            if is_barrier(node):
                self._barriers.append(node)
            self._num_barriers.append(len(self._barriers))

    def section(self, node: Node) -> int:
        """How many barriers stand before a node; nodes of different sections stay in order."""
        return self._num_barriers[self.position[node]]

    def barrier_after(self, node: Node) -> Node | None:
        """The first barrier behind a node."""
        index = self.section(node)
        return self._barriers[index] if index < len(self._barriers) else None

    def stays_inside(self, node: Node) -> bool:
        """Whether nobody writes to the memory of a node, and no output of the graph shares it."""
        return not (self._aliases.is_written(node) or self._aliases.holds_output(node))

    def reason_not_to_move(self, node: Node) -> str | None:
        """Why a node must stay where it is; None if only its arguments and readers bind it."""
        if node.op in ("placeholder", "output"):
            return f"{node.name} is an {'input' if node.op == 'placeholder' else 'output'}"
        if is_barrier(node):
            return f"not all that {node.name} does is known"
        if draws_random_numbers(node):
            return f"{node.name} draws random numbers"
        is_fsdp = fsdp_collective(node) is not None
        if is_collective(node) and not is_fsdp:
            return f"{node.name} is a collective that is not FSDP's"
        for touched in (node, *node.all_input_nodes):
            # What was made since stands for what it replaced, which somebody asked about then.
            if touched in self.position and self._aliases.is_written(touched):
                return f"{touched.name} shares memory that is written to"
        return None

    def ancestors_after(self, nodes: Iterable[Node], limit: Node) -> list[Node] | str:
        """What ``nodes`` need and stands behind ``limit``, themselves included, in order.

        Returns:
            The nodes to move in front of ``limit``, or the reason why one of them must stay.
        """
        found = self._closure(nodes, lambda n: n.all_input_nodes, lambda n: limit < n)
        if not isinstance(found, str) and any(limit in node.all_input_nodes for node in found):
            return f"it needs {limit.name}"
        return found

    def dependents_before(self, nodes: Iterable[Node], limit: Node) -> list[Node] | str:
        """What reads ``nodes``, directly or not, and stands before ``limit``, in order.

        Returns:
            The nodes to move behind ``limit``, without ``nodes`` themselves, or the reason why one
            of them must stay.
        """
        starts = dict.fromkeys(nodes)
        found = self._closure(
            (user for node in starts for user in node.users), lambda n: n.users, lambda n: n < limit
        )
        if isinstance(found, str):
            return found
        if any(limit in node.users for node in (*starts, *found)):
            return f"{limit.name} needs it"
        return [node for node in found if node not in starts]

    def _closure(
        self,
        nodes: Iterable[Node],
        following: Callable[[Node], Iterable[Node]],
        within: Callable[[Node], bool],
    ) -> list[Node] | str:
        found: dict[Node, None] = {}
        stack = list(nodes)
        while stack:
            node = stack.pop()
            if node in found or not within(node):
                continue
            reason = self.reason_not_to_move(node)
            if reason is not None:
                return reason
            found[node] = None
            stack.extend(following(node))
        return sorted(found)
