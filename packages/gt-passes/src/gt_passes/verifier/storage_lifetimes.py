"""Does every storage surely live no longer than before a pass? Then no peak of memory grew.

An estimate of peak memory (``liveness``) looks at the whole graph twice, before a pass and after
it. A pass that cleans up mostly looks at the same memory another way: where every changed node
reads views of the storages that it read views of, and none moved, each storage dies where it died,
or earlier.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
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
    old, new = before.calls, after.calls
    if after.is_reordered(before) or not all(wait in new for wait in before.waits):
        return False  # what is never waited for is held to the end
    for node in after.changed_nodes(before):
        call, known = new[node], old.get(node)
        if known is None:
            # It holds its storage until a reader does, and that is looked at itself.
            if not _is_view(call) or not node.users:
                return False
        elif _is_view(call) and _is_view(known):
            if not _read_the_same(call, new, known, old):
                return False
        elif not (
            call.split()[0] is known.split()[0]
            and call.value is known.value
            and _read_the_same(call, new, known, old)
        ):
            return False
    return True


_Calls = Mapping[Node, NodeCall]


def _read_the_same(call: NodeCall, new: _Calls, known: NodeCall, old: _Calls) -> bool:
    """Whether two calls have the same storages in the same places."""
    now, then = call.split()[1], known.split()[1]
    return len(now) == len(then) and all(
        _storage_maker(node, new) is _storage_maker(was, old)
        for node, was in zip(now, then, strict=True)
    )


def _is_view(call: NodeCall) -> bool:
    target = call.target
    return (
        isinstance(target, OpOverload)
        and gives_a_view(target)
        and isinstance(call.value, torch.Tensor)  # not several of them
        and len(call.split()[1]) == 1
    )


def _storage_maker(node: Node, calls: _Calls) -> Node:
    """The node of which another is a view, perhaps of a view."""
    call = calls[node]
    while _is_view(call):
        (node,) = call.split()[1]
        call = calls[node]
    return node
