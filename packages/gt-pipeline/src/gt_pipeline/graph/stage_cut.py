"""A stage's joint graph cut into one graph for each kind of action.

::

    UNSHARD          parameters                              -> unsharded
    FORWARD          unsharded, arguments                    -> outputs, saved
    FULL_BACKWARD    unsharded, output gradients, saved      -> input gradients, unsharded gradients
    BACKWARD_INPUT   unsharded, output gradients, saved      -> input gradients, between
    BACKWARD_WEIGHT  unsharded, between                      -> unsharded gradients
    REDUCE_GRAD      accumulated unsharded gradients         -> gradients

Saved values hold no parameter: views of parameters are made again where they are needed, so that
RESHARD frees the gathered ones. What a microbatch saves of a buffer that its forward updates is a
copy, since the next microbatch's forward runs before this one's backward. So is what leaves the
stage and is memory of its state: whoever gets it may keep it for longer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from gt_config.node_keys import FsdpCollectiveAnnotation, PipelineAction, PipelineAnnotation
from gt_passes import Verifier
from gt_passes.analysis.aliasing import AliasClasses
from gt_passes.analysis.collectives import is_wait
from gt_passes.analysis.graph_scan import GraphScanner
from gt_passes.analysis.operator_effects import is_only_a_view
from gt_passes.analysis.written_memory import Memory, memories_written
from gt_passes.graph_problem import GraphProblem
from gt_passes.verifier.dataflow.check_dataflow import Dataflow
from gt_pipeline.errors import StageCutError, StageGraphError
from gt_pipeline.graph.action_graph import ActionGraph, append_graph, extract
from gt_pipeline.graph.action_parts import PARTS, assign_parts
from gt_pipeline.graph.slots import STATIC_KINDS, Slot, SlotKind
from gt_pipeline.graph.stage_capture import StageCapture
from gt_pipeline.graph.stage_graphs import StageGraphs
from gt_trace import read_annotation, write_annotation


def cut_stage(capture: StageCapture, *, verify: bool = True) -> StageGraphs:
    """Cut a stage's joint graph; the joint graph itself stays as it is.

    Args:
        capture: what ``capture_stage`` returned, after passes on its graph if there are any.
        verify: whether to verify each graph.

    Raises:
        StageCutError: an action would need what only a later one makes, or the state that actions
            of several microbatches share is written to in a way that their order would change.
        StageGraphError: a graph is broken.
    """
    graphs = _Cut(capture).graphs()
    if verify:
        problems = [
            f"{graph.kind}: {problem}"
            for graph in graphs
            if not graph.is_empty
            for problem in Verifier().verify(graph.graph_module).problems
        ]
        if not problems:
            problems = list(map(str, find_recomposition_problems(graphs)))
        if problems:
            raise StageGraphError(what=f"{_subject(capture)} was cut wrongly", problems=problems)
    return graphs


class _Cut:
    def __init__(self, capture: StageCapture) -> None:
        self._capture = capture
        self._joint: GraphModule = capture.traced.graph_module
        graph = self._joint.graph
        placeholders = graph.find_nodes(op="placeholder")
        self._slot_of_input: dict[Node, Slot] = dict(zip(placeholders, capture.inputs, strict=True))
        results = list(graph.output_node().args[0])  # type: ignore[arg-type]  # a tuple or list
        self._results: list[tuple[Slot, Node]] = [
            (slot, node)
            for slot, node in zip(capture.results, results, strict=True)
            if slot is not None
        ]
        self._parts = assign_parts(
            self._joint,
            output_gradients=[
                node for node, slot in self._slot_of_input.items() if slot.kind == "output_gradient"
            ],
            input_gradients=[node for _, node in self._results_of("input_gradient")],
            what=_cannot_be_cut(capture),
        )
        problems = [
            *find_state_problems(
                self._joint,
                slots=self._slot_of_input,
                parts=self._parts,
                outputs=[node for _, node in self._results_of("output")],
            ),
            *(
                f"{slot} depends on gradients of parameters after their reduction"
                for slot, node in self._results_of("input_gradient")
                if self._is_reduction(node)
            ),
        ]
        if problems:
            raise StageCutError(what=_cannot_be_cut(capture), problems=problems)
        self._aliases = AliasClasses(graph)
        self._unsharded = dict(self._name_unsharded())
        self._gradients = self._gradient_boundary()

    def graphs(self) -> StageGraphs:
        arriving = {n: s for n, s in self._slot_of_input.items() if s.kind == "output_gradient"}
        saved = {
            node: Slot(kind="saved", name=node.name)
            for node in self._kept_for("BACKWARD_INPUT", "BACKWARD_WEIGHT")
            if node not in arriving
        }
        unshard = self._graph("UNSHARD", {}, [(s, n) for n, s in self._unsharded.items()])
        forward_outputs = [*self._results_of("output"), *((s, n) for n, s in saved.items())]
        forward = self._graph("FORWARD", {}, forward_outputs)
        self._copy_state(forward, [node for _, node in self._results_of("output")])
        if not self._capture.differentiates:
            return StageGraphs(capture=self._capture, unshard=unshard, forward=forward)
        between = {
            node: Slot(kind="between", name=node.name) for node in self._kept_for("BACKWARD_WEIGHT")
        }
        leaving = self._results_of("input_gradient")
        entering = {**arriving, **saved}
        return StageGraphs(
            capture=self._capture,
            unshard=unshard,
            forward=forward,
            full_backward=self._graph("FULL_BACKWARD", entering, [*leaving, *self._gradients]),
            backward_input=self._graph(
                "BACKWARD_INPUT", entering, [*leaving, *((s, n) for n, s in between.items())]
            ),
            backward_weight=self._graph("BACKWARD_WEIGHT", between, self._gradients),
            reduce_grad=self._graph(
                "REDUCE_GRAD",
                {node: slot for slot, node in self._gradients if self._is_reduced(node)},
                [r for r in self._results_of("gradient") if self._is_reduction(r[1])],
            ),
        )

    # ---- values at the borders ------------------------------------------------------------------

    def _results_of(self, kind: SlotKind) -> list[tuple[Slot, Node]]:
        return [(slot, node) for slot, node in self._results if slot.kind == kind]

    def _is_reduction(self, node: Node) -> bool:
        return self._parts.get(node) == "REDUCE_GRAD"

    def _is_reduced(self, node: Node) -> bool:
        return any(self._is_reduction(user) for user in node.users)

    def _name_unsharded(self) -> Iterator[tuple[Node, Slot]]:
        """What parts behind UNSHARD read of it, named by parameter."""
        num_of: dict[str, int] = {}
        results = {node for _, node in self._results}
        for node, part in self._parts.items():
            if part != "UNSHARD":
                continue
            users = [self._parts.get(user) for user in node.users]
            if not any(user not in (None, "UNSHARD") for user in users) and node not in results:
                continue
            collective = read_annotation(node, FsdpCollectiveAnnotation)
            name = node.name if collective is None else collective.parameter_names[0]
            leaf = num_of[name] = num_of.get(name, -1) + 1
            yield node, Slot(kind="unsharded", name=name, leaf=leaf)

    def _gradient_boundary(self) -> list[tuple[Slot, Node]]:
        """What is accumulated: gradients that nothing reduces, and what REDUCE_GRAD reads."""
        boundary: list[tuple[Slot, Node]] = []
        names: set[Slot] = set()

        def add(name: str, node: Node) -> None:
            leaf = 0
            while (slot := Slot(kind="unsharded_gradient", name=name, leaf=leaf)) in names:
                leaf += 1
            names.add(slot)
            boundary.append((slot, node))

        known: set[Node] = set()
        for node, part in self._parts.items():
            if part != "REDUCE_GRAD":
                continue
            collective = read_annotation(node, FsdpCollectiveAnnotation)
            for source in node.all_input_nodes:
                if self._is_reduction(source) or source in known or self._static_slot(source):
                    continue
                known.add(source)
                add(source.name if collective is None else collective.parameter_names[0], source)
        for slot, node in self._results_of("gradient"):
            if not self._is_reduction(node):
                add(slot.name, node)
        return boundary

    def _static_slot(self, node: Node) -> Slot | None:
        """The slot of a value that stays the same from microbatch to microbatch."""
        slot = self._unsharded.get(node) or self._slot_of_input.get(node)
        if slot is None or slot.kind not in STATIC_KINDS or self._aliases.is_written(node):
            return None
        return slot

    def _is_static_view(self, node: Node) -> bool:
        """Whether a node only shows a static value differently, so that it is made again."""
        if not is_only_a_view(node) or len(node.all_input_nodes) != 1:
            return False
        (source,) = node.all_input_nodes
        return self._static_slot(source) is not None or self._is_static_view(source)

    def _kept_for(self, *parts: PipelineAction) -> list[Node]:
        """What these parts read of earlier ones and of a microbatch's inputs, in order."""
        read: set[Node] = {
            source
            for node, part in self._parts.items()
            if part in parts
            for source in node.all_input_nodes
        }
        if "BACKWARD_WEIGHT" in parts:
            read.update(node for _, node in self._gradients)
            read.update(node for _, node in self._results_of("input_gradient") if len(parts) > 1)
        return [
            node
            for node in self._joint.graph.nodes
            if node in read
            and node.op != "get_attr"
            and self._parts.get(node) not in parts
            and self._static_slot(node) is None
            and not self._is_static_view(node)
        ]

    # ---- graphs ---------------------------------------------------------------------------------

    def _graph(
        self,
        kind: PipelineAction,
        entering: Mapping[Node, Slot],
        outputs: Iterable[tuple[Slot, Node]],
    ) -> ActionGraph:
        """One action's graph; ``entering`` it are a microbatch's values, besides arguments."""
        parts = ("BACKWARD_INPUT", "BACKWARD_WEIGHT") if kind == "FULL_BACKWARD" else (kind,)
        slots_and_nodes = list(outputs)
        results = [node for _, node in slots_and_nodes]
        own = [n for n in self._joint.graph.nodes if self._parts.get(n) in parts]
        needed = self._with_static_views(own, results, entering)
        inside = set(needed)
        read = dict.fromkeys(
            source
            for sources in (*(node.all_input_nodes for node in needed), results)
            for source in sources
            if source not in inside and source not in entering and source.op != "get_attr"
        )
        static: dict[Slot, Node] = {}
        arguments: dict[Slot, Node] = {}
        for source in read:
            slot = self._unsharded.get(source) or self._slot_of_input.get(source)
            if slot is None:
                raise StageCutError(
                    what=_cannot_be_cut(self._capture),
                    problems=[f"{kind} needs {source.name} ({source.target}), of another part"],
                )
            (static if slot.is_static else arguments)[slot] = source
        if kind == "FORWARD":
            arguments = {s: n for n, s in self._slot_of_input.items() if s.kind == "argument"}
        graph_module = extract(
            self._joint,
            needed,
            inputs={**static, **arguments, **{slot: node for node, slot in entering.items()}},
            outputs=results,
        )
        annotation = PipelineAnnotation(stage_index=self._capture.stage_index, action=kind, slot=0)
        for node in graph_module.graph.nodes:
            if node.op not in ("placeholder", "output"):
                write_annotation(node, annotation)
        return ActionGraph(
            kind=kind,
            stage_index=self._capture.stage_index,
            graph_module=graph_module,
            inputs=(*static, *arguments, *entering.values()),
            outputs=tuple(slot for slot, _ in slots_and_nodes),
        )

    def _with_static_views(
        self, own: Sequence[Node], results: Sequence[Node], entering: Mapping[Node, Slot]
    ) -> list[Node]:
        """The nodes of a part, and the views of static values that it makes again, in order."""
        found = dict.fromkeys(own)
        pending = [*(source for node in own for source in node.all_input_nodes), *results]
        while pending:
            node = pending.pop()
            if node in found or node in entering or not self._is_static_view(node):
                continue
            found[node] = None
            pending.extend(node.all_input_nodes)
        return [node for node in self._joint.graph.nodes if node in found]

    def _copy_state(self, forward: ActionGraph, leaving: Sequence[Node]) -> None:
        """Copies of what would show later microbatches, or a later step, where it is kept.

        That is what is saved from memory that a forward writes to, and what leaves the stage from
        memory of its parameters and buffers.
        """
        joint_of = {node.name: node for node in self._joint.graph.nodes}
        state = {
            self._aliases.class_of(node)
            for node in (*self._slot_of_input, *self._unsharded)
            if node in self._unsharded or self._slot_of_input[node].is_static
        }
        graph = forward.graph_module.graph
        output = graph.output_node()
        results = list(forward.result_nodes())
        left = iter(leaving)
        for index, (slot, result) in enumerate(zip(forward.outputs, results, strict=True)):
            if slot.kind == "output":
                is_kept_state = self._aliases.class_of(next(left)) in state
            else:
                source = joint_of[slot.name]
                is_kept_state = self._aliases.is_written(source) and self._aliases.holds_input(
                    source
                )
            if not is_kept_state:
                continue
            with graph.inserting_before(output):
                copied = graph.call_function(torch.ops.aten.clone.default, (result,))
            copied.meta = {**result.meta, "val": torch.ops.aten.clone.default(result.meta["val"])}
            results[index] = copied
        output.args = (tuple(results),)
        forward.graph_module.recompile()


def _cannot_be_cut(capture: StageCapture) -> str:
    return f"the graph of {_subject(capture)} cannot be cut into actions"


def _subject(capture: StageCapture) -> str:
    return f"stage {capture.stage_index} of {capture.num_stages}"


# A stage's actions put together again: the proof that a cut lost nothing.
#
# The graphs of UNSHARD, FORWARD, the backward (whole, or dI and dW) and REDUCE_GRAD, one after
# the other, must compute what the joint graph computes. That is proven from their dataflow,
# without running them; tests run them too, and compare bits.
def recompose(graphs: StageGraphs, *, split_backward: bool = False) -> GraphModule:
    """The graphs of a stage put together again: a graph that takes and gives what the joint does.

    With ``split_backward``, dI and dW stand for the backward, instead of the whole one.
    """
    backward = (
        (graphs.backward_input, graphs.backward_weight)
        if split_backward
        else (graphs.full_backward,)
    )
    graph = Graph()
    made: dict[Slot, Node] = {}
    joint = graphs.capture.traced.graph_module.graph.find_nodes(op="placeholder")
    for slot, node in zip(graphs.capture.inputs, joint, strict=True):
        made[slot] = graph.placeholder(node.name)
        made[slot].meta = dict(node.meta)
    attributes = nn.Module()
    for action in (graphs.unshard, graphs.forward, *backward, graphs.reduce_grad):
        if action is not None:
            append_graph(graph, attributes, action, made)
    results = [
        None if slot is None else made[slot if slot in made else _unreduced(slot)]
        for slot in graphs.capture.results
    ]
    graph.output(tuple(results))
    return GraphModule(attributes, graph)


def find_recomposition_problems(graphs: StageGraphs) -> Iterator[GraphProblem]:
    """Yield a problem for each result of the joint graph that the actions compute differently.

    Proven by the dataflow of both, without running them.
    """
    joint = Dataflow.of(graphs.capture.traced.graph_module)
    for split_backward in (False, True) if graphs.full_backward is not None else (False,):
        together = recompose(graphs, split_backward=split_backward)
        yield from joint.find_differences(Dataflow.of(together, table=joint.table))


def _unreduced(slot: Slot) -> Slot:
    """The slot of a gradient that nothing reduces: the accumulated one is the gradient."""
    return Slot(kind="unsharded_gradient", name=slot.name, leaf=slot.leaf)


# Writes to memory that several actions or microbatches share, and which of them order would
# break.
#
# Eager training runs the forward and backward of one microbatch before the next; a pipeline does
# not. A forward that updates a buffer is fine, since forwards keep their order. What else is
# written and shared is refused.
def find_state_problems(
    graph_module: GraphModule,
    *,
    slots: Mapping[Node, Slot],
    parts: Mapping[Node, PipelineAction],
    outputs: Collection[Node],
) -> Iterator[str]:
    """Yield a sentence for each write of a joint graph that a pipeline cannot keep in order.

    ``slots`` are of its placeholders, ``parts`` of all other nodes; ``outputs`` leave the stage in
    its forward.
    """
    for memory in memories_written(GraphScanner().scan(graph_module)):
        yield from _problems(memory, slots, parts, outputs)


def _problems(
    memory: Memory,
    slots: Mapping[Node, Slot],
    parts: Mapping[Node, PipelineAction],
    outputs: Collection[Node],
) -> Iterator[str]:
    writers = [writer for writer in memory.writers if not is_wait(writer)]
    if not writers:
        return
    where = f"{writers[0].name} ({writers[0].target})"
    given = [slots[member] for member in memory.members if member in slots]
    for slot in given:
        if slot.kind in ("argument", "output_gradient"):
            yield f"{where} writes to {slot}, which belongs to another stage: write to a copy"
        elif slot.kind == "parameter":
            yield f"{where} writes to {slot}, which all microbatches read: write to a copy"
    unsharded = any(parts.get(member) == "UNSHARD" for member in memory.members)
    if unsharded and any(parts[writer] != "UNSHARD" for writer in writers):
        yield f"{where} writes to a gathered parameter, which all microbatches read"
    backward = [writer for writer in writers if parts[writer] not in ("UNSHARD", "FORWARD")]
    if not backward:
        return
    where = f"{backward[0].name} ({backward[0].target})"
    if any(member in outputs for member in memory.members):
        yield f"{where} writes in the backward to what the forward gave to the stage after"
    touching = {
        parts[node]
        for member in memory.members
        for node in (member, *member.users)
        if node in parts and not is_only_a_view(node)
    }
    if len(touching) > 1:
        yield from (
            f"{where} writes to {slot} in the backward, and {_named(touching)} touch it too: the "
            "order of microbatches would decide what they find"
            for slot in given
            if slot.kind == "buffer"
        )


def _named(parts: Collection[PipelineAction]) -> str:
    return ", ".join(sorted(parts, key=PARTS.index))
