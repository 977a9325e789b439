"""Which operand a node's results are views of, by the operator's schema."""

from __future__ import annotations

from gt_autoparallel._torch_internals import OpOverload
from gt_autoparallel.graph.placement_graph import PlacementNode


def viewed_operand(node: PlacementNode) -> int | None:
    """The operand whose storage the node's outputs are in; None if they have their own."""
    if node.kind == "share":
        return 0
    if not isinstance(node.target, OpOverload):
        return None
    returned = node.target._schema.returns
    aliases = [argument.alias_info for argument in node.target._schema.arguments[:1]]
    if len(returned) != 1 or returned[0].alias_info is None or aliases[0] is None:
        return None
    return 0
