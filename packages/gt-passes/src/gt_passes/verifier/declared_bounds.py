"""Check that a pass changed what a graph costs only as far as it declares.

Bytes are held in total, and by kind of collective and ranks that take part, so that what one
collective lost cannot hide behind what another gained. Where unknown operators cut a graph into
parts, the bytes of each part are held too: that is how a collective that a pass made anew on the
other side of one is seen.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch.fx import Node

from gt_passes.analysis.call_form import CallForm
from gt_passes.analysis.collectives import launch_bytes
from gt_passes.analysis.graph_scan import GraphScan
from gt_passes.analysis.process_groups import group_identity, group_name_of
from gt_passes.contract import GraphPass
from gt_passes.graph_problem import GraphProblem
from gt_passes.verifier.barrier_order import common_barriers, segments

_BLOCK_BYTES = 512
"""The CUDA allocator rounds every tensor up to such blocks. Estimates do not: a scalar
that is held for longer is no memory that anybody misses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSize:
    """How large a graph is, by measures that passes change."""

    num_ops: int
    """Number of calls: nodes without placeholders, attributes and the output."""

    collective_bytes: int
    """Bytes given to collectives on this rank; see
    ``gt_passes.analysis.collectives.collective_bytes``."""

    peak_memory_bytes: int | None
    """Estimated; None where nobody asked: see ``PassManager``."""


def find_bound_problems(
    graph_pass: GraphPass, before: GraphSize, after: GraphSize
) -> Iterator[GraphProblem]:
    """Yield a problem for each total that a pass changed beyond what it declares."""
    bounds = graph_pass.bounds
    old, new = before.collective_bytes, after.collective_bytes
    most = int(old * (1 + bounds.collective_bytes_growth))
    if new > most or (new < old and not bounds.collective_bytes_may_shrink):
        least = "0" if bounds.collective_bytes_may_shrink else str(old)
        yield GraphProblem(
            check="declared bounds",
            message=f"{graph_pass.name} changed the bytes given to collectives",
            expected=f"{least} to {most} bytes" if least != str(most) else f"{most} bytes",
            got=f"{new} bytes",
        )
    if before.peak_memory_bytes is None or after.peak_memory_bytes is None:
        return
    if bounds.peak_memory_growth is None:
        return
    most = int(before.peak_memory_bytes * (1 + bounds.peak_memory_growth))
    if after.peak_memory_bytes >= most + _BLOCK_BYTES:
        yield GraphProblem(
            check="declared bounds",
            message=f"{graph_pass.name} raised the estimated peak memory",
            expected=f"at most {most} bytes",
            got=f"{after.peak_memory_bytes} bytes",
        )


def find_removal_problems(
    graph_pass: GraphPass, before: GraphScan, after: GraphScan
) -> Iterator[GraphProblem]:
    """Yield a problem for the first thing besides erasing that a pass did which only removes."""
    if not graph_pass.bounds.only_removes:
        return

    def problem(node: Node, expected: str, got: str) -> GraphProblem:
        return GraphProblem(
            check="declared bounds",
            node_name=node.name,
            message=f"{graph_pass.name} declares that it only removes nodes",
            expected=expected,
            got=got,
        )

    for node in after.changed_nodes(before):
        got = "a changed node" if node in before.calls else "a new node"
        yield problem(node, "the node as it was", got)
        return
    for earlier, node in itertools.pairwise(after.position):
        if before.position[node] < before.position[earlier]:
            yield problem(node, "the node where it was", "a moved node")
            return


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What one launch takes part in."""

    kind: str
    ranks: str
    num_bytes: int


_NO_TRAFFIC: Mapping[Node, Traffic] = MappingProxyType({})


def traffic_of(
    scan: GraphScan,
    *,
    same_groups: Mapping[str, str],
    known: Mapping[Node, Traffic] = _NO_TRAFFIC,
    changed: Collection[Node] = (),
) -> dict[Node, Traffic]:
    """What every launch of a graph takes part in, as it is now.

    Args:
        scan: of the graph.
        same_groups: as ``PassContext.same_groups``; such groups count as one.
        known: the same of an earlier scan.
        changed: nodes of which that says nothing any more.
    """
    changed = frozenset(changed)
    ranks_of: dict[str, str] = {}
    lanes: dict[CallForm, tuple[str, str]] = {}  # kind and ranks, which constants alone decide
    traffic = {}
    for launch in scan.launches:
        same = known.get(launch)
        if same and launch not in changed and changed.isdisjoint(scan.calls[launch].split()[1]):
            traffic[launch] = same
            continue
        form, _ = scan.calls[launch].split()
        if form not in lanes:
            name = group_name_of(launch) or "no group"
            name = same_groups.get(name, name)
            if name not in ranks_of:
                ranks = group_identity(name).ranks
                ranks_of[name] = f"group {name!r}" if ranks is None else f"ranks {list(ranks)}"
            lanes[form] = _kind(str(launch.target)), ranks_of[name]
        kind, ranks_text = lanes[form]
        traffic[launch] = Traffic(kind=kind, ranks=ranks_text, num_bytes=launch_bytes(launch))
    return traffic


def find_traffic_problems(
    graph_pass: GraphPass,
    before: GraphScan,
    after: GraphScan,
    *,
    traffic_before: Mapping[Node, Traffic],
    traffic_after: Mapping[Node, Traffic],
) -> Iterator[GraphProblem]:
    """Yield a problem for each kind of collective over some ranks that lost bytes to another.

    Says nothing about a pass that may remove collectives.
    """
    if graph_pass.bounds.collective_bytes_may_shrink:
        return
    barriers = common_barriers(before, after)
    names = [*(barrier.name for barrier in barriers), "the end"]
    old_bytes, new_bytes = (
        _bytes_by_lane(traffic, segments(scan, barriers) if barriers else {})
        for scan, traffic in ((before, traffic_before), (after, traffic_after))
    )
    if sum(new_bytes.values()) < sum(old_bytes.values()):
        return  # the total says it
    for (kind, ranks, segment), old in old_bytes.items():
        new = new_bytes.get((kind, ranks, segment), 0)
        if new < old:
            part = f", of the part of the graph up to {names[segment]}" if barriers else ""
            yield GraphProblem(
                check="declared bounds",
                message=f"{graph_pass.name} took bytes from {kind} over {ranks}{part}",
                expected=f"at least {old} bytes",
                got=f"{new} bytes",
            )


def _bytes_by_lane(
    traffic: Mapping[Node, Traffic], segment_of: Mapping[Node, int]
) -> dict[tuple[str, str, int], int]:
    """Bytes by kind of collective, ranks and part of the graph."""
    lanes: dict[tuple[str, str, int], int] = {}
    for launch, part in traffic.items():
        lane = (part.kind, part.ranks, segment_of.get(launch, 0))
        lanes[lane] = lanes.get(lane, 0) + part.num_bytes
    return lanes


def _kind(target: str) -> str:
    """The collective that an operator is a spelling of: coalesced, in place, into a buffer."""
    name = target.split(".")[1].removesuffix("_")
    return name.removesuffix("_out").removesuffix("_coalesced")
