"""The edits that both fusions of matrix products make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Graph, Node

from gt_passes._torch_internals import FakeTensorMode, quiet_fake_execution
from gt_passes.analysis.aliasing import AliasClasses
from gt_passes.analysis.node_calls import evaluate
from gt_passes.analysis.operator_effects import is_barrier
from gt_passes.contract import Refusal
from gt_trace.node_metadata import copy_annotations


class MatmulFusion:
    """A graph in which products are put together, as it was when this was built.

    Args:
        graph: to edit.
        fake_mode: of its values.
    """

    def __init__(self, graph: Graph, fake_mode: FakeTensorMode) -> None:
        self.graph = graph
        self.fake_mode = fake_mode
        self.aliases = AliasClasses(graph)
        self.refusals: list[Refusal] = []
        self.num_barriers: dict[Node, int] = {}
        """How many operators of unknown effect stand before each node, itself included."""

        count = 0
        for node in graph.nodes:
            count += is_barrier(node)
            self.num_barriers[node] = count

    def call(
        self,
        target: Callable[..., object],
        *args: Any,
        stands_for: Node,
        **kwargs: Any,
    ) -> Node:
        """A new node with the annotations of the one that it stands for."""
        node = self.graph.call_function(target, args, kwargs)
        copy_annotations(stands_for, node)
        with quiet_fake_execution(self.fake_mode):
            node.meta["val"] = evaluate(node)
        self.num_barriers[node] = self.num_barriers[stands_for]
        return node

    def hoist_views(self, matmul: Node, first: Node) -> None:
        """Move the views between ``first`` and a product's right operand in front of ``first``."""
        chain = []
        right = matmul.args[1]
        assert isinstance(right, Node)
        while not right < first:
            chain.append(right)
            (right,) = right.all_input_nodes
        for view in reversed(chain):
            first.prepend(view)
