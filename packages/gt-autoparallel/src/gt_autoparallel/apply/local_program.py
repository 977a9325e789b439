"""A plan as one rank runs it: instructions on plain local tensors, forward and backward.

A value lives in a *slot*. Each instruction takes its operands from slots, moves them to the layouts
that its option wants, runs the rank's part of its node and puts the results into slots. What the
plan recomputes runs in the forward, and once more in the backward, right before the first
instruction that reads it there, into other slots; views of it come along.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from gt_autoparallel._torch_internals import OpOverload
from gt_autoparallel.apply.rank_mesh import RankMesh
from gt_autoparallel.apply.run_redistribution import LocalMove, annotated, local_move
from gt_autoparallel.graph.layouts import replicated
from gt_autoparallel.graph.parameter_chains import (
    gradient_chains,
    is_view_like,
    parameter_chains,
)
from gt_autoparallel.graph.placement_graph import (
    SINKS,
    ModelInterface,
    NodePhase,
    PlacementGraph,
    PlacementNode,
    Use,
    Value,
)
from gt_autoparallel.graph.redistribution import RedistributionStep, redistribution_steps
from gt_autoparallel.plan.placement_plan import PlacementPlan
from gt_autoparallel.rules import LocalCall, local_call
from gt_config.node_keys import (
    FsdpCollectiveAnnotation,
    FsdpCollectiveKind,
    ModuleAnnotation,
    NodeAnnotation,
    PhaseAnnotation,
)
from gt_trace import traced_call

Values = dict[int, torch.Tensor]
"""From slot to this rank's tensor."""


class RunNode(Protocol):
    """This rank's part of a node."""

    def __call__(self, operands: Sequence[torch.Tensor], state: dict[str, Any]) -> Sequence[Any]:
        """Outputs of the node.

        Args:
            operands: local tensors, in the layouts of the node's option.
            state: of one call of the model, kept from forward to backward.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOperand:
    """Where an operand comes from, and how it gets into the wanted layout."""

    slot: int
    move: LocalMove | None
    """None if it is in that layout already."""

    def take(self, values: Values) -> torch.Tensor:
        """The operand as the node wants it."""
        tensor = values[self.slot]
        return tensor if self.move is None else self.move(tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One node, as a rank runs it."""

    name: str
    """Name of the node, for errors."""

    operands: tuple[LocalOperand, ...]
    run: RunNode | None
    """None for nodes that compute nothing: their output is their operand."""

    outputs: tuple[int | None, ...]
    """Slot of each output; None where nobody takes it."""

    annotations: tuple[NodeAnnotation, ...]
    last_uses: tuple[int, ...] = ()
    """Slots that no later instruction of the same phase reads, and that are not kept."""

    def execute(self, values: Values, state: dict[str, Any]) -> None:
        """Run it: take operands from ``values`` and put results there."""
        try:
            with annotated(*self.annotations):
                taken = [operand.take(values) for operand in self.operands]
                results = taken if self.run is None else self._results(self.run, taken, state)
        except Exception as error:
            error.add_note(f"in the placed model's node {self.name}")
            raise
        for slot, result in zip(self.outputs, results, strict=True):
            if slot is not None:
                values[slot] = result
        for slot in self.last_uses:
            del values[slot]

    def _results(
        self, run: RunNode, operands: Sequence[torch.Tensor], state: dict[str, Any]
    ) -> Sequence[Any]:
        key = run.key if isinstance(run, _Call) else None
        return traced_call(key, lambda given: run(given, state), operands)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalProgram:
    """Forward and backward of a placed model on one rank."""

    forward: tuple[Instruction, ...]
    backward: tuple[Instruction, ...]
    parameters: Mapping[str, int]
    """Slot of each parameter that the graph reads, by name."""

    buffers: Mapping[str, int]
    inputs: Mapping[int, int]
    """Slot of each input, by its node."""

    outputs: Mapping[int, int]
    """Slot of each output, by its node."""

    tangents: Mapping[int, int]
    """Slot of each gradient of an output, by its node."""

    tangent_of_output: Mapping[int, int]
    """From an output's node to that of its gradient, where it has one."""

    gradients: Mapping[str, int]
    """Slot of each parameter's gradient, by name."""

    input_gradients: Mapping[int, int]
    """Slot of each input's gradient, by the input's node; of those that have one."""

    saved: tuple[int, ...]
    """Slots that the backward reads and the forward, or its caller, fills."""

    has_experts: bool
    """Whether expert blocks of one model are called."""


def local_program(
    plan: PlacementPlan,
    mesh: RankMesh,
    *,
    interface: ModelInterface,
    experts: Mapping[str, RunNode] | None = None,
) -> LocalProgram:
    """Compile a plan for one rank; ``experts`` says by its name how each experts node runs."""
    tangent_of_output = {
        leaf.node: leaf.tangent
        for leaf in interface.outputs
        if leaf.node is not None and leaf.tangent is not None
    }
    return _Compiler(plan, mesh, experts or {}).compile(tangent_of_output)


class _Compiler:
    def __init__(self, plan: PlacementPlan, mesh: RankMesh, experts: Mapping[str, RunNode]) -> None:
        self._plan = plan
        self._graph: PlacementGraph = plan.graph
        self._mesh = mesh
        self._experts = experts
        self._steps = plan.steps_of_uses()
        self._unsharded = parameter_chains(plan.graph)
        self._reduced = gradient_chains(plan.graph)
        self._before_gathers = self._casts_before_gathers()
        self._behind_reductions = self._nodes_behind_reductions()
        self._repeated = _repeated(plan)
        self._again: dict[Value, int] = {}
        """Slot of each value that was made again so far."""

        self._num_slots = 0
        self._slots: dict[Value, int] = {}
        self._results: dict[int, int] = {}
        """Slot of what sinks (outputs, gradients) take, by node."""

        self._buffers: dict[str, int] = {}
        """Slot of each buffer as the model holds it, whole."""

        self._names = self._names_of_parameters()

    def compile(self, tangent_of_output: Mapping[int, int]) -> LocalProgram:
        for node in self._graph.nodes:
            for position in range(len(node.outputs)):
                self._slots[Value(node.index, position)] = self._new_slot()
            if node.kind in SINKS:
                self._results[node.index] = self._new_slot()
        drafts: dict[NodePhase, list[Instruction]] = {"forward": [], "backward": []}
        for index in execution_order(self._graph):
            node = self._graph.nodes[index]
            if node.kind == "buffer":
                drafts["forward"].append(self._buffer_draft(node))
            elif node.kind not in ("parameter", "input", "tangent"):
                if node.phase == "backward":
                    drafts["backward"] += self._made_again_for(node)
                drafts[node.phase].append(self._draft(node, phase=node.phase))
        read_in_backward = {o.slot for d in drafts["backward"] for o in d.operands}
        made_in_backward = {s for d in drafts["backward"] for s in d.outputs}
        tangents = self._sources("tangent")
        saved = sorted(read_in_backward - made_in_backward - set(tangents.values()))
        kept = {*saved, *self._results.values()}
        return LocalProgram(
            forward=_with_last_uses(drafts["forward"], kept=kept),
            backward=_with_last_uses(drafts["backward"], kept=set(self._results.values())),
            parameters={
                str(self._graph.nodes[node].target): slot
                for node, slot in self._sources("parameter").items()
            },
            buffers=self._buffers,
            inputs=self._sources("input"),
            outputs={n.index: self._results[n.index] for n in self._graph.of_kind("output")},
            tangents=tangents,
            tangent_of_output=tangent_of_output,
            gradients={
                str(n.target): self._results[n.index] for n in self._graph.of_kind("gradient")
            },
            input_gradients=self._input_gradients(),
            saved=tuple(saved),
            has_experts=bool(self._experts),
        )

    def _made_again_for(self, node: PlacementNode) -> list[Instruction]:
        """What must run again before ``node`` can, and has not yet, in order."""
        drafts: list[Instruction] = []
        for value in node.operands:
            maker = self._graph.nodes[value.node]
            if maker.index not in self._repeated or value in self._again:
                continue
            drafts += self._made_again_for(maker)
            for position in range(len(maker.outputs)):
                self._again[Value(maker.index, position)] = self._new_slot()
            drafts.append(self._draft(maker, phase="backward"))
        return drafts

    def _draft(self, node: PlacementNode, *, phase: NodePhase) -> Instruction:
        """The instruction of a node in its own phase, or again in the backward."""
        slots = self._slots if phase == "forward" else ChainMap(self._again, self._slots)
        outputs = [slots[Value(node.index, i)] for i in range(len(node.outputs))]
        if node.index in self._results:
            outputs = [self._results[node.index]]
        return Instruction(
            name=node.name,
            operands=tuple(
                self._operand(node, position, value, slots[value])
                for position, value in enumerate(node.operands)
            ),
            run=self._run_of(node),
            outputs=tuple(outputs),
            annotations=self._annotations(node, phase),
        )

    def _buffer_draft(self, node: PlacementNode) -> Instruction:
        """Every rank holds buffers whole, and takes its shard where it is planned to have one."""
        spec, layout = self._graph.spec(Value(node.index)), self._plan.layout(Value(node.index))
        shape = self._mesh.shape
        steps = redistribution_steps(spec.shape, replicated(shape), layout, shape)
        whole = self._new_slot()
        self._buffers[str(node.target)] = whole
        move = local_move(spec, steps, self._mesh) if steps else None
        return Instruction(
            name=node.name,
            operands=(LocalOperand(slot=whole, move=move),),
            run=None,
            outputs=(self._slots[Value(node.index)],),
            annotations=self._annotations(node, node.phase),
        )

    def _new_slot(self) -> int:
        self._num_slots += 1
        return self._num_slots - 1

    def _operand(self, node: PlacementNode, position: int, value: Value, slot: int) -> LocalOperand:
        steps = self._steps.get((node.index, position), ())
        move = None
        if steps:
            spec = self._graph.spec(value)
            move = local_move(spec, steps, self._mesh, fsdp=self._fsdp(value.node, node.index))
        return LocalOperand(slot=slot, move=move)

    def _fsdp(self, producer: int, consumer: int) -> FsdpCollectiveAnnotation | None:
        """What a redistribution does for a parameter; the axis is that of each of its steps."""
        kind: FsdpCollectiveKind
        if producer in self._unsharded:
            kind, name = "unshard", self._unsharded[producer]
        elif consumer in self._reduced:
            kind, name = "reduce_grad", self._reduced[consumer]
        else:
            return None
        return self._fsdp_annotation(kind, name)

    def _fsdp_annotation(self, kind: FsdpCollectiveKind, name: str) -> FsdpCollectiveAnnotation:
        return FsdpCollectiveAnnotation(
            kind=kind, parameter_names=self._names[name], mesh_axis=self._mesh.shape.names[0]
        )

    def _annotations(self, node: PlacementNode, phase: NodePhase) -> tuple[NodeAnnotation, ...]:
        if node.kind == "experts":
            # Its operators say for themselves where they belong, and gradients inherit from them.
            return ()
        found: list[NodeAnnotation] = [PhaseAnnotation(phase=phase)]
        if node.module:
            found.append(ModuleAnnotation(fqn=node.module))
        if node.index in self._before_gathers:
            # It is part of what gathers the parameter: nobody else reads it.
            found.append(self._fsdp_annotation("unshard", self._unsharded[node.index]))
        if node.index in self._behind_reductions:
            # Passes that wait for a reduction later take along what is done with its result.
            found.append(self._fsdp_annotation("reduce_grad", self._reduced[node.index]))
        return tuple(found)

    def _casts_before_gathers(self) -> frozenset[int]:
        """Casts of parameters whose results are gathered."""
        gathered = {
            use.value.node
            for use in self._graph.uses
            if use.value.node in self._unsharded
            and any(step.kind != "slice" for step in self._steps_of(use))
        }
        return frozenset(i for i in gathered if self._graph.nodes[i].kind == "operator")

    def _steps_of(self, use: Use) -> Sequence[RedistributionStep]:
        return self._steps.get((use.consumer, use.position), ())

    def _nodes_behind_reductions(self) -> frozenset[int]:
        """Casts and views of gradients that are reduced already."""
        found: set[int] = set()
        for node in self._graph.nodes:
            if node.index in self._reduced and node.kind == "operator":
                is_reduced = (node.index, 0) in self._steps or node.operands[0].node in found
                found |= {node.index} if is_reduced else set()
        return frozenset(found)

    def _run_of(self, node: PlacementNode) -> RunNode | None:
        if node.kind == "experts":
            return self._experts[node.name]
        if node.kind != "operator":
            return None
        call = local_call(
            node,
            self._plan.options[node.index],
            self._graph.operand_specs(node),
            self._mesh.shape,
            coordinate=self._mesh.coordinate,
        )
        return _caller(call, node.operands, self._mesh.device_type)

    def _sources(self, kind: Any) -> dict[int, int]:
        return {n.index: self._slots[Value(n.index)] for n in self._graph.of_kind(kind)}

    def _input_gradients(self) -> dict[int, int]:
        nodes = {str(node.target): node.index for node in self._graph.of_kind("input")}
        gradients = self._graph.of_kind("input_gradient")
        return {nodes[str(node.target)]: self._results[node.index] for node in gradients}

    def _names_of_parameters(self) -> dict[str, tuple[str, ...]]:
        nodes = {n.name: str(n.target) for n in self._graph.of_kind("parameter")}
        names: dict[str, list[str]] = {name: [name] for name in nodes.values()}
        for alias, node in self._graph.parameter_aliases.items():
            names[nodes[node]].append(alias)
        return {name: tuple(all_names) for name, all_names in names.items()}


def _repeated(plan: PlacementPlan) -> frozenset[int]:
    """What runs again, and the views of it that stay where they are.

    Not routed experts, which run again inside of their backward.
    """
    found = {i for i in plan.recomputed if plan.graph.nodes[i].kind != "experts"}
    for node in plan.graph.nodes:
        if node.phase == "backward" or not is_view_like(node):
            continue
        source = node.operands[0]
        stays = plan.layout(source) == plan.options[node.index].operands[0]
        if stays and source.node in found:
            found.add(node.index)
    return frozenset(found)


def _with_last_uses(drafts: Sequence[Instruction], *, kept: set[int]) -> tuple[Instruction, ...]:
    made = {slot for draft in drafts for slot in draft.outputs}
    read_later: set[int] = set()
    instructions: list[Instruction] = []
    for draft in reversed(drafts):
        reads = {operand.slot for operand in draft.operands}
        # What comes from outside stays: the caller holds it anyway.
        last = sorted((reads & made) - read_later - kept)
        outputs = tuple(
            slot if slot in read_later or slot in kept else None for slot in draft.outputs
        )
        instructions.append(replace(draft, outputs=outputs, last_uses=tuple(last)))
        read_later |= reads
    return tuple(reversed(instructions))


def _caller(call: LocalCall, operands: Sequence[Value], device_type: str) -> _Call:
    """A call whose arguments hold ``Value``s where this rank's tensors go."""
    leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
    # A device as the plan names it, for all ranks, becomes this rank's current one.
    leaves = [
        torch.device(device_type)
        if isinstance(leaf, torch.device) and leaf.type == device_type
        else leaf
        for leaf in leaves
    ]
    # A value that is given twice is two operands, each in a layout of its own.
    positions: dict[Value, list[int]] = {}
    for position, value in enumerate(operands):
        positions.setdefault(value, []).append(position)
    places: list[tuple[int, int]] = []
    for at, leaf in enumerate(leaves):
        if isinstance(leaf, Value):
            left = positions[leaf]
            places.append((at, left.pop(0) if len(left) > 1 else left[0]))

    taken = dict(places)
    constants = tuple(
        taken[at] if at in taken else (type(leaf), repr(leaf)) for at, leaf in enumerate(leaves)
    )
    return _Call(
        function=call.function,
        leaves=tuple(leaves),
        structure=spec,
        places=tuple(places),
        # Another function is one that a rule made for this node.
        key=(call.function, constants, repr(spec))
        if isinstance(call.function, OpOverload)
        else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """A function of a rank's tensors and constants; see ``RunNode``."""

    function: Callable[..., Any]
    leaves: tuple[Any, ...]
    """Of its arguments."""

    structure: pytree.TreeSpec
    places: tuple[tuple[int, int], ...]
    """Leaves that stand for operands, and for which."""

    key: Hashable | None
    """Equal for calls that compute the same; None if nobody can tell."""

    def __call__(self, operands: Sequence[torch.Tensor], state: dict[str, Any]) -> Sequence[Any]:
        filled = list(self.leaves)
        for at, index in self.places:
            filled[at] = operands[index]
        call_args, call_kwargs = pytree.tree_unflatten(filled, self.structure)
        result = self.function(*call_args, **call_kwargs)
        return result if isinstance(result, (tuple, list)) else (result,)


# In which order a placed model runs its nodes: parameters late, gradients at once.
#
# The planned graph has sources first and sinks last. Run so, every parameter would be gathered
# before the first layer, and every gradient would wait, whole, for the last. Here a parameter is
# cast and shared (hence gathered) right before the first node that computes with it, and a
# gradient is reduced right after it is there, as in a hand-placed model; passes then prefetch
# and bucket within bounds.
def execution_order(graph: PlacementGraph) -> tuple[int, ...]:
    """Indices of all nodes: forward, then backward; operands come before those that take them."""
    return _Order(graph).run()


class _Order:
    def __init__(self, graph: PlacementGraph) -> None:
        self._graph = graph
        self._chains = parameter_chains(graph)
        self._reductions = gradient_chains(graph)
        self._order: list[int] = []
        self._done: set[int] = set()
        self._consumers: dict[int, list[PlacementNode]] = {}
        for use in graph.uses:
            consumer = graph.nodes[use.consumer]
            self._consumers.setdefault(use.value.node, []).append(consumer)

    def run(self) -> tuple[int, ...]:
        phases: tuple[NodePhase, ...] = ("forward", "backward")
        for phase in phases:
            nodes = [node for node in self._graph.nodes if node.phase == phase]
            for node in nodes:
                if not self._is_late(node):
                    self._run(node)
            for node in nodes:  # of the forward, what only the backward reads
                self._run(node)
        return tuple(self._order)

    def _is_late(self, node: PlacementNode) -> bool:
        """Whether a node passes on a parameter, and so waits for whoever computes with it."""
        if node.kind == "parameter" or not node.operands:
            return False
        if node.index in self._chains:
            return True
        return node.kind == "share" and node.operands[0].node in self._chains

    def _run(self, node: PlacementNode) -> None:
        if node.index in self._done:
            return
        for value in node.operands:
            producer = self._graph.nodes[value.node]
            if self._is_late(producer):
                self._run(producer)
        self._done.add(node.index)
        self._order.append(node.index)
        for consumer in self._consumers.get(node.index, ()):
            if consumer.index in self._reductions:
                self._run(consumer)
