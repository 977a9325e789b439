"""Fake tensors of stamped nodes: same sizes as the traced ones, memory of their own unit.

Views of one memory must stay views of one memory, since passes read aliasing off the storages. So
every storage is known by the node at which it first appears (its *owner*), and a stamped tensor
lies in the storage of its own owner, which is found as any reference is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from gt_trace._torch_internals import FakeTensor, TensorMetadata, storage_key
from gt_trace.capture.fake_tensors import fake_over, tensors_in
from gt_trace.stamping.references import Reference
from gt_trace.stamping.report import NotStampable
from gt_trace.stamping.unit_symbols import UnitSymbols


@dataclass(frozen=True, slots=True)
class StoragePlan:
    """Whose memory one tensor lies in."""

    owner: Reference
    index: int
    """Position of the tensor that owns the memory among the tensors of the owner's value."""


def items_alike(ours: Any, theirs: Any, alike: Callable[[Any, Any], bool]) -> bool:
    """Whether two lists, tuples or dictionaries, of one type, have alike items in one order."""
    if isinstance(ours, dict):
        return list(ours) == list(theirs) and all(map(alike, ours.values(), theirs.values()))
    return len(ours) == len(theirs) and all(map(alike, ours, theirs))


class StorageOwners:
    """Which node each storage of a graph first appears at."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._owners: dict[int, tuple[Node, int]] = {}
        for node in nodes:
            for index, tensor in enumerate(tensors_in(node.meta.get("val"))):
                self._owners.setdefault(storage_key(tensor), (node, index))

    def of(self, tensor: torch.Tensor) -> tuple[Node, int]:
        """The owner, and which tensor of its value.

        Raises:
            NotStampable: no node has a value in that storage.
        """
        found = self._owners.get(storage_key(tensor))
        if found is None:
            raise NotStampable("a value lies in memory that no node owns")
        return found


class ValueMaker:
    """Makes values of stamped nodes."""

    def __init__(self, owners: StorageOwners, symbols: UnitSymbols) -> None:
        self._owners = owners
        self._symbols = symbols

    def plan(
        self, ours: Any, theirs: Any, meant: Callable[[Node, Node], Reference], where: str
    ) -> tuple[StoragePlan, ...]:
        """Whose memory the tensors of a value lie in, in any unit.

        Raises:
            NotStampable: the values differ in more than symbols and memory.
        """
        if not self._alike(ours, theirs):
            raise NotStampable(f"{where}: values of other shapes or kinds")
        plans: list[StoragePlan] = []
        for one, other in zip(tensors_in(ours), tensors_in(theirs), strict=True):
            node, index = self._owners.of(one)
            other_node, other_index = self._owners.of(other)
            if index != other_index:
                raise NotStampable(f"{where}: memory of other results of {node}")
            plans.append(StoragePlan(meant(node, other_node), index))
        return tuple(plans)

    def make(
        self,
        value: Any,
        plans: Sequence[StoragePlan],
        owner: Callable[[Reference], Node],
        node: Node,
        replaced: dict[Any, Any],
    ) -> Any:
        """A new value of ``node`` in another unit, like ``value`` of the first interior one.

        ``plans`` has one entry for each tensor of ``value``; ``owner`` finds the node that a
        reference means in that unit, and ``replaced`` the unit's symbol for one of the first;
        ``node`` owns memory that no earlier node does.
        """
        remaining = iter(plans)
        own: dict[int, torch.UntypedStorage] = {}

        def tensor(old: torch.Tensor) -> torch.Tensor:
            plan = next(remaining)
            holder = owner(plan.owner)
            if holder is not node:
                storage = _held(holder, plan.index).untyped_storage()
            elif plan.index in own:
                storage = own[plan.index]
            else:
                storage = own[plan.index] = self._new_storage(old, replaced)
            return self._tensor(old, storage, replaced)

        return self._map(value, tensor, replaced)

    def rehomed(
        self,
        value: Any,
        plans: Sequence[StoragePlan],
        owner: Callable[[Reference], Node],
        node: Node,
    ) -> Any:
        """``value``, of a traced node, with tensors moved to memory whose owner is now another."""
        remaining = iter(plans)
        moved = False

        def tensor(old: torch.Tensor) -> torch.Tensor:
            nonlocal moved
            plan = next(remaining)
            holder = owner(plan.owner)
            if holder is node:
                return old
            held = _held(holder, plan.index)
            if storage_key(held) == storage_key(old):
                return old
            moved = True
            return self._tensor(old, held.untyped_storage(), {})

        made = self._map(value, tensor, {})
        return made if moved else value

    def shape_facts(self, facts: TensorMetadata, replaced: dict[Any, Any]) -> TensorMetadata:
        """``meta["tensor_meta"]`` with the unit's symbols; without any it is the very same."""
        if not replaced:
            return facts
        return facts._replace(
            shape=torch.Size([self._symbols.size(size, replaced) for size in facts.shape]),
            stride=tuple(self._symbols.size(size, replaced) for size in facts.stride),
        )

    def _map(
        self, value: Any, tensor: Callable[[torch.Tensor], torch.Tensor], replaced: dict[Any, Any]
    ) -> Any:
        if isinstance(value, torch.Tensor):
            return tensor(value)
        if isinstance(value, list | tuple):
            return type(value)([self._map(each, tensor, replaced) for each in value])
        if isinstance(value, dict):
            mapped = {key: self._map(each, tensor, replaced) for key, each in value.items()}
            # fx's immutable containers stay what they are.
            return type(value)(mapped)
        if isinstance(value, torch.SymInt):
            return self._symbols.size(value, replaced)
        return value

    def _alike(self, ours: Any, theirs: Any) -> bool:
        if type(ours) is not type(theirs):
            return isinstance(ours, int | torch.SymInt) and self._symbols.same(ours, theirs)
        if isinstance(ours, torch.Tensor):
            return self._alike_tensors(ours, theirs)
        if isinstance(ours, list | tuple | dict):
            return items_alike(ours, theirs, self._alike)
        if isinstance(ours, int | torch.SymInt):
            return self._symbols.same(ours, theirs)
        if isinstance(ours, torch.SymBool | torch.SymFloat):
            return False
        return bool(ours == theirs)

    def _alike_tensors(self, ours: torch.Tensor, theirs: torch.Tensor) -> bool:
        facts = _fixed_facts(ours)
        if facts is None or facts != _fixed_facts(theirs):
            return False
        sizes = (*ours.shape, *ours.stride(), ours.storage_offset())
        others = (*theirs.shape, *theirs.stride(), theirs.storage_offset())
        return len(sizes) == len(others) and all(map(self._symbols.same, sizes, others))

    def _new_storage(self, old: torch.Tensor, replaced: dict[Any, Any]) -> torch.UntypedStorage:
        num_bytes = self._symbols.size(old.untyped_storage().nbytes(), replaced)
        if isinstance(num_bytes, int):
            return torch.UntypedStorage(num_bytes, device="meta")  # type: ignore[no-untyped-call]  # torch's
        made = torch.empty((num_bytes,), dtype=torch.uint8, device="meta").untyped_storage()
        self._symbols.derived(made.nbytes(), old.untyped_storage().nbytes(), replaced)
        return made

    def _tensor(
        self, old: torch.Tensor, storage: torch.UntypedStorage, replaced: dict[Any, Any]
    ) -> torch.Tensor:
        shape: Any = old.shape
        stride: Any = old.stride()
        offset: Any = old.storage_offset()
        if replaced:
            shape = [self._symbols.size(size, replaced) for size in shape]
            stride = [self._symbols.size(size, replaced) for size in stride]
            offset = self._symbols.size(offset, replaced)
        element = torch.empty((0,), dtype=old.dtype, device="meta")
        element.set_(storage, offset, shape, stride)
        if replaced:
            # It may have been asked for already, and is then what it was.
            self._symbols.derived(element.numel(), old.numel(), replaced)
        return fake_over(old, element)


def _held(node: Node, index: int) -> torch.Tensor:
    """One tensor of a node's value."""
    value = node.meta["val"]
    return value if isinstance(value, torch.Tensor) else tensors_in(value)[index]


def _fixed_facts(tensor: torch.Tensor) -> tuple[object, ...] | None:
    if not isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided:
        return None
    return (tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg(), tensor.dim())
