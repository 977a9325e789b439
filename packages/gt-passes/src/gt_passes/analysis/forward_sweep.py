"""One sweep over a graph in execution order, in which every node already sees its final inputs.

Replacing a node with ``replace_all_uses_with`` rewrites each of its users at once. A user with many
arguments, above all the output node with one gradient per parameter, is then rewritten once for
each, which is quadratic in the number of parameters. Here each node is rewritten at most once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.fx import Graph, Node
from torch.fx.node import map_arg


class ForwardSweep:
    """Replaces nodes by earlier ones.

    ::

        sweep = ForwardSweep(graph)
        for node in sweep:
            if is_redundant(node):
                sweep.replace(node, by=an_earlier_node)
        # here all replaced nodes are erased
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._replacements: dict[Node, Node] = {}

    @property
    def num_replaced(self) -> int:
        """Number of nodes replaced so far."""
        return len(self._replacements)

    def replace(self, node: Node, *, by: Node) -> None:
        """Let every later node read ``by`` in place of ``node``.

        Args:
            node: the node that the sweep has just given.
            by: an earlier node that has not been replaced itself.
        """
        assert by not in self._replacements, f"{by} is replaced itself"
        self._replacements[node] = by

    def __iter__(self) -> Iterator[Node]:
        """Every node in execution order, its inputs rewritten; erases the replaced ones at last."""
        for node in list(self._graph.nodes):
            if any(argument in self._replacements for argument in node.all_input_nodes):
                node.args = map_arg(node.args, self._current)
                node.kwargs = map_arg(node.kwargs, self._current)
            yield node
        for node in reversed(self._replacements):
            self._graph.erase_node(node)

    def _current(self, node: Node) -> Any:
        return self._replacements.get(node, node)
