"""The dataflow of a graph: which operators on which values gave each output.

A pass that says it keeps the dataflow may reorder, share, recompute, remove what nobody reads, move
elements between buffers, and copy to another device and back. It may not change what is computed.
So every output, and everything that the graph leaves in its inputs, must have the same number in
one table of values (``value_table``) before the pass and after it. Proving each run of a compiler
right, instead of the compiler, is translation validation (Pnueli, Siegel and Singerman, TACAS
1998); Alive2 does it for LLVM, ``gt_passes.verifier.memory_order`` for order alone.

What is not proven: that two *different* operators agree. A pass that replaces one operator by
others declares ``keeps_dataflow = False``.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Self

from torch.fx import GraphModule, Node

from gt_passes.analysis.graph_scan import GraphScan, GraphScanner
from gt_passes.analysis.outlined_region import inline_regions
from gt_passes.graph_problem import GraphProblem
from gt_passes.verifier.dataflow.flat_contents import Contents, Piece, atoms_of, whole
from gt_passes.verifier.dataflow.symbolic_execution import SymbolicExecution
from gt_passes.verifier.dataflow.value_table import Definition, ValueTable

_NO_GROUPS: Mapping[str, str] = MappingProxyType({})
_MOST_PROBLEMS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataflow:
    """What a graph computes, by numbers of values. Compare only those of one table."""

    execution: SymbolicExecution
    """Which node has which value, and what the graph does besides."""

    @property
    def table(self) -> ValueTable:
        """What the numbers stand for."""
        return self.execution.table

    @property
    def exchanges(self) -> Mapping[Node, tuple[str, ...]]:
        """``ValueTable.exchanges_of`` the result of each launch of a collective."""
        return self.execution.exchanges

    @classmethod
    def of(
        cls,
        graph_module: GraphModule,
        *,
        table: ValueTable | None = None,
        scan: GraphScan | None = None,
        same_groups: Mapping[str, str] = _NO_GROUPS,
        before: Dataflow | None = None,
    ) -> Self:
        """The dataflow of a graph.

        Args:
            graph_module: well-formed, with fake values in ``node.meta["val"]`` that are right.
            table: that of the dataflow to compare with; None for a new one.
            scan: of the graph, if there is one already.
            same_groups: by name of a process group, the name of one with the same ranks in the
                same order, as which it counts.
            before: of the same graph before it was edited, in the same table: what did not change
                is taken from there.
        """
        inlined = inline_regions(graph_module)
        if inlined is not graph_module:
            graph_module, scan, before = inlined, None, None
        walk = SymbolicExecution(
            scan or GraphScanner().scan(graph_module),
            table=ValueTable() if table is None else table,
            same_groups=same_groups,
            before=None if before is None else before.execution,
        )
        walk.run()
        return cls(execution=walk)

    def find_differences(self, after: Dataflow) -> Iterator[GraphProblem]:
        """Yield a problem for each output or effect that ``after`` computes differently.

        Each problem names the values nearest to the inputs at which the two part.

        Args:
            after: of the graph after a pass, in the same table.
        """
        assert after.table is self.table, "numbers of two tables cannot be compared"
        old, new = self.execution, after.execution
        differing = list(_differing(old, new))
        if not differing and old.checks <= new.checks:
            return
        names_before, names_after = old.names(), new.names()
        found = 0
        seen: set[tuple[int, int]] = set()
        for subject, expected, got, node_name in differing:
            difference = explain_difference(
                self.table, expected, got, names_before=names_before, names_after=names_after
            )
            if (difference.expected_number, difference.got_number) in seen:
                continue  # the same cause
            seen.add((difference.expected_number, difference.got_number))
            found += 1
            if found > _MOST_PROBLEMS:
                return
            yield GraphProblem(
                check="dataflow",
                node_name=difference.node_name or node_name,
                message=f"{subject} is not computed as before",
                expected=difference.expected,
                got=difference.got,
            )
        for number in sorted(old.checks - new.checks):
            yield GraphProblem(
                check="dataflow",
                message="something is not asserted any more",
                expected=explain_difference(
                    self.table, number, number, names_before=names_before, names_after=names_before
                ).expected,
            )


def _differing(
    before: SymbolicExecution, after: SymbolicExecution
) -> Iterator[tuple[str, int, int, str | None]]:
    """What has another number: in words, both numbers, and the node."""
    outputs = zip(before.outputs, after.outputs, after.output_names, strict=False)
    for position, (expected, got, name) in enumerate(outputs):
        if expected != got:
            yield f"output {position} ({name})", expected, got, name
    for name, expected in before.left_in_inputs.items():
        got = after.left_in_inputs.get(name, expected)
        if expected != got:
            yield f"what is left in input {name}", expected, got, None
    for name, (held, expected) in before.constants.items():
        _, got = after.constants.get(name, (held, held))
        if expected != got:
            yield f"what is left in constant {name}", expected, got, None
    for subject, expected, got in (
        ("the sequence of random draws", before.draws, after.draws),
        ("the sequence of unknown operators", before.unknown_calls, after.unknown_calls),
        ("the sequence of messages", before.messages, after.messages),
    ):
        if expected != got:
            yield subject, expected, got, None


# Where two values part: from two numbers of one table back to the first operators that differ.
_MOST_ARGUMENTS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDifference:
    """The two values nearest to the inputs of the graph that should be equal and are not."""

    expected_number: int
    got_number: int

    node_name: str | None
    """The node of the latter; None where no node alone has it."""

    expected: str
    got: str
    """Both in words."""


def explain_difference(
    table: ValueTable,
    expected: int,
    got: int,
    *,
    names_before: Mapping[int, str],
    names_after: Mapping[int, str],
) -> ValueDifference:
    """Walk back from two values to the first two that are computed differently.

    Args:
        table: of both numbers.
        expected: number of the value before a pass.
        got: number of the value after it.
        names_before: nodes by number, for the text.
        names_after: likewise.
    """
    steps = [(expected, got)]
    while True:
        first, second = map(table.definition_of, steps[-1])
        deeper = _first_difference(first, second)
        if deeper is None:
            break
        steps.append(deeper)
    # Two different inputs say less than the operator that read one instead of the other; but where
    # one node stands for something else now, that is the difference.
    computed = [
        (first, second)
        for first, second in steps
        if not (_is_leaf(table, first) or _is_leaf(table, second))
        or names_before.get(first, first) == names_after.get(second, second)
    ]
    expected, got = computed[-1] if computed else steps[-1]
    return ValueDifference(
        expected_number=expected,
        got_number=got,
        node_name=names_after.get(got),
        expected=_describe(table, expected, names_before),
        got=_describe(table, got, names_after),
    )


def _is_leaf(table: ValueTable, number: int) -> bool:
    return table.definitions[number][0] in ("input", "constant", "start")


def _first_difference(expected: Definition, got: Definition) -> tuple[int, int] | None:
    """The first pair of values in which two definitions differ; None if they differ in more."""
    if expected[0] != got[0]:
        return None
    if expected[0] in ("tensor", "joined"):
        return _first_atom_difference(expected[-1], got[-1], expected[1:-1] == got[1:-1])
    pairs = list(_value_differences(expected, got))
    if None in pairs or not pairs:
        return None
    found = [pair for pair in pairs if pair is not None]
    swapped = sorted(first for first, _ in found) == sorted(second for _, second in found)
    # Operands that changed places are the difference, and not what they are.
    return None if swapped else found[0]


def _first_atom_difference(
    expected: Hashable, got: Hashable, same_shape: bool
) -> tuple[int, int] | None:
    assert isinstance(expected, tuple)  # Contents, as is the other
    assert isinstance(got, tuple)
    if not same_shape or _layout(expected) != _layout(got):
        return None
    old, new = list(atoms_of(expected)), list(atoms_of(got))
    differing = [pair for pair in zip(old, new, strict=True) if pair[0] != pair[1]]
    if not differing or (len(old) > 1 and sorted(old) == sorted(new)):
        return None
    return differing[0]


def _layout(contents: Contents) -> Hashable:
    """Contents without their atoms."""
    return tuple(
        item[1:]
        if isinstance(item, Piece)
        else (
            item.num_rows,
            tuple((column.first[1:], column.row_stride) for column in item.columns),
        )
        for item in contents
    )


def _value_differences(expected: Hashable, got: Hashable) -> Iterator[tuple[int, int] | None]:
    """Pairs of numbers of values that differ; None for anything else that does."""
    if type(expected) is int and type(got) is int:
        if expected != got:
            yield expected, got
    elif _is_node_like(expected) and _is_node_like(got):
        assert isinstance(expected, tuple)
        assert isinstance(got, tuple)
        if len(expected) != len(got):
            yield None
            return
        for first, second in zip(expected, got, strict=True):
            yield from _value_differences(first, second)
    elif expected != got:
        yield None


def _is_node_like(part: Hashable) -> bool:
    """Whether a part of a definition may hold numbers: a tuple that is not a constant."""
    return isinstance(part, tuple) and not (len(part) == 2 and isinstance(part[0], type))


def _describe(table: ValueTable, number: int, names: Mapping[int, str]) -> str:
    """What a value is, in one line."""
    name = names.get(number)
    text = _describe_definition(table, number, names)
    return text if name is None else f"{text}, as in node {name}"


def _describe_definition(table: ValueTable, number: int, names: Mapping[int, str]) -> str:
    definition = table.definition_of(number)
    tag = definition[0]
    text: str
    if tag in ("tensor", "joined"):
        text = _describe_contents(table, definition[-1], names)
        if tag == "tensor":
            assert isinstance(definition[1], tuple)
            text += f" of shape {list(definition[1])}"
    elif tag == "start":
        text = "none"
    elif tag == "input":
        text = f"the input {definition[2]}"
    elif tag == "constant":
        text = f"the {definition[1]}"
    elif tag in ("after", "result", "item"):
        assert isinstance(definition[1], int)
        text = _describe_definition(table, definition[1], names)
    else:
        arguments = [_argument(table, part, names) for part in definition[1:]]
        if tag in ("call", "elementwise", "draw", "unknown", "message"):
            tag, *arguments = (argument for argument in arguments if argument != "call")
        if len(arguments) > _MOST_ARGUMENTS:
            arguments[_MOST_ARGUMENTS:] = ["..."]
        text = f"{tag}({', '.join(arguments)})"
    return text


def _describe_contents(table: ValueTable, contents: Hashable, names: Mapping[int, str]) -> str:
    assert isinstance(contents, tuple)  # Contents
    atoms = list(dict.fromkeys(atoms_of(contents)))
    if not atoms:
        return "an empty tensor"
    if contents == whole(atoms[0], table.numel_of(atoms[0])):
        return _describe_definition(table, atoms[0], names)
    described = [_name_of(table, atom, names) for atom in atoms[:_MOST_ARGUMENTS]]
    if len(atoms) > _MOST_ARGUMENTS:
        described.append("...")
    if len(contents) == 1 and isinstance(contents[0], Piece):
        _, offset, dims = contents[0]
        return f"the part {list(dims)} from element {offset} of {described[0]}"
    return "parts of " + ", ".join(described)


def _argument(table: ValueTable, part: Hashable, names: Mapping[int, str]) -> str:
    if type(part) is int:
        return _name_of(table, part, names)
    if isinstance(part, tuple):
        if len(part) == 2 and isinstance(part[0], type):
            return float.fromhex(part[1]).__repr__() if part[0] is float else str(part[1])
        if part and part[0] == "list":
            return "[" + ", ".join(_argument(table, item, names) for item in part[1:]) + "]"
        if len(part) == 2 and isinstance(part[0], str):
            return f"{part[0]}={_argument(table, part[1], names)}"
        return "(" + ", ".join(_argument(table, item, names) for item in part) + ")"
    return str(part)


def _name_of(table: ValueTable, number: int, names: Mapping[int, str]) -> str:
    """A short name of a value: a node that has it, or what made it."""
    name = names.get(number)
    if name is not None:
        return name
    definition = table.definition_of(number)
    tag = definition[0]
    if tag == "input":
        return str(definition[2])
    if tag in ("tensor", "joined"):
        return _describe_contents(table, definition[-1], names)
    if tag in ("call", "elementwise"):
        return f"a result of {definition[1]}"
    if tag == "start":
        return "the start"
    return f"a result of {tag}"
