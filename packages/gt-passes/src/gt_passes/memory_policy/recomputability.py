"""Which values of the forward may be computed a second time, and what that takes.

Computing again gives the same bits if the operators are deterministic, if they still find what they
found the first time in the memory that they read, and if nobody sees that they run twice. What that
rules out, with its reason in words:

- operators that draw random numbers: a second draw gives other numbers, so the first is kept;
- operators that nobody promises to be pure (custom operators without a tag of pure ones);
- operators that decide between equals, as ``topk``: the decision is kept, since a GPU may decide
  otherwise the second time, and a batch of tokens would go elsewhere than in the forward;
- operators whose result has a size that only they know (data-dependent sizes);
- readers of memory that is written to between the forward and the end of the backward;
- operators that write to other memory than the result (running statistics), or that have other
  effects;
- in-place operators, unless each only continues the one that made the memory
  (``rsqrt(add_(mean(x), eps))``), so that the chain can be run again on fresh memory;
- gathering a parameter, which is for the FSDP passes to decide, and other collectives unless asked
  for.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch.fx import Node

from gt_passes._torch_internals import OpOverload
from gt_passes.analysis.aliasing import has_unknown_effects, written_nodes
from gt_passes.analysis.collectives import is_collective, is_pure_collective, is_wait
from gt_passes.analysis.fsdp_collective import fsdp_collective
from gt_passes.analysis.operator_effects import (
    draws_random_numbers,
    has_other_effect,
    is_barrier,
)
from gt_passes.analysis.storages import Storages
from gt_trace.node_metadata import phase_of

_DECISIONS = frozenset({"aten.topk", "aten.sort", "aten.argsort", "aten.histc", "aten.bincount"})


def operator_name(node: Node) -> str:
    """The operator that a node calls, without its overload, as ``aten.mm``."""
    if isinstance(node.target, OpOverload):
        return str(node.target.overloadpacket)
    return str(node.target)


class Recomputability:
    """What may be recomputed in one graph, by storage. Linear; the graph must not change.

    Args:
        storages: of the graph.
        recompute_collectives: whether collectives other than FSDP's may run again.
    """

    def __init__(self, storages: Storages, *, recompute_collectives: bool = False) -> None:
        self._storages = storages
        self._recompute_collectives = recompute_collectives
        self.position = {node: position for position, node in enumerate(storages.nodes)}
        """Where every node stands in execution order."""

        self.is_backward = {node for node in storages.nodes if phase_of(node) == "backward"}
        """The nodes of the phase backward."""

        self._writers: dict[int, list[int]] = {}  # positions, by storage
        self._holders: dict[int, list[Node]] = {}
        self._find_writers_and_holders()

    def holders(self, storage: int) -> list[Node]:
        """The nodes that hold a storage, in execution order: its maker, writers, views."""
        return self._holders[storage]

    def making(self, storage: int) -> list[Node]:
        """The nodes that make a storage and write to it, up to the last write.

        A writer need not have a result.
        """
        holders, writers = self._holders[storage], self._writers.get(storage)
        if not writers:
            return holders[:1]
        nodes = {node for node in holders if self.position[node] <= writers[-1]}
        nodes.update(self._storages.nodes[position] for position in writers)
        return sorted(nodes, key=self.position.__getitem__)

    def final_position(self, storage: int) -> int:
        """The position from which on a storage holds what the backward finds there."""
        writers = self._writers.get(storage, ())
        return max(self._storages.made_at[storage], *writers, 0)

    def sources(self, storage: int) -> dict[int, None]:
        """The other storages that are read to make a storage, in order."""
        read: dict[int, None] = {}
        for node in self.making(storage):
            read |= dict.fromkeys(self._storages.of_arguments(node))
        read.pop(storage, None)
        return read

    def reason_against(self, storage: int) -> str | None:
        """Why a storage must not be made again; None if it may."""
        making = self.making(storage)
        for node in making:
            reason = self.reason_against_operator(node)
            reason = reason or self._reason_against_other_writes(storage, node)
            if reason is not None:
                return reason if node is making[0] else f"{node.name}: {reason}"
        return self._reason_against_writes(storage, making)

    def reason_against_operator(self, node: Node) -> str | None:
        """Why a node must not run a second time, whatever it reads; None if it may."""
        if node.op != "call_function":
            return "it is an input or a constant"
        if fsdp_collective(node) is not None:
            return "it is part of a collective of FSDP"
        if has_other_effect(node):
            return f"{operator_name(node)} has an effect"
        if draws_random_numbers(node):
            return "it draws random numbers"
        if has_unknown_effects(node) or is_barrier(node):
            return f"nobody says that {operator_name(node)} is pure"
        if operator_name(node) in _DECISIONS:
            return "it decides between equals"
        if node.meta.get("unbacked_bindings"):
            return "only it knows the size of its result"
        if is_collective(node):
            if not self._recompute_collectives:
                return "it is a collective"
            if not is_pure_collective(node) or not all(map(_waits_or_measures, _readers(node))):
                return "it is a collective of which more is read than what is waited for"
        return None

    def _find_writers_and_holders(self) -> None:
        last_backward = max((self.position[node] for node in self.is_backward), default=-1)
        for position, node in enumerate(self._storages.nodes):
            for storage in dict.fromkeys(self._storages.of(node)):
                self._holders.setdefault(storage, []).append(node)
            if position > last_backward:
                continue  # the optimizer: nothing is recomputed after it
            for written in written_nodes(node):
                for storage in self._storages.of(written):
                    self._writers.setdefault(storage, []).append(position)

    def _reason_against_other_writes(self, storage: int, node: Node) -> str | None:
        for written in written_nodes(node):
            if any(other != storage for other in self._storages.of(written)):
                return f"it also writes to {written.name}"
        return None

    def _reason_against_writes(self, storage: int, making: list[Node]) -> str | None:
        for node, following in itertools.pairwise(making):
            # Whoever else reads the memory between two writes would have to run in between again.
            if list(node.users) != [following]:
                return f"{making[-1].name} writes to memory that others read before"
        for node in making:
            for read in self._storages.of_arguments(node):
                writers = self._writers.get(read)
                if read != storage and writers and writers[-1] > self.position[node]:
                    writer = self._storages.nodes[writers[-1]]
                    return f"it is computed from memory that {writer.name} writes to later"
        return None


def _readers(collective: Node) -> Iterator[Node]:
    """What uses the raw results of a collective."""
    for user in collective.users:
        if not is_wait(user) and isinstance(user.meta.get("val"), torch.Tensor):
            yield from user.users if "getitem" in operator_name(user) else (user,)
        else:
            yield user


def _waits_or_measures(reader: Node) -> bool:
    return is_wait(reader) or not isinstance(reader.meta.get("val"), (torch.Tensor, tuple, list))
