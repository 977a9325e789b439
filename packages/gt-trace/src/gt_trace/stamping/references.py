"""References between nodes, written so that they hold in every unit.

What a node of one unit reads can be meant in several ways: that far from the unit's own beginning,
or that far from the beginning of the head or the centre, or the input of that layer. One unit does
not tell which; two do. Each reference is written in all ways, those of both interior units are
intersected, and exactly one must be left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch.fx import Node

from gt_trace.stamping.report import NotStampable, ReachesTooFar
from gt_trace.stamping.short_graph import ShortGraph

ReferenceKind = Literal["forward", "backward", "head", "centre", "tail", "input", "layer_input"]


@dataclass(frozen=True, slots=True)
class Reference:
    """One way to say which node is meant."""

    kind: ReferenceKind
    offset: int
    """Where the node stands: counted from the beginning of its unit's forward or backward, or of
    its part. For ``layer_input`` the distance in layers, for ``input`` which plain tensor of it."""

    name: str = ""
    """Name of an input; for ``layer_input`` within its layer. Empty for nodes that compute."""

    leaf: int = 0


class ReferenceFinder:
    """Says what nodes of the two interior units mean."""

    def __init__(self, short: ShortGraph) -> None:
        self._short = short
        plan = short.plan
        self._forward = {plan.first: short.first_forward, plan.last: short.last_forward}
        self._backward = {plan.first: short.first_backward, plan.last: short.last_backward}
        self._warm_up = plan.num_warm_up

    def meant(self, ours: Node, theirs: Node, where: str, *, is_output: bool = False) -> Reference:
        """What ``ours``, read by the first unit, and ``theirs``, read by the last, both mean.

        The reader is in a unit, or the output of the graph (``is_output``).

        Raises:
            NotStampable: they mean nothing in common, or more than one thing.
        """
        plan = self._short.plan
        common = self._ways(ours, plan.first, is_output) & self._ways(theirs, plan.last, is_output)
        if len(common) == 1:
            return next(iter(common))
        if common:
            raise NotStampable(f"{where}: {ours} and {theirs} can be meant in {len(common)} ways")
        raise ReachesTooFar(f"{where}: {ours} and {theirs} are at other distances")

    def _ways(self, node: Node, unit: int, is_output: bool) -> set[Reference]:
        short = self._short
        if node.op == "placeholder":
            return self._ways_of_input(node, unit)
        position = short.positions[node]
        ways: set[Reference] = set()
        reach = short.centre + self._warm_up * short.forward_length
        if position < reach:
            ways.add(Reference("forward", position - self._forward[unit]))
        if position < short.first_forward:
            ways.add(Reference("head", position))
        if short.centre <= position < short.last_backward:
            ways.add(Reference("centre", position - short.centre))
        if position >= short.last_backward - self._warm_up * short.backward_length:
            ways.add(Reference("backward", position - self._backward[unit]))
        if is_output and position >= short.tail:
            ways.add(Reference("tail", position - short.tail))
        return ways

    def _ways_of_input(self, node: Node, unit: int) -> set[Reference]:
        found = self._short.inputs[node]
        ways = {Reference("input", 0, found.name, found.leaf)}
        layer, own = self._short.planned.layers.split(found.name)
        if layer is not None:
            distance = layer - self._short.plan.layer(unit)
            ways.add(Reference("layer_input", distance, own, found.leaf))
        return ways
