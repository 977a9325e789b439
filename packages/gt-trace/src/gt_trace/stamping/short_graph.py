"""The graph of the shortened model, cut into what is kept and the two units of the template.

The body of the graph, in order::

    head        | first | last  | centre                    | last  | first | tail
    0        first_f  last_f  centre      (tail's layers, last_b  first_b  tail      end
                                           loss, their backward)

``first`` and ``last`` are the interior units, forward on the left and backward on the right.
``marked_layers`` marks, during the trace, where the units begin.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from torch.fx import GraphModule, Node

from gt_trace._torch_internals import get_proxy_mode, is_erased, is_in_backward, sequence_counter
from gt_trace.capture.graph_inputs import GraphInput
from gt_trace.capture.traced_step import TracedStep
from gt_trace.node_metadata import is_backward, sequence_number
from gt_trace.stamping.layer_plan import LayerPlan, PlannedLayers
from gt_trace.stamping.report import NotStampable, ReachesTooFar


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortGraph:
    """Nodes of the shortened model's graph, and where its parts begin."""

    planned: PlannedLayers
    body: tuple[Node, ...]
    """All nodes that compute, in order."""

    positions: dict[Node, int]
    """The place of each node in ``body``."""

    inputs: dict[Node, GraphInput]
    output: Node
    root: GraphModule
    """The module that holds what ``get_attr`` nodes read."""

    first_forward: int
    last_forward: int
    centre: int
    last_backward: int
    first_backward: int
    tail: int
    first_number: int
    """Autograd's counter where the forward of the first interior unit began."""

    last_number: int
    centre_number: int
    final_number: int
    """The largest autograd number of a forward node."""

    @property
    def plan(self) -> LayerPlan:
        """Which layers were traced."""
        return self.planned.plan

    @property
    def forward_length(self) -> int:
        """Nodes of one unit's forward."""
        return self.last_forward - self.first_forward

    @property
    def backward_length(self) -> int:
        """Nodes of one unit's backward."""
        return self.first_backward - self.last_backward

    def attribute(self, node: Node) -> Any:
        """What a ``get_attr`` node reads."""
        return attrgetter(str(node.target))(self.root)

    @property
    def number_stride(self) -> int:
        """Autograd nodes of one unit."""
        return self.last_number - self.first_number


def is_accumulation(node: Node) -> bool:
    """Whether the node adds up gradients; such nodes carry the counter, not a forward's number."""
    return bool(node.meta.get("is_gradient_acc", False))


def cut_graph(step: TracedStep, planned: PlannedLayers, marks: TraceMarks) -> ShortGraph:
    """Cut the graph of the shortened model.

    Raises:
        NotStampable: the two interior units have other numbers of nodes.
    """
    nodes = list(step.graph_module.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    body = tuple(node for node in nodes if node.op not in ("placeholder", "output"))
    positions = {node: index for index, node in enumerate(body)}
    first, last, after = (marks.of(planned.plan.layer(unit)) for unit in planned.plan.marked_units)
    begins = [mark.position(positions) for mark in (first, last, after)]
    backward = _backward_starts(
        body, begins[2], [mark.sequence_number for mark in (after, last, first)]
    )
    short = ShortGraph(
        planned=planned,
        body=body,
        positions=positions,
        inputs=dict(zip(placeholders, step.inputs, strict=True)),
        output=nodes[-1],
        root=step.graph_module,
        first_forward=begins[0],
        last_forward=begins[1],
        centre=begins[2],
        last_backward=backward[0],
        first_backward=backward[1],
        tail=backward[2],
        first_number=first.sequence_number,
        last_number=last.sequence_number,
        centre_number=after.sequence_number,
        final_number=_final_number(body[: backward[0]]),
    )
    _check(short)
    return short


def _backward_starts(body: tuple[Node, ...], begin: int, numbers: list[int]) -> list[int]:
    """Where the backward first comes to a node that was made before each of ``numbers``."""
    starts: list[int] = []
    index = begin
    for number in numbers:
        while index < len(body) and not _belongs_before(body[index], number):
            index += 1
        starts.append(index)
    return starts


def _belongs_before(node: Node, number: int) -> bool:
    own: Any = sequence_number(node)
    return is_backward(node) and not is_accumulation(node) and own is not None and own < number


def _final_number(body: tuple[Node, ...]) -> int:
    """The largest autograd number of what ran before the backward."""
    numbers = [sequence_number(node) for node in body if not is_backward(node)]
    return max((number for number in numbers if number is not None), default=0)


def _check(short: ShortGraph) -> None:
    lengths = (short.forward_length, short.centre - short.last_forward)
    if lengths[0] != lengths[1] or lengths[0] <= 0:
        raise NotStampable(
            f"the forwards of the interior layers have {lengths[0]} and {lengths[1]} operators"
        )
    lengths = (short.backward_length, short.tail - short.first_backward)
    if lengths[0] != lengths[1]:
        # The layer below makes a part of the end of a backward, and the head may be unlike others.
        raise ReachesTooFar(
            f"the backwards of the interior layers have {lengths[1]} and {lengths[0]} operators"
        )
    if short.centre_number - short.last_number != short.number_stride:
        raise NotStampable("the interior layers have other numbers of autograd nodes")
