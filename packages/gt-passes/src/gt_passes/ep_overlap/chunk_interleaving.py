"""The order in which the chunks of a stretch of a graph take turns: a list scheduler.

The chunks take turns at every token exchange. In a turn a chunk waits for its last exchange,
computes what its next one needs, and launches that; then it is the next chunk's turn. So behind the
launch of each exchange stands what the other chunks compute until it comes round again. What no
exchange needs (gradients of weights, shared experts) is kept, and spent where by estimate an
exchange would otherwise be waited for.

The order is right by construction: a node is emitted when all that it depends on has been. It is
the same on every rank: the order of collectives follows from the graph alone, since what is spent
by estimate never holds one, nor a wait, nor a reading of the host.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from torch.fx import Node

from gt_passes.analysis.collectives import is_collective, is_wait, waits_of
from gt_passes.analysis.fsdp_collective import fsdp_collective
from gt_passes.analysis.order_constraints import is_host_read
from gt_passes.analysis.process_groups import group_name_of
from gt_passes.ep_overlap.exchange_operators import is_exchange_launch, is_token_exchange


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapWindow:
    """A stretch of a graph whose chunks take turns."""

    nodes: tuple[Node, ...]
    """All nodes of the stretch, without a gap, in the original order."""

    predecessors: tuple[tuple[int, ...], ...]
    """What must come before each node, both by index."""

    home: tuple[int, ...]
    """In the how many-th region of the window each node stands."""

    chunk_order: tuple[int, ...]
    """The chunks, in the order of their turns."""

    bodies: dict[int, tuple[int, ...]]
    """The nodes of each chunk, by index, in the original order."""


class _Turn(NamedTuple):
    """A chunk's way to its next exchange."""

    region: int
    chunk: int
    launch: int
    opens_region: bool
    """Whether no chunk has launched an exchange of this region before."""


def interleaved_order(
    window: OverlapWindow, duration_us: Callable[[Node], float]
) -> tuple[Node, ...]:
    """The nodes of a window in the order in which they shall run.

    Args:
        window: chunks that are alike: as many token exchanges in each, region by region.
        duration_us: an estimate, in microseconds.
    """
    return _Interleaving(window, duration_us).order()


class _Interleaving:
    def __init__(self, window: OverlapWindow, duration_us: Callable[[Node], float]) -> None:
        self._window = window
        self._duration_us = duration_us
        size = len(window.nodes)
        self._launch_of_wait: dict[int, int] = {}
        self._is_launch = [is_exchange_launch(node) for node in window.nodes]
        index = {node: i for i, node in enumerate(window.nodes)}
        for i in range(size):
            if self._is_launch[i]:
                for wait in waits_of(window.nodes[i]):
                    if wait in index:
                        self._launch_of_wait[index[wait]] = i
        self._is_fsdp_launch = [_is_fsdp_launch(node) for node in window.nodes]
        self._followers: list[list[int]] = [[] for _ in range(size)]
        self._num_missing = [len(before) for before in window.predecessors]
        for i, before in enumerate(window.predecessors):
            for each in before:
                self._followers[each].append(i)
        self._turns = self._make_turns()
        self._gap_of = self._fsdp_gaps()

        self._emitted: list[int] = []
        self._is_emitted = [False] * size
        self._spendable: list[tuple[int, int]] = []  # (home, index), a heap
        self._unfinished: dict[int, list[int]] = {}
        for i, region in enumerate(window.home):
            self._unfinished.setdefault(region, []).append(i)
        self._region = 0
        self._now_us = 0.0
        self._network_free_us = 0.0
        self._end_us: dict[int, float] = {}
        for i in range(size):
            if self._num_missing[i] == 0:
                self._note_ready(i)

    def order(self) -> tuple[Node, ...]:
        """See ``interleaved_order``."""
        self._emit_fsdp_of_gap(0)
        for turn in self._turns:
            self._region = max(self._region, turn.region)
            self._take(turn)
            if turn.opens_region:
                self._finish_regions(turn.region - 2)
        for chunk in self._window.chunk_order:
            self._emit_with_ancestors(self._window.bodies[chunk])
        self._emit_with_ancestors(i for i, fsdp in enumerate(self._is_fsdp_launch) if not fsdp)
        self._emit_with_ancestors(range(len(self._window.nodes)))
        return tuple(self._window.nodes[i] for i in self._emitted)

    # ---- before scheduling ----------------------------------------------------------------------

    def _make_turns(self) -> list[_Turn]:
        """Every token exchange of the bodies: by region, then by number, then by chunk."""
        launches: dict[tuple[int, int], list[int]] = {}
        for chunk in self._window.chunk_order:
            for i in self._window.bodies[chunk]:
                if self._is_launch[i] and is_token_exchange(self._window.nodes[i]):
                    launches.setdefault((self._window.home[i], chunk), []).append(i)
        turns: list[_Turn] = []
        for region in sorted({region for region, _ in launches}):
            lanes = [(c, launches.get((region, c), [])) for c in self._window.chunk_order]
            opens = region > 0
            for number in range(max(len(lane) for _, lane in lanes)):
                for chunk, lane in lanes:
                    if number < len(lane):
                        turns.append(_Turn(region, chunk, lane[number], opens))
                        opens = False
        return turns

    def _fsdp_gaps(self) -> dict[int, list[int]]:
        """For the turn that opens a region: the FSDP launches to put in front of its exchange.

        There no exchange is in flight. Key 0 is the start of the window; launches that must wait
        for the last exchange are in no gap, and come at the end.
        """
        if not any(self._is_fsdp_launch):
            return {}
        needed_at = self._first_turn_that_needs()
        openings = {turn.region: t for t, turn in enumerate(self._turns) if turn.opens_region}
        regions = sorted({0, *openings})
        earliest = self._first_turn_after_exchanges()
        gaps: dict[int, list[int]] = {}
        for i, is_fsdp in enumerate(self._is_fsdp_launch):
            if not is_fsdp:
                continue
            fitting = [
                region
                for region in regions
                if earliest[i] <= openings.get(region, 0)
                and (region == 0 or needed_at[i] > openings[region])
            ]
            if fitting:
                at_home = [region for region in fitting if region <= self._window.home[i]]
                gaps.setdefault(at_home[-1] if at_home else fitting[0], []).append(i)
        return gaps

    def _first_turn_that_needs(self) -> list[int]:
        found = [len(self._turns)] * len(self._window.nodes)
        for number, turn in enumerate(self._turns):
            pending = [turn.launch]
            while pending:
                i = pending.pop()
                if found[i] == len(self._turns):
                    found[i] = number
                    pending.extend(self._window.predecessors[i])
        return found

    def _first_turn_after_exchanges(self) -> list[int]:
        """The first turn at which all exchanges are launched that a node depends on."""
        turn_of = {turn.launch: number for number, turn in enumerate(self._turns)}
        found: list[int] = []
        for i, before in enumerate(self._window.predecessors):
            own = turn_of.get(self._launch_of_wait.get(i, -1), -1) + 1
            found.append(max([own, *(found[each] for each in before)]))
        return found

    # ---- scheduling -----------------------------------------------------------------------------

    def _take(self, turn: _Turn) -> None:
        if self._is_emitted[turn.launch]:
            return
        needed = self._missing_ancestors([turn.launch])
        # Early, since the host will wait for it; what is not part of it runs meanwhile.
        counts = [
            i for i in needed if self._is_launch[i] and not is_token_exchange(self._window.nodes[i])
        ]
        self._emit_with_ancestors(counts)
        self._emit_sorted(i for i in needed if i != turn.launch)
        if turn.opens_region and self._gap_of.get(turn.region):
            in_flight = [
                wait
                for wait, launch in self._launch_of_wait.items()
                if self._is_emitted[launch] and not self._is_emitted[wait]
            ]
            self._emit_with_ancestors(in_flight)
            self._emit_fsdp_of_gap(turn.region)
        self._emit(turn.launch)

    def _emit_fsdp_of_gap(self, region: int) -> None:
        for launch in self._gap_of.get(region, ()):
            self._emit_with_ancestors([launch])

    def _finish_regions(self, last: int) -> None:
        """Emit what is left of the regions up to ``last``, so that it does not live for ever."""
        for region in sorted(region for region in self._unfinished if region <= last):
            left = []
            for i in self._unfinished[region]:
                if self._num_missing[i] or self._is_launch[i] or self._is_fsdp_launch[i]:
                    left.append(i)
                elif not self._is_emitted[i]:
                    self._emit(i)
            self._unfinished[region] = [i for i in left if not self._is_emitted[i]]

    def _emit_with_ancestors(self, wanted: Iterable[int]) -> None:
        self._emit_sorted(self._missing_ancestors(wanted))

    def _missing_ancestors(self, wanted: Iterable[int]) -> list[int]:
        """What is not emitted of ``wanted`` and all that they depend on, in the original order."""
        found: set[int] = set()
        pending = list(wanted)
        while pending:
            i = pending.pop()
            if not self._is_emitted[i] and i not in found:
                found.add(i)
                pending.extend(self._window.predecessors[i])
        return sorted(found)

    def _emit_sorted(self, batch: Iterable[int]) -> None:
        """Emit nodes whose missing ancestors are among them: first what waits for no exchange."""
        level: dict[int, int] = {}
        for i in batch:  # in the original order, so predecessors come first
            if not self._is_emitted[i]:
                before = (level.get(each, 0) for each in self._window.predecessors[i])
                level[i] = max(before, default=0) + (i in self._launch_of_wait)
        for i in sorted(level, key=lambda i: (level[i], i)):
            if not self._is_emitted[i]:  # it may have been spent meanwhile
                self._emit(i)

    def _emit(self, i: int) -> None:
        launch = self._launch_of_wait.get(i)
        if launch is not None and is_token_exchange(self._window.nodes[launch]):
            self._spend_until(self._end_us.get(launch, 0.0))
        self._run(i)

    def _spend_until(self, end_us: float) -> None:
        """Run what is ready and in nobody's way until an exchange is over, by estimate."""
        while self._now_us < end_us and self._spendable and self._spendable[0][0] <= self._region:
            _, i = heapq.heappop(self._spendable)
            if not self._is_emitted[i]:
                self._run(i)

    def _run(self, i: int) -> None:
        node = self._window.nodes[i]
        self._is_emitted[i] = True
        self._emitted.append(i)
        if self._is_launch[i]:
            self._network_free_us = max(self._now_us, self._network_free_us)
            self._network_free_us += self._duration_us(node)
            self._end_us[i] = self._network_free_us
        elif i in self._launch_of_wait:
            self._now_us = max(self._now_us, self._end_us.get(self._launch_of_wait[i], 0.0))
        else:
            self._now_us += self._duration_us(node)
        for follower in self._followers[i]:
            self._num_missing[follower] -= 1
            if self._num_missing[follower] == 0:
                self._note_ready(follower)

    def _note_ready(self, i: int) -> None:
        node = self._window.nodes[i]
        if not (
            self._is_launch[i]
            or i in self._launch_of_wait
            or is_collective(node)
            or is_wait(node)
            or is_host_read(node)
            or group_name_of(node) is not None
        ):
            heapq.heappush(self._spendable, (self._window.home[i], i))


def _is_fsdp_launch(node: Node) -> bool:
    return is_collective(node) and fsdp_collective(node) is not None
