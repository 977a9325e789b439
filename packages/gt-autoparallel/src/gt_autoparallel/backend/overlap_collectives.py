"""Launch collectives as soon as their input is there, and wait where their result is needed."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Graph, GraphModule, Node

from gt_config.graph_kinds import GraphKind
from gt_config.node_keys import FsdpCollectiveAnnotation
from gt_config.numerics import Numerics
from gt_passes.analysis.aliasing import AliasClasses
from gt_passes.analysis.collectives import is_collective
from gt_passes.analysis.operator_effects import is_barrier
from gt_passes.contract import ChangeBounds, GraphPass, PassContext, PassReport
from gt_trace import read_annotation

_aten = torch.ops.aten
_LAYOUT_OPERATORS = frozenset(
    {
        _aten.cat.default,
        _aten.clone.default,
        _aten.permute.default,
        _aten.split.Tensor,
        _aten.t.default,
        _aten.transpose.int,
        _aten.view.default,
        operator.getitem,
    }
)
"""What brings a tensor into the order that a collective wants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapCollectives(GraphPass):
    """Let what computes between a value and its use run while the value is moved.

    A planned graph moves a value right before the operator that wants it in another layout. Here
    the launch, with the local copies that prepare it, goes up to where its input is made, and the
    wait, with the copies that unpack it, stays with the reader. All launches keep their order, so
    that ranks agree. FSDP's collectives have passes of their own (``prefetch-all-gathers``,
    ``delay-waits``), which bound what is in flight.

    *Before*::

        a = mm(x, w)
        b = mm(x, v)
        g = all_gather_into_tensor(a, 4, "tp");  h = wait_tensor(g)
        y = mm(h, u)

    *After*::

        a = mm(x, w)
        g = all_gather_into_tensor(a, 4, "tp")
        b = mm(x, v)
        h = wait_tensor(g)
        y = mm(h, u)

    *Refuses*, silently, since a late launch is only slow: to move across a barrier, or anything
    that shares memory with what is written to.

    *Preserves numerics*: yes.
    """

    name: ClassVar[str] = "overlap-collectives"
    numerics: ClassVar[Numerics] = "bitwise"
    runs_on: ClassVar[frozenset[GraphKind]] = frozenset({"STEP"})

    @property
    def bounds(self) -> ChangeBounds:
        """What is in flight is held longer."""
        return ChangeBounds(peak_memory_growth=None)

    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        """Move launches up; see the class."""
        num_moved = _hoist_launches(graph_module.graph)
        return PassReport(changed=num_moved > 0, counts={"launches_moved": num_moved})


def _hoist_launches(graph: Graph) -> int:
    aliases = AliasClasses(graph)
    previous_launch: Node | None = None
    last_barrier: Node | None = None
    num_moved = 0
    for node in list(graph.nodes):
        if is_barrier(node):
            last_barrier = node
        if not is_collective(node):
            continue
        if _may_move(node, aliases):
            num_moved += _hoist(node, aliases, after=[previous_launch, last_barrier])
        previous_launch = node
    return num_moved


def _may_move(launch: Node, aliases: AliasClasses) -> bool:
    if is_barrier(launch) or read_annotation(launch, FsdpCollectiveAnnotation) is not None:
        return False
    return not any(aliases.is_written(each) for each in (launch, *launch.all_input_nodes))


def _hoist(launch: Node, aliases: AliasClasses, *, after: list[Node | None]) -> bool:
    """Move ``launch``, and what only prepares it, behind the last of what it needs."""
    moving = _with_preparation(launch, aliases)
    needed = {n for each in moving for n in each.all_input_nodes} - set(moving)
    bounds = [*needed, *(each for each in after if each is not None)]
    if not bounds:
        return False
    place = max(bounds, key=_Position)
    while place.next.op == "placeholder":
        place = place.next
    if not place < moving[0] or _follow(place, moving):
        return False
    for each in reversed(moving):
        place.append(each)
    return True


def _with_preparation(launch: Node, aliases: AliasClasses) -> list[Node]:
    """The launch and the local copies and views that are made for it alone, in order."""
    moving = {launch}
    stack = list(launch.all_input_nodes)
    while stack:
        node = stack.pop()
        is_layout = node.op == "call_function" and node.target in _LAYOUT_OPERATORS
        if node in moving or not is_layout or not moving.issuperset(node.users):
            continue
        if not aliases.is_written(node):
            moving.add(node)
            stack += node.all_input_nodes
    return sorted(moving, key=_Position)


def _follow(place: Node, nodes: list[Node]) -> bool:
    """Whether ``nodes`` stand right behind ``place``, in order."""
    for expected in nodes:
        place = place.next
        if place is not expected:
            return False
    return True


@dataclass(frozen=True, slots=True)
class _Position:
    """Nodes compare by where they stand; ``max`` wants a key that does."""

    node: Node

    def __lt__(self, other: _Position) -> bool:
        return self.node < other.node
