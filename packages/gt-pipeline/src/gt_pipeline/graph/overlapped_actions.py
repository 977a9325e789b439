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

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn
from torch.fx import Graph, GraphModule, Node

from gt_config.node_keys import PipelineAnnotation
from gt_passes import PassContext, PassManager
from gt_passes.analysis.symbol_bindings import renew_symbols, symbols_bound_by, symbols_of
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
    """Join a forward and a backward, neither of them transformed, to one graph; interleave them.

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

    def take(lane: str, action: ActionGraph, slots: Sequence[Slot], made: dict[Slot, Node]) -> None:
        placeholders = action.graph_module.graph.find_nodes(op="placeholder")
        originals = dict(zip(action.inputs, placeholders, strict=True))
        for slot in slots:
            made[slot] = graph.placeholder(f"{lane}_{slot.placeholder_name}")
            made[slot].target = made[slot].name
            made[slot].meta = dict(originals[slot].meta)

    take("b", backward, backward.static_inputs, of_backward)
    if forward.stage_index == backward.stage_index:
        of_forward.update(of_backward)
    own = [i for i, slot in enumerate(forward.static_inputs) if slot not in of_forward]
    forward_own = [forward.static_inputs[index] for index in own]
    take("f", forward, forward_own, of_forward)
    take("b", backward, backward.inputs[backward.num_static :], of_backward)
    take("f", forward, forward.inputs[forward.num_static :], of_forward)
    attributes = nn.Module()
    append_graph(graph, attributes, backward, of_backward)
    num_of_backward = len(graph.nodes)
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
            write_annotation(node, replace(annotation, slot=1))
    graph_module = GraphModule(attributes, graph)
    _give_forward_its_own_sizes(graph_module, num_of_backward)
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


def _give_forward_its_own_sizes(graph_module: GraphModule, num_before: int) -> None:
    """Two microbatches of a stage find out two sizes; their graphs were cut from one trace."""
    nodes = list(graph_module.graph.nodes)
    taken = set().union(
        *(symbols_bound_by(node) for node in nodes[:num_before]),
        *(symbols_of(node.meta.get("val")) for node in nodes if node.op == "placeholder"),
    )
    if taken:
        renew_symbols(nodes[num_before:-1], taken, PassContext.from_graph(graph_module).fake_mode)


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
