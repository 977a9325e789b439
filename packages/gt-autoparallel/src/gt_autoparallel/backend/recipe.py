"""The passes of ``autoparallel_backend``: what a planned step gets in place of the native recipe.

Where the native recipe does what a user chooses among policies, this one has a single policy:
recompute just enough to keep the memory budget of the plan, overlap every collective with what does
not need it, and give the whole graph to Inductor as one partition. It is what AutoParallel's own
mode does (torchtitan's ``autoparallel`` experiment), with verified passes.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Graph, GraphModule, Node

from gt_config.graph_kinds import GraphKind
from gt_config.node_keys import FsdpCollectiveAnnotation, Residency, ResidencyAnnotation
from gt_config.numerics import Numerics
from gt_passes import (
    BucketAllGathers,
    BucketAllReduces,
    BucketReduceScatters,
    CanonicalizeViews,
    CompileWholeGraph,
    DelayWaits,
    GraphPass,
    InductorCompiler,
    MergeWaits,
    PrefetchAllGathers,
    RecomputeTagged,
    RemoveDeadCode,
    ReshardAfterForward,
    ShareAllGathers,
    SubgraphCompiler,
    estimate_peak_bytes,
)
from gt_passes.analysis.aliasing import AliasClasses
from gt_passes.analysis.collectives import is_collective
from gt_passes.analysis.layer_names import LayerNames
from gt_passes.analysis.operator_effects import is_barrier
from gt_passes.analysis.storages import Storages
from gt_passes.contract import ChangeBounds, PassContext, PassReport
from gt_passes.memory_policy.recomputability import Recomputability
from gt_passes.memory_policy.saved_tensor_policy import (
    EXPENSIVE_OPERATORS,
    SavedTensorPolicy,
    is_one_of,
)
from gt_trace import read_annotation, write_annotation


def backend_passes(
    *,
    memory_budget_bytes: int | None = None,
    bucket_cap_mib: int | None = None,
    reshard_after_forward: bool | None = None,
    compiler: SubgraphCompiler | None = None,
) -> tuple[GraphPass, ...]:
    """The passes for the captured step of a placed model, in their order.

    Args:
        memory_budget_bytes: of one rank, as for the plan; None for no limit: nothing is recomputed.
        bucket_cap_mib: the largest bucket in MiB; None for no limit.
        reshard_after_forward: whether FSDP parameters are gathered again for the backward; None:
            not, since the plan says which are.
        compiler: compiles the whole graph; None for Inductor.
    """
    has_budget = memory_budget_bytes is not None
    tagging = [TagToMemoryBudget(budget_bytes=memory_budget_bytes), RecomputeTagged()]
    return (
        RemoveDeadCode(),
        MergeWaits(),
        CanonicalizeViews(),
        ShareAllGathers(scope="phase"),
        *(tagging if has_budget else []),
        *([ReshardAfterForward()] if reshard_after_forward else []),
        BucketAllGathers(cap_mib=bucket_cap_mib),
        BucketReduceScatters(cap_mib=bucket_cap_mib),
        BucketAllReduces(cap_mib=bucket_cap_mib),
        DelayWaits(),
        PrefetchAllGathers(),
        OverlapCollectives(),
        CompileWholeGraph(compiler=compiler or InductorCompiler()),
    )


# Launch collectives as soon as their input is there, and wait where their result is needed.
_aten = torch.ops.aten
_LAYOUT_OPERATORS = frozenset(
    {
        _aten.cat.default,
        _aten.clone.default,
        _aten.permute.default,
        _aten.split.Tensor,
        _aten.t.default,
        _aten.transpose.int,
        _aten.view.default,
        operator.getitem,
    }
)
"""What brings a tensor into the order that a collective wants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapCollectives(GraphPass):
    """Let what computes between a value and its use run while the value is moved.

    A planned graph moves a value right before the operator that wants it in another layout. Here
    the launch, with the local copies that prepare it, goes up to where its input is made, and the
    wait, with the copies that unpack it, stays with the reader. All launches keep their order, so
    that ranks agree. FSDP's collectives have passes of their own (``prefetch-all-gathers``,
    ``delay-waits``), which bound what is in flight.

    *Before*::

        a = mm(x, w)
        b = mm(x, v)
        g = all_gather_into_tensor(a, 4, "tp");  h = wait_tensor(g)
        y = mm(h, u)

    *After*::

        a = mm(x, w)
        g = all_gather_into_tensor(a, 4, "tp")
        b = mm(x, v)
        h = wait_tensor(g)
        y = mm(h, u)

    *Refuses*, silently, since a late launch is only slow: to move across a barrier, or anything
    that shares memory with what is written to.

    *Preserves numerics*: yes.
    """

    name: ClassVar[str] = "overlap-collectives"
    numerics: ClassVar[Numerics] = "bitwise"
    runs_on: ClassVar[frozenset[GraphKind]] = frozenset({"STEP"})

    @property
    def bounds(self) -> ChangeBounds:
        """What is in flight is held longer."""
        return ChangeBounds(peak_memory_growth=None)

    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        """Move launches up; see the class."""
        num_moved = _hoist_launches(graph_module.graph)
        return PassReport(changed=num_moved > 0, counts={"launches_moved": num_moved})


def _hoist_launches(graph: Graph) -> int:
    aliases = AliasClasses(graph)
    previous_launch: Node | None = None
    last_barrier: Node | None = None
    num_moved = 0
    for node in list(graph.nodes):
        if is_barrier(node):
            last_barrier = node
        if not is_collective(node):
            continue
        if _may_move(node, aliases):
            num_moved += _hoist(node, aliases, after=[previous_launch, last_barrier])
        previous_launch = node
    return num_moved


def _may_move(launch: Node, aliases: AliasClasses) -> bool:
    if is_barrier(launch) or read_annotation(launch, FsdpCollectiveAnnotation) is not None:
        return False
    return not any(aliases.is_written(each) for each in (launch, *launch.all_input_nodes))


def _hoist(launch: Node, aliases: AliasClasses, *, after: list[Node | None]) -> bool:
    """Move ``launch``, and what only prepares it, behind the last of what it needs."""
    moving = _with_preparation(launch, aliases)
    needed = {n for each in moving for n in each.all_input_nodes} - set(moving)
    bounds = [*needed, *(each for each in after if each is not None)]
    if not bounds:
        return False
    place = max(bounds, key=_Position)
    while place.next.op == "placeholder":
        place = place.next
    if not place < moving[0] or _follow(place, moving):
        return False
    for each in reversed(moving):
        place.append(each)
    return True


def _with_preparation(launch: Node, aliases: AliasClasses) -> list[Node]:
    """The launch and the local copies and views that are made for it alone, in order."""
    moving = {launch}
    stack = list(launch.all_input_nodes)
    while stack:
        node = stack.pop()
        is_layout = node.op == "call_function" and node.target in _LAYOUT_OPERATORS
        if node in moving or not is_layout or not moving.issuperset(node.users):
            continue
        if not aliases.is_written(node):
            moving.add(node)
            stack += node.all_input_nodes
    return sorted(moving, key=_Position)


def _follow(place: Node, nodes: list[Node]) -> bool:
    """Whether ``nodes`` stand right behind ``place``, in order."""
    for expected in nodes:
        place = place.next
        if place is not expected:
            return False
    return True


@dataclass(frozen=True, slots=True)
class _Position:
    """Nodes compare by where they stand; ``max`` wants a key that does."""

    node: Node

    def __lt__(self, other: _Position) -> bool:
        return self.node < other.node


# Decide what the backward computes again, by a budget of bytes instead of a policy of layers.
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
