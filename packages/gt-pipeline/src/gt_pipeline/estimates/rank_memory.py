"""The memory that a rank holds over a step, its peak, and what holds it.

Without a pipeline it is the memory of one graph, with the optimizer's state and accumulated
gradients added. In a pipeline the rank's list of actions is walked as it runs. What stages hold
between actions is added and dropped where the actions do it. The peak of each action comes on top.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, cast, get_args

from gt_config.node_keys import PipelineAction
from gt_passes.analysis.liveness import MemoryKind, MemoryProfile
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
"""Why a rank of a pipeline holds memory.

gradients: sums over microbatches, as gathered, until the step's end, with what their reduction
needs; then as parameters are stored.
activations: what forwards of microbatches under way saved for backwards.
transfers: what was made for neighbouring stages or received from them and not used yet.
running action: what the action that runs has made, less what it has given up of the others.
"""

MEMORY_PARTS: tuple[MemoryPart, ...] = get_args(MemoryPart)

_PART_OF_KIND: Mapping[MemoryKind, str] = {
    "static inputs": "parameters and buffers",
    "arguments": "batch",
    "outputs": "gradients",
    "gathered parameters": "gathered parameters",
    "saved for backward": "activations",
    "temporaries": "temporaries",
}

ADAM_STATES = 2
"""Tensors that the optimizer keeps for each parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMoment:
    """The most that a rank holds while one node or one action runs."""

    action: Action | None = None
    """The action of a pipeline; None for the optimizer, and for the nodes of a graph."""

    bytes_by_part: Mapping[str, int]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all parts."""
        return sum(self.bytes_by_part.values())


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The peak of one rank, and all moments of its step."""

    rank: int
    """Rank of the pipeline; 0 without one."""

    moments: tuple[RankMoment, ...]
    """Moments of each node of a graph. Of a list of actions: each computation, UNSHARD and
    REDUCE_GRAD in its order; then, as reductions are waited for, each REDUCE_GRAD again; then the
    optimizer."""

    @cached_property
    def peak(self) -> RankMoment:
        """The first moment at which most is held."""
        return max(self.moments, key=lambda moment: moment.num_bytes)

    @property
    def peak_bytes(self) -> int:
        """The most that it holds."""
        return self.peak.num_bytes


def graph_memory(
    profile: MemoryProfile, *, optimizer_bytes: int, accumulated_bytes: int
) -> RankMemory:
    """Return the memory of a rank whose step runs a graph.

    Args:
        profile: memory of the graph; of several graphs the one that needs the most.
        optimizer_bytes: state of the optimizer.
        accumulated_bytes: gradients of earlier microbatches, held outside the graph.
    """
    outside = {"optimizer state": optimizer_bytes, "accumulated gradients": accumulated_bytes}
    names = [_PART_OF_KIND[kind] for kind in profile.live_bytes_by_kind]
    moments = []
    for held in zip(*profile.live_bytes_by_kind.values(), strict=True):
        state, *others = zip(names, held, strict=True)
        moments.append(RankMoment(bytes_by_part=dict([state, *outside.items(), *others])))
    return RankMemory(rank=0, moments=tuple(moments))


def rank_memory(
    lowered: LoweredSchedule,
    *,
    rank: int,
    stages: Mapping[int, StageMemory],
    pair: Callable[[Action], ActionMemory],
    optimizer_states: int = ADAM_STATES,
    accumulates: bool = False,
) -> RankMemory:
    """Walk one rank's list.

    Args:
        lowered: the schedule as it runs.
        rank: of the pipeline.
        stages: of the rank, by index; others are not read.
        pair: the memory of an OVERLAP_F_B.
        optimizer_states: tensors that the optimizer keeps for each parameter; 2 for Adam.
        accumulates: whether the schedule runs several times before the optimizer does. Gradients
            of earlier runs are in memory then.
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
        self._held: dict[str, int] = dict.fromkeys(MEMORY_PARTS, 0)
        self._held["parameters and buffers"] = sum(each.state_bytes for each in mine)
        self._held["optimizer state"] = optimizer_states * sum(e.parameter_bytes for e in mine)
        if accumulates:
            self._held["gradients"] = sum(each.reduced_bytes for each in mine)
        self._accumulating: set[int] = set()
        self._reducing: list[Action] = []
        self._waiting: dict[Product, int] = {}
        self._moments: list[RankMoment] = []

    def reach(self, extra_bytes: int, action: Action | None) -> None:
        """Note what is held with this much on top."""
        held = {**self._held, "running action": extra_bytes}
        self._moments.append(RankMoment(action=action, bytes_by_part=held))

    def after(self, action: Action) -> None:
        """Change what is held as an action does."""
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
        return RankMemory(rank=self._rank, moments=tuple(self._moments))

    def _after_compute(self, part: Action) -> None:
        stage = self._stages[part.stage]
        taken = consumed_by(part, self._schedule.num_stages)
        if taken is not None:
            self._drop(taken)
        made = produced_by(part, self._schedule.num_stages)
        if made is not None:
            self._wait_for_use(made)
        if part.kind == "FORWARD":
            self._held["activations"] += stage.saved_bytes
        elif part.kind == "BACKWARD_INPUT":
            self._held["activations"] += stage.between_bytes - stage.saved_bytes
        else:
            full = part.kind == "FULL_BACKWARD"
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
