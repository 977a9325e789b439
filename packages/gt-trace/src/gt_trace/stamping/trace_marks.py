"""Where the units of layers begin in the trace of the shortened model."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from torch.fx import Node

from gt_trace._torch_internals import get_proxy_mode, is_erased, is_in_backward, sequence_counter
from gt_trace.stamping.planned_layers import PlannedLayers
from gt_trace.stamping.report import NotStampable


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceMark:
    """The moment at which a layer's forward began."""

    layer: int
    node: Node
    """The last node that was traced before the forward began."""

    sequence_number: int
    """The number that autograd gives to its next node."""

    def position(self, positions: dict[Node, int]) -> int:
        """The place of the first node after the mark, among those that the trace kept."""
        node = self.node
        while node not in positions:
            if not is_erased(node):
                # A placeholder: nothing was computed before.
                return 0
            # What was erased still knows what stood before it.
            node = node.prev
        return positions[node] + 1


@dataclass(slots=True, kw_only=True)
class TraceMarks:
    """The marks of one trace."""

    found: list[TraceMark] = field(default_factory=list)

    def of(self, layer: int) -> TraceMark:
        """The mark of a layer.

        Raises:
            NotStampable: it began twice, or never.
        """
        marks = [mark for mark in self.found if mark.layer == layer]
        if len(marks) != 1:
            raise NotStampable(f"layer {layer} began {len(marks)} times in the trace")
        return marks[0]


@contextmanager
def marked_layers(planned: PlannedLayers) -> Iterator[TraceMarks]:
    """Mark where the forwards of the units begin at which the trace made inside will be cut.

    A forward that a backward runs again, for activation checkpointing, is a part of that backward.
    """
    marks = TraceMarks()

    def mark(index: int, *_of_hook: object) -> None:
        if is_in_backward():
            return
        mode = get_proxy_mode()
        assert mode is not None
        node = next(iter(reversed(mode.tracer.graph.nodes)))
        marks.found.append(TraceMark(layer=index, node=node, sequence_number=sequence_counter()))

    with ExitStack() as stack:
        for index in map(planned.plan.layer, planned.plan.marked_units):
            layer = planned.layers.layers[index]
            handle = layer.register_forward_pre_hook(functools.partial(mark, index), prepend=True)
            stack.callback(handle.remove)
        yield marks
