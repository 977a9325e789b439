"""The price of every action of a pipeline, each distinct graph read once.

Stages that are alike may share one capture, so that a pipeline of many is priced as fast as one of
few: who captured them says which stand for which.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

from torch.fx import GraphModule

from gt_config.node_keys import OverlappedBackward, PipelineAction
from gt_passes.simulation import (
    CostModel,
    GraphProgram,
    StepSimulation,
    balanced_exchange_sizes,
    simulate_step,
)
from gt_pipeline.estimates.action_memory import ActionMemory, StageMemory, action_memory
from gt_pipeline.graph import GraphPipelineStage
from gt_pipeline.graph.action_graph import ActionGraph
from gt_pipeline.schedules import Action, Schedule
from gt_pipeline.schedules.dependencies import Product, transferred_by
from gt_pipeline.schedules.schedule import LoweredSchedule


def symbol_sizes_of(stages: Sequence[GraphPipelineStage]) -> dict[str, int]:
    """Sizes of the stages' data-dependent symbols under balanced routing.

    Forwards come first: what a backward exchanges has the sizes that its forward found.
    """
    sizes: dict[str, int] = {}
    for stage in dict.fromkeys(stages):
        for kind in ("FORWARD", "FULL_BACKWARD"):
            sizes = balanced_exchange_sizes(stage.actions[kind].graph_module, sizes=sizes)
    return sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphRuns:
    """A simulated graph, and the number of times that a rank runs it."""

    graph: StepSimulation
    graph_module: GraphModule
    count: float
    """Runs in a step. Of the actions of a pipeline: the mean over ranks, in one run of the
    schedule."""


class _PricedGraph:
    """The graph of an action, read once for all machines.

    Args:
        action: of the stage ``backward_stage``, or a forward and a backward of it as one graph.
        backward_stage: the stage whose saved values it frees.
        cost_model: with the sizes of data-dependent symbols.
    """

    def __init__(
        self, action: ActionGraph, backward_stage: GraphPipelineStage, cost_model: CostModel
    ) -> None:
        self.graph_module = action.graph_module
        self.program = GraphProgram(action.graph_module, cost_model)
        self._action = action
        self._backward_stage = backward_stage
        self._symbol_sizes = cost_model.sizes.sizes

    @cached_property
    def memory(self) -> ActionMemory:
        return action_memory(self._action, self._backward_stage, symbol_sizes=self._symbol_sizes)


class PricedStages:
    """Times and memory of the actions of a pipeline.

    Args:
        stages: for each stage of the pipeline the one that was captured for it; equal stages may
            share one. All with the same fake mode.
        schedule: of the whole pipeline.
        cost_model: prices nodes and transfers; it knows ``symbol_sizes_of`` the stages, and is told
            of sizes that are found out in graphs of two actions.
        ranks: the global rank of each pipeline rank, on one of the pipelines that run side by side.
        group_labels: as for ``simulate_step``.
    """

    def __init__(
        self,
        stages: Sequence[GraphPipelineStage],
        schedule: Schedule,
        cost_model: CostModel,
        *,
        ranks: Sequence[int],
        group_labels: Mapping[str, str] | None = None,
    ) -> None:
        self._stages = tuple(stages)
        self._schedule = schedule
        self._cost_model = cost_model
        self._ranks = tuple(ranks)
        self._labels = group_labels
        self._graphs: dict[tuple[Hashable, ...], _PricedGraph] = {}
        self._pairs: list[_PricedGraph] = []
        sizes = cost_model.sizes.sizes
        of_kind = {each: StageMemory.of(each, symbol_sizes=sizes) for each in self._stages}
        self.memory: Mapping[int, StageMemory] = {
            index: of_kind[stage] for index, stage in enumerate(self._stages)
        }
        """Memory of each stage between actions, by its index."""

    @property
    def num_unsized(self) -> int:
        """Values of the stages whose size depends on data and counts as nothing."""
        of_stages = {id(each): each for each in self.memory.values()}.values()
        actions = [action for each in of_stages for action in each.actions.values()]
        pairs = [each.memory for each in self._pairs]
        return sum(each.num_unsized for each in (*actions, *pairs))

    def runs(self, lowered: LoweredSchedule) -> tuple[GraphRuns, ...]:
        """Return the simulated graphs of the computations of a schedule."""
        counts = Counter(
            self._priced(action)
            for of_rank in lowered.actions
            for action in of_rank
            if action.is_compute
        )
        return tuple(
            GraphRuns(
                graph=simulate_step(
                    each.graph_module,
                    self._cost_model,
                    group_labels=self._labels,
                    program=each.program,
                ),
                graph_module=each.graph_module,
                count=count / lowered.num_ranks,
            )
            for each, count in counts.items()
        )

    def costs(self, cost_model: CostModel | None = None) -> Callable[[Action], float]:
        """A cost function for ``simulate``, in microseconds.

        Args:
            cost_model: the same assumptions on another machine, if it is not for this one.
        """
        model = cost_model or self._cost_model
        known: dict[Hashable, float] = {}

        def cost(action: Action) -> float:
            if action.kind == "RESHARD":
                return 0.0
            if action.is_point_to_point:
                product = transferred_by(action)
                way = (product.stage, product.direction)
                if way not in known:
                    known[way] = self._transfer_us(product, model)
                return known[way]
            priced = self._priced(action)
            if priced not in known:
                known[priced] = priced.program.run(model).timeline.makespan_us
            return known[priced]

        return cost

    def pair_memory(self, action: Action) -> ActionMemory:
        """Return the memory of an OVERLAP_F_B."""
        return self._priced(action).memory

    def _priced(self, action: Action) -> _PricedGraph:
        forward, backward = action.parts or (action, action)
        stage, other = self._stages[forward.stage], self._stages[backward.stage]
        key = (stage.stage_index, other.stage_index, forward.kind, backward.kind)
        if key not in self._graphs:
            if action.parts is None:
                graph = stage.actions[cast("PipelineAction", action.kind)]
            else:
                graph = stage.overlapped_action(other, cast("OverlappedBackward", backward.kind))
                known = self._cost_model.sizes
                known.add(balanced_exchange_sizes(graph.graph_module, sizes=known.sizes))
            self._graphs[key] = _PricedGraph(graph, other, self._cost_model)
            self._pairs += [self._graphs[key]] * (action.parts is not None)
        return self._graphs[key]

    def _transfer_us(self, product: Product, model: CostModel) -> float:
        stage_to_rank = self._schedule.stage_to_rank
        ends = [self._ranks[stage_to_rank[s]] for s in (product.stage, product.consumer_stage)]
        memory = self.memory[product.stage]
        forward = product.direction == "forward"
        num_bytes = memory.leaving_bytes if forward else memory.entering_bytes
        return model.collective_us("send_receive", num_bytes, ends)
