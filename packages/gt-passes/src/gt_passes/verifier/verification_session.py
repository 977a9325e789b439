"""Verification of one graph while passes change it.

After a pass, what it did not touch is as right as it was: only nodes that changed and their users
are propagated again, and the order is only looked at where it changed. What cannot be seen that
way, because a pass wrote into a recorded value in place, is seen at the end, when all values are
read once more, and every operator is asked again unless all of them are what they were.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from gt_passes._torch_internals import OpOverload, graph_module_without_code
from gt_passes.analysis.collectives import is_pure_collective
from gt_passes.analysis.graph_scan import GraphScan, NodeCall
from gt_passes.analysis.storages import gives_a_view
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


# A graph as it was when it was scanned, made again after passes have edited it.
#
# A scan knows what every node called and what was recorded for it. Checks that need the earlier
# graph as a graph are rare, so that it is made when one asks, and not kept.
def made_again(scan: GraphScan) -> GraphModule:
    """The graph as it was, of new nodes with the names of the old ones.

    Metadata other than recorded values is what it is now, and so is what ``get_attr`` nodes name.

    Args:
        scan: of a well-formed graph, which may have been edited since.
    """
    graph = Graph()
    made: dict[Node, Node] = {}
    for node, call in scan.calls.items():
        target, args, kwargs = (  # types of a node's that a call knows less of
            cast(Any, part) for part in (call.target, call.args, call.kwargs)
        )
        copy = made[node] = graph.create_node(
            node.op,
            target,
            map_arg(args, made.__getitem__),
            map_arg(kwargs, made.__getitem__),
            name=node.name,
        )
        copy.meta = {**node.meta, "val": call.value}
    return graph_module_without_code(scan.graph_module, graph)


# Does every storage surely live no longer than before a pass? Then no peak of memory grew.
#
# An estimate of peak memory (``liveness``) looks at the whole graph twice, before a pass and
# after it. A pass that cleans up mostly looks at the same memory another way: where every
# changed node reads views of the storages that it read views of, and none moved, each storage
# dies where it died, or earlier.
def surely_held_no_longer(before: GraphScan, after: GraphScan) -> bool:
    """Whether no storage is made earlier, is larger, or dies later than before a pass.

    Args:
        before: of the graph before the pass.
        after: of the well-formed graph now, made with ``before``.
    """
    old, new = before.calls, after.calls
    if after.is_reordered(before) or not all(wait in new for wait in before.waits):
        return False  # what is never waited for is held to the end
    for node in after.changed_nodes(before):
        call, known = new[node], old.get(node)
        if known is None:
            # It holds its storage until a reader does, and that is looked at itself.
            if not _is_view(call) or not node.users:
                return False
        elif _is_view(call) and _is_view(known):
            if not _read_the_same(call, new, known, old):
                return False
        elif not (
            call.split()[0] is known.split()[0]
            and call.value is known.value
            and _read_the_same(call, new, known, old)
        ):
            return False
    return True


_Calls = Mapping[Node, NodeCall]


def _read_the_same(call: NodeCall, new: _Calls, known: NodeCall, old: _Calls) -> bool:
    """Whether two calls have the same storages in the same places."""
    now, then = call.split()[1], known.split()[1]
    return len(now) == len(then) and all(
        _storage_maker(node, new) is _storage_maker(was, old)
        for node, was in zip(now, then, strict=True)
    )


def _is_view(call: NodeCall) -> bool:
    target = call.target
    return (
        isinstance(target, OpOverload)
        and gives_a_view(target)
        and isinstance(call.value, torch.Tensor)  # not several of them
        and len(call.split()[1]) == 1
    )


def _storage_maker(node: Node, calls: _Calls) -> Node:
    """The node of which another is a view, perhaps of a view."""
    call = calls[node]
    while _is_view(call):
        (node,) = call.split()[1]
        call = calls[node]
    return node
