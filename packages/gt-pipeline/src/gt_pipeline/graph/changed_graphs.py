"""Which graphs passes have changed since they were cut, and what is wrong with stored ones.

A document holds what was cut, and of the pieces those alone that passes have changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from gt_trace.errors import ArtifactError


def refuse_problems(what: str, problems: Iterable[object]) -> None:
    """Refuse a document.

    Args:
        what: it describes wrongly.
        problems: found there; none is fine.

    Raises:
        ArtifactError: there are problems; every one is listed.
    """
    if found := list(problems):
        lines = "\n  - ".join(map(str, found))
        raise ArtifactError(f"the document describes {what} wrongly:\n  - {lines}")


def is_unchanged(cut: GraphModule, now: GraphModule) -> bool:
    """Whether a copy of a graph is still that graph, with the very objects as metadata."""
    if cut is now:
        return True
    nodes, others = list(cut.graph.nodes), list(now.graph.nodes)
    if len(nodes) != len(others):
        return False
    same = dict(zip(nodes, others, strict=True))
    return all(_is_same_node(node, other, same) for node, other in same.items())


def _is_same_node(node: Node, other: Node, same: dict[Node, Node]) -> bool:
    if (node.op, node.name, node.target) != (other.op, other.name, other.target):
        return False
    operands = [map_arg(each, same.__getitem__) for each in (node.args, node.kwargs)]
    if operands != [other.args, other.kwargs] or node.meta.keys() != other.meta.keys():
        return False
    if node.op == "get_attr":
        roots = node.graph.owning_module, other.graph.owning_module
        here, there = (attrgetter(str(node.target))(root) for root in roots)
        if here is not there:
            return False
    return all(value is other.meta[key] for key, value in node.meta.items())
