"""Which action runs which node of a stage's joint graph.

Nothing is recognized by its shape. FSDP's collectives say what they are (``gt.fsdp_collective``),
forward and backward too (``gt.phase``), which also keeps what memory policies decided: a node that
they compute again is a backward node. What the gradients of the stage's inputs need is dI, the rest
of the backward dW. A loss that differentiates itself while it runs (a chunked one) is all forward:
no gradient that arrives takes part in it, and its logits need not be kept.

A part may need what earlier parts make, never the other way round: neither as an argument, nor
through memory that is written to, random numbers, or the host's reading of device memory. All such
bonds of the joint graph are checked, and each that a cut would break is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import getitem
from typing import Literal

import torch
from torch.fx import GraphModule, Node

from gt_config.node_keys import FsdpCollectiveAnnotation, PipelineAction
from gt_passes.analysis.order_constraints import OrderConstraints
from gt_pipeline.errors import StageCutError
from gt_trace import phase_of, read_annotation

_MOST_PROBLEMS = 8


PARTS: tuple[PipelineAction, ...] = (
    "UNSHARD",
    "FORWARD",
    "BACKWARD_INPUT",
    "BACKWARD_WEIGHT",
    "REDUCE_GRAD",
)
"""The parts of a joint graph, in the order in which a microbatch meets them."""


SharedPart = Literal["UNSHARD", "MICROBATCH", "REDUCE_GRAD"]

SHARED_PARTS: tuple[SharedPart, ...] = ("UNSHARD", "MICROBATCH", "REDUCE_GRAD")
"""The same where forward and backward stay together."""


def assign_parts(
    graph_module: GraphModule,
    *,
    output_gradients: Iterable[Node],
    input_gradients: Sequence[Node],
    what: str,
) -> dict[Node, PipelineAction]:
    """The part of every node of a stage's joint graph that computes something.

    ``output_gradients`` are placeholders, ``input_gradients`` results of it; an error begins with
    ``what``.

    Raises:
        StageCutError: an earlier part would need what a later one makes.
    """
    constraints = OrderConstraints(graph_module)
    parts = _annotated_parts(graph_module)
    nodes = list(parts)
    for node in _differentiated_in_forward(nodes, parts, output_gradients):
        parts[node] = "FORWARD"
    for node in _needed_for(input_gradients, nodes, parts, constraints):
        parts[node] = "BACKWARD_INPUT"
    for node in nodes:
        if node.target is getitem and parts[node] == "BACKWARD_WEIGHT":
            parts[node] = parts[node.all_input_nodes[0]]  # a tuple does not cross
    _refuse_broken_bonds(parts, PARTS, constraints, what=what)
    return parts


def assign_shared_parts(graph_module: GraphModule, *, what: str) -> dict[Node, SharedPart]:
    """What of a whole step is a microbatch's own, and what all microbatches of it can share.

    An error begins with ``what``.

    Raises:
        StageCutError: a gathering would need what a microbatch makes, or a microbatch what is made
            of reduced gradients.
    """
    parts: dict[Node, SharedPart] = {
        node: part if part == "UNSHARD" or part == "REDUCE_GRAD" else "MICROBATCH"
        for node, part in _annotated_parts(graph_module).items()
    }
    _refuse_broken_bonds(parts, SHARED_PARTS, OrderConstraints(graph_module), what=what)
    return parts


def _annotated_parts(graph_module: GraphModule) -> dict[Node, PipelineAction]:
    """By annotations alone: all of a backward is dW."""
    parts: dict[Node, PipelineAction] = {}
    reduced: set[Node] = set()
    for node in graph_module.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        parts[node] = _part(node, parts, reduced)
        if parts[node] == "REDUCE_GRAD":
            reduced.add(node)
    return parts


def _part(node: Node, parts: Mapping[Node, PipelineAction], reduced: set[Node]) -> PipelineAction:
    sources = [source for source in node.all_input_nodes if source in parts]
    if node.target is getitem and sources:
        return parts[sources[0]]  # a tuple does not cross
    if any(source in reduced for source in sources):
        return "REDUCE_GRAD"  # as the sum of two reduced gradients of one parameter
    collective = read_annotation(node, FsdpCollectiveAnnotation)
    if collective is not None and collective.kind == "unshard":
        return "UNSHARD"
    if collective is not None and not _is_leading_cast(node):
        return "REDUCE_GRAD"
    return "BACKWARD_WEIGHT" if phase_of(node) == "backward" else "FORWARD"


def _is_leading_cast(node: Node) -> bool:
    """The cast to the dtype of reduction belongs to the backward: gradients accumulate in it.

    So do FSDP2's (torch/distributed/fsdp/_fully_shard/_fsdp_param.py, ``to_accumulated_grad``).
    """
    return node.target is torch.ops.aten._to_copy.default


def _differentiated_in_forward(
    nodes: Sequence[Node], parts: Mapping[Node, PipelineAction], output_gradients: Iterable[Node]
) -> set[Node]:
    """The backward nodes that the forward needs and that no arriving gradient reaches."""
    reached = set(output_gradients)
    for node in nodes:
        if any(source in reached for source in node.all_input_nodes):
            reached.add(node)
    found: set[Node] = set()
    for node in reversed(nodes):
        if parts[node] != "FORWARD" and node not in found:
            continue
        found.update(
            source
            for source in node.all_input_nodes
            if parts.get(source) == "BACKWARD_WEIGHT" and source not in reached
        )
    return found


def _needed_for(
    results: Iterable[Node],
    nodes: Sequence[Node],
    parts: Mapping[Node, PipelineAction],
    constraints: OrderConstraints,
) -> set[Node]:
    """The backward nodes that ``results`` cannot do without, whatever binds them."""
    predecessors = constraints.predecessors(nodes)
    index = {node: i for i, node in enumerate(nodes)}
    found: set[int] = set()
    pending = [index[node] for node in results if node in index]
    while pending:
        i = pending.pop()
        if i in found or parts[nodes[i]] != "BACKWARD_WEIGHT":
            continue
        found.add(i)
        pending.extend(predecessors[i])
    return {nodes[i] for i in found}


def _refuse_broken_bonds(
    parts: Mapping[Node, str], order: Sequence[str], constraints: OrderConstraints, *, what: str
) -> None:
    problems = [*_broken_bonds(parts, order, constraints)]
    if len(problems) > _MOST_PROBLEMS:
        problems[_MOST_PROBLEMS:] = [f"and {len(problems) - _MOST_PROBLEMS} more"]
    if problems:
        raise StageCutError(what=what, problems=problems)


def _broken_bonds(
    parts: Mapping[Node, str], order: Sequence[str], constraints: OrderConstraints
) -> Iterator[str]:
    # Not across barriers: FSDP's own collectives go where the schedule says, on all ranks alike,
    # and the order of the others is that of the joint graph within each part.
    position = {node: order.index(part) for node, part in parts.items()}
    for node in parts:
        for earlier in constraints.earlier(node):
            if earlier in parts and position[earlier] > position[node]:
                yield (
                    f"{node.name} ({node.target}) is part of {parts[node]}, and must run "
                    f"after {earlier.name} ({earlier.target}), which is part of "
                    f"{parts[earlier]}"
                )
