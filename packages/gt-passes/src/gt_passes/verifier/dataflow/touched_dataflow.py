"""Does what a pass touched still read the same values? Asked without following the whole graph.

A node that a pass left alone computes what it did, if what it reads is what it was. So the dataflow
is cut there: such nodes are unknowns, equal in both graphs, and what the pass made or removed is
followed up to them. Every node that both graphs have, and that reads something else than before,
must then read equal values. By induction along the new graph all nodes that both have, and with
them the outputs, are what they were: an equality over unknowns can only speak of such as stand
before the node at hand.

A cut can be too coarse, never wrong. Where it does not show that all is as before,
``check_dataflow`` follows both graphs from their inputs, and finds what differs if anything does.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from gt_passes._torch_internals import fast_tensor_attributes
from gt_passes.analysis.call_form import call_form
from gt_passes.analysis.graph_scan import GraphScan, NodeCall
from gt_passes.verifier.dataflow.flat_contents import atoms_of
from gt_passes.verifier.dataflow.operator_dataflow import apply_rule
from gt_passes.verifier.dataflow.value_table import TensorValue, TupleValue, Value, ValueTable
from gt_passes.verifier.memory_order import MemoryOrder

Exchanges = Mapping[Node, tuple[int, ...]]
"""By launch of a collective, the numbers of the exchanges of which its result consists: those of
the captured graph in its order, then what passes made of something else."""


@dataclass(slots=True)
class Cut:
    """What is known of the values of one graph while passes that keep its dataflow change it.

    A node that a pass left alone, or was shown to leave its value, is the same unknown in all of
    its states, so that buckets of an earlier pass are still known to consist of their members.
    """

    table: ValueTable = field(default_factory=ValueTable)
    unknowns: dict[Node, Value] = field(default_factory=dict)
    followed: set[int] = field(default_factory=set)
    """Identities of operators that some pass made or removed: in all states of the graph their
    calls are followed, so that equal values are seen to be."""


class _NotShownError(Exception):
    """The cut does not show that a value is as before."""


def captured_exchanges(scan: GraphScan) -> Exchanges:
    """The exchanges of a graph as captured: each result of a launch is one of its own."""
    found: dict[Node, tuple[int, ...]] = {}
    number = 0
    for launch in scan.launches:
        recorded = scan.calls[launch].value
        count = len(recorded) if isinstance(recorded, (tuple, list)) else 1
        found[launch] = tuple(range(number, number + count))
        number += count
    return found


def exchanges_after(
    before: MemoryOrder,
    after: MemoryOrder,
    *,
    cut: Cut,
    exchanges: Exchanges,
    same_groups: Mapping[str, str],
    keeps_dataflow: bool,
) -> Exchanges | None:
    """The exchanges of a graph after a pass that kept the dataflow, where it surely did.

    Args:
        before: of the graph before the pass.
        after: of the graph now, whose scan was made with that of ``before``.
        cut: of the graph before; it is that of the graph after, if that computes the same.
        exchanges: of the graph before.
        same_groups: as ``Dataflow.of``.
        keeps_dataflow: whether the graph must compute what it did. If not, the rest is believed to,
            and only asked what launches exchange.

    Returns:
        None where the whole of both graphs must be followed to tell.
    """
    try:
        with fast_tensor_attributes():
            comparison = _Comparison(before, after, cut, same_groups)
            if keeps_dataflow:
                comparison.require_same()
            return comparison.exchanges(exchanges)
    except _NotShownError:
        return None


class _Comparison:
    """One graph before and after a pass, followed where it was touched."""

    def __init__(
        self,
        before: MemoryOrder,
        after: MemoryOrder,
        cut: Cut,
        same_groups: Mapping[str, str],
    ) -> None:
        if not have_same_effects(before, after):
            raise _NotShownError
        self._old, self._new = before.scan.calls, after.scan.calls
        self._same_groups = same_groups
        self._table, self._unknowns = cut.table, cut.unknowns
        self._written = before.memory_of.keys() | after.memory_of.keys()
        # What they compute depends on more than the values of their operands.
        self._unusual = {
            node
            for scan in (before.scan, after.scan)
            for node in (
                *scan.barriers,
                *scan.random,
                *scan.writers,
                *scan.messages,
                *scan.layout_readers,
            )
        }
        self._before_launches, self._after_launches = before.scan.launches, after.scan.launches
        self._launches = frozenset((*self._before_launches, *self._after_launches))
        self._differing: set[Node] = set()  # of both graphs, and computes another value
        self._reached: set[Node] = set()  # reads one of those
        self._position = after.scan.position
        self._changed = after.scan.changed_nodes(before.scan)
        made = (self._new[node] for node in self._changed if node not in self._old)
        # What was made in place of something is followed, and so is its like that was left alone.
        self._followed = cut.followed
        self._followed.update(id(call.target) for call in made)
        self._followed.update(
            id(call.target) for node, call in self._old.items() if node not in self._new
        )
        self._values_before: dict[Node, Value] = {}
        self._values_after: dict[Node, Value] = {}

    def require_same(self) -> None:
        """Whatever reads something else than before computes what it did, outputs above all.

        Raises:
            _NotShownError: otherwise, or perhaps.
        """
        self._follow_launches()
        position = self._position
        pending = [position[node] for node in self._changed if node in self._old]
        heapq.heapify(pending)  # sorted: whatever a node reads was looked at before
        nodes = list(self._new)
        latest = -1
        while pending:
            index = heapq.heappop(pending)
            if index == latest:
                continue
            node, latest = nodes[index], index
            if not self._is_same(node):
                self._reached.update(node.users)
                for user in node.users:
                    if user in self._old:
                        heapq.heappush(pending, position[user])

    def exchanges(self, known: Exchanges) -> Exchanges:
        """The exchanges of the new graph.

        Args:
            known: those of the old one.
        """
        self._follow_launches()
        number_of: dict[int, int] = {}
        for launch, numbers in known.items():
            if launch in self._values_after:
                self._before(launch)
            if launch in self._values_before:
                atoms = _atoms(self._values_before[launch])
                if len(atoms) != len(numbers):
                    raise _NotShownError
                for atom, number in zip(atoms, numbers, strict=True):
                    number_of.setdefault(atom, number)
        following = 1 + max((number for each in known.values() for number in each), default=-1)
        changed = frozenset(self._changed)
        found: dict[Node, tuple[int, ...]] = {}
        for launch in self._after_launches:
            if launch in known and launch not in changed and launch not in self._values_before:
                found[launch] = known[launch]
                continue
            own: list[int] = []
            for atom in _atoms(self._after(launch)):
                if atom not in number_of:
                    number_of[atom] = following
                    following += 1
                own.append(number_of[atom])
            found[launch] = tuple(own)
        for node in self._differing:
            self._unknowns.pop(node, None)  # it stands for another value from now on
        return found

    def _follow_launches(self) -> None:
        """Follow what was launched before: buckets are told apart by what is known of members."""
        for launch in self._before_launches:
            if self._old[launch] is not self._new.get(launch):
                self._before(launch)

    def _is_same(self, node: Node) -> bool:
        """Whether a node of both graphs reads what it read, or else computes what it did."""
        old, new = self._old[node], self._new[node]
        if node.op == "get_attr" or node in self._unusual or node in self._written:
            raise _NotShownError
        (old_form, old_operands), (new_form, new_operands) = old.split(), new.split()
        if old_form is new_form and old_form.is_exact:
            pairs = zip(old_operands, new_operands, strict=True)
            if all(
                (x is y and x not in self._differing)
                or self._before(x).number == self._after(y).number
                for x, y in pairs
            ):
                return True
        if node.op != "call_function":
            raise _NotShownError
        if self._before(node).number == self._after(node).number:
            return True
        self._differing.add(node)
        return False

    def _before(self, node: Node) -> Value:
        return self._value(node, self._old, self._values_before)

    def _after(self, node: Node) -> Value:
        return self._value(node, self._new, self._values_after)

    def _value(
        self, node: Node, calls: Mapping[Node, NodeCall], values: dict[Node, Value]
    ) -> Value:
        """The value of a node in terms of unknowns."""
        pending = [node]
        while pending:
            current = pending[-1]
            if current in values:
                pending.pop()
                continue
            call = calls[current]
            if self._is_unknown(current, call):
                values[current] = self._unknown(current, call)
                continue
            if current in self._unusual or current in self._written:
                raise _NotShownError
            _, operands = call.split()
            missing = [operand for operand in operands if operand not in values]
            if missing:
                pending += missing
                continue
            values[current] = self._computed(current, call, [values[each] for each in operands])
        return values[node]

    def _is_unknown(self, node: Node, call: NodeCall) -> bool:
        """Whether a node was left alone and need not be followed."""
        if self._old.get(node) is not self._new.get(node) or node in self._reached:
            return False
        return (
            id(call.target) not in self._followed
            or node.op != "call_function"
            or node in self._unusual
            or node in self._written
            or not self._written.isdisjoint(call.split()[1])
        )

    def _unknown(self, node: Node, call: NodeCall) -> Value:
        value = self._unknowns.get(node)
        if value is None:
            if node in self._written or not _is_sized(call.value):
                raise _NotShownError
            definition = ("unknown", (int, len(self._unknowns)))
            value = self._unknowns[node] = self._table.result(definition, call.value)
        return value

    def _computed(self, node: Node, call: NodeCall, operands: list[Value]) -> Value:
        if node.op != "call_function" or not _is_sized(call.value):
            raise _NotShownError
        form, nodes = call.split()
        if not form.is_exact or not self._written.isdisjoint(nodes):
            raise _NotShownError
        if node in self._launches and self._same_groups:
            args = [self._group(item) if isinstance(item, str) else item for item in call.args]
            form, _ = call_form(call.target, args, call.kwargs)
        elif len(operands) == 1:
            made = self._table.made_of(form, operands[0])
            if made is not None:
                return made
        definition = ("call", form, *[operand.number for operand in operands])
        value = self._table.results.get(definition)
        if value is None:
            value = apply_rule(self._table, call, operands, self._group)
            if value is None:
                value = self._table.result(definition, call.value)
            self._table.results[definition] = value
        return value

    def _group(self, name: str) -> str:
        return self._same_groups.get(name, name)


def have_same_effects(before: MemoryOrder, after: MemoryOrder) -> bool:
    """Whether the same nodes do something besides making their result, in the same order."""
    old, new = before.scan, after.scan
    return (
        old.writers == new.writers
        and old.effects == new.effects
        and before.overwritten == after.overwritten
        and before.left_behind == after.left_behind
        and old.random == new.random
        and old.barriers == new.barriers
        and old.messages == new.messages
    )


def _atoms(value: Value) -> list[int]:
    """What a value consists of: see ``ValueTable.exchanges_of``."""
    if isinstance(value, TupleValue):
        return [atom for item in value.items for atom in _atoms(item)]
    made = list(atoms_of(value.contents)) if isinstance(value, TensorValue) else []
    return made or [value.number]  # where this rank has no elements, too


def _is_sized(recorded: object) -> bool:
    """Whether a recorded value is one or more tensors of known sizes."""
    if isinstance(recorded, torch.Tensor):
        return set(map(type, recorded.shape)) <= _ONLY_INTS
    return isinstance(recorded, (tuple, list)) and all(map(_is_sized, recorded))


_ONLY_INTS = {int}
