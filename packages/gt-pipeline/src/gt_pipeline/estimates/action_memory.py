"""The memory of an action's graph while it runs, and the memory that it leaves, in bytes.

A stage holds values between actions (saved activations, gathered parameters, sums of gradients); an
action adds what it makes, and gives up what it takes for the last time. Both are read off the graph
that runs: ``gt_passes.analysis.liveness`` says what is alive at each node.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Node

from gt_config.node_keys import PipelineAction
from gt_passes.analysis.collectives import is_wait
from gt_passes.analysis.liveness import CUDA_BLOCK_BYTES, estimate_memory
from gt_passes.analysis.outlined_region import only_region, region_inputs, region_of
from gt_passes.analysis.storages import Storages
from gt_pipeline.graph import GraphPipelineStage
from gt_pipeline.graph.action_graph import ActionGraph
from gt_pipeline.graph.gradient_accumulators import owned_results
from gt_pipeline.graph.slots import Slot, SlotKind
from gt_pipeline.runner.stage_protocol import ActivationSignature

_GIVEN_UP: frozenset[SlotKind] = frozenset({"saved", "between", "unsharded_gradient"})
"""Inputs that only the action holds. It frees them after their last use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionMemory:
    """Memory of one action, of one stage or of a pair."""

    extra_bytes: int
    """The most that it holds beyond what is held when it starts: what it has made and still reads
    or returns, less what it has given up by then."""

    launched_bytes: int
    """The same before its first wait, where UNSHARD and REDUCE_GRAD are while other actions run.
    Below 0 if it has given up more than it has made."""

    num_unsized: int
    """Values whose size depends on data and counts as nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Memory of one stage between actions, in bytes of one rank."""

    state_bytes: int
    """Parameters as stored, and buffers."""

    num_parameters: int
    """Numbers in the trained parameters that this rank stores."""

    parameter_bytes: int
    """Trained parameters as stored; an optimizer keeps its state for these."""

    gathered_bytes: int
    """Gathered parameters, from UNSHARD to RESHARD."""

    saved_bytes: int
    """For one microbatch, from its forward until its backward, or dI."""

    between_bytes: int
    """For one microbatch, from its dI until its dW."""

    accumulated_bytes: int
    """Sums of gradients, from the stage's first backward until they are reduced."""

    reduced_bytes: int
    """Reduced gradients, until the optimizer has run."""

    entering_bytes: int
    """Activations from the stage before, of one microbatch."""

    leaving_bytes: int
    """Activations for the stage after, of one microbatch."""

    actions: Mapping[PipelineAction, ActionMemory]

    @classmethod
    def of(
        cls, stage: GraphPipelineStage, *, symbol_sizes: Mapping[str, int] | None = None
    ) -> StageMemory:
        """Read the memory of a stage from its graphs. Tensors may be on meta.

        Args:
            stage: captured.
            symbol_sizes: as for ``estimate_memory``.
        """
        values = {kind: _HeldValues(each, symbol_sizes) for kind, each in stage.actions.items()}
        shared = _shared_slots(stage)
        traced, parameters = stage.capture.traced, local_parameters(stage)
        backward, reduced = stage.actions["FULL_BACKWARD"], stage.actions["REDUCE_GRAD"].inputs
        # What nothing reduces stays as it was accumulated.
        kept = sum(
            _bytes_of(node.meta["val"])
            for slot, node in zip(backward.outputs, backward.result_nodes(), strict=True)
            if slot.kind == "unsharded_gradient" and slot not in reduced
        )
        return cls(
            state_bytes=sum(
                _bytes_of(example)
                for example, slot in zip(traced.example_inputs, stage.capture.inputs, strict=True)
                if slot.kind in ("parameter", "buffer")
            ),
            num_parameters=sum(each.numel() for each in parameters),
            parameter_bytes=sum(map(_bytes_of, parameters)),
            gathered_bytes=values["UNSHARD"].made_bytes("unsharded"),
            saved_bytes=values["FORWARD"].made_bytes("saved"),
            between_bytes=values["BACKWARD_INPUT"].made_bytes("between"),
            accumulated_bytes=values["FULL_BACKWARD"].gradient_bytes("unsharded_gradient"),
            reduced_bytes=values["REDUCE_GRAD"].gradient_bytes("gradient") + kept,
            entering_bytes=sum(map(_activation_bytes, stage.input_signature)),
            leaving_bytes=sum(map(_activation_bytes, stage.output_signature)),
            actions={kind: each.memory(shared) for kind, each in values.items()},
        )


def local_parameters(stage: GraphPipelineStage) -> list[torch.Tensor]:
    """A stage's parameters that are trained, as this rank stores them."""
    return [
        each.to_local() if isinstance(each, DTensor) else each
        for each in stage.parameters().values()
        if each.requires_grad
    ]


def action_memory(
    action: ActionGraph,
    backward_stage: GraphPipelineStage,
    *,
    symbol_sizes: Mapping[str, int] | None = None,
) -> ActionMemory:
    """Estimate the memory of one action, or of a pair that runs as one graph.

    Args:
        action: with fake values in ``node.meta["val"]``.
        backward_stage: the stage whose saved values it frees.
        symbol_sizes: as for ``estimate_memory``.
    """
    return _HeldValues(action, symbol_sizes).memory(_shared_slots(backward_stage))


def _shared_slots(stage: GraphPipelineStage) -> frozenset[Slot]:
    """Values kept for a backward that free nothing when they are given up."""
    forward, backward_input = stage.actions["FORWARD"], stage.actions["BACKWARD_INPUT"]
    return _HeldValues(forward).shared_slots() | _HeldValues(backward_input).shared_slots()


class _HeldValues:
    """The values that an action's graph holds: its inputs by slot, its results, their storages.

    Where the whole action is one compiled region, they are those of the region's body.
    """

    def __init__(self, action: ActionGraph, symbol_sizes: Mapping[str, int] | None = None) -> None:
        self._action = action
        self._symbol_sizes = symbol_sizes
        graph_module = action.graph_module
        inputs = graph_module.graph.find_nodes(op="placeholder")
        self._graph_module: GraphModule = graph_module
        self._slots: dict[Node, Slot] = dict(zip(inputs, action.inputs, strict=True))
        self._results: Sequence[Any] = action.result_nodes()
        region = only_region(graph_module)
        if region is not None:
            self._enter(region.body)
        self._storages = Storages(
            self._graph_module, block_bytes=CUDA_BLOCK_BYTES, symbol_sizes=symbol_sizes
        )
        self._standing = {
            storage
            for node, slot in self._slots.items()
            if _stays(slot)
            for storage in self._storages.of(node)
        }

    def _enter(self, body: GraphModule) -> None:
        (call,) = (node for node in self._graph_module.graph.nodes if region_of(node) is not None)
        inside = dict(
            zip(region_inputs(call), body.graph.find_nodes(op="placeholder"), strict=True)
        )
        made: Any = body.graph.output_node().args[0]

        def in_body(result: Any) -> Any:
            if isinstance(result, Node) and result.target is operator.getitem:
                return made[result.args[1]]
            return inside.get(result)

        self._graph_module = body
        self._slots = {inside[node]: slot for node, slot in self._slots.items() if node in inside}
        self._results = [in_body(result) for result in self._results]

    def shared_slots(self) -> frozenset[Slot]:
        """Results whose memory something else has too, so that freeing them alone frees nothing."""
        holders: dict[int, list[Slot]] = {}
        for slot, result in zip(self._action.outputs, self._results, strict=True):
            for storage in self._storages.of(result) if isinstance(result, Node) else ():
                holders.setdefault(storage, []).append(slot)
        return frozenset(
            slot
            for storage, slots in holders.items()
            if len(slots) > 1 or storage in self._standing
            for slot in slots
        )

    def memory(self, shared: Collection[Slot]) -> ActionMemory:
        """Estimate the memory of the action.

        Args:
            shared: inputs that free nothing when they are given up.
        """
        given_up = [
            node
            for node, slot in self._slots.items()
            if slot.kind in _GIVEN_UP and slot not in shared
        ]
        profile = estimate_memory(
            self._graph_module,
            block_bytes=CUDA_BLOCK_BYTES,
            symbol_sizes=self._symbol_sizes,
            released_inputs=given_up,
        )
        brought = {storage for node in self._slots for storage in self._storages.of(node)}
        held_at_start = sum(self._storages.num_bytes[storage] for storage in brought)
        nodes = list(self._graph_module.graph.nodes)
        first_wait = next((at for at, node in enumerate(nodes) if is_wait(node)), len(nodes) - 1)
        return ActionMemory(
            extra_bytes=max(0, profile.peak_bytes - held_at_start),
            launched_bytes=profile.live_bytes[first_wait] - held_at_start,
            num_unsized=profile.num_unsized,
        )

    def made_bytes(self, kind: SlotKind) -> int:
        """Bytes of the results of a kind that were not there before the action."""
        made = {
            storage
            for slot, result in zip(self._action.outputs, self._results, strict=True)
            if slot.kind == kind and isinstance(result, Node)
            for storage in self._storages.of(result)
        }
        return sum(self._storages.num_bytes[storage] for storage in made - self._standing)

    def gradient_bytes(self, kind: SlotKind) -> int:
        """Bytes of gradients as a stage keeps them: a copy of those whose memory is shared."""
        results = zip(self._action.outputs, self._results, strict=True)
        of_kind = [result for slot, result in results if slot.kind == kind]
        total = 0
        for result, is_own in zip(of_kind, owned_results(self._action, kind), strict=True):
            if isinstance(result, Node) and is_own:
                held = self._storages.of(result)
                total += sum(self._storages.num_bytes[storage] for storage in held)
            elif isinstance(result, Node):
                total += _bytes_of(result.meta["val"])
        return total


def _stays(slot: Slot) -> bool:
    """Return whether a value is held whatever the action does: state, or a part of the batch.

    Activations are arguments too, and come from a neighbour.
    """
    is_batch = slot.kind == "argument" and not slot.name.startswith("activations[")
    return slot.is_static or is_batch


def _activation_bytes(signature: ActivationSignature) -> int:
    return _rounded(torch.Size(signature.shape).numel() * signature.dtype.itemsize)


def _bytes_of(tensor: torch.Tensor) -> int:
    return _rounded(tensor.numel() * tensor.element_size())


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // CUDA_BLOCK_BYTES) * CUDA_BLOCK_BYTES
