"""Verification of one graph while passes change it.

After a pass, what it did not touch is as right as it was: only nodes that changed and their users
are propagated again, and the order is only looked at where it changed. What cannot be seen that
way, because a pass wrote into a recorded value in place, is seen at the end, when all values are
read once more, and every operator is asked again unless all of them are what they were.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence

from torch.fx import GraphModule, Node

from gt_passes.analysis.collectives import is_pure_collective
from gt_passes.analysis.graph_scan import GraphScan
from gt_passes.analysis.scanned_graph import made_again
from gt_passes.contract import GraphPass
from gt_passes.graph_problem import GraphProblem
from gt_passes.verifier.barrier_order import find_barrier_problems, find_draw_problems
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


class VerificationSession:
    """Verifies a graph as captured, after each pass, and completely at the end.

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
        self._order: MemoryOrder | None = None
        self._traffic: Mapping[Node, Traffic] = {}
        self._dataflow: Dataflow | None = None  # of the graph as it is, where a pass must keep it
        self.unverified: tuple[UnverifiedNode, ...] = ()
        """What the latest complete verification could not re-propagate."""

        self.is_unchanged = False
        """Whether the latest pass that was verified left the graph as it was."""

    def verify_capture(self) -> tuple[GraphProblem, ...]:
        """Everything that can be said of the graph before any pass."""
        problems = self._verify_completely(self._scan)
        if not problems:
            self._note(position=-1)
        return problems

    def take_as_verified(self) -> None:
        """Begin as ``verify_capture`` does where another session has just verified this graph."""
        self._note(position=-1)

    def verify_completely(self) -> tuple[GraphProblem, ...]:
        """Everything that can be said of the graph as it is now, whatever was verified before."""
        scan = self._scan
        if not scan.still_holds():
            scan = self._verifier.scan(self._graph_module, before=scan)
        return self._verify_completely(scan)

    def _verify_completely(self, scan: GraphScan) -> tuple[GraphProblem, ...]:
        report = self._verifier.verify(
            self._graph_module,
            interface=self._interface,
            tolerated_waits=self._tolerated,
            scan=scan,
        )
        self.unverified = report.unverified
        return report.problems

    def verify_pass(self, position: int) -> tuple[GraphProblem, ...]:
        """What the pass at ``position`` did wrong to the graph; it has just run."""
        before = copy.copy(self)
        self.is_unchanged = self._scan.still_holds()
        if self.is_unchanged:
            self._note(position)
            return ()
        self._earlier_scan = before._scan
        self._scan = self._verifier.scan(self._graph_module, before=before._scan)
        self._order = self._dataflow = None
        problems = self._verifier.find_new_problems(
            before._scan, self._scan, interface=self._interface, tolerated_waits=self._tolerated
        )
        if problems:
            return problems
        self._note(position, before)
        return tuple(self._change_problems(self._passes[position], before))

    @property
    def surely_holds_nothing_longer(self) -> bool:
        """Whether what the latest pass did cannot have raised the peak of memory."""
        return self.is_unchanged or surely_held_no_longer(self._earlier_scan, self._scan)

    def graph_before(self) -> GraphModule:
        """The graph before the latest pass that changed it, made again."""
        return made_again(self._earlier_scan)

    def _change_problems(
        self, graph_pass: GraphPass, before: VerificationSession
    ) -> Iterator[GraphProblem]:
        """What differs from the graph before, in ways that the pass must not have changed."""
        assert self._order is not None  # _note has made it
        assert before._order is not None
        yield from find_removal_problems(graph_pass, before._scan, self._scan)
        yield from find_race_problems(self._order)
        yield from find_barrier_problems(before._scan, self._scan)
        yield from find_traffic_problems(
            graph_pass,
            before._scan,
            self._scan,
            traffic_before=before._traffic,
            traffic_after=self._traffic,
        )
        if graph_pass.keeps_dataflow:
            assert before._dataflow is not None
            assert self._dataflow is not None
            yield from before._dataflow.find_differences(self._dataflow)
        else:
            # The dataflow knows what memory holds. Without it, the order of reads, writes and
            # random draws is all that can be compared.
            yield from find_memory_order_problems(before._order, self._order)
            yield from find_draw_problems(before._scan, self._scan)

    def _note(self, position: int, before: VerificationSession | None = None) -> None:
        """What the checks after the next pass will compare with."""
        if self._order is None:
            self._order = MemoryOrder.of(self._scan)
            self._traffic = traffic_of(
                self._scan,
                same_groups=self._same_groups,
                known=before._traffic if before else {},
                changed=self._scan.changed_nodes(before._scan) if before else (),
            )
        near = self._passes[max(position, 0) : position + 2]
        if before and before._order and _computes_the_same(before._order, self._order):
            self._dataflow = before._dataflow
        if self._dataflow is None and any(each.keeps_dataflow for each in near):
            self._dataflow = Dataflow.of(
                self._graph_module,
                table=self._values,
                scan=self._scan,
                same_groups=self._same_groups,
                before=before._dataflow if before else None,
            )
            note_exchanges(self._dataflow.exchanges)


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
