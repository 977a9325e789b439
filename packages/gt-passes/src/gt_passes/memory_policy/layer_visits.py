"""When a step enters and leaves its layers, forward and backward.

A step goes through its layers forward, then through the same layers backward; with several
microbatches or a loss in chunks it turns round more often. The stretch between two turns is a
*segment*. Within a segment a layer begins where its first node stands, and ends where the next
layer begins: nodes of other layers that are scattered in between (gradients of parameters, mostly)
do not matter.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.fx import Node

from gt_passes.analysis.layer_names import LayerNames
from gt_trace.node_metadata import phase_of


@dataclass(slots=True, kw_only=True)
class Segment:
    """A stretch of nodes that are all of the backward, or all not. Positions in execution order."""

    is_backward: bool
    start: int
    end: int = 0
    """Position after its last node."""

    layer_starts: list[int] = field(default_factory=list)
    """Where each layer begins, in the order in which they are entered."""

    layers_end: int = 0
    """Position after the last node of any layer."""

    def start_of_layer(self, position: int, *, ahead: int) -> int:
        """Where the layer begins that is entered ``ahead`` layers after the one at ``position``.

        Negative: before it. Where there is no such layer: the start of the segment, the end of its
        last layer, and beyond that the end of the segment.
        """
        index = bisect.bisect_right(self.layer_starts, position) - 1 + ahead
        if index < 0:
            return self.start
        if index < len(self.layer_starts):
            return self.layer_starts[index]
        return self.layers_end if index == len(self.layer_starts) else self.end


class LayerVisits:
    """The segments of one graph.

    Args:
        nodes: of the graph, in execution order.
        layers: tells which layer a node belongs to.
    """

    def __init__(self, nodes: Sequence[Node], layers: LayerNames) -> None:
        self.segments: list[Segment] = []
        entered: set[str] = set()
        for position, node in enumerate(nodes):
            phase = phase_of(node)
            if phase is None or phase == "optimizer":
                continue
            is_backward = phase == "backward"
            if not self.segments or self.segments[-1].is_backward is not is_backward:
                self.segments.append(Segment(is_backward=is_backward, start=position))
                entered.clear()
            segment = self.segments[-1]
            segment.end = position + 1
            layer = layers.layer_of(node)
            if layer is None:
                continue
            segment.layers_end = position + 1
            if layer not in entered:
                entered.add(layer)
                segment.layer_starts.append(position)
        self._starts = [segment.start for segment in self.segments]

    def segment_at(self, position: int) -> Segment:
        """The segment in which a node of the step stands."""
        return self.segments[max(0, bisect.bisect_right(self._starts, position) - 1)]
