"""A stage's actions put together again: the proof that a cut lost nothing.

The graphs of UNSHARD, FORWARD, the backward (whole, or dI and dW) and REDUCE_GRAD, one after the
other, must compute what the joint graph computes. That is proven from their dataflow, without
running them; tests run them too, and compare bits.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.fx import Graph, GraphModule, Node

from gt_passes.graph_problem import GraphProblem
from gt_passes.verifier.dataflow.check_dataflow import Dataflow
from gt_pipeline.graph.action_graph import append_graph
from gt_pipeline.graph.slots import Slot
from gt_pipeline.graph.stage_graphs import StageGraphs


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
