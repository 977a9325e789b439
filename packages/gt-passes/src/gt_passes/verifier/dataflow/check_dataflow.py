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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Self

from torch.fx import GraphModule, Node

from gt_passes.analysis.graph_scan import GraphScan, GraphScanner
from gt_passes.analysis.outlined_region import inline_regions
from gt_passes.graph_problem import GraphProblem
from gt_passes.verifier.dataflow.dataflow_differences import explain_difference
from gt_passes.verifier.dataflow.symbolic_execution import SymbolicExecution
from gt_passes.verifier.dataflow.value_table import ValueTable

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
