"""Check that nothing touches memory that a collective or host copy in flight reads or writes.

Between a launch and its wait the network reads the arguments, and writes the result. Whatever
overwrites an argument in between races with it, and so does whatever reads the buffer that a
collective with an ``out`` argument, or one in place, is about to fill. Both can be read off one
graph. Declared launches of other libraries (``declare_launch``) are collectives here too. The fresh
results of other collectives are judged by ``gt_passes.verifier.collective_waits``.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from torch.fx import Node

from gt_passes.analysis.aliasing import written_nodes
from gt_passes.analysis.collectives import is_declared_launch, is_wait, raw_results, waits_of
from gt_passes.analysis.graph_scan import GraphScan
from gt_passes.analysis.host_copies import starts_host_copy, waits_for_copy
from gt_passes.analysis.operator_effects import is_only_a_view, reads_only_metadata
from gt_passes.analysis.written_memory import Memory
from gt_passes.graph_problem import GraphProblem
from gt_passes.verifier.memory_order import MemoryOrder


def find_race_problems(order: MemoryOrder) -> Iterator[GraphProblem]:
    """Yield a problem for each access that races with a collective in flight."""
    if not order.memory_of:
        return
    position, calls = order.scan.position, order.scan.calls
    copies = filter(starts_host_copy, order.scan.host_copies)
    for launch in (*order.scan.launches, *order.scan.declared_launches, *copies):
        if order.memory_of.keys().isdisjoint(calls[launch].split()[1]):
            continue  # as of most
        end = _end_of_flight(launch, order.scan)
        written = {id(order.memory_of[argument]) for argument in written_nodes(launch)}
        for argument in launch.all_input_nodes:
            memory = order.memory_of.get(argument)
            if memory is None:
                continue
            accesses = _writes(memory, position[launch], end)
            if id(memory) in written:
                accesses = _accesses(memory, order.scan, position[launch], end)
            is_copy = starts_host_copy(launch)
            kind = "copy" if is_copy else "collective"
            for access in accesses:
                yield GraphProblem(
                    check="copy waits" if is_copy else "collective waits",
                    node_name=access.name,
                    target=str(access.target),
                    message=f"it touches the memory of {argument.name} while the {kind} "
                    f"{launch.name} is in flight",
                    expected=f"to stand before {launch.name} or after its wait",
                    got="to stand between them",
                )


def _end_of_flight(launch: Node, scan: GraphScan) -> int:
    """Position of the last first wait of a launch; the end of the graph where there is none."""
    if is_declared_launch(launch):
        # One wait may be enough for several results.
        return max(map(scan.position.__getitem__, waits_of(launch)), default=len(scan.position))
    if starts_host_copy(launch):
        ends = map(scan.position.__getitem__, waits_for_copy(launch))
        return max(ends, default=len(scan.position))
    end = scan.position[launch]
    for result in raw_results(launch):
        waits = [scan.position[user] for user in result.users if is_wait(user)]
        end = max(end, min(waits, default=len(scan.position)))
    return end


def _writes(memory: Memory, begin: int, end: int) -> tuple[Node, ...]:
    low = bisect_right(memory.writer_positions, begin)
    high = bisect_left(memory.writer_positions, end)
    return memory.writers[low:high]


def _accesses(memory: Memory, scan: GraphScan, begin: int, end: int) -> tuple[Node, ...]:
    users = {user: None for member in memory.members for user in member.users}
    return tuple(
        sorted(
            (
                user
                for user in users
                if begin < scan.position[user] < end
                and not is_only_a_view(user)
                and not is_wait(user)
                and not reads_only_metadata(user)
            ),
            key=scan.position.__getitem__,
        )
    )
