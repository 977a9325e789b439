"""What a region that Inductor compiled runs: its body, with neighbouring operators fused.

A compiled region is one node of the graph, and its body knows what it does
(``gt_passes.analysis.outlined_region``). Inductor fuses operators that are bound by memory. Here
each run of such operators, uninterrupted in program order by a matrix product, attention or a
collective, is one kernel: it reads once what comes from outside the run, and writes once what is
used outside it. Inductor also fuses across such interruptions where it may reorder, and epilogues
into products; neither is modelled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch.fx import GraphModule, Node

from gt_passes.analysis.bucket_copies import BUCKET_COPIES
from gt_passes.simulation.cost_model import CostModel
from gt_passes.simulation.operands import OperandReader
from gt_passes.simulation.work import OpKind, is_view_node

_TRANSPARENT: frozenset[OpKind] = frozenset({"none", "view"})


class FusedKernel(NamedTuple):
    """Operators that run as one kernel, bound by memory."""

    node: Node
    """The last of them."""

    moved_bytes: int


def compiled_kernels(
    body: GraphModule, cost_model: CostModel, reader: OperandReader
) -> Iterator[Node | FusedKernel]:
    """What the body of a region runs, in order: nodes as they are, and fused ones.

    Args:
        body: of a compiled region.
        cost_model: says of each operator what kind it is.
        reader: of the operands of the body's nodes.
    """
    run: list[Node] = []
    for node in body.graph.nodes:
        if node.op != "call_function":
            continue
        cost = cost_model.cost_of_key(cost_model.key(node, reader), node)
        # Inductor calls our own operators, which it does not see into.
        is_call = cost.is_guess or node.target in BUCKET_COPIES
        fuses = cost.kind == "streaming" and not is_call
        if fuses or (run and cost.kind in _TRANSPARENT):
            run.append(node)
            if cost.kind == "none":  # free, and perhaps an item of a collective's results
                yield node
            continue
        yield from _fused(run, reader)
        run = []
        yield node
    yield from _fused(run, reader)


def _fused(run: list[Node], reader: OperandReader) -> Iterator[FusedKernel]:
    """One kernel for a run of operators, if there are any."""
    if not run:
        return
    members = set(run)
    read = dict.fromkeys(
        argument for node in run for argument in node.all_input_nodes if argument not in members
    )
    written = [node for node in run if any(user not in members for user in node.users)]
    # A view that leaves the run is what it views, and several views of one value are one value.
    sources = dict.fromkeys(_viewed(node, members) for node in written)
    moved = sum(operand.num_bytes for node in (*read, *sources) for operand in reader.outputs(node))
    yield FusedKernel(node=run[-1], moved_bytes=moved)


def _viewed(node: Node, members: set[Node]) -> Node:
    """What a view inside the run is a view of, or the node itself."""
    while is_view_node(node) and node.all_input_nodes and node.all_input_nodes[0] in members:
        node = node.all_input_nodes[0]
    return node
