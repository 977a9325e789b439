"""Which saved tensors go to host memory: those that free the most, for the longest, first.

A tensor is idle from its last reader in the forward to its first reader in the backward. Bytes
times idle nodes is what offloading it frees, and gives the order in which tensors are taken until
the host memory is full. In nodes and not in microseconds, so that no cost model is needed.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Node

from gt_passes.analysis.collectives import is_collective, is_wait
from gt_passes.analysis.storages import Storages
from gt_passes.memory_policy.recomputability import Recomputability


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
