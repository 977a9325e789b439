"""Cut a graph into pieces that can each be recorded as one CUDA graph.

A piece is a maximal run of nodes, in execution order, without an obstacle in between. Nothing is
reordered. A collective must be launched and awaited in the same piece, and so must a copy to or
from host memory: a recording that forks onto another stream has to join it again before it ends.
Where an obstacle stands between the two, both run on their own, which may cut further pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from gt_passes.analysis.collectives import is_collective, is_wait, raw_results
from gt_passes.analysis.host_copies import WAIT_COPY, starts_host_copy
from gt_passes.analysis.operator_effects import is_only_a_view
from gt_passes.analysis.outlined_region import region_of
from gt_passes.cuda_graphs.cuda_graph_safety import CaptureTarget, Obstacle, find_obstacles


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Pieces to record, and what stays outside."""

    pieces: tuple[tuple[Node, ...], ...]
    """Calls, in execution order."""

    obstacles: tuple[Obstacle, ...]
    """Why the other calls are in no piece, in execution order."""


def partition(
    graph_module: GraphModule,
    target: CaptureTarget,
    *,
    num_static_inputs: int,
    min_kernels: int,
) -> Partition:
    """Cut a graph into recordable pieces.

    Args:
        graph_module: with fake values.
        target: what to record for.
        num_static_inputs: leading placeholders whose tensors keep their addresses.
        min_kernels: leave smaller pieces out: a replay costs about as much as two launches. A
            region counts as what is in it, before a compiler fuses it.
    """
    nodes = _calls(graph_module)
    positions = {node: position for position, node in enumerate(nodes)}
    left_out: dict[Node, str] = {}
    while True:
        obstacles = find_obstacles(
            graph_module, target, num_static_inputs=num_static_inputs, left_out=left_out
        )
        cuts = {obstacle.node for obstacle in obstacles}
        found = _crossing_transfers(nodes, positions, cuts)
        runs = list(_runs(nodes, cuts | set(found)))
        for run in runs:
            if num_kernels(run) < min_kernels:
                reason = f"fewer than {min_kernels} kernels stand together here"
                found.update(dict.fromkeys(run, reason))
        if not found:
            return Partition(pieces=tuple(map(tuple, runs)), obstacles=obstacles)
        # What is left out lives at addresses that change, which may matter to those who read it.
        left_out.update(found)


def _calls(graph_module: GraphModule) -> list[Node]:
    return [node for node in graph_module.graph.nodes if node.op == "call_function"]


def num_kernels(nodes: Iterable[Node]) -> int:
    """How many kernels calls launch, where a region counts as what it was made of."""
    count = 0
    for node in nodes:
        region = region_of(node)
        if region is not None:
            count += num_kernels(_calls(region.body))
        else:
            count += not is_only_a_view(node)
    return count


def _runs(nodes: Sequence[Node], cuts: set[Node]) -> Iterator[list[Node]]:
    run: list[Node] = []
    for node in nodes:
        if node not in cuts:
            run.append(node)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _crossing_transfers(
    nodes: Sequence[Node], positions: dict[Node, int], cuts: set[Node]
) -> dict[Node, str]:
    """The launches and waits that a cut separates, each with the reason."""
    launches = [node for node in nodes if _is_launch(node) and node not in cuts]
    spans = []
    parts_of = []
    for launch in launches:
        results = list(raw_results(launch)) if is_collective(launch) else [launch]
        waits = [user for result in results for user in result.users if _waits_for(user, result)]
        parts_of.append((*(result for result in results if result is not launch), *waits))
        spans.append((positions[launch], max((positions[wait] for wait in waits), default=-1)))
    open_spans = _Spans(spans)
    left_out: dict[Node, str] = {}
    pending = [positions[node] for node in nodes if node in cuts]
    while pending:
        position = pending.pop()
        for number in open_spans.take_around(position):
            launch, parts = launches[number], parts_of[number]
            between = f"{nodes[position].name}, which is not recorded,"
            left_out[launch] = f"{between} stands between it and its wait"
            for part in parts:
                left_out[part] = f"{between} stands between {launch.name} and its wait"
            pending += [positions[node] for node in (launch, *parts)]
    return left_out


def _is_launch(node: Node) -> bool:
    return is_collective(node) or starts_host_copy(node)


def _waits_for(node: Node, result: Node) -> bool:
    return is_wait(node) or (node.target is WAIT_COPY and node.args[0] is result)


class _Spans:
    """Spans of positions, sorted by where they start; those around a position can be taken out.

    A tree over them keeps the farthest end, so that a search visits only what it takes and the
    path there: all searches together cost n log n.
    """

    def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
        self._starts = [start for start, _ in spans]
        self._size = 1 << max(len(spans) - 1, 0).bit_length()
        self._ends = [-1] * (2 * self._size)
        for number, (_, end) in enumerate(spans):
            self._ends[self._size + number] = end
        for node in range(self._size - 1, 0, -1):
            self._ends[node] = max(self._ends[2 * node], self._ends[2 * node + 1])

    def take_around(self, position: int) -> list[int]:
        """Take out the spans that start before ``position`` and end after it; their numbers."""
        taken: list[int] = []
        while (number := self._find(position)) is not None:
            taken.append(number)
            self._remove(number)
        return taken

    def _find(self, position: int) -> int | None:
        pending = [(1, 0, self._size)]
        while pending:
            node, first, width = pending.pop()
            starts_too_late = first >= len(self._starts) or self._starts[first] >= position
            if starts_too_late or self._ends[node] <= position:
                continue
            if width == 1:
                return first
            half = width // 2
            pending += [(2 * node, first, half), (2 * node + 1, first + half, half)]
        return None

    def _remove(self, number: int) -> None:
        node = self._size + number
        self._ends[node] = -1
        while node > 1:
            node //= 2
            self._ends[node] = max(self._ends[2 * node], self._ends[2 * node + 1])
