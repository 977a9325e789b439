"""Decide what the backward computes again, by a budget of bytes instead of a policy of layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule, Node

from gt_config.graph_kinds import GraphKind
from gt_config.node_keys import Residency, ResidencyAnnotation
from gt_config.numerics import Numerics
from gt_passes import estimate_peak_bytes
from gt_passes.analysis.layer_names import LayerNames
from gt_passes.analysis.storages import Storages
from gt_passes.contract import ChangeBounds, GraphPass, PassContext, PassReport
from gt_passes.memory_policy.recomputability import Recomputability
from gt_passes.memory_policy.saved_tensor_policy import (
    EXPENSIVE_OPERATORS,
    SavedTensorPolicy,
    is_one_of,
)
from gt_trace import write_annotation


@dataclass(frozen=True, slots=True, kw_only=True)
class TagToMemoryBudget(GraphPass):
    """Tag for recomputation just as much as the estimated peak is above the budget.

    Values whose recomputation costs the least time for the bytes that it frees go first, matrix
    products and attention last. ``RecomputeTagged`` carries it out. Within budget nothing is done.
    The idea is that of PyTorch's ``activation_memory_budget``, on the graph of a whole step.

    *Before*::

        h = aten.mm(x, w)       # layers.0
        a = aten.silu(h)        # layers.0; the backward reads h and a

    *After*, with a peak of less than ``a`` above the budget::

        h = aten.mm(x, w)
        a = aten.silu(h)        # tagged recompute

    *Refuses*: nothing; what is still above the budget is in the report, as ``bytes_over_budget``.

    *Preserves numerics*: yes.
    """

    name: ClassVar[str] = "tag-to-memory-budget"
    numerics: ClassVar[Numerics] = "bitwise"
    runs_on: ClassVar[frozenset[GraphKind]] = frozenset({"STEP"})

    budget_bytes: int | None
    """Bytes that parameters, gradients, optimizer state and activations may take on one rank; None
    for no limit, hence no tags."""

    optimizer_state_copies: float = 2.0
    """State that the optimizer keeps beside the graph, in units of the parameters' bytes."""

    layers: str = "layers.*"
    """Pattern of the names of the modules inside which values are recomputed."""

    @property
    def bounds(self) -> ChangeBounds:
        """Tags change nothing."""
        return ChangeBounds()

    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        """Tag saved tensors; see the class."""
        if self.budget_bytes is None:
            return PassReport(changed=False)
        beside = self.optimizer_state_copies * _static_bytes(graph_module, context)
        excess = int(estimate_peak_bytes(graph_module) + beside - self.budget_bytes)
        if excess <= 0:
            return PassReport(changed=False)
        storages = Storages(graph_module)
        recomputability = Recomputability(storages)
        chosen: dict[int, None] = {}
        freed = 0
        # Cheap operators first; only if these are not enough, what is expensive too.
        for kept_operators in (EXPENSIVE_OPERATORS, frozenset[str]()):
            policy = SavedTensorPolicy(
                layers=LayerNames(self.layers), keeps=is_one_of(kept_operators)
            )
            decisions = policy.decide(storages, recomputability)
            shall = {storage for storage, way in decisions.items() if way == "recompute"}
            held = _held_for_backward(shall, recomputability)
            for storage in _by_density(held, storages, recomputability):
                if freed >= excess:
                    break
                if storage not in chosen:
                    freed += storages.num_bytes[storage]
                    chosen |= _with_sources(storage, shall, held, recomputability)
        tags = _tags(chosen, storages, recomputability)
        for node, residency in tags.items():
            write_annotation(node, ResidencyAnnotation(residency=residency))
        counts = {
            "tensors_recompute": len(chosen),
            "bytes_freed": freed,
            "bytes_over_budget": max(0, excess - freed),
        }
        return PassReport(changed=bool(tags), counts=counts)


def _static_bytes(graph_module: GraphModule, context: PassContext) -> int:
    """Bytes of the parameters and buffers that the graph reads."""
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    values = [node.meta["val"] for node in placeholders[: len(context.static_input_names)]]
    return sum(int(value.numel()) * int(value.element_size()) for value in values)


def _held_for_backward(shall: Collection[int], recomputability: Recomputability) -> set[int]:
    """Those that the backward itself reads; others are only on the way to them."""
    backward = recomputability.is_backward
    return {
        storage
        for storage in shall
        if any(not backward.isdisjoint(n.users) for n in recomputability.holders(storage))
    }


def _with_sources(
    storage: int, shall: Collection[int], held: Collection[int], recomputability: Recomputability
) -> dict[int, None]:
    """``storage`` and what must be computed again to make it; what is held anyway stays so."""
    found: dict[int, None] = {}
    stack = [storage]
    while stack:
        each = stack.pop()
        if each in found:
            continue
        found[each] = None
        sources = recomputability.sources(each)
        stack += [source for source in sources if source in shall and source not in held]
    return found


def _by_density(
    held: Collection[int], storages: Storages, recomputability: Recomputability
) -> list[int]:
    """The storages that may be recomputed, the most bytes for the least traffic first.

    ::

        density(v) = bytes(v) / (bytes read to make v + bytes(v))
    """

    def density(storage: int) -> float:
        own = storages.num_bytes[storage]
        read = sum(storages.num_bytes[source] for source in recomputability.sources(storage))
        return own / max(1, own + read)

    return sorted(held, key=lambda storage: (-density(storage), storage))


def _tags(
    chosen: Mapping[int, None], storages: Storages, recomputability: Recomputability
) -> dict[Node, Residency]:
    """Every forward node that holds a chosen storage is recomputed with it."""
    return {
        node: "recompute"
        for node in storages.nodes
        if node.op == "call_function"
        and node not in recomputability.is_backward
        and not chosen.keys().isdisjoint(storages.of(node))
    }
