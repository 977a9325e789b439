"""OVERLAP_F_B: one graph that runs a forward and a backward, interleaved.

Before (concatenated; each lane waits for its own exchanges)::

    backward  a2a wait mm a2a wait mm
    forward                           mm a2a wait mm a2a wait mm

After::

    backward  a2a    wait mm a2a    wait mm
    forward       mm a2a     wait mm a2a    wait mm

The two may be of one stage (another microbatch each) or of two stages of a rank. What both read of
one stage's state is one input, so that order between a write of one and a read of the other is
kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.fx import Graph, GraphModule, Node

from gt_config.node_keys import PipelineAnnotation
from gt_passes import PassContext, PassManager
from gt_pipeline.errors import StageCutError
from gt_pipeline.graph.action_graph import ActionGraph, append_graph
from gt_pipeline.graph.interleave_actions import InterleaveActions
from gt_pipeline.graph.slots import Slot
from gt_trace import read_annotation, write_annotation


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlappedActions:
    """One graph of a backward and a forward.

    It takes what is the same for every microbatch (of the backward, then of the forward), then the
    backward's other inputs, then the forward's; and gives the backward's outputs, then the
    forward's.
    """

    action: ActionGraph
    """The graph of both actions. Its slots are those of two stages, so that one may occur twice."""

    forward: ActionGraph
    backward: ActionGraph

    forward_static: tuple[int, ...]
    """Positions of those static inputs of the forward that the backward does not read too."""


def overlap_actions(
    forward: ActionGraph, backward: ActionGraph, *, verify: bool = True
) -> OverlappedActions:
    """Join a forward and a backward to one graph, and interleave them.

    Args:
        forward: a FORWARD, not transformed.
        backward: a FULL_BACKWARD or BACKWARD_INPUT of the same or another stage, likewise.
        verify: whether to verify the graph before and after.

    Raises:
        StageCutError: the two were captured with different fake modes.
        gt_passes.VerificationError: the graph is broken.
    """
    actions = concatenate_actions(forward, backward)
    graph_module = actions.action.graph_module
    static = tuple(slot.name for slot in actions.action.inputs if slot.is_static)
    context = PassContext.from_graph(graph_module, static_input_names=static)
    PassManager([InterleaveActions()], context=context, verify=verify).run(graph_module)
    return actions


def concatenate_actions(forward: ActionGraph, backward: ActionGraph) -> OverlappedActions:
    """A backward and a forward as one graph, one after the other.

    Raises:
        StageCutError: the two were captured with different fake modes.
    """
    _check_fake_modes(forward, backward)
    graph = Graph()
    of_backward: dict[Slot, Node] = {}
    of_forward: dict[Slot, Node] = {}

    def take(action: ActionGraph, slot: Slot, made: dict[Slot, Node]) -> None:
        lane = "f" if action is forward else "b"
        node = graph.placeholder(f"{lane}_{slot.placeholder_name}")
        node.target = node.name
        (original,) = [
            each
            for each, held in zip(
                action.graph_module.graph.find_nodes(op="placeholder"), action.inputs, strict=True
            )
            if held == slot
        ]
        node.meta = dict(original.meta)
        made[slot] = node

    for slot in backward.static_inputs:
        take(backward, slot, of_backward)
    own: list[int] = []
    for index, slot in enumerate(forward.static_inputs):
        if forward.stage_index == backward.stage_index and slot in of_backward:
            of_forward[slot] = of_backward[slot]
            continue
        own.append(index)
        take(forward, slot, of_forward)
    for slot in backward.inputs[backward.num_static :]:
        take(backward, slot, of_backward)
    for slot in forward.inputs[forward.num_static :]:
        take(forward, slot, of_forward)
    attributes = nn.Module()
    append_graph(graph, attributes, backward, of_backward)
    append_graph(graph, attributes, forward, of_forward)
    graph.output(
        (
            *(of_backward[slot] for slot in backward.outputs),
            *(of_forward[slot] for slot in forward.outputs),
        )
    )
    for node in graph.nodes:
        annotation = read_annotation(node, PipelineAnnotation)
        if annotation is not None and annotation.action == "FORWARD":
            second = PipelineAnnotation(
                stage_index=annotation.stage_index, action="FORWARD", slot=1
            )
            write_annotation(node, second)
    graph_module = GraphModule(attributes, graph)
    graph_module.recompile()
    forward_own = [forward.static_inputs[index] for index in own]
    action = ActionGraph(
        kind="OVERLAP_F_B",
        stage_index=forward.stage_index,
        graph_module=graph_module,
        inputs=(
            *backward.static_inputs,
            *forward_own,
            *backward.inputs[backward.num_static :],
            *forward.inputs[forward.num_static :],
        ),
        outputs=(*backward.outputs, *forward.outputs),
    )
    return OverlappedActions(
        action=action, forward=forward, backward=backward, forward_static=tuple(own)
    )


def _check_fake_modes(forward: ActionGraph, backward: ActionGraph) -> None:
    modes = [
        PassContext.from_graph(action.graph_module).fake_mode
        for action in (forward, backward)
        if not action.is_empty
    ]
    if len(modes) == 2 and modes[0] is not modes[1]:
        raise StageCutError(
            what=f"FORWARD of stage {forward.stage_index} and {backward.kind} of stage "
            f"{backward.stage_index} cannot overlap",
            problems=["they were captured with different fake modes; give one's to the other"],
        )
