"""Keep in host memory what is tagged for it, from the forward to the backward.

As activation offloading in torchtune and in PyTorch's partitioner
(``torch/_functorch/_activation_offloading``), on the graph of a whole step or of a pipeline's
stage, where the distances between copies and waits can be counted in layers.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from gt_config.graph_kinds import STEP_GRAPHS, GraphKind
from gt_config.node_keys import ChunkAnnotation, PhaseAnnotation, ResidencyAnnotation
from gt_config.numerics import Numerics
from gt_passes._torch_internals import OpOverload, quiet_fake_execution
from gt_passes.analysis.collectives import is_collective, is_wait
from gt_passes.analysis.host_copies import OFFLOAD, RELOAD, WAIT_COPY
from gt_passes.analysis.layer_names import LayerNames
from gt_passes.analysis.storages import Storages
from gt_passes.contract import GraphPass, PassContext, PassReport, Refusal
from gt_passes.memory_policy.recomputability import Recomputability
from gt_passes.registry import register_pass
from gt_trace.node_metadata import phase_of, read_annotation, remove_annotation, write_annotation

_OFFLOAD = ResidencyAnnotation(residency="offload")
_SAVE = ResidencyAnnotation(residency="save")


@register_pass
@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadTagged(GraphPass):
    """Copy tagged values to host memory, and back for the backward.

    *Before*, with h tagged ``offload``::

        h = aten.mm(x, w)                          # layers.0
        ...                                        # layers.1, layers.2, loss
        grad = aten.silu_backward(grad_a, h)       # layers.0, phase backward

    *After*, with both distances 1::

        h = aten.mm(x, w)                          # layers.0
        started = gt_passes.offload(h)
        ...                                        # layers.1
        host = gt_passes.wait_copy(started, h)     # h is let go
        ...                                        # layers.2, loss, layers.2 backward
        returning = gt_passes.reload(host, device)
        ...                                        # layers.1 backward
        h_again = gt_passes.wait_copy(returning, host)
        grad = aten.silu_backward(grad_a, h_again)

    Views that the backward reads must be tagged ``recompute`` and come from ``recompute-tagged``,
    which runs before; a view that is not holds the memory of its base.

    The graph of a pipeline's stage is cut between forward and backward, and actions of other
    microbatches run there (``cut_after_forward``). So each copy to the host is waited for in the
    forward, each copy back starts in the backward, and what waits between the two is the host's.

    *Refuses*, and tags ``save``: what is not one tensor that fills its memory and has a fixed size;
    what is written to later; the raw result of a collective; and what would come back no later
    than it has left, if nothing else runs in between.

    *Preserves numerics*: yes. Copies keep every bit.
    """

    name: ClassVar[str] = "offload-tagged"
    numerics: ClassVar[Numerics] = "bitwise"
    runs_on: ClassVar[frozenset[GraphKind]] = frozenset({*STEP_GRAPHS, "STAGE"})

    prefetch_layers: int = 1
    """A tensor starts to come back this many layers, in the order of the backward, before the
    layer that first reads it."""

    defer_layers: int = 1
    """The wait for a copy to the host stands this many layers, in the order of the forward, after
    the layer that made the tensor."""

    layers: str = "layers.*"
    """Pattern of the names of the modules that are layers."""

    cut_after_forward: bool = False
    """Whether forward and backward will be graphs of their own, as those of a pipeline's stage."""

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {getattr(self, name)!r}, not 0 or more"
            for name in ("prefetch_layers", "defer_layers")
            if getattr(self, name) < 0
        ]
        if problems:
            raise ValueError(f"{type(self).__name__}: " + "; ".join(problems))

    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        """Offload what is tagged; see the class."""
        return _Offloading(graph_module, context, self).run()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trip:
    """The way of one tensor to host memory and back. Positions in execution order."""

    node: Node
    readers: tuple[Node, ...]
    """The nodes of the backward that read it, in execution order."""

    leaves_at: int
    """The wait for the copy to the host stands before this position."""

    returns_at: int
    """The copy back starts before this position."""


class _Offloading:
    """One run of the pass."""

    def __init__(
        self, graph_module: GraphModule, context: PassContext, options: OffloadTagged
    ) -> None:
        self._graph = graph_module.graph
        self._fake_mode = context.fake_mode
        self._options = options
        self._host_values: dict[Hashable, torch.Tensor] = {}
        self._tagged = [
            node
            for node in self._graph.nodes
            if read_annotation(node, ResidencyAnnotation) == _OFFLOAD
        ]
        if self._tagged:
            self._storages = Storages(graph_module)
            self._recomputability = Recomputability(self._storages)
            self._visits = LayerVisits(self._storages.nodes, LayerNames(options.layers))

    def run(self) -> PassReport:
        trips: list[_Trip] = []
        refusals: list[Refusal] = []
        num_bytes = 0
        for node in self._tagged:
            readers = self._backward_readers(node)
            if not readers:
                continue
            trip = self._trip(node, readers)
            reason = self._reason_against(node)
            at_once = trip.leaves_at >= trip.returns_at and not self._options.cut_after_forward
            if reason is None and at_once:
                reason = "it would come back no later than it has left"
            if reason is not None:
                write_annotation(node, _SAVE)
                refusals.append(Refusal(node_name=node.name, reason=reason))
                continue
            trips.append(trip)
            num_bytes += sum(self._storages.num_bytes[each] for each in self._storages.of(node))
        on_host = [self._leave(trip) for trip in trips]
        # The copies share one stream: what is read first starts first.
        order = sorted(
            range(len(trips)), key=lambda i: self._recomputability.position[trips[i].readers[0]]
        )
        for i in order:
            self._return(trips[i], on_host[i])
        counts = {"tensors_offloaded": len(trips), "bytes_offloaded": num_bytes}
        return PassReport.of(counts, refusals)

    def _backward_readers(self, node: Node) -> tuple[Node, ...]:
        position = self._recomputability.position
        readers = [user for user in node.users if user in self._recomputability.is_backward]
        return tuple(sorted(readers, key=lambda reader: position[reader]))

    def _trip(self, node: Node, readers: tuple[Node, ...]) -> _Trip:
        position = self._recomputability.position
        made_at, read_at = position[node], position[readers[0]]
        made_in, read_in = self._visits.segment_at(made_at), self._visits.segment_at(read_at)
        leaves_at = max(
            made_in.start_of_layer(made_at, ahead=self._options.defer_layers + 1), made_at + 1
        )
        returns_at = read_in.start_of_layer(read_at, ahead=-self._options.prefetch_layers)
        if self._options.cut_after_forward:
            leaves_at = min(leaves_at, read_in.start)
            returns_at = max(returns_at, read_in.start)
        return _Trip(node=node, readers=readers, leaves_at=leaves_at, returns_at=returns_at)

    def _reason_against(self, node: Node) -> str | None:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return "it is not one tensor"
        if any(isinstance(extent, torch.SymInt) for extent in (*value.shape, *value.stride())):
            return "its size depends on data"
        (storage,) = self._storages.of(node)
        maker = self._storages.maker[storage]
        if maker.op != "call_function":
            return "it is an input or a constant"
        if is_collective(maker) and not is_wait(node):
            return "it is the result of a collective, not waited for"
        if self._recomputability.final_position(storage) > self._recomputability.position[node]:
            return "its memory is written to later"
        if value.numel() * value.element_size() != self._storages.num_bytes[storage]:
            return "it does not fill its memory"
        return None

    def _leave(self, trip: _Trip) -> Node:
        value = self._host_value(trip.node.meta["val"])
        with self._graph.inserting_after(trip.node):
            started = self._add(trip.node, OFFLOAD, (trip.node,), value, name="offload")
        with self._graph.inserting_before(self._storages.nodes[trip.leaves_at]):
            return self._add(trip.node, WAIT_COPY, (started, trip.node), value, name="on_host")

    def _return(self, trip: _Trip, on_host: Node) -> None:
        value = trip.node.meta["val"]
        with self._graph.inserting_before(self._storages.nodes[trip.returns_at]):
            returning = self._add(trip.node, RELOAD, (on_host, value.device), value, name="reload")
        with self._graph.inserting_before(trip.readers[0]):
            back = self._add(trip.node, WAIT_COPY, (returning, on_host), value, name="back")
        for node in (returning, back):
            write_annotation(node, PhaseAnnotation(phase="backward"))
        for reader in trip.readers:
            reader.replace_input_with(trip.node, back)

    def _add(
        self, node: Node, target: OpOverload, args: tuple[Any, ...], value: object, *, name: str
    ) -> Node:
        """A new node that stands for ``node``, elsewhere."""
        added = self._graph.call_function(target, args, name=f"{node.name}_{name}")
        added.meta = {**node.meta, "val": value}
        remove_annotation(added, ResidencyAnnotation)
        # Copies move to other layers; what is of a chunk stays with it.
        remove_annotation(added, ChunkAnnotation)
        return added

    def _host_value(self, value: torch.Tensor) -> torch.Tensor:
        """The fake value of a copy in host memory, made once for all tensors alike."""
        like = (value.shape, value.stride(), value.dtype, value.device)
        if like not in self._host_values:
            with quiet_fake_execution(self._fake_mode):
                self._host_values[like] = OFFLOAD(value)
        return self._host_values[like]


# When a step enters and leaves its layers, forward and backward.
#
# A step goes through its layers forward, then through the same layers backward; with several
# microbatches or a loss in chunks it turns round more often. The stretch between two turns is a
# *segment*. Within a segment a layer begins where its first node stands, and ends where the next
# layer begins: nodes of other layers that are scattered in between (gradients of parameters,
# mostly) do not matter.
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
