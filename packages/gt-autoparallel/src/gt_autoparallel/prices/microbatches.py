"""Steps that run the planned graph for several microbatches, as a pipeline's do with each stage.

Such a step gathers parameters before the first microbatch and lets them go after the last, adds up
gradients as the backward makes them, and reduces the sums once (``gt_pipeline.graph``). So what is
done for parameters costs a microbatch its share, gathered parameters are there once, and of what a
forward saves there is as much as microbatches are between forward and backward. A backward hands
out the gradients of its microbatch together, and then they are added to the sums.

Where a rank holds several graphs that take turns, what there is only while one of them runs is
there once: each graph counts its part of that.
"""

from __future__ import annotations

from dataclasses import dataclass

from gt_autoparallel.errors import PlacementInputError
from gt_autoparallel.graph.parameter_chains import gradient_chains, parameter_chains
from gt_autoparallel.graph.placement_graph import PlacementGraph, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatches:
    """How a step runs the planned graph, whose inputs are one microbatch.

    Raises:
        PlacementInputError: there is no microbatch, or none of them is live.
    """

    num_in_step: int
    num_live: int
    """At most so many of them have saved what their backward needs, at one time."""

    num_graphs: int = 1
    """Graphs that a rank holds, of which one runs at a time; each may take an equal part of it."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_live <= self.num_in_step:
            raise PlacementInputError(
                f"num_live is {self.num_live!r} of {self.num_in_step!r} microbatches in a step; "
                "allowed: from 1 to as many as there are"
            )
        if self.num_graphs < 1:
            raise PlacementInputError(f"num_graphs is {self.num_graphs!r}; allowed: at least 1")

    def __str__(self) -> str:
        live = f"{self.num_in_step} in a step, {self.num_live} of them live"
        return live if self.num_graphs == 1 else f"{live}, of {self.num_graphs} graphs in turn"


def gathered_parameters(graph: PlacementGraph) -> frozenset[int]:
    """The nodes whose results are parameters as they are computed with: casts, and their shares."""
    chains = parameter_chains(graph)
    return frozenset(
        node.index
        for node in graph.nodes
        if (node.index in chains and node.kind != "parameter")
        or (node.kind == "share" and node.operands[0].node in chains)
    )


def accumulated_gradients(graph: PlacementGraph) -> dict[Value, int]:
    """What is added up over microbatches -> bytes of an element of the sum.

    That is what computes the gradient of a parameter, in the dtype in which it is reduced.
    """
    chains = gradient_chains(graph)
    found: dict[Value, int] = {}
    for node in graph.of_kind("gradient"):
        value = node.operands[0]
        itemsize = graph.spec(value).dtype.itemsize
        while value.node in chains:
            producer = graph.nodes[value.node]
            if producer.kind == "share":  # where it is reduced, before a cast
                itemsize = producer.output().dtype.itemsize
            value = producer.operands[0]
        found[value] = max(itemsize, found.get(value, 0))
    return found
