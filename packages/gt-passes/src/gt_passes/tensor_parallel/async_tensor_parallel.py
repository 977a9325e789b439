"""Pipeline the collectives of tensor parallelism with the matrix products next to them.

The product is cut along the tokens of the ranks. While a GPU multiplies the tokens of one rank, it
reads those of the next from its memory: PyTorch's symmetric-memory operators do both in one call.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.fx import Graph, GraphModule, Node

from gt_config.graph_kinds import COMPUTING_ACTIONS, JOINT_GRAPHS, STEP_GRAPHS, GraphKind, MeshAxis
from gt_config.numerics import Numerics
from gt_passes._torch_compilation_internals import load_symmetric_memory_operators
from gt_passes._torch_internals import FakeTensorMode, value_of
from gt_passes.analysis.node_calls import arguments_of
from gt_passes.analysis.operator_effects import is_only_a_view
from gt_passes.contract import ChangeBounds, GraphPass, PassContext, PassReport, Refusal
from gt_passes.registry import register_pass
from gt_passes.tensor_parallel.matmul_fusion import MatmulFusion
from gt_passes.tensor_parallel.symmetric_memory import SymmetricMemory, SymmetricMemoryHere
from gt_passes.tensor_parallel.tensor_parallel_matmuls import (
    GatheredOperand,
    ScatteredProduct,
    find_gathered_operands,
    find_scattered_products,
    views_of,
)

_aten = torch.ops.aten


@register_pass
@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncTensorParallel(GraphPass):
    """Fuse all-gather with the products that read it, and a product with its reduce-scatter.

    *Before*::

        g = all_gather_into_tensor(x, 8, "tp");  a = cat(split(wait_tensor(g), B), 1)
        y = mm(view(a, [B*T, D]), b);  z = mm(view(a, [B*T, D]), c)

        p = view(mm(h, b), [B, T, D])
        g = reduce_scatter_tensor(cat(split(p, T/8, 1)), "sum", 8, "tp");  r = wait_tensor(g)

    *After*::

        f = fused_all_gather_matmul(x, [b, c], 1, "tp", return_A=False)
        y = view(f[1][0], [B*T, D]);  z = view(f[1][1], [B*T, D])

        r = fused_matmul_reduce_scatter(view(h, [B, T, K]), b, "sum", 1, "tp")

    Likewise a scattered product of operands in 8 bits (``fused_scaled_matmul_reduce_scatter``),
    with scales of tensors or of rows. A gathered activation that is rounded to 8 bits afterwards
    stays as it is: the fused operator gathers what is rounded already.

    Whoever else reads the gathered activation gets it from the fused call. Where dims of more than
    one element come before the gathered one, results are copied to the layout that was captured.

    *Refuses*: groups without symmetric memory; a gather or scatter along the dim of the product's
    sum; products whose other operand is made too late; products read by others than the
    reduce-scatter; anything on the other side of an operator of which nothing is known, and memory
    that is written to. Every collective that is left alone is named with the reason.

    In a pipeline it runs on each action, not on the stage before its cut: products that read one
    gathered gradient may be of dI and of dW, and one call cannot be in both.

    *Preserves numerics*: no. Products of other shapes may sum in another order, and the
    reduce-scatter sums the ranks in another order.
    """

    name: ClassVar[str] = "async-tensor-parallel"
    numerics: ClassVar[Numerics] = "reordered"
    mesh_axes: ClassVar[frozenset[MeshAxis]] = frozenset({"tp"})
    runs_on: ClassVar[frozenset[GraphKind]] = frozenset(
        {*STEP_GRAPHS, *JOINT_GRAPHS, *COMPUTING_ACTIONS}
    )
    keeps_dataflow: ClassVar[bool] = False

    symmetric_memory: SymmetricMemory = field(default_factory=SymmetricMemoryHere)
    """Knows which groups have symmetric memory."""

    @property
    def bounds(self) -> ChangeBounds:
        """The fused calls are not counted as collectives; a launch may move to its products."""
        return ChangeBounds(collective_bytes_may_shrink=True, peak_memory_growth=None)

    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        """Fuse; see the class."""
        load_symmetric_memory_operators()
        return _Fusion(graph_module.graph, context.fake_mode, self.symmetric_memory).run()


class _Fusion(MatmulFusion):
    def __init__(
        self, graph: Graph, fake_mode: FakeTensorMode, symmetric_memory: SymmetricMemory
    ) -> None:
        super().__init__(graph, fake_mode)
        self._symmetric_memory = symmetric_memory

    def run(self) -> PassReport:
        # Found before anything changes: one product may be fused to the left or to the right.
        scattered = list(find_scattered_products(self.graph))
        gathered = list(find_gathered_operands(self.graph))
        taken: set[Node] = set()
        num_gathers = num_scatters = 0
        for operand in gathered:
            matmuls, reason = self._matmuls_to_fuse(operand)
            if reason is not None:
                self.refusals.append(Refusal(node_name=operand.launch.name, reason=reason))
                continue
            self._fuse_gather(operand, matmuls)
            taken.update(matmuls)
            num_gathers += 1
        for product in scattered:
            reason = self._reason_against_scatter(product, taken)
            if reason is not None:
                self.refusals.append(Refusal(node_name=product.launch.name, reason=reason))
                continue
            self._fuse_scatter(product)
            num_scatters += 1
        counts = {"all_gathers_fused": num_gathers, "reduce_scatters_fused": num_scatters}
        return PassReport.of(counts, self.refusals)

    def _matmuls_to_fuse(self, operand: GatheredOperand) -> tuple[list[Node], str | None]:
        """The products to fuse, or why there are none."""
        if not operand.matmuls:
            return [], "no matrix product reads what it gathers"
        reason = self._symmetric_memory.reason_against(operand.group_name)
        if reason is not None:
            return [], reason
        value = value_of(operand.result)
        assert isinstance(value, torch.Tensor)
        if operand.gather_dim == value.ndim - 1:
            return [], f"it gathers dim {operand.gather_dim}, over which the product sums"
        if any(map(self.aliases.is_written, (operand.shard, operand.result))):
            return [], "what it gathers, or the result, is written to"
        first = self._first_reader(operand.result)
        if self.num_barriers[first] != self.num_barriers[operand.launch]:
            return [], f"{first.name} reads it behind an operator of which nothing is known"
        matmuls = [matmul for matmul in operand.matmuls if self._can_hoist(matmul, first, operand)]
        if not matmuls:
            return [], "the other operand of the product is made after the gathered one is read"
        return matmuls, None

    def _first_reader(self, result: Node) -> Node:
        views = {result, *views_of(result)}
        readers = (user for view in views for user in view.users if user not in views)
        return min(readers)  # a product, at least, reads it; nodes compare by place

    def _can_hoist(self, matmul: Node, first: Node, operand: GatheredOperand) -> bool:
        """Whether the right operand of a product is there before ``first``, up to views."""
        right = matmul.args[1]
        assert isinstance(right, Node)
        gathered = {operand.result, *views_of(operand.result)}
        while not right < first:
            if not is_only_a_view(right) or self.aliases.is_written(right):
                return False
            (right,) = right.all_input_nodes
        return right not in gathered

    def _fuse_gather(self, operand: GatheredOperand, matmuls: Sequence[Node]) -> None:
        first = self._first_reader(operand.result)
        for matmul in matmuls:
            self.hoist_views(matmul, first)
        views = sorted({*views_of(operand.result)})
        others = [
            user
            for view in (operand.result, *views)
            for user in view.users
            if user not in views and user not in matmuls
        ]
        with self.graph.inserting_before(first):
            fused = self.call(
                torch.ops.symm_mem.fused_all_gather_matmul.default,
                operand.shard,
                [matmul.args[1] for matmul in matmuls],
                operand.gather_dim,
                operand.group_name,
                return_A=bool(others),
                stands_for=matmuls[0],
            )
            products = self.call(operator.getitem, fused, 1, stands_for=matmuls[0])
            for number, matmul in enumerate(matmuls):
                product = self.call(operator.getitem, products, number, stands_for=matmul)
                value = value_of(matmul)
                assert isinstance(value, torch.Tensor)
                product = self._contiguous(product)
                matrix = self.call(
                    _aten.view.default, product, list(value.shape), stands_for=matmul
                )
                matmul.replace_all_uses_with(matrix)
            if others:
                whole = self.call(operator.getitem, fused, 0, stands_for=operand.result)
                whole = self._contiguous(whole)
                operand.result.replace_all_uses_with(whole)
        for view in views:
            if view < first and any(user not in matmuls for user in view.users):
                first.prepend(view)
        self._erase([*operand.internals, *views, *matmuls], unless=set(others))

    def _reason_against_scatter(self, product: ScatteredProduct, taken: set[Node]) -> str | None:
        matmul = product.matmul
        if matmul is None:
            return "what it scatters is not a matrix product"
        if matmul in taken:
            return "its product is fused with an all-gather already"
        reason = self._symmetric_memory.reason_against(product.group_name)
        if reason is not None:
            return reason
        if product.num_readers > 1:
            return f"others than the reduce-scatter read {matmul.name}"
        if product.reduce_op not in ("sum", "avg"):
            return f"it reduces by {product.reduce_op!r}, and the fused operator by sum or avg"
        if product.scatter_dim == len(product.shape) - 1:
            return f"it scatters dim {product.scatter_dim}, the last of the product"
        if matmul.target is _aten._scaled_mm.default:
            arguments = arguments_of(matmul)
            if product.scatter_dim > 1:
                return f"it scatters dim {product.scatter_dim} of a product in 8 bits"
            if arguments["bias"] is not None or arguments["scale_result"] is not None:
                return "its product in 8 bits has a bias or a scale of the result"
        if any(map(self.aliases.is_written, (matmul, *matmul.all_input_nodes))):
            return "the product, or an operand of it, is written to"
        if self.num_barriers[matmul] != self.num_barriers[product.launch]:
            return f"{matmul.name} is made before an operator of which nothing is known"
        return None

    def _fuse_scatter(self, product: ScatteredProduct) -> None:
        matmul = product.matmul
        assert matmul is not None
        with self.graph.inserting_before(product.launch):
            left = self._as_scattered(matmul.args[0], product)
            if matmul.target is _aten.mm.default:
                fused = self.call(
                    torch.ops.symm_mem.fused_matmul_reduce_scatter.default,
                    left,
                    matmul.args[1],
                    product.reduce_op,
                    product.scatter_dim,
                    product.group_name,
                    stands_for=matmul,
                )
            else:
                fused = self._fused_scaled(matmul, left, product)
        product.result.replace_all_uses_with(fused)
        self._erase(product.internals, unless=set())

    def _fused_scaled(self, matmul: Node, left: Node, product: ScatteredProduct) -> Node:
        arguments = arguments_of(matmul)
        scale = arguments["scale_a"]
        value = value_of(scale)
        assert isinstance(value, torch.Tensor)
        return self.call(
            torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter.default,
            left,
            arguments["mat2"],
            self._as_scattered(scale, product) if value.numel() > 1 else scale,
            arguments["scale_b"],
            product.reduce_op,
            product.scatter_dim,
            product.scatter_dim,
            product.group_name,
            list(product.shape),
            out_dtype=arguments["out_dtype"],
            use_fast_accum=arguments["use_fast_accum"],
            stands_for=matmul,
        )

    def _as_scattered(self, rows: Any, product: ScatteredProduct) -> Node:
        """A matrix of the product's rows with the dims before them that are scattered."""
        assert isinstance(rows, Node)
        assert product.matmul is not None
        value = value_of(rows)
        assert isinstance(value, torch.Tensor)
        if len(product.shape) == 2:
            return rows
        shape = [*product.shape[:-1], value.shape[1]]
        return self.call(_aten.reshape.default, rows, shape, stands_for=product.matmul)

    def _contiguous(self, node: Node) -> Node:
        value = value_of(node)
        assert isinstance(value, torch.Tensor)
        if value.is_contiguous():
            return node
        contiguous = torch.contiguous_format
        return self.call(_aten.clone.default, node, memory_format=contiguous, stands_for=node)

    def _erase(self, nodes: Sequence[Node], *, unless: set[Node]) -> None:
        for node in sorted({*nodes} - unless, reverse=True):
            if not node.users:
                self.graph.erase_node(node)
