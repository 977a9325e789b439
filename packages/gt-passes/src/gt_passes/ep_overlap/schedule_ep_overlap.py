"""Hide the token exchanges of one chunk behind the computation of another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule, Node

from gt_config.graph_kinds import STEP_GRAPHS, GraphKind
from gt_config.node_keys import ChunkAnnotation, FsdpCollectiveAnnotation
from gt_config.numerics import Numerics
from gt_passes.analysis.collectives import is_collective
from gt_passes.analysis.order_constraints import OrderConstraints
from gt_passes.contract import ChangeBounds, GraphPass, PassContext, PassReport, Refusal
from gt_passes.ep_overlap.chunk_interleaving import OverlapWindow, interleaved_order
from gt_passes.ep_overlap.chunk_metadata import ChunkRegion, ChunkRegions
from gt_passes.ep_overlap.exchange_operators import is_exchange_launch, is_token_exchange
from gt_passes.ep_overlap.node_durations import NodeDurations, estimated_durations
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


# The stretches of a graph in which chunks take turns, found from its chunk regions.
#
# Usually one region, in one direction. Regions whose chunks follow from each other without a
# join, as whole transformer blocks chunked on the graph do, form one stretch, so that the last
# exchange of one block hides behind the first computation of the next.
@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """Regions that are scheduled together, in the order in which they begin."""

    regions: tuple[ChunkRegion, ...]
    start: int
    end: int
    """Positions of the first and of the last node of a body."""


def find_overlap_windows(
    regions: Sequence[ChunkRegion],
    nodes: Sequence[Node],
    constraints: OrderConstraints,
    *,
    may_find_none: bool = False,
) -> tuple[list[OverlapWindow], list[Refusal]]:
    """The windows to schedule, and the regions that must stay as they are.

    Args:
        regions: of the graph.
        nodes: all nodes of the graph, in order.
        constraints: of the same graph.
        may_find_none: whether there may be no exchange; it is a refusal otherwise.
    """
    windows: list[OverlapWindow] = []
    refusals: list[Refusal] = []
    for span in _spans(regions, constraints.position):
        if not any(map(_is_token_launch, _body_nodes(span.regions))):
            continue
        reason = _reason_to_leave(span)
        if reason is not None:
            node = span.regions[0].chunks[0][0]
            refusals.append(Refusal(node_name=node.name, reason=reason))
            continue
        windows.append(_window(span, nodes, constraints))
    if regions and not windows and not refusals and not may_find_none:
        reason = (
            "no chunk has a token exchange that is known: another operator than all_to_all_single "
            "has to be registered (register_exchange_operator)"
        )
        refusals.append(Refusal(node_name=regions[0].chunks[0][0].name, reason=reason))
    return windows, refusals


def _spans(regions: Sequence[ChunkRegion], position: dict[Node, int]) -> list[_Span]:
    """Regions that overlap or follow from each other, joined."""
    single = []
    for region in regions:
        held = [position[node] for node in _body_nodes([region])]
        single.append(_Span(regions=(region,), start=min(held), end=max(held)))
    joined: list[_Span] = []
    for span in sorted(single, key=lambda span: span.start):
        last = joined[-1] if joined else None
        if last is not None and (span.start <= last.end or _follows(last, span)):
            joined[-1] = _Span(
                regions=(*last.regions, *span.regions),
                start=last.start,
                end=max(last.end, span.end),
            )
        else:
            joined.append(span)
    return joined


def _follows(earlier: _Span, later: _Span) -> bool:
    """Whether a chunk of the later region reads the same chunk of the one before it."""
    before, after = earlier.regions[-1], later.regions[0]
    if before.direction != after.direction or before.num_chunks != after.num_chunks:
        return False
    for made, reading in zip(before.chunks, after.chunks, strict=True):
        own = set(made)
        if any(source in own for node in reading for source in node.all_input_nodes):
            return True
    return False


def _reason_to_leave(span: _Span) -> str | None:
    first = span.regions[0]
    for other in span.regions[1:]:
        if other.direction != first.direction:
            return f"{first} and {other} run into each other, as if a module ran twice"
        if other.num_chunks != first.num_chunks:
            return (
                f"{first} and {other} run into each other, in {first.num_chunks} and "
                f"{other.num_chunks} chunks"
            )
    return None


def _window(span: _Span, nodes: Sequence[Node], constraints: OrderConstraints) -> OverlapWindow:
    stretch = tuple(nodes[span.start : span.end + 1])
    index = {node: i for i, node in enumerate(stretch)}
    begins = [
        min(constraints.position[node] for node in _body_nodes([region])) - span.start
        for region in span.regions
    ]
    home: list[int] = []
    for i in range(len(stretch)):
        last = home[-1] if home else 0
        home.append(last + 1 if last + 1 < len(begins) and begins[last + 1] <= i else last)
    bodies: dict[int, list[int]] = {}
    for number, region in enumerate(span.regions):
        for chunk, body in enumerate(region.chunks):
            bodies.setdefault(chunk, []).extend(index[node] for node in body)
            for node in body:
                home[index[node]] = number
    chunks = range(span.regions[0].num_chunks)
    return OverlapWindow(
        nodes=stretch,
        predecessors=tuple(constraints.predecessors(stretch)),
        home=tuple(home),
        chunk_order=tuple(chunks if span.regions[0].direction == "forward" else reversed(chunks)),
        bodies={chunk: tuple(sorted(body)) for chunk, body in bodies.items()},
    )


def _body_nodes(regions: Sequence[ChunkRegion]) -> Iterator[Node]:
    for region in regions:
        for nodes in region.chunks:
            yield from nodes


def _is_token_launch(node: Node) -> bool:
    return is_exchange_launch(node) and is_token_exchange(node)


# FSDP's collectives of a pipeline stage, put where the stage's cut will have them.
#
# The cut takes gathers of parameters and reductions of gradients out, into graphs of their own.
# Until then they stand between the chunks: what reads a parameter seems to wait for its gather,
# and none may come between the halves of an exchange, so that chunks would make room for what
# goes away.
def set_fsdp_aside(graph_module: GraphModule) -> bool:
    """Move gathers, with what they need, to the front, and reductions with what follows to the end.

    Nothing moves where a gather needs what follows a reduction.

    Returns:
        Whether anything moved.
    """
    graph = graph_module.graph
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    predecessors = OrderConstraints(graph_module).predecessors(nodes)
    gathers: set[int] = set()
    reductions: set[int] = set()
    for i, node in enumerate(nodes):
        if _is_reduction(node) or not reductions.isdisjoint(predecessors[i]):
            reductions.add(i)
    pending = [i for i, node in enumerate(nodes) if _is_gather(node)]
    while pending:
        i = pending.pop()
        if i not in gathers:
            gathers.add(i)
            pending.extend(predecessors[i])
    if not gathers.isdisjoint(reductions):
        return False
    place = [(i in reductions) - (i in gathers) for i in range(len(nodes))]
    order = sorted(range(len(nodes)), key=lambda i: (place[i], i))
    for i in order:
        graph.output_node().prepend(nodes[i])
    return order != list(range(len(nodes)))


def _is_gather(node: Node) -> bool:
    collective = read_annotation(node, FsdpCollectiveAnnotation)
    return collective is not None and collective.kind == "unshard"


def _is_reduction(node: Node) -> bool:
    collective = read_annotation(node, FsdpCollectiveAnnotation)
    return collective is not None and collective.kind != "unshard" and is_collective(node)
