"""The routed experts of one layer on one rank, by the model's own dispatcher and experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from gt_autoparallel._torch_internals import TorchDispatchMode
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


# Running a forward twice, and parts of it once.
#
# How many rows ranks exchange is found out once: who asks again waits for all ranks, and for the
# host. If a plan says so, all that matrix products and exchanges make is kept too. The second
# run is given it in their places, and computes what lies between. The idea is that of PyTorch's
# selective activation checkpointing (``torch/utils/checkpoint.py``), which leaves the choice to
# a partitioner where it is traced; a plan has chosen.
_aten, _collectives = torch.ops.aten, torch.ops._c10d_functional
_EXCHANGES = frozenset({_collectives.all_to_all_single.default, _collectives.wait_tensor.default})
_PRODUCTS = frozenset({_aten.mm.default, _aten.bmm.default, _aten._grouped_mm.default})

ResultT = TypeVar("ResultT")
_IsKept = Callable[[Any, Sequence[Any]], bool]
"""Says of an operator and its arguments whether the result of the first run is for both."""


class KeptResults:
    """Results of a first run, in order, for a second run of the same operators.

    Args:
        products: whether those of matrix products and of all exchanges; or only how many rows are
            exchanged, and what ranks tell one another of it.
    """

    def __init__(self, *, products: bool) -> None:
        self._products = products
        self._results: list[tuple[Any, Any]] = []

    def keep(self, run: Callable[[], ResultT]) -> ResultT:
        """Run for the first time."""
        with _Keep(self._results, self._is_kept):
            return run()

    def give(self, run: Callable[[], ResultT]) -> ResultT:
        """Run for the second time, once.

        Raises:
            AssertionError: the run is another one.
        """
        results, self._results = self._results, []
        with _Give(results, self._is_kept):
            found = run()
        assert not results, f"{len(results)} results of the first run were not asked for"
        return found

    def _is_kept(self, func: Any, args: Sequence[Any]) -> bool:
        if func is _aten._local_scalar_dense.default:
            return True
        if func in _EXCHANGES:
            return self._products or not args[0].is_floating_point()
        return self._products and func in _PRODUCTS


class _Run(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is untyped
    def __init__(self, results: list[tuple[Any, Any]], is_kept: _IsKept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._results, self._is_kept = results, is_kept


class _Keep(_Run):  # type: ignore[no-untyped-call]  # as above
    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._is_kept(func, args):
            self._results.append((func, result))
        return result


class _Give(_Run):  # type: ignore[no-untyped-call]  # as above
    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if not self._is_kept(func, args):
            return func(*args, **(kwargs or {}))
        assert self._results, f"the first run had no more {func}"
        kept, result = self._results.pop(0)
        assert kept is func, f"the first run had {kept} where the second has {func}"
        return result
