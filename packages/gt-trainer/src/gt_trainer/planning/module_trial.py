"""A module that recipes are tried on: by each it is shared, captured and simulated.

The ranks do not exist, and tensors have no values.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gt_autoparallel import PlacementPlan, apply_plan
from gt_config import CompileConfig
from gt_passes import optimize
from gt_passes.simulation import Hardware, model_flops_utilization
from gt_trace import TracedStep
from gt_trace.fsdp import MixedPrecision, shard
from gt_trainer.dry_run.pipeline_dry_run import parameters_by_rank
from gt_trainer.dry_run.simulated_run import simulate_run
from gt_trainer.dry_run.step_facts import StepFacts
from gt_trainer.planning.module_recipes import mesh_of, mode_of, passes_of
from gt_trainer.planning.placed_module import (
    ModuleWithLoss,
    labels_of_placed,
    meta_inputs,
    placement_of,
)
from gt_trainer.planning.recipe_outcome import RecipeOutcome
from gt_trainer.planning.run_recipe import RunRecipe
from gt_trainer.planning.simulate_recipes import outcome_of_pipeline, outcome_of_step
from gt_trainer.planning.staged_module import ModuleStages, StagedModule
from gt_trainer.steps.layer_tracer import layer_tracer

Loss = Callable[..., Tensor]
"""From the model and the inputs of one microbatch to a scalar."""


@dataclass(slots=True, kw_only=True)
class ModuleTrial:
    """A module that recipes are tried on, within ``fake_ranks``."""

    model: nn.Module
    loss: Loss
    inputs: Sequence[Tensor]
    machine: Hardware
    tokens_per_sample: int
    layers: str
    mixed_precision: MixedPrecision | None
    flops_per_token: int = 0
    """Of a step that repeats nothing."""

    def outcome_of(
        self, recipe: RunRecipe, placement: PlacementPlan | None = None
    ) -> RecipeOutcome:
        """The step of a recipe without a pipeline.

        Args:
            recipe: says how ranks share the module, if it is not placed.
            placement: of a recipe with tensor parallelism.
        """
        mine, loss = self._shared(recipe, placement)
        traced = _captured(mine, loss, meta_inputs(self.inputs, times=recipe.tp))
        passes = passes_of(recipe, layers=self.layers)
        optimize(traced, CompileConfig(verify_passes=False), passes=passes)
        facts = self._facts(recipe, mine.parameters(), num_microbatches=recipe.num_microbatches)
        labels = {} if placement is None else labels_of_placed(mesh_of(recipe, "cpu"))
        run = simulate_run(traced, facts, labels=labels, hardware=self.machine)
        if placement is None and recipe.memory_policy == "save_all":
            self.flops_per_token = run.graph.flops // (recipe.microbatch * self.tokens_per_sample)
        return self._with_mfu(outcome_of_step(recipe, run))

    def placement_of(self, recipe: RunRecipe) -> PlacementPlan:
        """Where a solver puts the module's tensors; errors are those of ``find_placement``."""
        return placement_of(
            recipe,
            self._with_loss(),
            meta_inputs(self.inputs, times=recipe.tp),
            self.machine,
            mixed_precision=self.mixed_precision,
        )

    def outcome_of_stages(self, recipe: RunRecipe, stages: ModuleStages) -> RecipeOutcome:
        """The step of a pipeline.

        Raises:
            GtPipelineError: the module cannot be cut so, or not run by that schedule.
        """
        staged = StagedModule.of(_meta_copy(self.model), stages, recipe, meta_inputs(self.inputs))
        mesh = mesh_of(recipe, "cpu")["shard"]
        for part in staged.parts:
            shard(part, mesh, mode=mode_of(recipe), mixed_precision=self.mixed_precision)
        captured = staged.captured(lambda graph: passes_of(recipe, layers=self.layers, graph=graph))
        by_rank = parameters_by_rank(captured, staged.pipeline.schedule)
        fullest = max(by_rank, key=lambda each: sum(p.numel() for p in each))
        facts = self._facts(recipe, fullest, num_microbatches=1)  # all in one run of the schedule
        run = staged.simulated(captured, facts, self.machine)
        return self._with_mfu(outcome_of_pipeline(recipe, run))

    def _shared(self, recipe: RunRecipe, placement: PlacementPlan | None) -> tuple[nn.Module, Loss]:
        """The module with this rank's part of its parameters, and what gives its loss."""
        mesh = mesh_of(recipe, "cpu")
        if placement is not None:
            # What hooks compute was captured; a run that places the module is asked about them.
            placed = apply_plan(self._with_loss(), placement, mesh, ignore_hooks=True)
            return placed, operator.call
        mine = _meta_copy(self.model)
        shard(mine, mesh, mode=mode_of(recipe), mixed_precision=self.mixed_precision)
        return mine, self.loss

    def _with_loss(self) -> ModuleWithLoss:
        return ModuleWithLoss(_meta_copy(self.model), self.loss)

    def _with_mfu(self, outcome: RecipeOutcome) -> RecipeOutcome:
        mfu = model_flops_utilization(
            outcome.tokens_per_second_per_gpu,
            flops_per_token=self.flops_per_token,
            hardware=self.machine,
        )
        return replace(outcome, mfu=mfu)

    def _facts(
        self, recipe: RunRecipe, parameters: Iterable[Tensor], *, num_microbatches: int
    ) -> StepFacts:
        stored = [
            each.to_local() if isinstance(each, DTensor) else each
            for each in parameters
            if each.requires_grad
        ]
        return StepFacts(
            num_gpus=recipe.num_gpus,
            tokens=recipe.global_batch * self.tokens_per_sample,
            num_microbatches=num_microbatches,
            flops_per_token=0,
            num_parameters_per_rank=sum(each.numel() for each in stored),
            parameter_bytes_per_rank=sum(each.numel() * each.element_size() for each in stored),
            clips_gradients=False,
        )


def _meta_copy(model: nn.Module) -> nn.Module:
    """A copy without values. What is shared in the model is shared in it."""
    state: dict[int, Any] = {}
    for buffer in model.buffers():
        state[id(buffer)] = buffer.to("meta")
    for parameter in model.parameters():
        values = parameter.detach().to("meta")
        state[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, state)


def _captured(model: nn.Module, loss: Loss, inputs: Sequence[Tensor]) -> TracedStep:
    def step(*microbatch: Tensor) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        value = loss(model, *microbatch)
        parameters = [each for each in model.parameters() if each.requires_grad]
        return value, torch.autograd.grad(value, parameters, allow_unused=True)

    trace = layer_tracer("auto")
    return trace(step, module=model, meta_device="cpu")(*inputs)
