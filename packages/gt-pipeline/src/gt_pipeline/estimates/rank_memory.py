"""What memory a rank of a pipeline holds over a step, the most of it, and for what.

Its list of actions is walked as it runs: what stages hold between actions is added and dropped
where the actions do it, and each action's own peak comes on top.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, cast, get_args

from gt_config.node_keys import PipelineAction
from gt_pipeline.estimates.action_memory import ActionMemory, StageMemory
from gt_pipeline.runner.send_lifetimes import sends_done_after
from gt_pipeline.schedules import Action
from gt_pipeline.schedules.dependencies import Product, consumed_by, produced_by, transferred_by
from gt_pipeline.schedules.schedule import LoweredSchedule

MemoryPart = Literal[
    "parameters and buffers",
    "optimizer state",
    "gradients",
    "gathered parameters",
    "activations",
    "transfers",
    "running action",
]
"""Why a rank holds memory.

gradients: sums over microbatches, as gathered, until the step's end, with what their reduction
needs; then as parameters are stored.
activations: what forwards of microbatches under way saved for backwards.
transfers: what was made for neighbouring stages or received from them and not used yet.
running action: what the action that runs has made, less what it has given up of the others.
"""

MEMORY_PARTS: tuple[MemoryPart, ...] = get_args(MemoryPart)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMoment:
    """What a rank holds at the most while one action runs."""

    action: Action | None
    """None for the optimizer."""

    bytes_by_part: Mapping[MemoryPart, int]

    @property
    def num_bytes(self) -> int:
        """Of all parts."""
        return sum(self.bytes_by_part.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """The peak of one rank, and how it comes to it."""

    rank: int
    moments: tuple[RankMoment, ...]
    """Of each computation, UNSHARD and REDUCE_GRAD in the order of its list; then, as reductions
    are waited for, of each REDUCE_GRAD again; then of the optimizer."""

    peak: RankMoment
    """The first at which most is held."""

    peak_live: int
    """The most chunks that are saved at once: one for each microbatch of each of its stages."""

    @property
    def peak_bytes(self) -> int:
        """The most that it holds."""
        return self.peak.num_bytes

    @property
    def action(self) -> Action | None:
        """The action that runs at the peak; None for the optimizer."""
        return self.peak.action

    @property
    def bytes_by_part(self) -> Mapping[MemoryPart, int]:
        """What is held at the peak; the values add up to ``peak_bytes``."""
        return self.peak.bytes_by_part


def rank_memory(
    lowered: LoweredSchedule,
    *,
    rank: int,
    stages: Mapping[int, StageMemory],
    pair: Callable[[Action], ActionMemory],
    optimizer_states: int = 2,
    accumulates: bool = False,
) -> RankMemory:
    """Walk one rank's list.

    Args:
        lowered: the schedule as it runs.
        rank: of the pipeline.
        stages: of the rank, by index; others are not read.
        pair: the memory of an OVERLAP_F_B.
        optimizer_states: tensors that the optimizer keeps for each parameter; 2 for Adam.
        accumulates: whether the schedule runs again before the optimizer does, with the gradients
            of the runs before in memory.
    """
    walk = _Walk(lowered, rank, stages, optimizer_states, accumulates)
    done_after = sends_done_after(lowered, rank)
    for position, action in enumerate(lowered.actions[rank]):
        if action.is_compute or action.kind in ("UNSHARD", "REDUCE_GRAD"):
            if action.parts is None:
                own = stages[action.stage].actions[cast("PipelineAction", action.kind)]
            else:
                own = pair(action)
            walk.reach(own.extra_bytes, action)
        walk.after(action)
        for send in done_after.get(position, ()):
            walk.sent(send)
    walk.finish_reductions()
    return walk.result()


class _Walk:
    def __init__(
        self,
        lowered: LoweredSchedule,
        rank: int,
        stages: Mapping[int, StageMemory],
        optimizer_states: int,
        accumulates: bool,
    ) -> None:
        self._schedule = lowered.schedule
        self._rank = rank
        self._stages = stages
        mine = [stages[index] for index in lowered.schedule.stages_of_rank(rank)]
        self._held: dict[MemoryPart, int] = dict.fromkeys(MEMORY_PARTS, 0)
        self._held["parameters and buffers"] = sum(each.state_bytes for each in mine)
        self._held["optimizer state"] = optimizer_states * sum(e.parameter_bytes for e in mine)
        if accumulates:
            self._held["gradients"] = sum(each.reduced_bytes for each in mine)
        self._accumulating: set[int] = set()
        self._reducing: list[Action] = []
        self._live = 0
        self._peak_live = 0
        self._waiting: dict[Product, int] = {}
        self._moments: list[RankMoment] = []

    def reach(self, extra_bytes: int, action: Action | None) -> None:
        """Note what is held with this much on top."""
        held: dict[MemoryPart, int] = {**self._held, "running action": extra_bytes}
        self._moments.append(RankMoment(action=action, bytes_by_part=held))

    def after(self, action: Action) -> None:
        """What is held differently when an action has run."""
        stage = self._stages.get(action.stage)
        assert stage is not None  # a rank acts on its own stages
        if action.kind == "UNSHARD":
            self._held["gathered parameters"] += stage.gathered_bytes
        elif action.kind == "RESHARD":
            self._held["gathered parameters"] -= stage.gathered_bytes
        elif action.kind == "REDUCE_GRAD":
            self._reducing.append(action)
            self._held["gradients"] += stage.actions["REDUCE_GRAD"].launched_bytes
        elif action.is_receive:
            self._wait_for_use(transferred_by(action))
        for part in action.compute_parts:
            self._after_compute(part)

    def finish_reductions(self) -> None:
        """The end of the step: reductions are waited for, in order; then the optimizer runs."""
        for action in self._reducing:
            stage = self._stages[action.stage]
            reduction = stage.actions["REDUCE_GRAD"]
            self.reach(max(0, reduction.extra_bytes - reduction.launched_bytes), action)
            left = reduction.launched_bytes + stage.accumulated_bytes
            self._held["gradients"] += stage.reduced_bytes - left
        self.reach(0, None)

    def sent(self, send: Action) -> None:
        """Let go of what a send moved."""
        self._drop(transferred_by(send))

    def result(self) -> RankMemory:
        return RankMemory(
            rank=self._rank,
            moments=tuple(self._moments),
            peak=max(self._moments, key=lambda moment: moment.num_bytes),
            peak_live=self._peak_live,
        )

    def _after_compute(self, part: Action) -> None:
        stage = self._stages[part.stage]
        taken = consumed_by(part, self._schedule.num_stages)
        if taken is not None:
            self._drop(taken)
        made = produced_by(part, self._schedule.num_stages)
        if made is not None:
            self._wait_for_use(made)
        if part.kind == "FORWARD":
            self._live += 1
            self._peak_live = max(self._peak_live, self._live)
            self._held["activations"] += stage.saved_bytes
        elif part.kind == "BACKWARD_INPUT":
            self._held["activations"] += stage.between_bytes - stage.saved_bytes
        else:
            full = part.kind == "FULL_BACKWARD"
            self._live -= 1
            self._held["activations"] -= stage.saved_bytes if full else stage.between_bytes
            if part.stage not in self._accumulating:
                self._accumulating.add(part.stage)
                self._held["gradients"] += stage.accumulated_bytes

    def _wait_for_use(self, product: Product) -> None:
        is_made_here = self._schedule.stage_to_rank[product.stage] == self._rank
        memory = self._stages[product.stage if is_made_here else product.consumer_stage]
        # A gradient is as large as the activation that it is of.
        leaves = (product.direction == "forward") == is_made_here
        num_bytes = memory.leaving_bytes if leaves else memory.entering_bytes
        self._waiting[product] = num_bytes
        self._held["transfers"] += num_bytes

    def _drop(self, product: Product) -> None:
        self._held["transfers"] -= self._waiting.pop(product)
