"""Runs the lists of all ranks on paper: when each action starts and ends, or who is stuck.

Each rank runs its list in order. Communication either overlaps computation, as it does on a GPU
with streams of its own, or blocks, as if a rank could do only one thing at a time:

- *overlapped*: a rank posts a send, a receive, an UNSHARD or a REDUCE_GRAD when the computation
  before it in the list is done, and goes on. A transfer starts when both ranks have posted it, and
  two ranks have one channel between them, so their transfers follow each other. A rank's UNSHARDs
  and REDUCE_GRADs follow each other too. Computation waits for the transfers and for the
  parameters that it needs.
- *blocking*: a rank does nothing until what it posted is done. If this ends, nothing deadlocks.

Transfers and gathers (UNSHARD and REDUCE_GRAD) overlap or block independently of each other, since
there are stages that wait for what they gather and runners that do not wait for transfers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gt_pipeline.schedules.actions import Action
from gt_pipeline.schedules.costs import CostModel
from gt_pipeline.schedules.dependencies import Product, consumed_by, transferred_by

Lane = Literal["compute", "transfer", "collective"]

LANES: tuple[Lane, ...] = ("compute", "transfer", "collective")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One action of one rank in time, simulated or measured."""

    rank: int
    lane: Lane
    action: Action
    start: float
    """When the action starts, in the unit of the costs; where it was measured, in microseconds."""

    end: float

    @property
    def duration(self) -> float:
        """``end - start``."""
        return self.end - self.start


class RankLists:
    """The lists of all ranks and how far they have run; transfers and gathers may block.

    Of a transfer, the cost of its SEND counts.
    """

    def __init__(
        self,
        stage_to_rank: Sequence[int],
        actions: Sequence[Sequence[Action]],
        costs: CostModel,
        *,
        blocking_transfers: bool,
        blocking_gathers: bool,
    ) -> None:
        num_ranks = len(actions)
        self.stage_to_rank = stage_to_rank
        self.actions = actions
        self.costs = costs
        self.blocking_transfers = blocking_transfers
        self.blocking_gathers = blocking_gathers
        self.next_index = [0] * num_ranks
        self.lacking: dict[int, Product] = {}
        self.spans: list[dict[int, Span]] = [{} for _ in range(num_ranks)]
        self.computed_at = [0.0] * num_ranks
        self.collective_free_at = [0.0] * num_ranks
        self.channel_free_at: dict[tuple[int, int], float] = {}
        self.posted_first: dict[Product, tuple[int, int, float]] = {}
        self.arrived_at: dict[Product, float] = {}
        self.gathered_at: dict[int, float] = {}

    def run(self) -> tuple[str, ...]:
        """Run until every list ends or no rank can go on; says for whom each stuck rank waits."""
        ranks = range(len(self.actions))
        progress = True
        while progress:
            progress = False
            for rank in ranks:
                progress |= self._advance(rank)
        return tuple(
            self._describe_stuck(rank)
            for rank in ranks
            if self.next_index[rank] < len(self.actions[rank])
        )

    def spans_by_rank(self) -> list[list[Span]]:
        """When each action that has run did, in the order of the lists."""
        return [[spans[index] for index in sorted(spans)] for spans in self.spans]

    def _advance(self, rank: int) -> bool:
        """Take a rank as far as it gets now; whether it got anywhere."""
        actions = self.actions[rank]
        first = index = self.next_index[rank]
        while index < len(actions):
            action = actions[index]
            if action.is_compute:
                done = self._compute(rank, index, action)
            elif action.is_point_to_point:
                done = self._transfer(rank, index, action)
            else:
                done = self._collective(rank, index, action)
            if not done:
                break
            index += 1
        self.next_index[rank] = index
        return index > first

    def _compute(self, rank: int, index: int, action: Action) -> bool:
        start = self.computed_at[rank]
        for part in action.compute_parts:
            start = max(start, self.gathered_at.get(part.stage, 0.0))
            taken = consumed_by(part, len(self.stage_to_rank))
            if taken is None or self.stage_to_rank[taken.stage] == rank:
                continue
            if taken not in self.arrived_at:
                self.lacking[rank] = taken
                return False
            start = max(start, self.arrived_at[taken])
        self.computed_at[rank] = end = start + self.costs(action)
        self._record(rank, index, "compute", action, start, end)
        return True

    def _transfer(self, rank: int, index: int, action: Action) -> bool:
        moved = transferred_by(action)
        if moved not in self.posted_first:
            self.posted_first[moved] = (rank, index, self.computed_at[rank])
        other_rank, other_index, posted_at = self.posted_first[moved]
        if other_rank != rank:
            pair = (min(rank, other_rank), max(rank, other_rank))
            start = max(posted_at, self.computed_at[rank], self.channel_free_at.get(pair, 0.0))
            end = start + self.costs(moved.send)
            self.arrived_at[moved] = self.channel_free_at[pair] = end
            other = self.actions[other_rank][other_index]
            self._record(rank, index, "transfer", action, start, end)
            self._record(other_rank, other_index, "transfer", other, start, end)
        if not self.blocking_transfers:
            return True
        if moved not in self.arrived_at:
            self.lacking[rank] = moved
            return False
        self.computed_at[rank] = max(self.computed_at[rank], self.arrived_at[moved])
        return True

    def _collective(self, rank: int, index: int, action: Action) -> bool:
        start = self.computed_at[rank]
        if action.kind != "RESHARD":
            start = max(start, self.collective_free_at[rank])
        end = start + self.costs(action)
        self._record(rank, index, "collective", action, start, end)
        if action.kind == "RESHARD":
            return True
        self.collective_free_at[rank] = end
        if action.kind == "UNSHARD":
            self.gathered_at[action.stage] = end
        if self.blocking_gathers:
            self.computed_at[rank] = end
        return True

    def _describe_stuck(self, rank: int) -> str:
        place = self.next_index[rank]
        action, product = self.actions[rank][place], self.lacking[rank]
        if action.is_compute:
            needs = f"{product.send} of rank {self.stage_to_rank[product.stage]} to arrive"
        else:
            needs = f"{product.send if action.is_receive else product.receive}, its counterpart"
        return f"rank {rank} stands at {action} (place {place} of its list) and waits for {needs}"

    def _record(
        self, rank: int, index: int, lane: Lane, action: Action, start: float, end: float
    ) -> None:
        self.spans[rank][index] = Span(rank=rank, lane=lane, action=action, start=start, end=end)
