"""An action's graph that is launched, and finished later: its collectives run meanwhile.

::

    as cut       cast gather wait split   cast gather wait split
    first part   cast gather cast gather
    last part                             wait split wait split

A collective that needs what another one made (the all-reduce over replicas behind a reduce-scatter)
makes a part between the two. The parts are one graph, put in their order and verified as a whole:
only where it is cut does not show in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from gt_passes import Verifier
from gt_passes.analysis.collectives import is_wait
from gt_passes.analysis.order_constraints import OrderConstraints
from gt_pipeline.errors import StageGraphError
from gt_pipeline.graph.action_graph import ActionGraph, copied, extract
from gt_pipeline.graph.gradient_accumulators import owned_results
from gt_pipeline.graph.slots import Slot
from gt_trace import BoxedFunction, boxed
from gt_trace.capture.captured_mode import as_captured


class LaunchedExecutable:
    """UNSHARD or REDUCE_GRAD of a stage, ready to be launched.

    Args:
        action: after passes; stays as it is.
        verify: whether to verify the graph in the order of its parts.

    Raises:
        StageGraphError: that order is wrong.
    """

    def __init__(self, action: ActionGraph, *, verify: bool) -> None:
        self.action = copied(action)
        parts = _put_in_order(self.action.graph_module)
        if verify and not action.is_empty:
            problems = Verifier().verify(self.action.graph_module).problems
            if problems:
                raise StageGraphError(
                    what=f"{action.kind} of stage {action.stage_index} cannot be launched in parts",
                    problems=map(str, problems),
                )
        self.owned_gradients = owned_results(self.action, "gradient")
        """For each gradient among its results, whether no other value shares its memory."""

        self._parts = _cut(self.action, parts)

    @property
    def num_parts(self) -> int:
        """Parts between which something else can run; 1 for a graph without collectives."""
        return len(self._parts)

    def launch(self, inputs: list[Tensor]) -> LaunchedAction:
        """Run the first part, on tensors in the order of the action's slots; empties the list."""
        return LaunchedAction(self._parts, inputs)


class LaunchedAction:
    """An action of which some parts have run."""

    def __init__(self, parts: Sequence[BoxedFunction], inputs: list[Tensor]) -> None:
        self._left = iter(parts)
        self._values: list[Any] = inputs
        self.go_on()

    def go_on(self) -> None:
        """Wait for what is under way, and run the next part; nothing if there is none."""
        part = next(self._left, None)
        if part is not None:
            with as_captured():
                self._values = list(part(self._values))

    def finish(self) -> list[Tensor]:
        """Run all that is left, and return the action's results in the order of its slots."""
        for part in self._left:
            with as_captured():
                self._values = list(part(self._values))
        return self._values


def _put_in_order(graph_module: GraphModule) -> list[list[Node]]:
    """The graph's nodes by part, and the graph in that order: a part begins with waits."""
    nodes = [n for n in graph_module.graph.nodes if n.op not in ("placeholder", "output")]
    predecessors = OrderConstraints(graph_module).predecessors(nodes)
    part_of: list[int] = []
    for node, before in zip(nodes, predecessors, strict=True):
        part_of.append(max((part_of[i] for i in before), default=0) + is_wait(node))
    parts: list[list[Node]] = [[] for _ in range(max(part_of, default=0) + 1)]
    for node, part in zip(nodes, part_of, strict=True):
        parts[part].append(node)
    output = graph_module.graph.output_node()
    for node in (node for part in parts for node in part):
        output.prepend(node)
    graph_module.recompile()
    return parts


def _cut(action: ActionGraph, parts: Sequence[Sequence[Node]]) -> tuple[BoxedFunction, ...]:
    """A function for each part, of what the one before it returns; the last returns the results."""
    graph_module = action.graph_module
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    entering = dict(zip(action.inputs, placeholders, strict=True))
    results = action.result_nodes()
    functions = []
    for index, part in enumerate(parts):
        later = {
            source
            for following in parts[index + 1 :]
            for node in following
            for source in node.all_input_nodes
        }
        known = [*entering.values(), *part]
        is_last = index == len(parts) - 1
        leaving = [
            node for node in known if node.op != "get_attr" and (node in later or node in results)
        ]
        outputs = results if is_last else leaving
        functions.append(boxed(extract(graph_module, part, inputs=entering, outputs=outputs)))
        entering = {Slot(kind="between", name=node.name): node for node in leaving}
    return tuple(functions)
