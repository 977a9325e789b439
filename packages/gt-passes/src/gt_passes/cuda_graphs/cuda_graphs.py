"""Record the pieces of a graph that can be recorded, and say of every other node why not."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

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
from gt_passes._torch_internals import quiet_fake_execution, value_of
from gt_passes.analysis.aliasing import AliasClasses
from gt_passes.analysis.host_copies import is_host_copy
from gt_passes.analysis.outlined_region import Outline, OutlinedRegion, RegionOutliner, region_of
from gt_passes.contract import ChangeBounds, GraphPass, PassContext, PassReport, Refusal
from gt_passes.cuda_graphs.cuda_graph_partition import num_kernels, partition
from gt_passes.cuda_graphs.cuda_graph_replay import Recorder, ReplayedPiece, ReplaySession
from gt_passes.cuda_graphs.cuda_graph_safety import CaptureTarget, find_obstacles
from gt_passes.cuda_graphs.cuda_recorder import CudaRecorder
from gt_passes.cuda_graphs.piece_memory import PieceMemory, bytes_between_pieces, with_rooms
from gt_passes.cuda_graphs.whole_recording import (
    WholeRecording,
    mark_for_recording,
    whole_recording,
)
from gt_passes.registry import register_pass
from gt_trace.node_metadata import copy_annotations, read_annotation


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
