"""Verification of one graph while passes change it.

After a pass, or after several that are verified together, what they did not touch is as right as it
was: only nodes that changed and their users are propagated again, and the order is only looked at
where it changed. What cannot be seen that way, because a pass wrote into a recorded value in place,
is seen at the end, when all values are read once more, and every operator is asked again unless all
of them are what they were.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Graph, GraphModule, Node

from gt_passes._torch_internals import OpOverload
from gt_passes.analysis.collectives import is_pure_collective
from gt_passes.analysis.graph_scan import GraphScan
from gt_passes.analysis.scanned_graph import graph_made_again, made_again
from gt_passes.contract import GraphPass
from gt_passes.graph_problem import GraphProblem
from gt_passes.verifier.barrier_order import find_barrier_problems
from gt_passes.verifier.collective_order import note_exchanges
from gt_passes.verifier.collective_races import find_race_problems
from gt_passes.verifier.collective_waits import find_repeated_waits
from gt_passes.verifier.dataflow.check_dataflow import Dataflow
from gt_passes.verifier.dataflow.value_table import ValueTable
from gt_passes.verifier.declared_bounds import (
    Traffic,
    find_removal_problems,
    find_traffic_problems,
    traffic_of,
)
from gt_passes.verifier.memory_order import MemoryOrder, find_memory_order_problems
from gt_passes.verifier.repropagation import UnverifiedNode
from gt_passes.verifier.storage_lifetimes import surely_held_no_longer
from gt_passes.verifier.verifier import GraphInterface, Verifier


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verified:
    """A graph of which nothing is wrong, as later ones are compared with it."""

    scan: GraphScan
    order: MemoryOrder
    dataflow: Dataflow | None
    """Where a pass near it must keep it."""


class VerificationSession:
    """Verifies a graph as captured, after passes, and completely at the end.

    Args:
        graph_module: as captured; its inputs and outputs are what passes must keep.
        passes: that will run, in order.
        same_groups: as ``PassContext.same_groups``.
    """

    def __init__(
        self,
        graph_module: GraphModule,
        *,
        passes: Sequence[GraphPass],
        same_groups: Mapping[str, str],
    ) -> None:
        self._graph_module = graph_module
        self._passes = passes
        self._same_groups = same_groups
        self._verifier = Verifier()
        self._interface = GraphInterface.of(graph_module)
        self._scan = self._earlier_scan = self._verifier.scan(graph_module)
        self._tolerated = frozenset(find_repeated_waits(self._scan))
        self._values = ValueTable()
        self._traffic: Mapping[Node, Traffic] = {}
        self._verified: _Verified | None = None
        self.unverified: tuple[UnverifiedNode, ...] = ()
        """What the latest complete verification could not re-propagate."""

        self.is_unchanged = False
        """Whether the graph was as it had been when it was last looked at."""

    def verify_capture(self) -> tuple[GraphProblem, ...]:
        """Everything that can be said of the graph before any pass."""
        problems = self._verify_completely()
        if not problems:
            self.take_as_verified()
        return problems

    def take_as_verified(self) -> None:
        """Begin as ``verify_capture`` does where another session has just verified this graph."""
        self._traffic = traffic_of(self._scan, same_groups=self._same_groups)
        self._verified = self._note(-1)

    def verify_completely(self) -> tuple[GraphProblem, ...]:
        """Everything that can be said of the graph as it is now, whatever was verified before."""
        if not self._scan.still_holds():
            self._scan = self._verifier.scan(self._graph_module, before=self._scan)
        return self._verify_completely()

    def _verify_completely(self) -> tuple[GraphProblem, ...]:
        report = self._verifier.verify(
            self._graph_module,
            interface=self._interface,
            tolerated_waits=self._tolerated,
            scan=self._scan,
        )
        self.unverified = report.unverified
        return report.problems

    def verify_pass(self, position: int) -> tuple[GraphProblem, ...]:
        """What the pass at ``position`` did wrong to the graph; it has just run."""
        self._look()
        problems = () if self.is_unchanged else self._new_problems()
        if problems:
            return problems
        return (*self._bound_problems(position), *self._change_problems(position))

    def look_after_pass(self, position: int) -> tuple[GraphProblem, ...]:
        """What passes up to ``position`` did beyond their bounds since the latest look.

        Since then only passes must have run that are alike in what they may do to collectives, and
        one alone if it is held to its nodes or to a peak of memory.
        """
        self._look()
        return tuple(self._bound_problems(position))

    def verify_passes(self, last: int, *, completely: bool) -> tuple[GraphProblem, ...]:
        """What passes up to ``last`` did wrong together since the latest verification.

        All must keep the dataflow, and the graph has been looked at after the last of them.

        Args:
            last: the position of the last pass.
            completely: whether to verify what they did not touch too: see ``verify_completely``.
        """
        problems = self._verify_completely() if completely else self._new_problems()
        return problems or self._change_problems(last)

    @property
    def surely_holds_nothing_longer(self) -> bool:
        """Whether what happened between the latest looks cannot have raised the peak of memory."""
        return self.is_unchanged or surely_held_no_longer(self._earlier_scan, self._scan)

    def graph_before(self) -> GraphModule:
        """The graph before its latest change that a look found, made again."""
        return made_again(self._earlier_scan)

    def verified_graph(self) -> Graph:
        """The graph as it was when nothing was wrong with it, made again."""
        assert self._verified is not None
        return graph_made_again(self._verified.scan)

    def _look(self) -> None:
        self.is_unchanged = self._scan.still_holds()
        if not self.is_unchanged:
            self._earlier_scan = self._scan
            self._scan = self._verifier.scan(self._graph_module, before=self._scan)

    def _new_problems(self) -> tuple[GraphProblem, ...]:
        """What is wrong with the graph that was not before, whatever was computed before."""
        assert self._verified is not None
        return self._verifier.find_new_problems(
            self._verified.scan,
            self._scan,
            interface=self._interface,
            tolerated_waits=self._tolerated,
        )

    def _bound_problems(self, position: int) -> Iterator[GraphProblem]:
        """What the pass at a position, or passes with its bounds, changed beyond them."""
        if self.is_unchanged:
            return
        before, known = self._earlier_scan, self._traffic
        self._traffic = traffic_of(
            self._scan,
            same_groups=self._same_groups,
            known=known,
            changed=self._scan.changed_nodes(before),
        )
        graph_pass = self._passes[position]
        yield from find_removal_problems(graph_pass, before, self._scan)
        yield from find_traffic_problems(
            graph_pass, before, self._scan, traffic_before=known, traffic_after=self._traffic
        )

    def _change_problems(self, last: int) -> tuple[GraphProblem, ...]:
        """What differs from the verified graph, and the passes since then must not have changed."""
        before = self._verified
        assert before is not None
        after = self._note(last, before)
        problems: tuple[GraphProblem, ...] = ()
        if after.scan is not before.scan:
            problems = tuple(_differences(before, after, self._passes[last]))
        if not problems:
            self._verified = after
        return problems

    def _note(self, position: int, before: _Verified | None = None) -> _Verified:
        """What the checks after the next pass will compare with."""
        is_same = before is not None and before.scan is self._scan
        order = before.order if before and is_same else MemoryOrder.of(self._scan)
        dataflow = None
        if before and (is_same or _computes_the_same(before.order, order)):
            dataflow = before.dataflow
        near = self._passes[max(position, 0) : position + 2]
        if dataflow is None and any(each.keeps_dataflow for each in near):
            dataflow = Dataflow.of(
                self._graph_module,
                table=self._values,
                scan=self._scan,
                same_groups=self._same_groups,
                before=before.dataflow if before else None,
            )
            note_exchanges(dataflow.exchanges)
        return _Verified(scan=self._scan, order=order, dataflow=dataflow)


def _differences(
    before: _Verified, after: _Verified, graph_pass: GraphPass
) -> Iterator[GraphProblem]:
    yield from find_race_problems(after.order)
    yield from find_barrier_problems(before.scan, after.scan)
    if graph_pass.keeps_dataflow:
        assert before.dataflow is not None
        assert after.dataflow is not None
        yield from before.dataflow.find_differences(after.dataflow)
    elif not _hands_code_over(before.scan, after.scan):
        # The dataflow knows what memory holds. Without it, the order of reads and writes is all
        # that can be compared; of code inside compiled or recorded regions, not even that.
        yield from find_memory_order_problems(before.order, after.order)


def _computes_the_same(before: MemoryOrder, after: MemoryOrder) -> bool:
    """Whether a graph is another order of the same calls, and no call can tell.

    Calls that did nothing besides making their result may be gone, since nobody reads it.

    The dataflow is then the same, and need not be followed again.
    """
    old, new = before.scan, after.scan
    return (
        not new.changed_nodes(old)
        and old.writers == new.writers
        and old.effects == new.effects
        and before.overwritten == after.overwritten
        and before.left_behind == after.left_behind
        and old.random == new.random
        and old.barriers == new.barriers
        and _messages(old) == _messages(new)
    )


def _messages(scan: GraphScan) -> list[Node]:
    return [launch for launch in scan.launches if not is_pure_collective(launch)]


def _hands_code_over(before: GraphScan, after: GraphScan) -> bool:
    """Whether a pass put calls into the graph that stand for code that was nodes before."""
    return any(
        node.op in ("call_function", "get_attr")
        and node not in before.calls
        and not isinstance(call.target, OpOverload)
        and call.target is not operator.getitem
        for node, call in after.calls.items()
    )
