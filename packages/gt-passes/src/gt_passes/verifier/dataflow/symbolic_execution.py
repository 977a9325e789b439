"""Symbolic execution of a graph: the value of every node, in the order in which they run.

Values are numbers of definitions (``value_table``). Operators that only move elements are followed
by their rules (``operator_dataflow``), memory that is written to is kept up to date
(``memory_contents``), and what a node does besides making its result is chained: each random draw
is known by all draws before it, each unknown operator by all before it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch.fx import Node

from gt_passes._torch_internals import OpOverload, value_of
from gt_passes.analysis.aliasing import nodes_of_same_constant, shared_nodes, written_nodes
from gt_passes.analysis.call_form import CallForm, call_form
from gt_passes.analysis.collectives import is_pure_collective, is_wait
from gt_passes.analysis.graph_constants import frozen_literal
from gt_passes.analysis.graph_scan import GraphScan, NodeCall
from gt_passes.analysis.operator_effects import (
    is_only_a_view,
    only_asserts,
    reads_only_metadata,
)
from gt_passes.analysis.written_memory import memories_written
from gt_passes.verifier.dataflow.call_spelling import canonical_call
from gt_passes.verifier.dataflow.flat_contents import Piece
from gt_passes.verifier.dataflow.memory_contents import MemoryContents
from gt_passes.verifier.dataflow.operator_dataflow import apply_rule, item_of
from gt_passes.verifier.dataflow.value_table import (
    Definition,
    TensorValue,
    TupleValue,
    Value,
    ValueTable,
)


class SymbolicExecution:
    """One graph, executed once, on numbered values.

    Args:
        scan: of the graph.
        table: numbers values.
        same_groups: by name of a process group, the one as which it counts.
        before: the execution, in the same table, of an earlier state of the same graph: what a
            node computed there need not be worked out again where nothing about it changed.
    """

    def __init__(
        self,
        scan: GraphScan,
        *,
        table: ValueTable,
        same_groups: Mapping[str, str],
        before: SymbolicExecution | None = None,
    ) -> None:
        self.table: ValueTable = table
        assert before is None or before.table is table, "numbers of two tables cannot be compared"
        self.outputs: list[int] = []
        self.output_names: list[str] = []  # the node of each
        self.left_in_inputs: dict[str, int] = {}  # what each placeholder holds after the run
        self.constants: dict[str, tuple[int, int]] = {}  # what each holds before and after the run
        # All random draws, all calls of unknown effect, all point-to-point messages, in order.
        self.draws = self.unknown_calls = self.messages = table.number(("start",))
        self.checks: set[int] = set()  # what the graph asserts
        self.exchanges: dict[Node, tuple[str, ...]] = {}
        self._before = before
        self._names: dict[int, str] = {}  # of what is not in self._values
        self._scan = scan
        self._graph_module = scan.graph_module
        self._values: dict[Node, Value] = {}
        self._same_groups = same_groups
        self._launches = frozenset(scan.launches)
        self._barriers = frozenset(scan.barriers)
        self._random = frozenset(scan.random)
        self._effects = frozenset(scan.effects)
        self._writers = frozenset(scan.writers)
        self._layout_readers = frozenset(scan.layout_readers)
        class_of = {
            member: index
            for index, memory in enumerate(memories_written(scan))
            for member in memory.members
        }
        self._memory = MemoryContents(
            table=table,
            class_of=class_of,
            view_of=self._value_of_call,
            load_other=self._values.__getitem__,
        )
        self._in_written_memory: dict[Node, Value] = {}  # what launches gave that write to it
        placeholders = self._graph_module.graph.find_nodes(op="placeholder")
        self._inputs = {node: index for index, node in enumerate(placeholders)}
        self._written_inputs = [node for node in placeholders if node in class_of]
        self._writes_constants = any(node.op == "get_attr" for node in class_of)
        self._unusual = (
            self._barriers
            | self._random
            | self._effects
            | self._writers
            | self._layout_readers
            | class_of.keys()
        )
        if same_groups:
            self._unusual |= self._launches
        self._messages = {
            node
            for node in scan.launches
            if not is_pure_collective(node) and node not in self._writers
        }
        self._unusual |= self._messages
        table.begin_graph()

    def names(self) -> dict[int, str]:
        """A node for each value, and for what it is made of."""
        names: dict[int, str] = {}
        for node, value in self._values.items():
            _name(names, value, node)
        return {**self._names, **names}

    def run(self) -> None:
        """Walk the graph: all of it, or what may have another value than before."""
        position = self._scan.position
        before, self._before = self._before, None  # nor what it remembers itself
        if before is None:
            for node in position:
                self._visit(node)
        else:
            nodes = list(position)
            pending = [position[node] for node in self._to_visit(before)]
            heapq.heapify(pending)
            latest = -1
            while pending:
                index = heapq.heappop(pending)
                if index == latest:
                    continue
                node, latest = nodes[index], index
                self._visit(node)
                if self._values.get(node) is not before._values.get(node):
                    for user in node.users:
                        heapq.heappush(pending, position[user])
        for launch in self._scan.launches:
            result = self._in_written_memory.get(launch) or self._values[launch]
            known = None
            if before is not None and result is before._values.get(launch):
                known = before.exchanges.get(launch)
            self.exchanges[launch] = known or self.table.exchanges_of(result)

    def _to_visit(self, before: SymbolicExecution) -> list[Node]:
        """Take over what surely is as before; returns the other nodes, but for users of those."""
        class_of, values, calls = self._memory.class_of, self._values, self._scan.calls
        nodes = list(self._scan.changed_nodes(before._scan))
        values.update(before._values)
        forgotten = [
            node
            for node, value in values.items()
            if (type(value) is not TensorValue and not _has_known_sizes(value))
            or node not in calls
            or node in class_of
        ]
        for node in forgotten:
            del values[node]
        nodes += calls.keys() - values.keys()
        nodes += self._unusual
        nodes += (user for member in class_of for user in member.users)
        nodes += (node for node in self._scan.attributes)
        return nodes

    def _visit(self, node: Node) -> None:
        if node.op == "call_function":
            if node in self._unusual:
                self._visit_unusual(node)
                if node in self._launches and node in self._memory.class_of:
                    self._in_written_memory[node] = self._memory.read(node)
                return
            call = self._scan.calls[node]
            form, nodes = call.split()
            operands = [self._values.get(each) or self._load(each) for each in nodes]
            value: Value | None = None
            if len(operands) == 1:
                if type(operands[0]) is TupleValue:
                    value = item_of(call, operands[0])
                else:
                    value = self.table.made_of(form, operands[0])
            if type(value) is not TensorValue:
                results = self.table.results
                definition = ("call", form, *[operand.number for operand in operands])
                value = results.get(definition)
                if not _has_known_sizes(value):
                    value = results[definition] = self._compute(node, definition, operands)
            self._values[node] = value
        elif node.op == "placeholder":
            self._define(node, ("input", (int, self._inputs[node]), str(node.target)))
        elif node.op == "get_attr":
            # Equal bits are one value until somebody writes to one of them.
            name = str(node.target) if self._writes_constants else None
            self._define(node, ("constant", self._scan.attributes[node], name))
            if node in self._memory.class_of:
                self._share_constant(node)
        elif node.op == "output":
            self._visit_output(node)

    def _define(self, node: Node, definition: Definition) -> None:
        value = self.table.result(definition, value_of(node))
        recorded = value_of(node)
        if isinstance(recorded, torch.SymInt):
            self.table.bind_size(recorded, value)
        self._set(node, value)

    def _set(self, node: Node, value: Value, sources: Sequence[Node] = ()) -> None:
        """A node made a value, in memory of its own, or perhaps in that of some sources."""
        if node not in self._memory.class_of:
            self._values[node] = value
            return
        _name(self._names, value, node)
        if sources:
            self._memory.share_perhaps(node, sources, value)
        else:
            self._memory.allocate(node, value)

    def _share_constant(self, node: Node) -> None:
        """Let a constant be the memory of an earlier node of the same one, or perhaps of others."""
        position = self._scan.position
        others = [
            other
            for other in nodes_of_same_constant(node)
            if position.get(other, position[node]) < position[node]
        ]
        same = next((other for other in others if other.target == node.target), None)
        if same is not None:
            self._memory.rename(node, same)
        elif others:
            self._memory.share_perhaps(node, others, self._memory.read(node))

    def _load(self, node: Node) -> Value:
        value = self._values.get(node)
        return self._memory.read(node) if value is None else value

    def _operands(self, node: Node, load: Callable[[Node], Value]) -> list[Value]:
        return [load(operand) for operand in self._scan.calls[node].split()[1]]

    def _definition(
        self, node: Node, operands: Sequence[Value], load: Callable[[Node], Value]
    ) -> Definition:
        """A call on numbered values."""
        call = self._scan.calls[node]
        form, _ = call.split()
        if self._same_groups and node in self._launches:
            args = [self._group_of(item) if isinstance(item, str) else item for item in call.args]
            form, _ = call_form(call.target, args, call.kwargs)
        if node not in self._layout_readers:
            return ("call", form, *[operand.number for operand in operands])
        read = self._scan.calls[node].split()[1]
        numbers = [
            each.number if (flat := self._dense(operand, each)) is None else flat
            for operand, each in zip(read, operands, strict=True)
        ]
        # A graph may take the same memory once where the graph before took it by two views.
        makers = dict.fromkeys(
            ("laid out", load(source).number, self.table.layout(recorded))
            if (flat := self._dense(source, load(source))) is None
            else ("dense", flat)
            for source in _storage_makers(node)
            if isinstance(recorded := value_of(source), torch.Tensor)
        )
        return ("call", form, *numbers, *makers)

    def _dense(self, node: Node, value: Value) -> int | None:
        """Return the number of the elements of the storage; None if a tensor lacks some of them."""
        recorded = value_of(node)
        if (
            type(value) is TensorValue
            and isinstance(recorded, torch.Tensor)
            and recorded.is_contiguous()
            and not (recorded.is_conj() or recorded.is_neg())
            and recorded.untyped_storage().nbytes() == recorded.numel() * recorded.itemsize
        ):
            return self.table.tensor((recorded.numel(),), value.contents).number
        return None

    def _group_of(self, name: str) -> str:
        return self._same_groups.get(name, name)

    def _value_of_call(self, node: Node, load: Callable[[Node], Value]) -> Value:
        operands = self._operands(node, load)
        return self._compute(node, self._definition(node, operands, load), operands)

    def _compute(self, node: Node, definition: Definition, operands: Sequence[Value]) -> Value:
        """The value of a call: by the rule of its operator, or a new one."""
        call = self._scan.calls[node]
        recorded = call.value
        if isinstance(recorded, torch.SymInt):
            if reads_only_metadata(node) or not isinstance(node.target, OpOverload):
                made = apply_rule(self.table, call, operands, self._group_of)  # an item of a tuple
                if made is None:
                    return self.table.size(recorded)
            else:
                made = self.table.result(definition, recorded)
            self.table.bind_size(recorded, made)
            return made
        value = apply_rule(self.table, call, operands, self._group_of)
        if value is not None:
            return value
        return self.table.result(self._as_written_once(call, definition, operands), recorded)

    def _as_written_once(
        self, call: NodeCall, definition: Definition, operands: Sequence[Value]
    ) -> Definition:
        """The definition of a call by the one spelling of its arguments (``canonical_call``)."""
        form = definition[1]
        if definition[0] != "call" or form is not call.split()[0]:
            return definition  # with the name of another group
        assert type(form) is CallForm
        ranks = tuple(len(each.shape) if type(each) is TensorValue else None for each in operands)
        spelled = self.table.spellings.get((form, ranks))
        if spelled is None:
            spelled = canonical_call(form, call, ranks)
            if form.is_exact:
                self.table.spellings[form, ranks] = spelled
        spelling, order = spelled
        numbers = [operands[index].number for index in order]
        return ("call", spelling, *numbers, *definition[2 + form.num_operands :])

    def _visit_unusual(self, node: Node) -> None:
        operands = self._operands(node, self._load)
        call = self._scan.calls[node]
        as_written = self._definition(node, operands, self._load)
        definition = self._as_written_once(call, as_written, operands)
        if node in self._barriers:
            # It may do anything, also read parameters and buffers: what was done to them before it,
            # and which draws came before it, is part of what it is.
            definition = ("unknown", *definition, self.unknown_calls, self.draws, *self._written())
            self.unknown_calls = self.draws = self.table.number(definition)
        elif node in self._random:
            definition = ("draw", *definition, self.draws)
            self.draws = self.table.number(definition)
        elif node in self._messages:
            definition = ("message", *definition, self.messages)
            self.messages = self.table.number(definition)
        if node in self._effects:
            if only_asserts(node):
                self.checks.add(self.table.number(definition))
            else:
                definition = ("effect", *definition, self.unknown_calls)
                self.unknown_calls = self.table.number(definition)
        if node in self._writers:
            self._visit_writer(node, definition, operands)
            return
        is_plain = definition[0] == "call"
        sources = [source for source in shared_nodes(node) if source in self._memory.class_of]
        if sources and is_plain and (is_only_a_view(node) or is_wait(node)):
            self._memory.share(node, sources)
            _name(self._names, self._load(node), node)
            return
        if is_plain:
            value = self._compute(node, as_written, operands)
        else:
            value = self.table.result(definition, value_of(node))
        self._set(node, value, sources)

    def _visit_writer(self, node: Node, definition: Definition, operands: Sequence[Value]) -> None:
        written = list(dict.fromkeys(written_nodes(node)))
        number = self.table.number(definition)
        result = value_of(node)
        sources = [source for source in shared_nodes(node) if source in self._memory.class_of]
        if node in self._barriers and not isinstance(node.target, OpOverload):
            for index, argument in enumerate(written):
                effect = self.table.number(("argument", number, (int, index)))
                self._memory.clobber(argument, effect)
            self._set(node, self.table.result(("result", number), result), sources)
            return
        held = None
        if len(written) == 1 and definition[0] == "call":
            held = apply_rule(self.table, self._scan.calls[node], operands, self._group_of)
        values = [
            held or self.table.result(("after", number, (int, index)), value_of(argument))
            for index, argument in enumerate(written)
        ]
        for argument, value in zip(written, values, strict=True):
            self._memory.write(argument, value)
        if len(written) == 1 and isinstance(result, torch.Tensor) and _returns_argument(node):
            self._memory.rename(node, written[0])
            _name(self._names, self._load(node), node)
        else:
            self._set(node, self.table.result(("result", number), result), sources)

    def _written(self) -> list[int]:
        """What the inputs hold now that are written to at some time."""
        return [self._memory.read(node).number for node in self._written_inputs]

    def _visit_output(self, node: Node) -> None:
        (results,) = node.args

        def visit(result: Any) -> None:
            if isinstance(result, (tuple, list)):
                for item in result:
                    visit(item)
            elif isinstance(result, dict):
                for item in result.values():
                    visit(item)
            elif isinstance(result, Node):
                self.outputs.append(self._load(result).number)
                self.output_names.append(result.name)
            else:
                self.outputs.append(self.table.number(("literal", frozen_literal(result))))
                self.output_names.append(repr(result))

        visit(results)
        for placeholder in self._inputs:
            self.left_in_inputs[str(placeholder.target)] = self._load(placeholder).number
        for node, frozen in self._scan.attributes.items():
            if frozen.kind != "constant":
                continue
            definition = ("constant", frozen, str(node.target))
            held = self.table.result(definition, value_of(node)).number
            left = self._load(node).number if node in self._memory.class_of else held
            self.constants[str(node.target)] = (held, left)


def _has_known_sizes(value: Value | None) -> TypeGuard[TensorValue | TupleValue]:
    """Whether a value is one or more tensors that bind no symbols of the graph at hand."""
    if type(value) is TupleValue:
        return all(type(item) is TensorValue for item in value.items)
    return type(value) is TensorValue


def _storage_makers(node: Node) -> Iterator[Node]:
    """The arguments of a node, and what they are views of: all that decides where elements lie."""
    pending = list(node.all_input_nodes)
    seen: set[Node] = set()
    while pending:
        source = pending.pop()
        if source in seen:
            continue
        seen.add(source)
        viewed = list(shared_nodes(source))
        # A view in the middle changes nothing; what may copy instead may have made the storage.
        if source in node.all_input_nodes or not (viewed and is_only_a_view(source)):
            yield source
        pending += viewed


def _name(names: dict[int, str], value: Value, node: Node) -> None:
    """Remember a node for a value, and for what it is made of, unless there is one."""
    names.setdefault(value.number, node.name)
    if type(value) is TensorValue and len(value.contents) == 1:
        item = value.contents[0]
        if type(item) is Piece:
            names.setdefault(item.atom, node.name)


def _returns_argument(node: Node) -> bool:
    """Whether the one result of a node is the argument that it wrote."""
    if not isinstance(node.target, OpOverload):
        return False
    returns = node.target._schema.returns
    alias = returns[0].alias_info if len(returns) == 1 else None
    return alias is not None and alias.is_write
