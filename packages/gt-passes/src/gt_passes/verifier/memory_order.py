"""Does every reader still see the memory that it saw before a pass?

A graph with in-place operators means something only together with its order: what a node finds in
the memory of its argument is the value that was made there, and what was written over it since. So
for each node and each argument the writes between the two are noted before a pass, and must be the
same after it. This one rule finds reads and writes that moved across each other, writes that were
dropped, doubled or swapped, and values that are used after something new overwrote them. It is the
idea of MemorySSA (LLVM, ``llvm/Analysis/MemorySSA.h``) on alias classes.

On one graph alone nothing of this can be judged, since a program may mean to read a view after its
base has changed. Only what a collective in flight reads or writes can: see
``gt_passes.verifier.collective_races``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch.fx import Node

from gt_passes.analysis.aliasing import has_unknown_effects
from gt_passes.analysis.graph_scan import GraphScan
from gt_passes.analysis.written_memory import (
    Memory,
    WriteInterval,
    data_readers,
    memories_written,
    origin_of,
)
from gt_passes.graph_problem import GraphProblem

_NOTHING: Mapping[Node, WriteInterval] = {}
_GIVEN = {"placeholder": "input", "get_attr": "constant"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOrder:
    """Which arguments of each node were written to since they were made, and by whom."""

    scan: GraphScan

    overwritten: Mapping[Node, Mapping[Node, WriteInterval]]
    """The writes, by reader and argument. Most readers of a captured step have none."""

    left_behind: Mapping[tuple[str, str], WriteInterval]
    """All writes to what the caller sees after the graph has run: by kind of node (placeholder or
    constant) and its target."""

    memory_of: Mapping[Node, Memory]
    """The written memory that each node may share."""

    @classmethod
    def of(cls, scan: GraphScan) -> MemoryOrder:
        """The memory order of a well-formed graph as it is now."""
        overwritten: dict[Node, dict[Node, WriteInterval]] = {}
        left_behind: dict[tuple[str, str], WriteInterval] = {}
        memory_of: dict[Node, Memory] = {}
        for memory in memories_written(scan):
            for member in memory.members:
                memory_of[member] = memory
                origin = origin_of(member)  # what is given was made before the graph runs
                made_at = -1 if origin.op in _GIVEN else scan.position[origin]
                for reader in data_readers(member):
                    writes = memory.writes_between(made_at, scan.position[reader])
                    if writes is not None:
                        overwritten.setdefault(reader, {})[member] = writes
                if member.op in _GIVEN:
                    writes = memory.writes_between(-1, len(scan.position))
                    assert writes is not None  # every memory here has a writer
                    left_behind[member.op, str(member.target)] = writes
        return cls(scan=scan, overwritten=overwritten, left_behind=left_behind, memory_of=memory_of)


def find_memory_order_problems(before: MemoryOrder, after: MemoryOrder) -> Iterator[GraphProblem]:
    """Yield a problem for each node that no longer sees the memory that it saw.

    A writer or reader that a pass made again stands for the one of the same operator that is gone.
    New nodes may write to memory that is new as well, and may read what an old reader saw.
    """
    return _Comparison(before, after).find_problems()


class _Comparison:
    """The memory orders of one graph, before and after one pass."""

    def __init__(self, before: MemoryOrder, after: MemoryOrder) -> None:
        self._before = before
        self._after = after
        self._old = before.scan.calls
        self._new = after.scan.calls
        self._seen_before: dict[Node, list[WriteInterval]] = {}  # by argument
        for writes in before.overwritten.values():
            for argument, interval in writes.items():
                self._seen_before.setdefault(argument, []).append(interval)

    def find_problems(self) -> Iterator[GraphProblem]:
        yield from self._dropped_writer_problems()
        for reader in {**self._after.overwritten, **self._before.overwritten}:
            if reader not in self._new:
                continue  # gone, and whatever stands for it is judged as itself
            if reader in self._old:
                yield from self._reader_problems(reader)
            else:
                yield from self._new_reader_problems(reader)
        yield from self._left_behind_problems()

    def _dropped_writer_problems(self) -> Iterator[GraphProblem]:
        made_again: Counter[object] = Counter(
            w.target for w in self._after.scan.writers if w not in self._old
        )
        for writer in self._before.scan.writers:
            if writer in self._new:
                continue
            target = self._old[writer].target
            made_again[target] -= 1
            if made_again[target] < 0:
                yield GraphProblem(
                    check="memory order",
                    node_name=writer.name,
                    target=str(target),
                    message="it writes to memory, and is gone",
                    expected="the node itself, or a new one of the same operator",
                    got="neither",
                )

    def _reader_problems(self, reader: Node) -> Iterator[GraphProblem]:
        """The problems of a node that was there before the pass."""
        old_writes = self._before.overwritten.get(reader, _NOTHING)
        writes = self._after.overwritten.get(reader, _NOTHING)
        old_inputs, inputs = self._old[reader].inputs, self._new[reader].inputs
        for argument in inputs:
            old, new = old_writes.get(argument), writes.get(argument)
            if argument in old_inputs:
                if not self._same(old, new):
                    yield _problem(reader, argument, expected=old, got=new)
            elif new is not None:
                replaced = (old_writes[a] for a in old_writes if a not in inputs)
                alike = any(self._alike(old, new) for old in replaced)
                if not alike and not self._may_be_read(argument, new):
                    yield _problem(reader, argument, expected=None, got=new)
        for argument, old in old_writes.items():
            if argument not in inputs:
                standing = (writes[a] for a in writes if a not in old_inputs)
                if not any(self._alike(old, new) for new in standing):
                    yield _problem(reader, argument, expected=old, got=None)

    def _new_reader_problems(self, reader: Node) -> Iterator[GraphProblem]:
        for argument, new in self._after.overwritten[reader].items():
            if not self._may_be_read(argument, new):
                yield _problem(reader, argument, expected=None, got=new)

    def _left_behind_problems(self) -> Iterator[GraphProblem]:
        old_writes, writes = self._before.left_behind, self._after.left_behind
        known = {(n.op, str(n.target)) for n in self._before.scan.position if n.op in _GIVEN}
        for op, target in {**old_writes, **writes}:
            old, new = old_writes.get((op, target)), writes.get((op, target))
            if (op, target) in known and not self._same(old, new):
                yield GraphProblem(
                    check="memory order",
                    node_name=target,
                    message=f"the memory of this {_GIVEN[op]} is written to in another way than "
                    "before",
                    expected=_describe(old),
                    got=_describe_new(new),
                )

    def _may_be_read(self, argument: Node, interval: WriteInterval) -> bool:
        """Whether new code may read an argument that was overwritten since it was made."""
        if any(self._same(old, interval) for old in self._seen_before.get(argument, ())):
            return True
        # The pass's own memory, which only it has written to.
        return not any(self._made_memory(m) for m in self._after.memory_of[argument].members)

    def _made_memory(self, member: Node) -> bool:
        """Whether a node is older than the pass and made memory, not only a view of it."""
        return member in self._old and origin_of(member) is member

    def _same(self, old: WriteInterval | None, new: WriteInterval | None) -> bool:
        if old is None or new is None:
            return old is new
        return (
            old.num_writes == new.num_writes
            and self._is_same_writer(old.first, new.first)
            and self._is_same_writer(old.last, new.last)
        )

    def _is_same_writer(self, old: Node, new: Node) -> bool:
        if old is new:
            return True
        made_again = old not in self._new and new not in self._old
        return made_again and self._old[old].target is new.target

    def _alike(self, old: WriteInterval, new: WriteInterval) -> bool:
        """Whether other memory was written to in the same way, as in a copy of a computation."""
        return (
            old.num_writes == new.num_writes
            and self._old[old.first].target is self._new[new.first].target
            and self._old[old.last].target is self._new[new.last].target
        )


def _problem(
    reader: Node, argument: Node, *, expected: WriteInterval | None, got: WriteInterval | None
) -> GraphProblem:
    return GraphProblem(
        check="memory order",
        node_name=reader.name,
        target=str(reader.target),
        message=f"between {argument.name} and its use here, its memory is written to in another "
        "way than before",
        expected=_describe(expected),
        got=_describe_new(got),
    )


def _describe(interval: WriteInterval | None) -> str:
    if interval is None:
        return "no write"
    if interval.num_writes == 1:
        return f"1 write, by {interval.first.name}"
    return f"{interval.num_writes} writes, by {interval.first.name} to {interval.last.name}"


def _describe_new(interval: WriteInterval | None) -> str:
    text = _describe(interval)
    if interval is not None and has_unknown_effects(interval.last):
        text += ", which no schema describes: register it with torch.library.custom_op"
    return text
