"""One large matrix product in place of several that share their left operand.

Tensor parallelism makes products narrow: 1/8 of ``w1`` of llama3 8B has 1,792 columns, which leaves
a seventh of an H100 idle in the last wave of tiles. Side by side with ``w3`` the waste halves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Graph, GraphModule, Node

from gt_config.graph_kinds import COMPUTING_ACTIONS, JOINT_GRAPHS, STEP_GRAPHS, GraphKind
from gt_config.numerics import Numerics
from gt_passes._torch_internals import FakeTensorMode, quiet_fake_execution, value_of
from gt_passes.analysis.node_calls import evaluate
from gt_passes.analysis.operator_effects import is_only_a_view
from gt_passes.analysis.tensor_signature import signature
from gt_passes.contract import ChangeBounds, GraphPass, PassContext, PassReport, Refusal
from gt_passes.registry import register_pass
from gt_passes.tensor_parallel.matmul_fusion import MatmulFusion
from gt_trace.node_metadata import phase_of

_aten = torch.ops.aten


@register_pass
@dataclass(frozen=True, slots=True, kw_only=True)
class FuseParallelMatmuls(GraphPass):
    """Multiply by several matrices at once where they stand side by side.

    *Before*::

        y = mm(x, w1);  z = mm(x, w3)

    *After*::

        b = cat([w1, w3], 1);  c = mm(x, b)
        y = slice(c, 1, 0, n);  z = slice(c, 1, n, 2n)

    A part is copied where somebody needs it without gaps: who reads it is asked.

    *Refuses*: products whose right operand is made after the first of them; memory that is written
    to; products with an unknown operator between them.

    *Preserves numerics*: no. Every element is the sum of the same products, but a wider product may
    run in another kernel, which sums in another order. Tolerance: that of a matrix product in the
    dtype, 1e-5 relative to the largest element in float32 and 1e-2 in bfloat16.
    """

    name: ClassVar[str] = "fuse-parallel-matmuls"
    numerics: ClassVar[Numerics] = "reordered"
    runs_on: ClassVar[frozenset[GraphKind]] = frozenset(
        {*STEP_GRAPHS, *JOINT_GRAPHS, *COMPUTING_ACTIONS}
    )
    keeps_dataflow: ClassVar[bool] = False

    max_columns: int = 4096
    """Fuse products of fewer columns each. A wide product fills a GPU alone, and putting its
    operands side by side copies them."""

    @property
    def bounds(self) -> ChangeBounds:
        """The right operands are copied side by side."""
        return ChangeBounds(peak_memory_growth=None)

    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        """Fuse products; see the class."""
        return _Fusion(graph_module.graph, context.fake_mode, self.max_columns).run()


class _Fusion(MatmulFusion):
    def __init__(self, graph: Graph, fake_mode: FakeTensorMode, max_columns: int) -> None:
        super().__init__(graph, fake_mode)
        self._max_columns = max_columns

    def run(self) -> PassReport:
        fused = [group for group in self._groups() if self._fuse(group)]
        counts = {"products": sum(map(len, fused)), "fused_into": len(fused)}
        return PassReport.of(counts, self.refusals)

    def _groups(self) -> Iterator[list[Node]]:
        """Products that share their left operand and their phase, in execution order."""
        groups: dict[tuple[object, ...], list[Node]] = {}
        for matmul in self.graph.find_nodes(op="call_function", target=_aten.mm.default):
            value, left = value_of(matmul), matmul.args[0]
            assert isinstance(value, torch.Tensor)
            if value.shape[1] < self._max_columns and isinstance(left, Node):
                groups.setdefault((_matrix(left), phase_of(matmul)), []).append(matmul)
        yield from ([*group] for group in groups.values() if len(group) > 1)

    def _fuse(self, group: list[Node]) -> bool:
        first = group[0]
        fusable = []
        for matmul in group:
            reason = self._reason_against(matmul, first)
            if reason is None:
                fusable.append(matmul)
            else:
                self.refusals.append(Refusal(node_name=matmul.name, reason=reason))
        if len(fusable) < 2 or fusable[0] is not first:
            return False
        self._replace(fusable)
        return True

    def _reason_against(self, matmul: Node, first: Node) -> str | None:
        if any(map(self.aliases.is_written, (matmul, *matmul.all_input_nodes))):
            return "the product, or an operand of it, is written to"
        if self.num_barriers[matmul] != self.num_barriers[first]:
            return f"an operator of which nothing is known stands between it and {first.name}"
        right = matmul.args[1]
        assert isinstance(right, Node)
        while not right < first:
            if not is_only_a_view(right):
                return f"its right operand is made after {first.name}, which it could join"
            (right,) = right.all_input_nodes
        return None

    def _replace(self, matmuls: Sequence[Node]) -> None:
        first = matmuls[0]
        for matmul in matmuls:
            self.hoist_views(matmul, first)
        with self.graph.inserting_before(first):
            rights = [matmul.args[1] for matmul in matmuls]
            wide = self.call(_aten.cat.default, rights, 1, stands_for=first)
            product = self.call(_aten.mm.default, first.args[0], wide, stands_for=first)
            start = 0
            for matmul in matmuls:
                value = value_of(matmul)
                assert isinstance(value, torch.Tensor)
                end = start + value.shape[1]
                part = self.call(_aten.slice.Tensor, product, 1, start, end, stands_for=matmul)
                views = self._views_with_gaps(matmul, value_of(part))
                if views is None:
                    contiguous = torch.contiguous_format
                    part = self.call(
                        _aten.clone.default, part, memory_format=contiguous, stands_for=matmul
                    )
                for view, seen in (views or {}).items():
                    view.meta["val"] = seen
                matmul.replace_all_uses_with(part)
                start = end
        for matmul in reversed(matmuls):
            self.graph.erase_node(matmul)

    def _views_with_gaps(self, matmul: Node, part: object) -> dict[Node, object] | None:
        """What the views of a product become when it has gaps between its rows.

        None if one of them cannot be a view any more, or if anybody who reads them would make
        something else of it than was captured.
        """
        values: dict[Node, object] = {matmul: part}

        def load(node: Node) -> object:
            return values[node] if node in values else value_of(node)

        pending = [matmul]
        with quiet_fake_execution(self.fake_mode):
            while pending:
                for user in pending.pop().users:
                    if user.op != "call_function":
                        return None  # the output
                    try:
                        result = evaluate(user, load)
                    except (RuntimeError, ValueError):  # strides that no view can have
                        return None
                    if is_only_a_view(user):
                        values[user] = result
                        pending.append(user)
                    elif signature(result) != signature(value_of(user)):
                        return None
        del values[matmul]
        return values


def _matrix(node: Node) -> tuple[object, ...]:
    """What a left operand is: equal for two equal views of one value."""
    if node.target is _aten.view.default and isinstance(node.args[0], Node):
        value = value_of(node)
        assert isinstance(value, torch.Tensor)
        return (node.args[0], tuple(value.shape))
    return (node,)
