"""Hide the token exchanges of one chunk behind the computation of another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule, Node

from gt_config.graph_kinds import STEP_GRAPHS, GraphKind
from gt_config.node_keys import ChunkAnnotation
from gt_config.numerics import Numerics
from gt_passes.analysis.order_constraints import OrderConstraints
from gt_passes.contract import ChangeBounds, GraphPass, PassContext, PassReport
from gt_passes.ep_overlap.chunk_interleaving import interleaved_order
from gt_passes.ep_overlap.chunk_metadata import ChunkRegions
from gt_passes.ep_overlap.node_durations import NodeDurations, estimated_durations
from gt_passes.ep_overlap.overlap_windows import find_overlap_windows
from gt_passes.ep_overlap.set_fsdp_aside import set_fsdp_aside
from gt_passes.registry import register_pass
from gt_trace.node_metadata import read_annotation


@register_pass
@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleEpOverlap(GraphPass):
    """Let the chunks of a region take turns at their token exchanges.

    Reads ``ChunkAnnotation`` and which operators exchange tokens (``register_exchange_operator``),
    and nothing of who made the chunks. Chunks go in order forward and in reverse backward. Launches
    stand as early as their inputs allow, waits as late as their readers; counts of tokens are
    exchanged, and read by the host, before what does not need them. FSDP collectives go where no
    exchange is in flight. See ``gt_passes.ep_overlap.chunk_interleaving`` for the rules. The
    stage of a pipeline is scheduled before it is cut: the graphs of its actions, and of pairs of
    them, keep the order.

    *Before*::

        d0 = all_to_all_single(x0, ...); y0 = experts(wait_tensor(d0))   # chunk 0
        c0 = all_to_all_single(y0, ...); z0 = combine(wait_tensor(c0))
        d1 = all_to_all_single(x1, ...); y1 = experts(wait_tensor(d1))   # chunk 1
        c1 = all_to_all_single(y1, ...); z1 = combine(wait_tensor(c1))

    *After*::

        d0 = all_to_all_single(x0, ...)
        d1 = all_to_all_single(x1, ...)
        y0 = experts(wait_tensor(d0)); c0 = all_to_all_single(y0, ...)
        y1 = experts(wait_tensor(d1)); c1 = all_to_all_single(y1, ...)
        z0 = combine(wait_tensor(c0))
        z1 = combine(wait_tensor(c1))

    *Refuses*: regions that run into one another in different directions or numbers of chunks, and
    graphs in whose chunks it knows no token exchange. What an operator of unknown effect separates
    stays separated.

    *Preserves numerics*: yes. Only the order changes.

    *Raises*: ``ChunkMetadataError`` on annotations that contradict themselves.
    """

    name: ClassVar[str] = "schedule-ep-overlap"
    numerics: ClassVar[Numerics] = "bitwise"
    runs_on: ClassVar[frozenset[GraphKind]] = frozenset({*STEP_GRAPHS, "STAGE"})

    durations: NodeDurations = estimated_durations
    """How long nodes are taken to run. It decides how much of what no exchange needs is kept for
    later, and nothing about the order of collectives."""

    of_stage: bool = False
    """Whether the graph is a pipeline stage's: of a part of a model, whose chunks may exchange
    nothing, and with FSDP collectives that its cut takes out, which are set aside first."""

    @property
    def bounds(self) -> ChangeBounds:
        """No bound on memory: all chunks are under way at once.

        What no exchange needs (gradients of weights) waits behind launches, and holds its inputs.
        """
        return ChangeBounds(peak_memory_growth=None)

    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        """Interleave the chunks of every region; see the class."""
        graph = graph_module.graph
        if all(read_annotation(node, ChunkAnnotation) is None for node in graph.nodes):
            return PassReport.of({})
        counts = {}
        if self.of_stage:
            counts["fsdp_set_aside"] = int(set_fsdp_aside(graph_module))
        nodes = list(graph.nodes)
        regions = ChunkRegions.of(graph_module).regions
        constraints = OrderConstraints(graph_module)
        windows, refusals = find_overlap_windows(
            regions, nodes, constraints, may_find_none=self.of_stage
        )
        duration_us = self.durations(graph_module)
        counts["windows_interleaved"] = 0
        for window in windows:
            order = interleaved_order(window, duration_us)
            if order != window.nodes:
                _put_in_order(window.nodes, order)
                counts["windows_interleaved"] += 1
        return PassReport.of(counts, refusals)


def _put_in_order(old: Sequence[Node], new: Sequence[Node]) -> None:
    """Reorder neighbouring nodes, in place."""
    before = old[0].prev
    for node in new:
        before.append(node)
        before = node
