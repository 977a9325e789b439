"""Decide what is kept of the forward for the backward.

The decision is written on the nodes, and other passes carry it out: ``recompute-tagged`` and
``offload-tagged``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from gt_config import MemoryPolicy, SavedOpSelector
from gt_config.graph_kinds import STEP_GRAPHS, GraphKind
from gt_config.numerics import Numerics
from gt_passes.analysis.collectives import is_collective, is_wait
from gt_passes.analysis.layer_names import LayerNames
from gt_passes.analysis.storages import Storages
from gt_passes.contract import GraphPass, PassContext, PassReport
from gt_passes.memory_policy.memory_policy_pass import counts_of, tags_of, write_tags
from gt_passes.memory_policy.recomputability import Recomputability
from gt_passes.memory_policy.saved_tensor_policy import (
    EXPENSIVE_OPERATORS,
    SavedTensorPolicy,
    every_second_product,
    is_one_of,
)
from gt_passes.registry import register_pass


@register_pass
@dataclass(frozen=True, slots=True, kw_only=True)
class TagSavedTensors(GraphPass):
    """Tag each tensor that the forward makes and the backward reads: save, recompute or offload.

    *Before*::

        h = aten.mm(x, w)             # layers.0
        a = aten.silu(h)              # layers.0
        y = aten.mm(a, v)             # layers.0
        ...                           # the backward reads h and a

    *After*, policy selective: the same nodes, with h tagged ``save`` and a tagged ``recompute``.

    What a view shares with its base is decided once, for both. See ``saved_tensor_policy`` for how,
    and ``recomputability`` for what is never recomputed. Nothing outside layers is recomputed or
    offloaded.

    *Refuses*: nothing; what must not be recomputed is saved.

    *Preserves numerics*: yes.
    """

    name: ClassVar[str] = "tag-saved-tensors"
    numerics: ClassVar[Numerics] = "bitwise"
    runs_on: ClassVar[frozenset[GraphKind]] = frozenset({*STEP_GRAPHS, "STAGE"})
    carried_out_by: ClassVar[frozenset[str]] = frozenset({"recompute-tagged", "offload-tagged"})

    policy: MemoryPolicy = "save_all"
    """save_all: tag nothing, which means to save everything.
    selective: save what is expensive to compute again, where it is needed.
    selective_alternate: as selective, but of the matrix products of a layer every second one.
    full_recompute: save the inputs of each layer.
    offload: as selective, and copy what is saved in layers to host memory."""

    saved_ops: tuple[SavedOpSelector, ...] = ()
    """Results that are saved whatever the policy is, where they are needed."""

    layers: str = "layers.*"
    """Pattern of the names of the modules that are layers."""

    expensive_operators: frozenset[str] = EXPENSIVE_OPERATORS
    """What selective and offload save, by name without overload, as ``aten.mm``."""

    recompute_collectives: bool = False
    """Whether collectives inside layers, other than FSDP's, may run a second time in the backward.
    It takes tensor-parallel gathered activations out of memory for up to as many bytes of
    communication again. ``RecomputeTagged`` needs the same."""

    host_budget_bytes: int | None = None
    """Host memory that policy offload may fill; None for no limit."""

    offload_min_bytes: int = 16 * 1024
    """Smaller tensors are not offloaded."""

    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        """Tag saved tensors; see the class."""
        if self.policy == "save_all":
            return PassReport(changed=False)
        storages = Storages(graph_module)
        recomputability = Recomputability(
            storages, recompute_collectives=self.recompute_collectives
        )
        layers = LayerNames(self.layers)
        decisions = SavedTensorPolicy(
            layers=layers,
            keeps=self._keeps(storages, recomputability),
            saved_selectors=self.saved_ops,
        ).decide(storages, recomputability)
        tags = tags_of(decisions, storages, recomputability)
        if self.policy == "offload":
            saved_in_layers = [
                storage
                for storage, residency in decisions.items()
                if residency == "save" and layers.layer_of(storages.maker[storage]) is not None
            ]
            offloaded = choose_offloaded(
                saved_in_layers,
                storages,
                recomputability,
                host_budget_bytes=self.host_budget_bytes,
                min_bytes=self.offload_min_bytes,
            )
            for storage, node in offloaded.items():
                decisions[storage] = "offload"
                # The backward makes the views that it reads anew, from what comes back.
                holders = recomputability.holders(storage)
                for view in holders[holders.index(node) + 1 :]:
                    if view not in recomputability.is_backward:
                        tags[view] = "recompute"
                tags[node] = "offload"
        return PassReport(changed=write_tags(tags), counts=counts_of(decisions))

    def _keeps(
        self, storages: Storages, recomputability: Recomputability
    ) -> Callable[[Node], bool]:
        """Whether what an operator gives is not computed again, by the policy."""
        if self.policy == "full_recompute":
            return lambda node: False
        is_expensive = is_one_of(self.expensive_operators)
        if self.policy != "selective_alternate":
            return is_expensive
        forward = (node for node in storages.nodes if node not in recomputability.is_backward)
        again = every_second_product(forward, LayerNames(self.layers))
        return lambda node: is_expensive(node) and node not in again


# Which saved tensors go to host memory: those that free the most, for the longest, first.
#
# A tensor is idle from its last reader in the forward to its first reader in the backward. Bytes
# times idle nodes is what offloading it frees, and gives the order in which tensors are taken
# until the host memory is full. In nodes and not in microseconds, so that no cost model is
# needed.
def choose_offloaded(
    saved: Iterable[int],
    storages: Storages,
    recomputability: Recomputability,
    *,
    host_budget_bytes: int | None,
    min_bytes: int,
) -> dict[int, Node]:
    """The tensors to offload, by storage, in execution order.

    Each is a node that holds all of its storage, in the order of memory; what else the backward
    reads of it are views.

    Args:
        saved: storages that are saved for the backward.
        storages: of the graph.
        recomputability: of the graph.
        host_budget_bytes: what all together may take; None for no limit.
        min_bytes: smaller ones stay, since a copy costs its launch.
    """
    gains: list[tuple[int, int, Node]] = []
    for storage in saved:
        node = _whole(storage, storages, recomputability)
        idle = _idle_nodes(storage, recomputability)
        if node is not None and idle > 0 and storages.num_bytes[storage] >= max(min_bytes, 1):
            gains.append((-storages.num_bytes[storage] * idle, storage, node))
    free = host_budget_bytes
    chosen = {}
    for _, storage, node in sorted(gains, key=lambda gain: gain[:2]):
        num_bytes = storages.num_bytes[storage]
        if free is not None and num_bytes > free:
            continue
        free = None if free is None else free - num_bytes
        chosen[storage] = node
    return dict(sorted(chosen.items(), key=lambda choice: recomputability.position[choice[1]]))


def _whole(storage: int, storages: Storages, recomputability: Recomputability) -> Node | None:
    """The node that fills its storage, and of which all that the backward reads are views."""
    making = recomputability.making(storage)
    if any(node in recomputability.is_backward for node in making):
        return None
    holders = recomputability.holders(storage)
    readable = is_wait if is_collective(making[0]) else _is_tensor
    final = recomputability.final_position(storage)
    written = (i for i, node in enumerate(holders) if recomputability.position[node] >= final)
    index = next((i for i in written if readable(holders[i])), None)
    if index is None:
        return None
    node = holders[index]
    backward = recomputability.is_backward
    if not all(backward.isdisjoint(earlier.users) for earlier in holders[:index]):
        return None
    value = node.meta["val"]
    if any(isinstance(extent, torch.SymInt) for extent in (*value.shape, *value.stride())):
        return None  # whether it fills its storage depends on data
    fills = value.numel() * value.element_size() == storages.num_bytes[storage]
    return node if fills and value.layout is torch.strided else None


def _idle_nodes(storage: int, recomputability: Recomputability) -> int:
    position, backward = recomputability.position, recomputability.is_backward
    forward_end, backward_start = 0, len(position)
    for holder in recomputability.holders(storage):
        for reader in (holder, *holder.users):
            if reader in backward:
                backward_start = min(backward_start, position[reader])
            else:
                forward_end = max(forward_end, position[reader])
    return backward_start - forward_end if backward_start < len(position) else 0


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)
