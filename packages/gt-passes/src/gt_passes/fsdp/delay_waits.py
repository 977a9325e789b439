"""Wait for FSDP collectives as late as possible."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Graph, GraphModule, Node

from gt_config.graph_kinds import JOINT_GRAPHS, STEP_GRAPHS, GraphKind
from gt_passes.analysis.code_motion import CodeMotion
from gt_passes.analysis.collectives import is_collective, is_wait
from gt_passes.analysis.fsdp_collective import fsdp_collective
from gt_passes.contract import PassContext, PassReport
from gt_passes.fsdp.fsdp_launches import FsdpLaunch, chain_levels
from gt_passes.fsdp.fsdp_pass import FsdpPass
from gt_passes.registry import register_pass

_functional = torch.ops._c10d_functional
_FSDP_COLLECTIVES = (
    _functional.all_gather_into_tensor.default,
    _functional.reduce_scatter_tensor.default,
    _functional.all_reduce.default,
)


@register_pass
@dataclass(frozen=True, slots=True, kw_only=True)
class DelayWaits(FsdpPass):
    """Move each FSDP wait, and what unpacks its result, to where the result is first needed.

    A gathering is waited for right before the first operator that computes with the parameter. A
    reduction is waited for once the reductions of ``blocks_behind`` further blocks have been
    launched: nothing in the step needs it, and its buffers should not pile up.

    *Before*::

        g = all_gather_into_tensor(...);  w = wait_tensor(g)
        h = mul(x, x)
        y = mm(h, w)

    *After*::

        g = all_gather_into_tensor(...)
        h = mul(x, x)
        w = wait_tensor(g)
        y = mm(h, w)

    *Refuses*, silently, since an early wait is only slow: to move across a barrier, past a write
    to the memory, or what draws random numbers.

    *Preserves numerics*: yes. Launches stay in their order, but for a collective that waits for
    another alone (the all-reduce of hybrid sharding, the second axis of two), which moves with it.
    """

    name: ClassVar[str] = "delay-waits"
    runs_on: ClassVar[frozenset[GraphKind]] = frozenset(
        {*STEP_GRAPHS, "UNSHARD", "REDUCE_GRAD", *JOINT_GRAPHS}
    )

    blocks_behind: int = 1
    """How many further blocks' reductions are launched before one is waited for."""

    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        """Delay waits; see the class."""
        graph = graph_module.graph
        found = self.find_launches(graph, *_FSDP_COLLECTIVES)
        counts = {
            "unshard_waits_moved": _delay_unshards(graph, found.launches),
            "reduction_waits_moved": _delay_reductions(graph, found.launches, self.blocks_behind),
        }
        return PassReport.of(counts, found.refusals)


def _delay_unshards(graph: Graph, launches: Iterable[FsdpLaunch]) -> int:
    motion = CodeMotion(graph)
    shared = _nodes_of_several_waits(graph)
    num_moved = 0
    for launch in launches:
        if launch.kind == "unshard":
            unpacking = _annotated_dependents(launch.wait, motion, shared)
            num_moved += _move(unpacking, _latest_place(unpacking, motion))
    return num_moved


def _delay_reductions(graph: Graph, launches: Iterable[FsdpLaunch], blocks_behind: int) -> int:
    reductions = [each for each in launches if each.kind == "reduce_grad"]
    shared = _nodes_of_several_waits(graph)
    num_moved = 0
    # A wait may be followed by a reduction along another axis (the all-reduce of hybrid sharding),
    # which can only move once the wait for that one has, which then has further to go: last first,
    # and once more.
    level_of = chain_levels(graph)
    levels = sorted({level_of[each.launch] for each in reductions})
    for level in (*reversed(levels), *levels[1:]):
        motion = CodeMotion(graph)
        alike = [each for each in reductions if level_of[each.launch] == level]
        number = {block: n for n, block in enumerate(dict.fromkeys(each.block for each in alike))}
        last_of = {number[each.block]: each.launch for each in alike}
        end_of: dict[Node, Node] = {}  # what was moved behind a launch last
        for launch in alike:
            limit = last_of.get(number[launch.block] + blocks_behind)
            tail = _annotated_dependents(launch.wait, motion, shared)
            place = _latest_place(tail, motion)
            if place is None:
                continue
            if limit is not None and motion.position[limit] < motion.position[place]:
                if motion.position[limit] < motion.position[tail[-1]]:
                    continue  # a part of it waits for something that comes later still
                place = end_of.get(limit, limit).next
                end_of[limit] = tail[-1]
            num_moved += _move(tail, place)
    return num_moved


def _nodes_of_several_waits(graph: Graph) -> set[Node]:
    """The FSDP nodes that hang on a wait and on something else, which would move them elsewhere.

    A bucket over one mesh axis reads several of another, where parameters are sharded over both,
    and gradients that are reduced along the one axis alone.
    """
    waits_of: dict[Node, frozenset[Node]] = {}
    shared: set[Node] = set()
    for node in graph.nodes:
        if fsdp_collective(node) is None:
            continue
        if is_wait(node):
            waits_of[node] = frozenset({node})
            continue
        before = [waits_of.get(source, frozenset()) for source in node.all_input_nodes]
        waits_of[node] = frozenset[Node]().union(*before)
        if len(waits_of[node]) > 1 or (waits_of[node] and not all(before)):
            shared.add(node)
    return shared


def _annotated_dependents(wait: Node, motion: CodeMotion, shared: Collection[Node]) -> list[Node]:
    """The wait and the FSDP nodes that hang on it alone, up to the next collective; in order."""
    found: dict[Node, None] = {}
    stack = [wait]
    while stack:
        node = stack.pop()
        if node in found or node in shared or motion.reason_not_to_move(node) is not None:
            continue
        found[node] = None
        if not is_collective(node):
            stack.extend(user for user in node.users if fsdp_collective(user) is not None)
    return sorted(found, key=motion.position.__getitem__)


def _latest_place(nodes: Sequence[Node], motion: CodeMotion) -> Node | None:
    """The node that ``nodes`` must stay in front of; None if they stay where they are."""
    moving = set(nodes)
    readers = [user for node in nodes for user in node.users if user not in moving]
    if not readers:
        return None
    place = min(readers, key=motion.position.__getitem__)
    barrier = motion.barrier_after(nodes[0])
    if barrier is not None and motion.position[barrier] < motion.position[place]:
        return barrier
    return place


def _move(nodes: Sequence[Node], place: Node | None) -> bool:
    """Move nodes, in their order, in front of ``place``."""
    if place is None or place in nodes or _stands_right_before(nodes, place):
        return False
    for node in nodes:
        place.prepend(node)
    return True


def _stands_right_before(nodes: Sequence[Node], place: Node) -> bool:
    node = place
    for expected in reversed(nodes):
        node = node.prev
        if node is not expected:
            return False
    return True
