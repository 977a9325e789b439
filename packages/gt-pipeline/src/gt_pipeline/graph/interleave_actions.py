"""The order in which two actions of one graph take turns: a list scheduler of two lanes.

The lanes take turns at their collectives. In its turn a lane waits for its last collective,
computes what its next one needs, and launches that; what it can compute besides comes after the
launch, and then it is the other lane's turn. So between a launch and its wait stands work of the
other lane. Where one lane has more collectives than the other, the turns of the other are spread
evenly, and what it computes for its next turn is divided over those in between.

The order is right by construction: a node is emitted when all that it depends on has been. It is
the same on every rank: the order of collectives follows from their numbers in the two lanes alone,
and what is divided by estimated durations never holds one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import ClassVar, NamedTuple

from torch.fx import GraphModule, Node

from gt_config.graph_kinds import GraphKind
from gt_config.node_keys import PipelineAnnotation
from gt_config.numerics import Numerics
from gt_passes import ChangeBounds, GraphPass, PassContext, PassReport
from gt_passes.analysis.collectives import is_collective, is_wait
from gt_passes.analysis.order_constraints import OrderConstraints, is_host_read
from gt_passes.ep_overlap.exposed_exchanges import is_compute
from gt_passes.ep_overlap.node_durations import NodeDurations, estimated_durations
from gt_trace import read_annotation

_NUM_LANES = 2


def lane_of(node: Node) -> int | None:
    """The action of an overlapped pair that a node belongs to: 0 the backward, 1 the forward."""
    annotation = read_annotation(node, PipelineAnnotation)
    return None if annotation is None else annotation.slot


@dataclass(frozen=True, slots=True, kw_only=True)
class InterleaveActions(GraphPass):
    """Let a backward and a forward in one graph work while the other's collectives run.

    *Before*::

        backward  a2a wait mm a2a wait mm
        forward                           mm a2a wait mm

    *After*::

        backward  a2a    wait mm a2a    wait mm
        forward       mm a2a     wait mm

    *Refuses*: nothing; what must stay in order (memory that is written to, random numbers, unknown
    operators) stays, also across the lanes.

    *Preserves numerics*: yes.
    """

    name: ClassVar[str] = "interleave-actions"
    numerics: ClassVar[Numerics] = "bitwise"
    runs_on: ClassVar[frozenset[GraphKind]] = frozenset({"OVERLAP_F_B"})

    durations: NodeDurations = estimated_durations
    """How long nodes are taken to run."""

    @property
    def bounds(self) -> ChangeBounds:
        """Both actions' values live at once: that is what the overlap costs."""
        return ChangeBounds(peak_memory_growth=None)

    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        """Interleave the lanes; see the class."""
        nodes = [n for n in graph_module.graph.nodes if n.op not in ("placeholder", "output")]
        if len({lane_of(node) for node in nodes} - {None}) < _NUM_LANES:
            return PassReport(changed=False)
        order = _Interleaving(graph_module, nodes, self.durations(graph_module)).order()
        if order == nodes:
            return PassReport(changed=False)
        output = graph_module.graph.output_node()
        for node in order:
            output.prepend(node)
        num_moved = sum(a is not b for a, b in zip(order, nodes, strict=True))
        return PassReport(changed=True, counts={"moved": num_moved})


class _Groups(NamedTuple):
    """Turns of a lane that stay together."""

    sizes: tuple[int, ...]
    """How many turns each group has."""

    begins_at_once: bool
    """Whether the first group needs nothing computed before, so that it may stand before
    everything."""


class _Interleaving:
    def __init__(
        self,
        graph_module: GraphModule,
        nodes: Sequence[Node],
        duration_us: Callable[[Node], float],
    ) -> None:
        self._nodes = nodes
        self._duration_us = duration_us
        self._predecessors = OrderConstraints(graph_module).predecessors(nodes)
        # What carries no annotation (a constant) belongs to whoever reads it first.
        self._lane = [lane_of(node) for node in nodes]
        self._is_emitted = [False] * len(nodes)
        self._emitted: list[int] = []
        self._turns = [self._turns_of(lane) for lane in range(_NUM_LANES)]

    def order(self) -> list[Node]:
        """The nodes in the order in which they shall run."""
        merged = _merged([self._groups(turns) for turns in self._turns])
        taken = [0] * _NUM_LANES
        for place, lane in enumerate(merged):
            self._take(self._turns[lane][taken[lane]])
            taken[lane] += 1
            following = merged[place + 1 :]
            if not following or following[0] == lane:
                other = 1 - lane
                own = list(takewhile(lane.__eq__, following))
                self._fill(other, taken[other], num_gaps=len(own) + 1)
        last = merged[-1] if merged else 1
        for lane in (1 - last, last):
            self._emit_all(i for i, own in enumerate(self._lane) if own == lane)
        self._emit_all(range(len(self._nodes)))
        return [self._nodes[i] for i in self._emitted]

    # ---- turns ----------------------------------------------------------------------------------

    def _turns_of(self, lane: int) -> list[tuple[int, ...]]:
        """The launches of a lane; those that need no result of the others before make one turn."""
        launches = [
            i for i, node in enumerate(self._nodes) if self._lane[i] == lane and is_collective(node)
        ]
        turns: list[list[int]] = []
        before: set[int] = set()
        for launch in launches:
            needed = self._ancestors([launch], before)
            waits = any(self._blocks(i) for i in needed)
            if turns and not waits:
                turns[-1].append(launch)
            else:
                turns.append([launch])
            before |= needed | {launch}
        return [tuple(turn) for turn in turns]

    def _groups(self, turns: Sequence[tuple[int, ...]]) -> _Groups:
        """Which turns stay together: one that computes, and those after it that do not.

        The exchange of token counts is such a pair: the sizes are only read, and the tokens go.
        """
        sizes: list[int] = []
        before: set[int] = set()
        begins_at_once = False
        for turn in turns:
            needed = self._ancestors(turn, before)
            before |= needed | set(turn)
            computes = any(is_compute(self._nodes[i]) for i in needed)
            if sizes and not computes:
                sizes[-1] += 1
                continue
            begins_at_once |= not computes
            sizes.append(1)
        return _Groups(sizes=tuple(sizes), begins_at_once=begins_at_once)

    def _take(self, turn: tuple[int, ...]) -> None:
        for launch in turn:
            self._emit_all([launch])
        lane, last = self._lane[turn[-1]], turn[-1]
        # What else this lane can do now stands behind the launch.
        for i in range(last):
            if self._lane[i] == lane and not self._is_emitted[i] and not self._blocks(i):
                self._emit_if_ready(i)

    def _fill(self, lane: int, num_taken: int, *, num_gaps: int) -> None:
        """Work of a lane that is not at its turn: an even share of what its next turn needs."""
        turns = self._turns[lane]
        if num_taken < len(turns):
            launches = set(turns[num_taken])
            wanted = sorted(self._missing(launches) - launches)
        else:
            wanted = [i for i, own in enumerate(self._lane) if own == lane]
            wanted = sorted(self._missing(wanted))
        durations = {i: self._duration_us(self._nodes[i]) for i in wanted}
        share = sum(durations.values()) / num_gaps
        spent = 0.0
        left = work = [i for i in wanted if is_compute(self._nodes[i])]
        for i in wanted:
            # Something in every gap as long as there is, and no more than its share in any.
            has_some = len(left) < len(work)
            if has_some and num_gaps > 1 and (len(left) < num_gaps or spent >= share):
                return
            if self._is_emitted[i]:
                continue
            self._emit_all([i])
            spent += durations[i]
            left = [each for each in left if not self._is_emitted[each]]

    # ---- emission -------------------------------------------------------------------------------

    def _blocks(self, i: int) -> bool:
        """Whether the node waits for a collective, or lets the host wait."""
        return is_wait(self._nodes[i]) or is_host_read(self._nodes[i])

    def _ancestors(self, wanted: Iterable[int], known: set[int]) -> set[int]:
        found: set[int] = set()
        pending = list(wanted)
        while pending:
            i = pending.pop()
            for each in self._predecessors[i]:
                if each not in found and each not in known:
                    found.add(each)
                    pending.append(each)
        return found

    def _missing(self, wanted: Iterable[int]) -> set[int]:
        """What is not emitted of ``wanted`` and all that they depend on."""
        found: set[int] = set()
        pending = list(wanted)
        while pending:
            i = pending.pop()
            if i not in found and not self._is_emitted[i]:
                found.add(i)
                pending.extend(self._predecessors[i])
        return found

    def _emit_all(self, wanted: Iterable[int]) -> None:
        """Emit nodes and what they need: first what need not wait, then the rest, in order."""
        missing = sorted(self._missing(wanted))
        for i in missing:
            if not self._blocks(i) and not is_collective(self._nodes[i]):
                self._emit_if_ready(i)
        for i in missing:
            if not self._is_emitted[i]:
                self._emit(i)

    def _emit_if_ready(self, i: int) -> None:
        if not self._is_emitted[i] and all(self._is_emitted[p] for p in self._predecessors[i]):
            self._emit(i)

    def _emit(self, i: int) -> None:
        self._is_emitted[i] = True
        self._emitted.append(i)


def _merged(lanes: Sequence[_Groups]) -> list[int]:
    """Two lanes' turns in one sequence, each lane's spread evenly; the backward first."""
    spread = [groups.sizes[groups.begins_at_once :] for groups in lanes]
    # The i-th of n stands at (2 i + 1) / (2 n); multiplied out, so that all is exact.
    places = [
        ((2 * i + 1) * len(spread[1 - lane]), lane, size)
        for lane in range(_NUM_LANES)
        for i, size in enumerate(spread[lane])
    ]
    places += [
        (-1, lane, groups.sizes[0]) for lane, groups in enumerate(lanes) if groups.begins_at_once
    ]
    return [lane for _, lane, size in sorted(places) for _ in range(size)]
