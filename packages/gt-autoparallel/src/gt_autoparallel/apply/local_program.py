"""A plan as one rank runs it: instructions on plain local tensors, forward and backward.

A value lives in a *slot*. Each instruction takes its operands from slots, moves them to the layouts
that its option wants, runs the rank's part of its node and puts the results into slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from gt_autoparallel.apply.execution_order import execution_order
from gt_autoparallel.apply.rank_mesh import RankMesh
from gt_autoparallel.apply.run_redistribution import LocalMove, annotated, local_move
from gt_autoparallel.graph.layouts import replicated
from gt_autoparallel.graph.parameter_chains import gradient_chains, parameter_chains
from gt_autoparallel.graph.placement_graph import (
    ModelInterface,
    NodePhase,
    PlacementGraph,
    PlacementNode,
    Value,
)
from gt_autoparallel.graph.redistribution import redistribution_steps
from gt_autoparallel.plan.placement_plan import PlacementPlan
from gt_autoparallel.rules import LocalCall, local_call
from gt_config.node_keys import (
    FsdpCollectiveAnnotation,
    FsdpCollectiveKind,
    ModuleAnnotation,
    NodeAnnotation,
    PhaseAnnotation,
)

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
                results = taken if self.run is None else self.run(taken, state)
        except Exception as error:
            error.add_note(f"in the placed model's node {self.name}")
            raise
        for slot, result in zip(self.outputs, results, strict=True):
            if slot is not None:
                values[slot] = result
        for slot in self.last_uses:
            del values[slot]


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
            if node.kind in ("output", "gradient"):
                self._results[node.index] = self._new_slot()
        drafts: dict[NodePhase, list[Instruction]] = {"forward": [], "backward": []}
        for index in execution_order(self._graph):
            node = self._graph.nodes[index]
            if node.kind == "buffer":
                drafts["forward"].append(self._buffer_draft(node))
            elif node.kind not in ("parameter", "input", "tangent"):
                drafts[node.phase].append(self._draft(node))
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
            saved=tuple(saved),
            has_experts=bool(self._experts),
        )

    def _draft(self, node: PlacementNode) -> Instruction:
        values = node.operands
        outputs = [self._slots[Value(node.index, i)] for i in range(len(node.outputs))]
        if node.index in self._results:
            outputs = [self._results[node.index]]
        return Instruction(
            name=node.name,
            operands=tuple(self._operand(node, i, value) for i, value in enumerate(values)),
            run=self._run_of(node),
            outputs=tuple(outputs),
            annotations=self._annotations(node),
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
            annotations=self._annotations(node),
        )

    def _new_slot(self) -> int:
        self._num_slots += 1
        return self._num_slots - 1

    def _operand(self, node: PlacementNode, position: int, value: Value) -> LocalOperand:
        steps = self._steps.get((node.index, position), ())
        move = None
        if steps:
            spec = self._graph.spec(value)
            move = local_move(spec, steps, self._mesh, fsdp=self._fsdp(value.node, node.index))
        return LocalOperand(slot=self._slots[value], move=move)

    def _fsdp(self, producer: int, consumer: int) -> FsdpCollectiveAnnotation | None:
        """What a redistribution does for a parameter; the axis is that of each of its steps."""
        kind: FsdpCollectiveKind
        if producer in self._unsharded:
            kind, name = "unshard", self._unsharded[producer]
        elif consumer in self._reduced:
            kind, name = "reduce_grad", self._reduced[consumer]
        else:
            return None
        return FsdpCollectiveAnnotation(
            kind=kind, parameter_names=self._names[name], mesh_axis=self._mesh.shape.names[0]
        )

    def _annotations(self, node: PlacementNode) -> tuple[NodeAnnotation, ...]:
        if node.kind == "experts":
            # Its operators say for themselves where they belong, and gradients inherit from them.
            return ()
        phase = PhaseAnnotation(phase=node.phase)
        return (ModuleAnnotation(fqn=node.module), phase) if node.module else (phase,)

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

    def _names_of_parameters(self) -> dict[str, tuple[str, ...]]:
        nodes = {n.name: str(n.target) for n in self._graph.of_kind("parameter")}
        names: dict[str, list[str]] = {name: [name] for name in nodes.values()}
        for alias, node in self._graph.parameter_aliases.items():
            names[nodes[node]].append(alias)
        return {name: tuple(all_names) for name, all_names in names.items()}


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


def _caller(call: LocalCall, operands: Sequence[Value], device_type: str) -> RunNode:
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

    def run(operands: Sequence[torch.Tensor], state: dict[str, Any]) -> Sequence[Any]:
        filled = list(leaves)
        for at, index in places:
            filled[at] = operands[index]
        call_args, call_kwargs = pytree.tree_unflatten(filled, spec)
        result = call.function(*call_args, **call_kwargs)
        return result if isinstance(result, (tuple, list)) else (result,)

    return run
