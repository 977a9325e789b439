"""Names and autograd numbers that the full trace would have given."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from torch.fx import Node

from gt_trace.node_metadata import is_backward, sequence_number
from gt_trace.stamping.report import NotStampable
from gt_trace.stamping.short_graph import ShortGraph, is_accumulation

_NAME = re.compile(r"^(.*?)(?:_(\d+))?$")
_ATTRIBUTE = re.compile(r"^(.*?)(\d+)$")


class NameBase(NamedTuple):
    """What names of one kind have in common: all but the index."""

    text: str
    is_attribute: bool = False
    """Whether the index follows at once, as subgraphs are named (``sdpa_mask0``); results have
    ``view_1``."""

    def at(self, index: int) -> str:
        """The name with that index."""
        if self.is_attribute:
            return f"{self.text}{index}"
        return f"{self.text}_{index}" if index else self.text


def _split_name(node: Node) -> tuple[NameBase, int]:
    """``view_7`` as base and index 7, ``view`` as the same base and index 0."""
    found = _ATTRIBUTE.match(node.name) if node.op == "get_attr" else None
    if found is not None:
        return NameBase(found[1], is_attribute=True), int(found[2])
    found = _NAME.match(node.name)
    assert found is not None
    return NameBase(found[1]), int(found[2] or 0)


class Names:
    """Names of nodes count up for each operator; a unit uses the same number of each.

    Raises:
        NotStampable: the interior units disagree.
    """

    def __init__(self, short: ShortGraph) -> None:
        self._plan = short.plan
        forward = range(short.first_forward, short.last_forward)
        backward = range(short.first_backward, short.tail)
        self._forward = _strides(short, forward, short.forward_length)
        self._backward = _strides(short, backward, -short.backward_length)
        self._in_forward: dict[Node, tuple[NameBase, int, int]] = {}
        self._in_backward: dict[Node, tuple[NameBase, int, int]] = {}

    def in_forward(self, node: Node, unit: int) -> str:
        """The name in ``unit``, of a node of the first interior unit's forward."""
        if node not in self._in_forward:
            base, index = _split_name(node)
            self._in_forward[node] = (base, index, self._forward[base])
        base, index, stride = self._in_forward[node]
        return base.at(index + (unit - self._plan.first) * stride)

    def in_backward(self, node: Node, unit: int) -> str:
        """The name in ``unit``, of a node of the last interior unit's backward."""
        if node not in self._in_backward:
            base, index = _split_name(node)
            index += self._plan.num_stamped * self._forward.get(base, 0)
            self._in_backward[node] = (base, index, self._backward[base])
        base, index, stride = self._in_backward[node]
        return base.at(index + (self._plan.last - unit) * stride)

    def in_centre(self, node: Node) -> str:
        """The name of a node between the forwards of the interior and their backwards."""
        base, index = _split_name(node)
        return base.at(index + self._plan.num_stamped * self._forward.get(base, 0))

    def in_tail(self, node: Node) -> str:
        """The name of a node after the backwards of the interior."""
        base, index = _split_name(node)
        per_unit = self._forward.get(base, 0) + self._backward.get(base, 0)
        return base.at(index + self._plan.num_stamped * per_unit)


def _strides(short: ShortGraph, positions: range, distance: int) -> dict[NameBase, int]:
    """How much the index of each operator's names grows from one unit to the next.

    From ``positions``, of the first interior unit, it is ``distance`` to the same nodes of the last
    one: less than 0 in the backward, which runs the other way.
    """
    strides: dict[NameBase, int] = {}
    for position in positions:
        ours, theirs = short.body[position], short.body[position + distance]
        base, index = _split_name(ours)
        other_base, other_index = _split_name(theirs)
        stride = (other_index - index) * (1 if distance > 0 else -1)
        if base != other_base or strides.setdefault(base, stride) != stride:
            raise NotStampable(f"{ours.name} and {theirs.name} are not named alike")
    return strides


class Numbers:
    """Autograd numbers: those of a forward, which its backward repeats, and those of the counter.

    Additions of gradients carry the counter as it stands, which grows by another amount from unit
    to unit than the forward's numbers.

    Args:
        short: the graph.
        num_unused: how many gradients of one unit were asked for in vain; autograd counts a node
            for each when a backward begins.

    Raises:
        NotStampable: the interior units disagree.
    """

    def __init__(self, short: ShortGraph, *, num_unused: int) -> None:
        self._short = short
        self._unused = short.plan.num_stamped * num_unused
        self._shift = short.plan.num_stamped * short.number_stride
        self._counter_stride: int | None = None
        for offset in range(short.forward_length):
            ours = short.body[short.first_forward + offset]
            theirs = short.body[short.last_forward + offset]
            if _number(theirs) - _number(ours) != short.number_stride:
                raise NotStampable(f"{ours.name} and {theirs.name} are not numbered alike")
        for offset in range(short.backward_length):
            self._check_backward(
                short.body[short.first_backward + offset], short.body[short.last_backward + offset]
            )

    def in_forward(self, node: Node, unit: int) -> int:
        """The number in ``unit``, of a node of the first interior unit's forward."""
        return _number(node) + (unit - self._short.plan.first) * self._short.number_stride

    def in_backward(self, ours: Node, theirs: Node, unit: int) -> int:
        """The number in ``unit``, of a node that is ``ours`` in the first unit's backward."""
        plan = self._short.plan
        if self._is_counter(ours):
            per_unit = self._counter_stride or 0
            counter = _number(theirs) + self._shift + self._unused
            return counter + (plan.last - unit) * per_unit
        return _number(ours) + (unit - plan.first) * self._short.number_stride

    def in_centre(self, node: Node) -> int:
        """The number of a node between the forwards of the interior and their backwards.

        Raises:
            NotStampable: it is the number of the first interior unit.
        """
        number = _number(node)
        if number > self._short.final_number:
            return number + self._shift + self._unused
        if number >= self._short.last_number - 1:
            return number + self._shift
        if number >= self._short.first_number:
            raise NotStampable(f"{node.name} belongs to a layer that is stamped")
        return number

    def in_tail(self, node: Node) -> int:
        """The number of a node after the backwards of the interior.

        Raises:
            NotStampable: it is the number of the last interior unit.
        """
        number, short = _number(node), self._short
        if self._is_counter(node):
            if self._counter_stride is None:
                raise NotStampable(f"{node.name} is numbered as nothing in the layers is")
            counter = number + self._shift + self._unused
            return counter + short.plan.num_stamped * self._counter_stride
        if number >= short.centre_number:
            return number + self._shift
        if number >= short.last_number:
            raise NotStampable(f"{node.name} belongs to a layer that is stamped")
        return number

    def _check_backward(self, ours: Node, theirs: Node) -> None:
        difference = _number(ours) - _number(theirs)
        if not self._is_counter(ours):
            expected = -self._short.number_stride
        elif self._counter_stride is None:
            expected = self._counter_stride = difference
        else:
            expected = self._counter_stride
        if difference != expected:
            raise NotStampable(f"{ours.name} and {theirs.name} are not numbered alike")

    def _is_counter(self, node: Node) -> bool:
        return is_accumulation(node) or _number(node) > self._short.final_number


def _number(node: Node) -> int:
    number: Any = sequence_number(node)
    if number is None:
        kind = "backward" if is_backward(node) else "forward"
        raise NotStampable(f"{node.name} of the {kind} has no autograd number")
    return int(number)
