"""The price of every action of a pipeline, each distinct graph read once.

Stages that are alike may share one capture, so that a pipeline of many is priced as fast as one of
few: who captured them says which stand for which.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import cast

import torch

from gt_config.node_keys import OverlappedBackward, PipelineAction
from gt_passes.simulation import (
    CostModel,
    GraphProgram,
    StepSimulation,
    balanced_exchange_sizes,
    simulate_step,
)
from gt_pipeline.estimates.action_memory import ActionMemory, StageMemory, pair_memory
from gt_pipeline.graph import GraphPipelineStage
from gt_pipeline.schedules import Action, Schedule
from gt_pipeline.schedules.dependencies import Product, transferred_by


def symbol_sizes_of(stages: Sequence[GraphPipelineStage]) -> dict[str, int]:
    """Sizes of the stages' data-dependent symbols under balanced routing.

    Forwards come first: what a backward exchanges has the sizes that its forward found.
    """
    sizes: dict[str, int] = {}
    for stage in dict.fromkeys(stages):
        for kind in ("FORWARD", "FULL_BACKWARD"):
            sizes = balanced_exchange_sizes(stage.actions[kind].graph_module, sizes=sizes)
    return sizes


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
        self._programs: dict[Hashable, GraphProgram] = {}
        self._simulations: dict[Hashable, StepSimulation] = {}
        self._pair_memory: dict[Hashable, ActionMemory] = {}
        self._pairs: dict[Hashable, torch.fx.GraphModule] = {}
        sizes = cost_model.sizes.sizes
        of_kind = {each: StageMemory.of(each, symbol_sizes=sizes) for each in self._stages}
        self.memory: Mapping[int, StageMemory] = {
            index: of_kind[stage] for index, stage in enumerate(self._stages)
        }
        """What each stage holds between actions, by its index."""

    @property
    def guesses(self) -> Mapping[str, int]:
        """Operators of which only the bytes were priced, in the graphs simulated so far."""
        found: Counter[str] = Counter()
        for simulation in self._simulations.values():
            found.update(simulation.guesses)
        return dict(found)

    @property
    def num_unsized(self) -> int:
        """Values of the stages whose size depends on data and counts as nothing."""
        of_stages = {id(each): each for each in self.memory.values()}.values()
        actions = [action for each in of_stages for action in each.actions.values()]
        return sum(each.num_unsized for each in (*actions, *self._pair_memory.values()))

    def simulation(self, action: Action) -> StepSimulation:
        """The simulated graph of one action: a computation, UNSHARD or REDUCE_GRAD."""
        key, _ = self._graph(action)
        if key not in self._simulations:
            program = self._program(action)
            graph_module = self._graph(action)[1]
            self._simulations[key] = simulate_step(
                graph_module, self._cost_model, group_labels=self._labels, program=program
            )
        return self._simulations[key]

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
            key, _ = self._graph(action)
            if key not in known:
                known[key] = self._program(action).run(model).timeline.makespan_us
            return known[key]

        return cost

    def pair_memory(self, action: Action) -> ActionMemory:
        """The memory of an OVERLAP_F_B."""
        key, _ = self._graph(action)
        if key not in self._pair_memory:
            assert action.parts is not None
            forward, backward = action.parts
            self._pair_memory[key] = pair_memory(
                self._stages[forward.stage],
                self._stages[backward.stage],
                cast("OverlappedBackward", backward.kind),
                symbol_sizes=self._cost_model.sizes.sizes,
            )
        return self._pair_memory[key]

    def _graph(self, action: Action) -> tuple[Hashable, torch.fx.GraphModule]:
        stage = self._stages[action.stage]
        if action.parts is None:
            kind = cast("PipelineAction", action.kind)
            return (stage.stage_index, kind), stage.actions[kind].graph_module
        backward = action.parts[1]
        other, backward_kind = self._stages[backward.stage], backward.kind
        key = (stage.stage_index, other.stage_index, backward_kind)
        if key not in self._pairs:
            pair = stage.overlapped_action(other, cast("OverlappedBackward", backward_kind))
            known = self._cost_model.sizes
            known.add(balanced_exchange_sizes(pair.graph_module, sizes=known.sizes))
            self._pairs[key] = pair.graph_module
        return key, self._pairs[key]

    def _program(self, action: Action) -> GraphProgram:
        key, graph_module = self._graph(action)
        if key not in self._programs:
            self._programs[key] = GraphProgram(graph_module, self._cost_model)
        return self._programs[key]

    def _transfer_us(self, product: Product, model: CostModel) -> float:
        stage_to_rank = self._schedule.stage_to_rank
        ends = [self._ranks[stage_to_rank[s]] for s in (product.stage, product.consumer_stage)]
        memory = self.memory[product.stage]
        forward = product.direction == "forward"
        num_bytes = memory.leaving_bytes if forward else memory.entering_bytes
        return model.collective_us("send_receive", num_bytes, ends)
