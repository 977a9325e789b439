"""The routed experts of one layer on one rank, by the model's own dispatcher and experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from gt_autoparallel.apply.kept_results import KeptResults
from gt_autoparallel.apply.recorded_forward import RecordedForward, record_forward
from gt_autoparallel.apply.run_redistribution import annotated
from gt_autoparallel.errors import PlanMismatchError
from gt_autoparallel.graph.experts import FIRST_WEIGHT_OPERAND, ExpertBlock, expert_parallel_axes
from gt_autoparallel.graph.placement_graph import PlacementNode
from gt_autoparallel.plan.placement_plan import PlacementPlan
from gt_config.node_keys import PhaseAnnotation
from gt_trace.capture.forward_in_backward import forward_in_backward


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedExperts:
    """Runs the forward and the backward node of one block.

    The forward is recorded by autograd, and its backward runs when the backward node does: what
    routing decided is kept in between, as it is where nobody planned, and operands are not, which
    the plan may gather again. Where the plan recomputes the forward, nothing of it is recorded, and
    the backward runs it once more before itself, but for how many rows are exchanged; or only what
    lies between its products, if these are kept.
    """

    name: str
    block: ExpertBlock
    expert_mesh: DeviceMesh | None
    runs_again: bool
    keeps_products: bool = False
    """Of a forward that runs again."""

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
            runs_again=any(node.index in plan.recomputed for node in nodes),
            keeps_products=any(
                node.phase == "backward" and node.index in plan.recomputed for node in nodes
            ),
        )

    def forward(self, operands: Sequence[torch.Tensor], state: dict[str, Any]) -> Sequence[Any]:
        """(tokens, scores, expert ids, token counts, weights) -> result for each token."""
        if self.runs_again:
            kept = state[self.name] = KeptResults(products=self.keeps_products)
            with torch.no_grad():
                return (kept.keep(lambda: self._run(operands, again=False)),)
        result, state[self.name] = self._recorded(operands, again=False)
        return (result,)

    def backward(self, operands: Sequence[torch.Tensor], state: dict[str, Any]) -> Sequence[Any]:
        """Gradient of the result first, then as forward -> of tokens, scores and each weight."""
        if self.runs_again:
            # Its operators would say that they belong to the forward.
            with forward_in_backward(), annotated(PhaseAnnotation(phase="backward")):
                kept: KeptResults = state[self.name]
                _, recorded = kept.give(lambda: self._recorded(operands[1:], again=True))
        else:
            recorded = state[self.name]
        return recorded.gradients(operands[0], operands[1:])

    def _recorded(
        self, operands: Sequence[torch.Tensor], *, again: bool
    ) -> tuple[torch.Tensor, RecordedForward]:
        tokens, scores, weights = 0, 1, range(FIRST_WEIGHT_OPERAND, len(operands))
        return record_forward(
            lambda given: self._run(given, again=again),
            operands,
            differentiate=(tokens, scores, *weights),
        )

    def _run(self, operands: Sequence[torch.Tensor], *, again: bool) -> torch.Tensor:
        tokens, scores, expert_ids, token_counts, *weights = operands
        return self.block.run(
            tokens,
            scores,
            expert_ids,
            token_counts,
            weights,
            expert_mesh=self.expert_mesh,
            again=again,
        )


def expert_axes(plan: PlacementPlan) -> set[tuple[int, ...]]:
    """Over which axes of the mesh a plan has experts exchange tokens, of each block."""
    return {
        axes for node in plan.graph.of_kind("experts") if (axes := _distributed_over(plan, node))
    }


def _distributed_over(plan: PlacementPlan, node: PlacementNode) -> tuple[int, ...]:
    axes = expert_parallel_axes(node, plan.options[node.index])
    # An axis of one rank has nothing to exchange.
    return tuple(axis for axis in axes if plan.mesh.sizes[axis] > 1)
