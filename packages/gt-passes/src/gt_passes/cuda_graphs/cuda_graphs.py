"""Record the pieces of a graph that can be recorded, and say of every other node why not."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from gt_config.graph_kinds import (
    COMPUTING_ACTIONS,
    JOINT_GRAPHS,
    PIPELINE_ACTIONS,
    STEP_GRAPHS,
    GraphKind,
)
from gt_config.node_keys import PipelineAction, PipelineAnnotation
from gt_config.numerics import Numerics
from gt_passes._torch_compilation_internals import symmetric_memory_workspaces
from gt_passes._torch_internals import quiet_fake_execution, value_of
from gt_passes.analysis.aliasing import AliasClasses
from gt_passes.analysis.collectives import is_collective, is_wait, raw_results
from gt_passes.analysis.host_copies import WAIT_COPY, is_host_copy, starts_host_copy
from gt_passes.analysis.operator_effects import is_only_a_view
from gt_passes.analysis.outlined_region import Outline, OutlinedRegion, RegionOutliner, region_of
from gt_passes.contract import ChangeBounds, GraphPass, PassContext, PassReport, Refusal
from gt_passes.cuda_graphs.cuda_graph_replay import Recorded, Recorder, ReplayedPiece, ReplaySession
from gt_passes.cuda_graphs.cuda_graph_safety import CaptureTarget, Obstacle, find_obstacles
from gt_passes.cuda_graphs.piece_memory import PieceMemory, bytes_between_pieces, with_rooms
from gt_passes.cuda_graphs.whole_recording import (
    WholeRecording,
    mark_for_recording,
    whole_recording,
)
from gt_passes.registry import register_pass
from gt_trace.node_metadata import copy_annotations, read_annotation


# The recorder that records: ``torch.cuda.CUDAGraph`` behind the protocol of
# ``cuda_graph_replay``.
#
# Deliberately small, since it is the one part of ``cuda-graphs`` that needs a GPU to run.
#
# ``make test-gpu`` records with it: an H200 with torch 2.11 has (docs/decisions/0069).
#
# Results are handed out once as the tensors that own their memory, and ever after as tensors
# over the same addresses that own nothing, as ``torch/_inductor/cudagraph_trees.py`` does. The
# allocator gives memory that was let go between two recordings of one pool to the later of them.
#
# Source: PyTorch, ``torch/cuda/graphs.py`` (``make_graphed_callables``).
class CudaRecorder:
    """Records on a stream of its own, into a memory pool that all pieces share.

    Needs CUDA from the first call on, not for its construction.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None

    def warm_up(
        self, piece: Callable[..., Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Run a piece as it is, on the caller's stream."""
        return piece(*inputs)

    def memory(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Bytes outside the pool, which no recording can use for its intermediates."""
        return torch.empty(
            num_bytes, dtype=torch.uint8, device=device, pin_memory=device.type == "cpu"
        )

    def record(
        self, piece: Callable[..., Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]
    ) -> Recorded:
        """Record a piece at the addresses of ``inputs``."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it so
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # thread_local: NCCL's watchdog asks for the state of events from a thread of its own.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            outputs = tuple(piece(*inputs))
        recording = _CudaRecording(
            graph, _without_ownership(outputs), symmetric_memory_workspaces()
        )
        return Recorded(recording=recording, outputs=outputs)

    def reset(self) -> None:
        """Use a new memory pool; the old one goes with the last recording in it."""
        self._stream = None
        self._pool = None


@dataclass(frozen=True, slots=True)
class _CudaRecording:
    graph: torch.cuda.CUDAGraph
    outputs: Sequence[torch.Tensor]
    workspaces: Sequence[torch.Tensor]
    """A larger one may replace them for another graph, and this one goes on using them."""

    def replay(self) -> None:
        """Launch the recorded kernels on the current stream."""
        self.graph.replay()


class _DeviceBytes:
    """Memory of somebody else, offered to torch by the CUDA array interface."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.__cuda_array_interface__ = {
            "shape": (storage.nbytes(),),
            "typestr": "|u1",
            "data": (storage.data_ptr(), False),
            "version": 3,
        }


def _without_ownership(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The same tensors, without keeping their memory; what shares a storage goes on sharing it."""
    of_storage: dict[int, torch.Tensor] = {}
    results = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.device.type != "cuda" or storage.nbytes() == 0:
            results.append(tensor)  # a room in host memory, which stays, or nothing at all
            continue
        address = storage.data_ptr()
        if address not in of_storage:
            of_storage[address] = torch.as_tensor(_DeviceBytes(storage), device=tensor.device)
        num_bytes = storage.nbytes() // tensor.dtype.itemsize * tensor.dtype.itemsize
        elements = of_storage[address][:num_bytes].view(tensor.dtype)
        results.append(elements.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()))
    return tuple(results)


@register_pass
@dataclass(frozen=True, slots=True, kw_only=True)
class CudaGraphs(GraphPass):
    """Replace maximal runs of recordable nodes by replays of CUDA graphs.

    ``cuda_graph_safety`` judges the nodes, ``cuda_graph_partition`` cuts the pieces, and
    ``cuda_graph_replay`` runs them. A replay overwrites the results of the one before. Within a
    step that is as it should be; what leaves the step is copied, so that a caller who keeps
    gradients from one microbatch to the next keeps those gradients (pytorch issue 96693).

    *Before*::

        y = mm(x, w);  z = relu(y)
        n = _local_scalar_dense(count)          # a host synchronization
        u = mul(z, z);  v = mm(u, w)
        return v, n

    *After*::

        p = run_region(cuda_graph_0, x, w);  z = p[0]
        n = _local_scalar_dense(count)
        q = run_region(cuda_graph_1, z, w);  v = q[0]
        kept = clone(v)
        return kept, n

    The graph of a pipeline's action, and that of a microbatch that shares what it gathers and sums,
    is cut into no pieces: what one microbatch keeps must outlive the replay for the next. Where all
    of it can be recorded, it is marked. Where all graphs of a step are, the whole step is recorded
    (``gt_pipeline.graph.step_recording``), else each marked action of a pipeline that computes,
    once for each place of a microbatch (``recorded_actions``, there).

    *Refuses*: what cannot be recorded, node by node with the reason, such as regions that copy to
    the host by themselves; everything where there is no CUDA. Run it last: a compiler cannot look
    into a piece.

    *Preserves numerics*: yes. The same kernels run, on the same values.
    """

    name: ClassVar[str] = "cuda-graphs"
    numerics: ClassVar[Numerics] = "bitwise"
    runs_on: ClassVar[frozenset[GraphKind]] = frozenset(
        {*STEP_GRAPHS, *JOINT_GRAPHS, *PIPELINE_ACTIONS}
    )
    generates_code: ClassVar[bool] = True

    target: CaptureTarget = field(default_factory=CaptureTarget)
    """What to record for. ``backend_of_group`` must know the groups of the graph, or collectives
    stay outside."""

    new_recorder: Callable[[], Recorder] = CudaRecorder
    """Makes the recorder of one graph. Another than the default is used without CUDA, too."""

    min_kernels: int = 4
    """Leave smaller pieces alone. A compiled region counts as the kernels it was made of."""

    num_warmup_steps: int = 1
    """Steps to run before recording."""

    max_recordings: int = 8
    """How often parameters may be replaced before that is an error."""

    whole: bool = False
    """Whether whoever runs the graph records all of it, together with others. So it is in a
    pipeline, whatever is said here."""

    @property
    def bounds(self) -> ChangeBounds:
        """Copies of inputs and outputs, and intermediates that stay reserved, are not bounded."""
        return ChangeBounds(collective_bytes_may_shrink=True, peak_memory_growth=None)

    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        """Record pieces; see the class."""
        calls = [node for node in graph_module.graph.nodes if node.op == "call_function"]
        if any(_is_piece(node) for node in calls) or whole_recording(graph_module) is not None:
            return PassReport(changed=False)
        if self.new_recorder is CudaRecorder and not torch.cuda.is_available():
            reason = "this machine has no CUDA, so nothing of the graph can be recorded"
            refusals = (Refusal(node_name="the graph", reason=reason),) if calls else ()
            return PassReport(changed=False, refusals=refusals)
        annotations = (read_annotation(node, PipelineAnnotation) for node in calls)
        actions = {each.action for each in annotations if each is not None}
        if self.whole or actions:
            return self._mark(graph_module, context, calls, actions)
        has_moved = _settle_items(graph_module.graph)
        parts = partition(
            graph_module,
            self.target,
            num_static_inputs=context.num_static_inputs,
            min_kernels=self.min_kernels,
        )
        counts = {"pieces": len(parts.pieces), "nodes": sum(map(len, parts.pieces))}
        if parts.pieces:
            memories = self._outline(graph_module, context, parts.pieces)
            counts["outputs_copied"] = _copy_outputs(graph_module.graph, context)
            counts |= _bytes_kept(graph_module, memories)
        return PassReport(
            changed=has_moved or bool(parts.pieces),
            counts=counts,
            refusals=tuple(
                Refusal(node_name=obstacle.node.name, reason=obstacle.reason)
                for obstacle in parts.obstacles
            ),
        )

    def _mark(
        self,
        graph_module: GraphModule,
        context: PassContext,
        calls: Sequence[Node],
        actions: Collection[PipelineAction],
    ) -> PassReport:
        """Mark a graph to be recorded as a whole, or say what is in the way.

        Args:
            graph_module: see ``run``.
            context: see ``run``.
            calls: its nodes.
            actions: of the pipeline, if it is one's.
        """
        obstacles = find_obstacles(
            graph_module, self.target, num_static_inputs=context.num_static_inputs
        )
        refusals = [Refusal(node_name=each.node.name, reason=each.reason) for each in obstacles]
        refusals += [
            Refusal(
                node_name=node.name,
                reason="each microbatch has host memory of its own, and a CUDA graph one address",
            )
            for node in calls
            if actions and is_host_copy(node)
        ]
        if refusals:
            return PassReport(changed=False, refusals=tuple(refusals))
        alone = not COMPUTING_ACTIONS.isdisjoint(actions)
        if alone and num_kernels(calls) < self.min_kernels:
            alone, reason = False, f"fewer than {self.min_kernels} kernels stand together here"
            refusals.append(Refusal(node_name=calls[0].name, reason=reason))
        mark_for_recording(
            graph_module,
            WholeRecording(
                new_recorder=self.new_recorder,
                num_warmup_runs=self.num_warmup_steps,
                max_recordings=self.max_recordings,
                alone=alone,
            ),
        )
        counts = {"actions_recorded": int(alone), "nodes": len(calls)}
        return PassReport(changed=False, counts=counts, refusals=tuple(refusals))

    def _outline(
        self, graph_module: GraphModule, context: PassContext, pieces: Sequence[Sequence[Node]]
    ) -> list[PieceMemory]:
        session = ReplaySession(
            recorder=self.new_recorder(),
            num_warmup_steps=self.num_warmup_steps,
            max_recordings=self.max_recordings,
        )
        placeholders = graph_module.graph.find_nodes(op="placeholder")
        stays = {*placeholders[: context.num_static_inputs]}
        stays.update(graph_module.graph.find_nodes(op="get_attr"))
        outliner = RegionOutliner(graph_module)
        memories = []
        for nodes in pieces:
            outline = outliner.outline(nodes)
            body = outliner.body(outline)
            memory = PieceMemory.of(body, static_inputs=_positions(outline, stays))
            runner = ReplayedPiece(
                with_rooms(body),
                session,
                memory=memory,
                input_names=[node.name for node in outline.inputs],
            )
            outliner.replace(outline, OutlinedRegion(body, runner), stem="cuda_graph")
            stays.update(outline.outputs)
            memories.append(memory)
        outliner.finish()
        return memories


def release_cuda_graphs(graph_module: GraphModule) -> None:
    """Drop all recordings of a graph, if any, before its process groups are destroyed."""
    for node in graph_module.graph.nodes:
        runner = _runner(node)
        if runner is not None:
            runner.session.release()


def _settle_items(graph: Graph) -> bool:
    """Put every item of a tuple right behind the node that makes the tuple; whether any moved.

    A recording leaves tensors, no tuples. A pass that reorders may have set an item apart.
    """
    has_moved = False
    for node in list(graph.find_nodes(op="call_function", target=operator.getitem)):
        source = node.all_input_nodes[0]
        place = source
        while place is not node and _is_item(place.next, source):
            place = place.next
        if place is not node:
            place.append(node)
            has_moved = True
    return has_moved


def _is_item(node: Node, source: Node) -> bool:
    return node.target is operator.getitem and node.args[0] is source


def _bytes_kept(graph_module: GraphModule, memories: Sequence[PieceMemory]) -> dict[str, int]:
    """What recordings keep, beside what a step needs while it runs; see ``piece_memory``."""
    shared = max(memory.shared_bytes for memory in memories)
    return {
        "bytes_between_pieces": bytes_between_pieces(
            graph_module, list(_pieces(graph_module.graph))
        ),
        "bytes_of_copied_inputs": shared + sum(memory.own_bytes for memory in memories),
        "host_bytes": sum(memory.room_bytes for memory in memories),
    }


def _positions(outline: Outline, nodes: set[Node]) -> frozenset[int]:
    return frozenset(position for position, node in enumerate(outline.inputs) if node in nodes)


def _runner(node: Node) -> ReplayedPiece | None:
    region = region_of(node)
    if region is None or not isinstance(region.runner, ReplayedPiece):
        return None
    return region.runner


def _is_piece(node: Node) -> bool:
    return _runner(node) is not None


def _copy_outputs(graph: Graph, context: PassContext) -> int:
    """Let the step return copies of whatever may lie in the memory of a recording."""
    aliases = AliasClasses(graph)
    recorded = {aliases.class_of(node) for node in _pieces(graph)}
    (output,) = graph.find_nodes(op="output")
    copies: dict[Node, Node] = {}
    for result in output.all_input_nodes:
        if result.op == "placeholder" or aliases.class_of(result) not in recorded:
            continue
        with graph.inserting_before(output):
            copy = graph.call_function(torch.ops.aten.clone.default, (result,))
        copy_annotations(result, copy)
        with quiet_fake_execution(context.fake_mode):
            copy.meta["val"] = torch.ops.aten.clone.default(value_of(result))
        copies[result] = copy
    output.args = map_arg(output.args, lambda node: copies.get(node, node))
    return len(copies)


def _pieces(graph: Graph) -> Iterator[Node]:
    return (node for node in graph.nodes if _is_piece(node))


# Cut a graph into pieces that can each be recorded as one CUDA graph.
#
# A piece is a maximal run of nodes, in execution order, without an obstacle in between. Nothing
# is reordered. A collective must be launched and awaited in the same piece, and so must a copy
# to or from host memory: a recording that forks onto another stream has to join it again before
# it ends. Where an obstacle stands between the two, both run on their own, which may cut further
# pieces.
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
