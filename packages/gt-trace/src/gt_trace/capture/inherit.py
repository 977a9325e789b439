"""Backward nodes inherit the annotations of the forward node that caused them.

Autograd numbers its nodes; a forward node of the graph and the backward nodes it causes carry the
same number (``meta["seq_nr"]``). Several forward nodes can share one: operators without a gradient
repeat the number of the last one that had it, so the *first* forward node of a number is the one
that autograd differentiates.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping

from torch.fx import Graph, GraphModule, Node

from gt_config.node_keys import (
    CpCollectiveAnnotation,
    FsdpCollectiveAnnotation,
    ModuleAnnotation,
    Phase,
    PhaseAnnotation,
)
from gt_trace.node_metadata import (
    copy_annotations,
    is_backward,
    read_annotation,
    sequence_number,
    write_annotation,
)


def inherit_annotations(graph_module: GraphModule) -> None:
    """Annotate backward nodes, and give every node its phase.

    A backward node takes over all annotations and the stack trace of its forward node. An FSDP
    unshard becomes a reduce-grad, since the backward of gathering a parameter is the reduction of
    its gradient. Nodes that accumulate gradients have no forward node and get a phase only.
    A node that was annotated as of the backward itself inherits nothing: an autograd function that
    runs a whole backward in its own (a placed model) says of each node where it belongs.
    Submodule graphs (of higher-order operators) are treated alike; what a node there inherits from
    is looked for in its own graph first. FlexAttention's hold a forward and its derivative, which a
    backward makes for each layer anew, so that several have the same numbers.
    """
    graphs = [module.graph for module in graph_module.modules() if isinstance(module, GraphModule)]
    first_of = [first_forward(graph) for graph in graphs]
    in_any: dict[int, Node] = {}
    for found in reversed(first_of):
        in_any.update(found)
    for graph, found in zip(graphs, first_of, strict=True):
        forward_of = ChainMap(found, in_any)
        latest: Phase = "forward"
        for node in graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            if _states_backward(node):
                continue
            if is_backward(node):
                _inherit(node, forward_of)
                write_annotation(node, PhaseAnnotation(phase="backward"))
                continue
            latest = _phase(node, latest)
            write_annotation(node, PhaseAnnotation(phase=latest))


def first_forward(graph: Graph) -> dict[int, Node]:
    """Return the first forward node of each number, which is the one that is differentiated."""
    found: dict[int, Node] = {}
    for node in graph.nodes:
        number = sequence_number(node)
        if number is not None and not is_backward(node):
            found.setdefault(number, node)
    return found


def _states_backward(node: Node) -> bool:
    stated = read_annotation(node, PhaseAnnotation)
    return stated is not None and stated.phase == "backward"


def _inherit(node: Node, forward_of: Mapping[int, Node]) -> None:
    if node.meta.get("is_gradient_acc", False):
        return
    number = sequence_number(node)
    source = None if number is None else forward_of.get(number)
    if source is None:
        return
    own = read_annotation(node, FsdpCollectiveAnnotation)
    own_of_sequence = read_annotation(node, CpCollectiveAnnotation)
    copy_annotations(source, node)
    collective = read_annotation(node, FsdpCollectiveAnnotation)
    # What is said by a collective itself stays: by a reduction that knows its own axis, or a
    # gathering that activation checkpointing runs again inside the backward.
    if own_of_sequence is not None:
        write_annotation(node, own_of_sequence)
    if own is not None:
        write_annotation(node, own)
    elif collective is not None and collective.kind == "unshard":
        write_annotation(
            node,
            FsdpCollectiveAnnotation(
                kind="reduce_grad",
                parameter_names=collective.parameter_names,
                mesh_axis=collective.mesh_axis,
            ),
        )
    if "stack_trace" in source.meta:
        node.meta["stack_trace"] = source.meta["stack_trace"]


def _phase(node: Node, latest: Phase) -> Phase:
    """What was stated; else forward inside a module, and elsewhere what came before.

    So the gradient that autograd starts from, a node that nobody could annotate, belongs to the
    loss.
    """
    stated = read_annotation(node, PhaseAnnotation)
    if stated is not None:
        return stated.phase
    return "forward" if read_annotation(node, ModuleAnnotation) is not None else latest
