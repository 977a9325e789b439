"""What an action's graph holds while it runs, and what it leaves behind, in bytes.

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

from gt_config.node_keys import OverlappedBackward, PipelineAction
from gt_passes.analysis.collectives import is_wait
from gt_passes.analysis.liveness import estimate_memory
from gt_passes.analysis.outlined_region import region_inputs, region_of
from gt_passes.analysis.storages import Storages
from gt_pipeline.graph import GraphPipelineStage
from gt_pipeline.graph.action_graph import ActionGraph
from gt_pipeline.graph.gradient_accumulators import owned_results
from gt_pipeline.graph.slots import Slot, SlotKind
from gt_pipeline.runner.stage_protocol import ActivationSignature

_BLOCK_BYTES = 512
"""PyTorch's CUDA allocator rounds every block up to a multiple of this."""

_GIVEN_UP: frozenset[SlotKind] = frozenset({"saved", "between", "unsharded_gradient"})
"""Inputs that nobody holds but the action that takes them; it frees them after their last use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionMemory:
    """Memory of one action, of one stage or of a pair."""

    extra_bytes: int
    """The most that it holds beyond what is held when it starts: what it has made and still reads
    or returns, less what it has given up by then."""

    launched_bytes: int
    """The same when it stands before its first wait, as UNSHARD and REDUCE_GRAD do while other
    actions run. Below 0 if it has given up more than it has made."""

    made_bytes: Mapping[SlotKind, int]
    """What its results of each kind hold that was not there before, when it has run."""

    num_unsized: int
    """Values whose size depends on data and counts as nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """What one stage holds between actions, each in bytes of one rank."""

    state_bytes: int
    """Parameters as stored, and buffers."""

    num_parameters: int
    """Numbers in the trained parameters that this rank stores."""

    parameter_bytes: int
    """Trained parameters as stored; an optimizer keeps its state for these."""

    gathered_bytes: int
    """From UNSHARD to RESHARD."""

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
        """Read it off a stage's graphs. Tensors may be on meta.

        Args:
            stage: captured.
            symbol_sizes: as for ``estimate_memory``.
        """
        shared = shared_slots(stage)
        actions = {
            kind: action_memory(action, symbol_sizes=symbol_sizes, shared=shared)
            for kind, action in stage.actions.items()
        }
        parameters = local_parameters(stage)
        state = [
            _rounded(example.numel() * example.element_size())
            for example, slot in zip(
                stage.capture.traced.example_inputs, stage.capture.inputs, strict=True
            )
            if slot.kind in ("parameter", "buffer")
        ]

        def made(kind: PipelineAction, *of: SlotKind) -> int:
            return sum(actions[kind].made_bytes.get(each, 0) for each in of)

        accumulated = made("FULL_BACKWARD", "unsharded_gradient")
        reduce_grad = stage.actions["REDUCE_GRAD"]
        reduced_slots = set(reduce_grad.inputs)
        # What nothing reduces stays as it was accumulated.
        kept = sum(
            _rounded(num_bytes)
            for slot, num_bytes in _gradient_bytes(stage.actions["FULL_BACKWARD"])
            if slot not in reduced_slots
        )
        return cls(
            state_bytes=sum(state),
            num_parameters=sum(each.numel() for each in parameters),
            parameter_bytes=sum(
                _rounded(each.numel() * each.element_size()) for each in parameters
            ),
            gathered_bytes=made("UNSHARD", "unsharded"),
            saved_bytes=made("FORWARD", "saved"),
            between_bytes=made("BACKWARD_INPUT", "between"),
            accumulated_bytes=accumulated,
            reduced_bytes=made("REDUCE_GRAD", "gradient") + kept,
            entering_bytes=_bytes_of(stage.input_signature),
            leaving_bytes=_bytes_of(stage.output_signature),
            actions=actions,
        )


def local_parameters(stage: GraphPipelineStage) -> list[torch.Tensor]:
    """A stage's parameters that are trained, as this rank stores them."""
    return [
        each.to_local() if isinstance(each, DTensor) else each
        for each in stage.parameters().values()
        if each.requires_grad
    ]


def pair_memory(
    forward_stage: GraphPipelineStage,
    backward_stage: GraphPipelineStage,
    kind: OverlappedBackward,
    *,
    symbol_sizes: Mapping[str, int] | None = None,
) -> ActionMemory:
    """The memory of a forward and a backward that run as one graph."""
    action = forward_stage.overlapped_action(backward_stage, kind)
    shared = shared_slots(backward_stage)
    return action_memory(action, symbol_sizes=symbol_sizes, shared=shared)


def shared_slots(stage: GraphPipelineStage) -> frozenset[Slot]:
    """What a backward takes whose memory something else has too, so that it frees nothing alone."""
    found: set[Slot] = set()
    for kind in ("FORWARD", "BACKWARD_INPUT"):
        graph_module, slots, results = _with_memory(stage.actions[kind])
        storages = Storages(graph_module)
        held = {s for node, slot in slots.items() if _stays(slot) for s in storages.of(node)}
        holders: dict[int, list[Slot]] = {}
        for slot, result in zip(stage.actions[kind].outputs, results, strict=True):
            for storage in storages.of(result) if isinstance(result, Node) else ():
                holders.setdefault(storage, []).append(slot)
        for storage, of_storage in holders.items():
            if len(of_storage) > 1 or storage in held:
                found.update(of_storage)
    return frozenset(found)


def action_memory(
    action: ActionGraph,
    *,
    symbol_sizes: Mapping[str, int] | None = None,
    shared: Collection[Slot] = (),
) -> ActionMemory:
    """Estimate what one action's graph holds. Linear in the graph.

    Args:
        action: with fake values in ``node.meta["val"]``.
        symbol_sizes: as for ``estimate_memory``.
        shared: inputs that it frees nothing by giving them up; see ``shared_slots``.
    """
    graph_module, slots, results = _with_memory(action)
    storages = Storages(graph_module, block_bytes=_BLOCK_BYTES, symbol_sizes=symbol_sizes)
    given_up = [
        node for node, slot in slots.items() if slot.kind in _GIVEN_UP and slot not in shared
    ]
    profile = estimate_memory(
        graph_module,
        block_bytes=_BLOCK_BYTES,
        symbol_sizes=symbol_sizes,
        released_inputs=given_up,
    )
    brought = {storage for node in slots for storage in storages.of(node)}
    held_at_start = sum(storages.num_bytes[storage] for storage in brought)
    nodes = list(graph_module.graph.nodes)
    first_wait = next((at for at, node in enumerate(nodes) if is_wait(node)), len(nodes) - 1)
    return ActionMemory(
        extra_bytes=max(0, profile.peak_bytes - held_at_start),
        launched_bytes=profile.live_bytes[first_wait] - held_at_start,
        made_bytes=_made_bytes(action, slots, results, storages),
        num_unsized=profile.num_unsized,
    )


def _made_bytes(
    action: ActionGraph,
    slots: Mapping[Node, Slot],
    results: Sequence[Any],
    storages: Storages,
) -> dict[SlotKind, int]:
    """Bytes by kind of result; memory of two kinds counts for the one that lives longer."""
    held_already = {
        storage for node, slot in slots.items() if _stays(slot) for storage in storages.of(node)
    }
    found: dict[SlotKind, int] = {}
    # What is kept comes before what leaves, which is dropped earlier.
    kinds = sorted({slot.kind for slot in action.outputs}, key=_LIFETIME.index)
    for kind in kinds:
        if kind in ("unsharded_gradient", "gradient"):
            found[kind] = _copied_or_owned(action, kind, results, storages)
            continue
        made = 0
        for slot, result in zip(action.outputs, results, strict=True):
            if slot.kind != kind or not isinstance(result, Node):
                continue
            for storage in storages.of(result):
                if storage not in held_already:
                    held_already.add(storage)
                    made += storages.num_bytes[storage]
        found[kind] = made
    return found


_LIFETIME: tuple[SlotKind, ...] = (
    "unsharded",
    "saved",
    "between",
    "unsharded_gradient",
    "gradient",
    "output",
    "input_gradient",
    "parameter",
    "buffer",
    "argument",
    "output_gradient",
)


def _copied_or_owned(
    action: ActionGraph, kind: SlotKind, results: Sequence[Any], storages: Storages
) -> int:
    """Gradients as a stage keeps them: in their own memory, or copied where that is shared."""
    total = 0
    owned = iter(owned_results(action, kind))
    for slot, result in zip(action.outputs, results, strict=True):
        if slot.kind != kind:
            continue
        is_own = next(owned)
        if not isinstance(result, Node):
            continue
        if is_own:
            total += sum(storages.num_bytes[storage] for storage in storages.of(result))
        else:
            total += _rounded(_tensor_bytes(result))
    return total


def _gradient_bytes(action: ActionGraph) -> list[tuple[Slot, int]]:
    return [
        (slot, _tensor_bytes(node))
        for slot, node in zip(action.outputs, action.result_nodes(), strict=True)
        if slot.kind == "unsharded_gradient"
    ]


def _with_memory(action: ActionGraph) -> tuple[GraphModule, dict[Node, Slot], Sequence[Any]]:
    """The graph whose values are held, its inputs by slot, and the value of each result.

    That is the body, where all of an action is one compiled region.
    """
    graph_module = action.graph_module
    inputs = graph_module.graph.find_nodes(op="placeholder")
    slots: dict[Node, Slot] = dict(zip(inputs, action.inputs, strict=True))
    results: Sequence[Any] = action.result_nodes()
    calls = [
        node
        for node in graph_module.graph.nodes
        if node.op == "call_function" and node.target is not operator.getitem
    ]
    region = region_of(calls[0]) if len(calls) == 1 else None
    if region is None:
        return graph_module, slots, results
    of_body = region.body.graph.find_nodes(op="placeholder")
    inside = dict(zip(region_inputs(calls[0]), of_body, strict=True))
    made: Any = region.body.graph.output_node().args[0]

    def in_body(result: Any) -> Any:
        if isinstance(result, Node) and result.target is operator.getitem:
            return made[result.args[1]]
        return inside.get(result)

    body_slots = {inside[node]: slot for node, slot in slots.items() if node in inside}
    return region.body, body_slots, [in_body(result) for result in results]


def _stays(slot: Slot) -> bool:
    """Whether a value is held whatever the action does: state, or a part of the batch.

    Activations are arguments too, and come from a neighbour.
    """
    is_batch = slot.kind == "argument" and not slot.name.startswith("activations[")
    return slot.is_static or is_batch


def _bytes_of(signatures: Collection[ActivationSignature]) -> int:
    return sum(
        _rounded(torch.Size(each.shape).numel() * each.dtype.itemsize) for each in signatures
    )


def _tensor_bytes(node: Node) -> int:
    value = node.meta["val"]
    return int(value.numel() * value.element_size())


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
