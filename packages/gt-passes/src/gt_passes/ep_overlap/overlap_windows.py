"""The stretches of a graph in which chunks take turns, found from its chunk regions.

Usually one region, in one direction. Regions whose chunks follow from each other without a join, as
whole transformer blocks chunked on the graph do, form one stretch, so that the last exchange of one
block hides behind the first computation of the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch.fx import Node

from gt_passes.analysis.order_constraints import OrderConstraints
from gt_passes.contract import Refusal
from gt_passes.ep_overlap.chunk_interleaving import OverlapWindow
from gt_passes.ep_overlap.chunk_metadata import ChunkRegion
from gt_passes.ep_overlap.exchange_operators import is_exchange_launch, is_token_exchange


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
