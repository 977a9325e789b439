"""The routed experts of one layer on one rank, by the model's own dispatcher and experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from gt_autoparallel.errors import PlanMismatchError
from gt_autoparallel.graph.experts import FIRST_WEIGHT_OPERAND, ExpertBlock, expert_parallel_axes
from gt_autoparallel.graph.placement_graph import PlacementNode
from gt_autoparallel.plan.placement_plan import PlacementPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedExperts:
    """Runs the forward and the backward node of one block.

    The forward is recorded by autograd, and its backward runs when the backward node does: what
    routing decided is kept in between, as it is where nobody planned.
    """

    name: str
    block: ExpertBlock
    expert_mesh: DeviceMesh | None

    @classmethod
    def of(
        cls,
        plan: PlacementPlan,
        mesh_of_axes: Callable[[tuple[int, ...]], DeviceMesh],
        *,
        name: str,
        block: ExpertBlock,
    ) -> PlacedExperts:
        """The block as the plan has it.

        Args:
            plan: the plan.
            mesh_of_axes: the ranks along some axes of its mesh together, in one dimension.
            name: of the block's module.
            block: the block.

        Raises:
            PlanMismatchError: the plan runs its forward in one way and its backward in another.
        """
        nodes = [node for node in plan.graph.of_kind("experts") if node.target == name]
        ways = [
            plan.options[node.index].operands[-FIRST_WEIGHT_OPERAND - len(block.weight_names) :]
            for node in nodes
        ]
        if any(way != ways[0] for way in ways):
            raise PlanMismatchError(
                f"the plan runs forward and backward of the experts {name!r} in different layouts"
            )
        distributed = _distributed_over(plan, nodes[0]) if nodes else ()
        return cls(
            name=name,
            block=block,
            expert_mesh=mesh_of_axes(distributed) if distributed else None,
        )

    def forward(self, operands: Sequence[torch.Tensor], state: dict[str, Any]) -> Sequence[Any]:
        """(tokens, scores, expert ids, token counts, weights) -> result for each token."""
        tokens, scores, expert_ids, token_counts, *weights = operands
        with torch.enable_grad():
            tokens, scores, *weights = leaves = [
                value.detach().requires_grad_() for value in (tokens, scores, *weights)
            ]
            result = self.block.run(
                tokens, scores, expert_ids, token_counts, weights, expert_mesh=self.expert_mesh
            )
        state[self.name] = (leaves, result)
        return (result.detach(),)

    def backward(self, operands: Sequence[torch.Tensor], state: dict[str, Any]) -> Sequence[Any]:
        """Gradient of the result first, then as forward -> of tokens, scores and each weight."""
        leaves, result = state[self.name]
        gradients: tuple[torch.Tensor, ...] = torch.autograd.grad(result, leaves, operands[0])
        return gradients


def expert_axes(plan: PlacementPlan) -> set[tuple[int, ...]]:
    """Over which axes of the mesh a plan has experts exchange tokens, of each block."""
    return {
        axes for node in plan.graph.of_kind("experts") if (axes := _distributed_over(plan, node))
    }


def _distributed_over(plan: PlacementPlan, node: PlacementNode) -> tuple[int, ...]:
    axes = expert_parallel_axes(node, plan.options[node.index])
    # An axis of one rank has nothing to exchange.
    return tuple(axis for axis in axes if plan.mesh.sizes[axis] > 1)
