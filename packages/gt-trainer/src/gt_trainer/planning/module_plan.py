"""A plan for any ``nn.Module``: how ranks share it, and what is computed again.

::

    plan = plan_module(model, loss, inputs, load_cluster("h100_sxm"), num_gpus=64)
    print(plan)
    best = plan.ranked[0].recipe

Every recipe is captured on fake ranks and simulated by the functions of a dry run. The recipes are
replicas (DDP), shards over all ranks (FSDP), and shards over the ranks of an NVLink domain that is
replicated (HSDP), each with every memory policy. There are a dozen of them. The search is that of
``gt-train plan``, with bounds that cut only recipes whose parameters, gradients and states have no
room. ``module_recipes`` has what a run by a recipe needs.

Tensor parallelism and pipelines are optional. A solver places the module for each degree of tensor
parallelism. ``ModuleStages`` says where the module is cut into stages.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gt_autoparallel import PlacementError, PlacementPlan, apply_plan
from gt_config import CompileConfig
from gt_passes import optimize
from gt_passes.analysis.layer_names import LayerNames
from gt_passes.simulation import Hardware, model_flops_utilization
from gt_pipeline.errors import GtPipelineError
from gt_trace import TracedStep
from gt_trace.fsdp import MixedPrecision, shard
from gt_trainer.dry_run.captured_dry_step import parameters_by_rank
from gt_trainer.dry_run.fake_step import fake_ranks
from gt_trainer.dry_run.numbers_as_text import GIB, ms
from gt_trainer.dry_run.simulate_steps import simulate_graphs, simulate_stages
from gt_trainer.dry_run.step_facts import StepFacts
from gt_trainer.planning.candidates import NoRecipeError
from gt_trainer.planning.cluster import Cluster
from gt_trainer.planning.module_recipes import (
    mesh_of,
    mode_of,
    passes_of,
    placed_recipe,
    recipes_by_hand,
    staged_recipes,
)
from gt_trainer.planning.placed_module import (
    ModuleWithLoss,
    labels_of_placed,
    meta_inputs,
    placement_of,
)
from gt_trainer.planning.plan_answer import binding, least_memory, ranked_table, why_slower
from gt_trainer.planning.recipe_outcome import RecipeOutcome, ranked
from gt_trainer.planning.run_recipe import RunRecipe
from gt_trainer.planning.search import BoundedCandidate, Cost, Frontier, search
from gt_trainer.planning.simulate_recipes import outcome_of
from gt_trainer.planning.staged_module import ModuleStages, StagedModule
from gt_trainer.planning.step_bounds import ADAM_STATES
from gt_trainer.steps.captured_step import WholeStepProgram
from gt_trainer.steps.layer_tracer import layer_tracer


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePlan:
    """Recipes for a module, simulated. Where a sample has no tokens, read samples for tokens."""

    cluster: Cluster
    num_gpus: int
    outcomes: tuple[RecipeOutcome, ...]
    """Outcomes of all simulated recipes."""

    without_memory: tuple[RunRecipe, ...]
    """Recipes whose parameters, gradients and states alone are more than a GPU has."""

    placements: Mapping[RunRecipe, PlacementPlan] = field(default_factory=dict)
    """Placements of ``ModuleWithLoss`` by a solver, for ``gt_autoparallel.apply_plan``: one on
    ``mesh_of`` each recipe with tensor parallelism."""

    left_out: Mapping[str, str] = field(default_factory=dict)
    """Recipes that could not be simulated, as ``tp 8`` or ``pp 4 by 1F1B``, and the reason."""

    @property
    def ranked(self) -> list[RecipeOutcome]:
        """Recipes that fit, the fastest first."""
        return ranked(self.outcomes)

    def __str__(self) -> str:
        """The plan as lines for a terminal."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        too_large = sum(not each.fits for each in self.outcomes)
        yield (
            f"Plan for {self.num_gpus:,} {self.cluster.hardware.name}: simulated, nothing here was "
            "measured"
        )
        yield (
            f"  recipes          {len(self.outcomes)} simulated, of which {too_large} do not fit; "
            f"{len(self.without_memory)} without room for parameters, gradients and states"
        )
        yield from self._placement_lines()
        best = self.ranked
        if not best:
            yield least_memory(self.outcomes)
            return
        yield from ranked_table(best, self.cluster, num_rows=len(best))
        yield f"  binds            {binding(best[0])}"
        if len(best) > 1:
            yield f"  second           {why_slower(best[0], best[1])}"

    def _placement_lines(self) -> Iterator[str]:
        for recipe, plan in self.placements.items():
            yield (
                f"  tp {recipe.tp:<14}placed by a solver, which expects {ms(plan.objective_us)} of "
                f"a microbatch and runs {len(plan.recomputed)} operators again"
            )
        for what, reason in self.left_out.items():
            yield f"  {what:<16} left out: {reason}"


def plan_module(
    model: nn.Module,
    loss: Loss,
    inputs: Sequence[Tensor],
    cluster: Cluster,
    *,
    num_gpus: int,
    num_microbatches: int = 1,
    tokens_per_sample: int = 1,
    layers: str = "layers.*",
    mixed_precision: MixedPrecision | None = None,
    tensor_parallel: Sequence[int] = (),
    stages: ModuleStages | None = None,
) -> ModulePlan:
    """Simulate all recipes. Needs a process without a process group.

    Passes are not verified here, as in ``gt-train plan``: a run verifies what it trains with.

    Args:
        model: on any device, meta included. Not changed, and no weight of it is copied.
        loss: called as ``loss(model, *inputs)``. It runs on tensors without values.
        inputs: of one microbatch on one GPU, on any device, samples first.
        cluster: of ``load_cluster``.
        num_gpus: two or more.
        num_microbatches: of a step, for each GPU.
        tokens_per_sample: what throughput counts; 1 counts samples.
        layers: pattern of the names of the modules that are layers, as ``model.layers.*``.
        mixed_precision: of ``gt_trace.fsdp.shard``.
        tensor_parallel: degrees for which a solver places the module: its samples are cut over
            ``num_gpus / degree`` groups of as many GPUs, each with ``degree`` times the samples of
            ``inputs``. It chooses every layout, and the recomputation where memory is short. A
            search may take a minute or more.
        stages: how the module is cut for the pipelines that are looked at, each with ``degree``
            times as many microbatches as there are without; None looks at none.

    Raises:
        ValueError: lists what is wrong with the arguments.
        NoRecipeError: no recipe has room for parameters, gradients and states.
        CaptureError: a step cannot be captured.
    """
    numbers = {
        "num_gpus": num_gpus,
        "num_microbatches": num_microbatches,
        "tokens_per_sample": tokens_per_sample,
    }
    machine = cluster.hardware
    _check(model, inputs, numbers, layers, tensor_parallel, stages, machine.gpus_per_node)
    trained = [p for p in model.parameters() if p.requires_grad]
    state_bytes = sum(p.numel() * p.element_size() for p in trained) * (2 + ADAM_STATES)
    by_hand = list(
        recipes_by_hand(inputs[0].shape[0], num_gpus, num_microbatches, machine.gpus_per_node)
    )
    has_room = [state_bytes / each.dp_shard <= machine.hbm_capacity_bytes for each in by_hand]
    if not any(has_room):
        raise NoRecipeError(
            f"the model does not fit: parameters, gradients and the optimizer's states are "
            f"{state_bytes / GIB:,.1f} GiB, and {num_gpus:,} GPUs have "
            f"{machine.hbm_capacity_bytes / GIB:.1f} GiB each"
        )
    first = by_hand[has_room.index(True)]
    further = [placed_recipe(first, degree) for degree in dict.fromkeys(tensor_parallel)]
    if stages is not None:
        further += staged_recipes(first, stages)
    bounds = [0.0 if each else math.inf for each in has_room] + [0.0] * len(further)
    frontier = Frontier(
        (
            BoundedCandidate(item=recipe, bounds_us=(bound,), guesses_us=(bound,))
            for recipe, bound in zip([*by_hand, *further], bounds, strict=True)
        ),
        [machine.hbm_capacity_bytes],
    )
    trial = ModuleTrial(
        model=model,
        loss=loss,
        inputs=inputs,
        machine=machine,
        tokens_per_sample=tokens_per_sample,
        layers=layers,
        mixed_precision=mixed_precision,
        stages=stages,
    )
    outcomes: list[RecipeOutcome] = []
    left_out: dict[str, str] = {}

    def simulate(recipe: RunRecipe) -> list[Cost] | None:
        what = f"tp {recipe.tp}" if recipe.tp > 1 else f"pp {recipe.pp} by {recipe.schedule}"
        if what in left_out:
            return None
        try:
            outcomes.append(trial.outcome_of(recipe))
        except Exception as error:  # the user's module and loss may raise anything
            if recipe.tp == recipe.pp == 1:
                raise
            left_out[what] = _reason(error)
            return None
        return [(outcomes[-1].step_us, outcomes[-1].peak_bytes)]

    with fake_ranks(num_gpus):
        search(frontier, simulate)
    return ModulePlan(
        cluster=cluster,
        num_gpus=num_gpus,
        outcomes=tuple(outcomes),
        without_memory=tuple(
            each for each, fits in zip(by_hand, has_room, strict=True) if not fits
        ),
        placements=trial.placements,
        left_out=left_out,
    )


def _reason(error: Exception) -> str:
    """Return the reason in one line for which a recipe is left out."""
    head, *rest = str(error).splitlines() or [""]
    text = " ".join([head, "; ".join(each.strip().removeprefix("- ") for each in rest)]).strip()
    is_ours = isinstance(error, (GtPipelineError, PlacementError))
    return text if is_ours else f"{type(error).__name__}: {text}"


def _check(
    model: nn.Module,
    inputs: Sequence[Tensor],
    numbers: Mapping[str, int],
    layers: str,
    tensor_parallel: Sequence[int],
    stages: ModuleStages | None,
    gpus_per_domain: int,
) -> None:
    problems = [
        f"{name} is {value!r}, and must be {least} or more"
        for name, value in numbers.items()
        if value < (least := 2 if name == "num_gpus" else 1)
    ]
    num_gpus = numbers["num_gpus"]
    allowed = [
        degree
        for degree in range(2, gpus_per_domain + 1)
        if num_gpus % degree == 0
        and num_gpus > degree
        and (num_gpus <= gpus_per_domain or gpus_per_domain % degree == 0)
    ]
    problems += [
        f"tensor_parallel has {degree!r}, and may have {allowed or 'nothing'}: what divides "
        f"{num_gpus} GPUs into two groups or more, and NVLink domains of {gpus_per_domain}"
        for degree in tensor_parallel
        if degree not in allowed
    ]
    if stages is not None:
        problems += [
            f"stages.degrees has {degree!r}, and may have what divides {num_gpus} GPUs "
            "into groups of two or more"
            for degree in stages.degrees
            if degree < 2 or num_gpus % degree or num_gpus == degree
        ]
    sizes = [tuple(each.shape[:1]) for each in inputs]
    if not sizes or len(set(sizes)) > 1 or not sizes[0] or not sizes[0][0]:
        problems.append(f"inputs have {sizes} samples, and must have the same number, 1 or more")
    if not any(each.requires_grad for each in model.parameters()):
        problems.append("the model has no parameter that is trained")
    names = LayerNames(layers)
    if all(names.layer_of_name(name) is None for name, _ in model.named_modules()):
        some = ", ".join(name for name, _ in model.named_children())
        problems.append(f"layers is {layers!r}, which no module of the model is; it has {some}")
    if problems:
        listed = "\n  ".join(problems)
        raise ValueError(f"plan_module:\n  {listed}")


# A module that recipes are tried on: by each it is shared, captured and simulated.
#
# The ranks do not exist, and tensors have no values.
Loss = Callable[..., Tensor]
"""Maps the model and the inputs of one microbatch to the scalar loss."""


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
    stages: ModuleStages | None
    flops_per_token: int = 0
    """Operations of a step without recomputation."""

    placements: dict[RunRecipe, PlacementPlan] = field(default_factory=dict)
    """Placements of the simulated recipes with tensor parallelism."""

    def outcome_of(self, recipe: RunRecipe) -> RecipeOutcome:
        """Simulate the step of a recipe.

        Raises:
            PlacementError: the module cannot be placed, or does not fit.
            GtPipelineError: the module cannot be cut into these stages, or not run by the schedule.
        """
        outcome = self._outcome_of_stages(recipe) if recipe.pp > 1 else self._outcome(recipe)
        mfu = model_flops_utilization(
            outcome.tokens_per_second_per_gpu,
            flops_per_token=self.flops_per_token,
            hardware=self.machine,
        )
        return replace(outcome, mfu=mfu)

    def _outcome(self, recipe: RunRecipe) -> RecipeOutcome:
        inputs = meta_inputs(self.inputs, times=recipe.tp)
        placement = None
        if recipe.tp > 1:
            placement = placement_of(
                recipe,
                self._with_loss(),
                inputs,
                self.machine,
                mixed_precision=self.mixed_precision,
            )
        mine, loss = self._shared(recipe, placement)
        traced = _captured(mine, loss, inputs)
        passes = passes_of(recipe, layers=self.layers)
        optimize(traced, CompileConfig(verify_passes=False), passes=passes)
        facts = self._facts(recipe, mine.parameters(), num_microbatches=recipe.num_microbatches)
        labels = {} if placement is None else labels_of_placed(mesh_of(recipe, "cpu"))
        run = simulate_graphs(
            WholeStepProgram(traced).graphs, facts, labels=labels, hardware=self.machine
        )
        if placement is not None:
            self.placements[recipe] = placement
        elif recipe.memory_policy == "save_all":
            self.flops_per_token = run.graph.flops // (recipe.microbatch * self.tokens_per_sample)
        return outcome_of(recipe, run)

    def _outcome_of_stages(self, recipe: RunRecipe) -> RecipeOutcome:
        assert self.stages is not None
        model, inputs = _meta_copy(self.model), meta_inputs(self.inputs)
        staged = StagedModule.of(model, self.stages, recipe, inputs)
        mesh = mesh_of(recipe, "cpu")["shard"]
        for part in staged.parts:
            shard(part, mesh, mode=mode_of(recipe), mixed_precision=self.mixed_precision)
        captured = staged.captured(lambda graph: passes_of(recipe, layers=self.layers, graph=graph))
        by_rank = parameters_by_rank(captured, staged.pipeline.schedule)
        fullest = max(by_rank, key=lambda each: sum(p.numel() for p in each))
        facts = self._facts(recipe, fullest, num_microbatches=1)  # all in one run of the schedule
        run = simulate_stages(
            captured,
            staged.pipeline.schedule,
            facts,
            labels={},
            hardware=self.machine,
            shared_groups=self.stages.shared_groups,
        )
        return outcome_of(recipe, run)

    def _shared(self, recipe: RunRecipe, placement: PlacementPlan | None) -> tuple[nn.Module, Loss]:
        """The module with this rank's part of its parameters, and what gives its loss."""
        mesh = mesh_of(recipe, "cpu")
        if placement is not None:
            # The capture includes the hooks' work. A run that places the module must accept them.
            placed = apply_plan(self._with_loss(), placement, mesh, ignore_hooks=True)
            return placed, operator.call
        mine = _meta_copy(self.model)
        shard(mine, mesh, mode=mode_of(recipe), mixed_precision=self.mixed_precision)
        return mine, self.loss

    def _with_loss(self) -> ModuleWithLoss:
        return ModuleWithLoss(_meta_copy(self.model), self.loss)

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
