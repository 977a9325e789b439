"""Does every storage surely live no longer than before a pass? Then no peak of memory grew.

An estimate of peak memory (``liveness``) looks at the whole graph twice, before and after a pass.
Most passes that may not raise the peak only look at the same memory another way: where every
changed node reads views of the storages that it read views of, and none moved, each storage dies
where it died, or earlier.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Node

from gt_passes._torch_internals import OpOverload
from gt_passes.analysis.graph_scan import GraphScan, NodeCall
from gt_passes.analysis.storages import gives_a_view


def surely_held_no_longer(before: GraphScan, after: GraphScan) -> bool:
    """Whether no storage is made earlier, is larger, or dies later than before a pass.

    Args:
        before: of the graph before the pass.
        after: of the well-formed graph now, made with ``before``.
    """
    if after.is_reordered(before):
        return False
    old, new = before.calls, after.calls
    for node in after.changed_nodes(before):
        call, known = new[node], old.get(node)
        if known is None:
            # It holds its storage until a reader does, and that is looked at itself.
            if not _is_view(call) or not node.users:
                return False
            continue
        if not (_is_view(call) and _is_view(known)) and (
            call.target is not known.target or call.value is not known.value
        ):
            return False
        given = [each for each in call.inputs if each not in known.inputs]
        if given:
            had = {_storage_maker(each, old) for each in known.inputs}
            if not all(_storage_maker(each, new) in had for each in given):
                return False
    return True


def _is_view(call: NodeCall) -> bool:
    target = call.target
    return isinstance(target, OpOverload) and gives_a_view(target) and len(call.inputs) == 1


def _storage_maker(node: Node, calls: Mapping[Node, NodeCall]) -> Node:
    """The node of which another is a view, perhaps of a view."""
    call = calls[node]
    while _is_view(call):
        (node,) = call.inputs
        call = calls[node]
    return node
