"""Check that a pass changed what a graph costs only as far as it declares.

Bytes are held in total, and by kind of collective and ranks that take part, so that what one
collective lost cannot hide behind what another gained. Where unknown operators cut a graph into
parts, the bytes of each part are held too: that is how a collective that a pass made anew on the
other side of one is seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch.fx import Node

from gt_passes.barrier_order import common_barriers, segments
from gt_passes.collectives import launch_bytes
from gt_passes.contract import GraphPass
from gt_passes.graph_problem import GraphProblem
from gt_passes.graph_scan import GraphScan
from gt_passes.pipeline_report import GraphSize
from gt_passes.process_groups import group_identity, group_name_of

__all__ = ["find_bound_problems", "find_traffic_problems"]


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
    if after.peak_memory_bytes > most:
        yield GraphProblem(
            check="declared bounds",
            message=f"{graph_pass.name} raised the estimated peak memory",
            expected=f"at most {most} bytes",
            got=f"{after.peak_memory_bytes} bytes",
        )


def find_traffic_problems(
    graph_pass: GraphPass,
    before: GraphScan,
    after: GraphScan,
    *,
    same_groups: Mapping[str, str],
) -> Iterator[GraphProblem]:
    """Yield a problem for each kind of collective over some ranks that lost bytes to another.

    Says nothing about a pass that may remove collectives.
    """
    if graph_pass.bounds.collective_bytes_may_shrink:
        return
    barriers = common_barriers(before, after)
    names = [*(barrier.name for barrier in barriers), "the end"]
    old_bytes, new_bytes = (
        _traffic(scan, segments(scan, barriers) if barriers else {}, same_groups)
        for scan in (before, after)
    )
    if sum(new_bytes.values()) < sum(old_bytes.values()):
        return  # the total says it
    for lane, old in old_bytes.items():
        new = new_bytes.get(lane, 0)
        if new < old:
            kind, ranks, segment = lane
            yield GraphProblem(
                check="declared bounds",
                message=f"{graph_pass.name} took bytes from {kind} over {ranks}"
                + (f", of the part of the graph up to {names[segment]}" if barriers else ""),
                expected=f"at least {old} bytes",
                got=f"{new} bytes",
            )


def _traffic(
    scan: GraphScan, segment_of: Mapping[Node, int], same_groups: Mapping[str, str]
) -> dict[tuple[str, str, int], int]:
    """Bytes by kind of collective, ranks and part of the graph."""
    ranks_of: dict[str, str] = {}
    traffic: dict[tuple[str, str, int], int] = {}
    for launch in scan.launches:
        name = group_name_of(launch) or "no group"
        name = same_groups.get(name, name)
        if name not in ranks_of:
            ranks = group_identity(name).ranks
            ranks_of[name] = f"group {name!r}" if ranks is None else f"ranks {list(ranks)}"
        lane = (_kind(str(launch.target)), ranks_of[name], segment_of.get(launch, 0))
        traffic[lane] = traffic.get(lane, 0) + launch_bytes(launch)
    return traffic


def _kind(target: str) -> str:
    """The collective that an operator is a spelling of: coalesced, in place, into a buffer."""
    name = target.split(".")[1].removesuffix("_")
    return name.removesuffix("_out").removesuffix("_coalesced")
