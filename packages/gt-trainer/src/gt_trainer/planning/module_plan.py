"""A plan for any ``nn.Module``: how ranks share it, and what is computed again.

::

    plan = plan_module(model, loss, inputs, load_cluster("h100_sxm"), num_gpus=64)
    print(plan)
    best = plan.ranked[0].recipe

Every recipe is captured on ranks that do not exist, and simulated, by the functions of a dry run:
replicas (DDP), shards over all ranks (FSDP), and shards over those of an NVLink domain that is
replicated (HSDP), each with every memory policy. There are a dozen of them, so that nothing is
guessed; only those are left out whose parameters, gradients and states have no room. ``mode_of``,
``mesh_of`` and ``passes_of`` are what a run by a recipe needs, and what the plan itself used.

Degrees of tensor parallelism are looked at where they are asked for: for each of them a solver
places the module, and the step of its placement is simulated like the others. Pipelines are not
searched: how a foreign model is cut into stages is asked of its author (``gt_pipeline.split``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from gt_autoparallel import InfeasiblePlacementError, PlacementPlan, apply_plan
from gt_autoparallel.errors import SolverError, UnsupportedModelError
from gt_config import CompileConfig, MemoryPolicy
from gt_passes import GraphPass, default_passes, optimize
from gt_passes.analysis.layer_names import LayerNames
from gt_passes.simulation import Hardware, model_flops_utilization
from gt_trace import TracedStep
from gt_trace.fsdp import MixedPrecision, ShardingMode, shard
from gt_trainer.dry_run.fake_step import fake_ranks
from gt_trainer.dry_run.numbers_as_text import GIB, ms
from gt_trainer.dry_run.simulated_run import simulate_run
from gt_trainer.dry_run.step_facts import StepFacts
from gt_trainer.planning.candidates import MEMORY_POLICIES, NoRecipeError
from gt_trainer.planning.cluster import Cluster
from gt_trainer.planning.placed_module import (
    MESH_AXES,
    MODULE,
    ModuleWithLoss,
    loss_of_placed,
    on_meta,
    placement_of,
)
from gt_trainer.planning.plan_answer import binding, ranked_table, why_slower
from gt_trainer.planning.recipe_outcome import RecipeOutcome
from gt_trainer.planning.run_recipe import RunRecipe
from gt_trainer.planning.simulate_recipes import outcome_of_step
from gt_trainer.planning.step_bounds import ADAM_STATES
from gt_trainer.steps.layer_tracer import layer_tracer

Loss = Callable[..., Tensor]
"""From the model and the inputs of one microbatch to a scalar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePlan:
    """Recipes for a module, simulated. Where a sample has no tokens, read samples for tokens."""

    cluster: Cluster
    num_gpus: int
    outcomes: tuple[RecipeOutcome, ...]
    """Of all that were simulated."""

    without_memory: tuple[RunRecipe, ...]
    """Whose parameters, gradients and states alone are more than a GPU has."""

    placements: Mapping[RunRecipe, PlacementPlan] = field(default_factory=dict)
    """Of recipes with tensor parallelism: where a solver puts every tensor of ``ModuleWithLoss``
    on ``mesh_of`` the recipe, for ``gt_autoparallel.apply_plan``."""

    unplaced: Mapping[int, str] = field(default_factory=dict)
    """Degrees of tensor parallelism for which the solver has no placement, and why."""

    @property
    def ranked(self) -> list[RecipeOutcome]:
        """Recipes that fit, the fastest first."""
        fitting = (each for each in self.outcomes if each.fits)
        return sorted(fitting, key=lambda each: each.step_us)

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
        ranked = self.ranked
        if not ranked:
            least = min(self.outcomes, key=lambda each: each.peak_bytes)
            yield (
                f"  nothing fits     the least needs {least.peak_bytes / GIB:.1f} GiB of "
                f"{least.capacity_bytes / GIB:.1f}: {least.recipe}"
            )
            return
        yield from ranked_table(ranked, self.cluster, num_rows=len(ranked))
        yield f"  binds            {binding(ranked[0])}"
        if len(ranked) > 1:
            yield f"  second           {why_slower(ranked[0], ranked[1])}"

    def _placement_lines(self) -> Iterator[str]:
        for recipe, plan in self.placements.items():
            yield (
                f"  tp {recipe.tp:<14}placed by a solver, which expects {ms(plan.objective_us)} of "
                f"a microbatch and runs {len(plan.recomputed)} operators again"
            )
        for degree, reason in self.unplaced.items():
            yield f"  tp {degree:<14}not placed: {reason}"


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
            ``inputs``. It chooses every layout, and what runs again where memory is short. A search
            may take a minute or more.

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
    _check(model, inputs, numbers, layers, tensor_parallel, machine.gpus_per_node)
    trained = [p for p in model.parameters() if p.requires_grad]
    state_bytes = sum(p.numel() * p.element_size() for p in trained) * (2 + ADAM_STATES)
    recipes = list(_recipes(inputs[0].shape[0], num_gpus, num_microbatches, machine.gpus_per_node))
    without_memory = tuple(
        each for each in recipes if state_bytes / each.dp_shard > machine.hbm_capacity_bytes
    )
    chosen = [each for each in recipes if each not in without_memory]
    if not chosen:
        raise NoRecipeError(
            f"the model does not fit: parameters, gradients and the optimizer's states are "
            f"{state_bytes / GIB:,.1f} GiB, and {num_gpus:,} GPUs have "
            f"{machine.hbm_capacity_bytes / GIB:.1f} GiB each"
        )
    trial = _Trial(
        model=model,
        loss=loss,
        inputs=inputs,
        machine=machine,
        tokens_per_sample=tokens_per_sample,
        layers=layers,
        mixed_precision=mixed_precision,
    )
    placements: dict[RunRecipe, PlacementPlan] = {}
    unplaced: dict[int, str] = {}
    with fake_ranks(num_gpus):
        outcomes = [trial.outcome_of(each) for each in chosen]
        for degree in dict.fromkeys(tensor_parallel):
            recipe = _placed_recipe(chosen[0], degree)
            try:
                placements[recipe] = trial.placement_of(recipe)
            except (InfeasiblePlacementError, SolverError, UnsupportedModelError) as error:
                head, *rest = str(error).splitlines()
                unplaced[degree] = " ".join([head, "; ".join(each.strip() for each in rest)])
                continue
            outcomes.append(trial.outcome_of(recipe, placements[recipe]))
    return ModulePlan(
        cluster=cluster,
        num_gpus=num_gpus,
        outcomes=tuple(outcomes),
        without_memory=without_memory,
        placements=placements,
        unplaced=unplaced,
    )


def mode_of(recipe: RunRecipe) -> ShardingMode:
    """How ``gt_trace.fsdp.shard`` shares the parameters of a model by a recipe.

    Raises:
        ValueError: it has tensor parallelism, and shares them by its placement.
    """
    if recipe.tp > 1:
        raise ValueError(f"{recipe} is not run by shard, but by {how_to_share(recipe)}")
    if recipe.dp_shard == 1:
        return "replicate"
    return "shard" if recipe.dp_replicate == 1 else "hybrid_shard"


def how_to_share(recipe: RunRecipe) -> str:
    """The call by which all ranks of a run share the model, on ``mesh_of`` the recipe."""
    if recipe.tp > 1:
        return "apply_plan(ModuleWithLoss(model, loss), plan.placements[recipe], mesh)"
    return f"shard(model, mesh, mode={mode_of(recipe)!r})"


def mesh_of(recipe: RunRecipe, device_type: str) -> DeviceMesh:
    """The mesh over which it does; all ranks call this."""
    if recipe.tp > 1:
        return init_device_mesh(device_type, (recipe.dp_shard, recipe.tp), mesh_dim_names=MESH_AXES)
    names = {"replicate": recipe.dp_replicate, "shard": recipe.dp_shard}
    axes = {name: size for name, size in names.items() if mode_of(recipe) in (name, "hybrid_shard")}
    return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def passes_of(recipe: RunRecipe, *, layers: str = "layers.*") -> tuple[GraphPass, ...]:
    """The passes of a recipe, for ``gt_passes.optimize``.

    Args:
        recipe: says the memory policy.
        layers: pattern of the names of the modules that are layers, in the module itself.
    """
    if recipe.tp > 1:
        layers = f"{MODULE}.{layers}"
    options = CompileConfig(memory_policy=cast("MemoryPolicy", recipe.memory_policy))
    return tuple(_with_layers(each, layers) for each in default_passes(options, graph="STEP"))


def _with_layers(graph_pass: Any, layers: str) -> Any:
    has_layers = any(field.name == "layers" for field in fields(graph_pass))
    return replace(graph_pass, layers=layers) if has_layers else graph_pass


def _recipes(
    microbatch: int, num_gpus: int, num_microbatches: int, gpus_per_domain: int
) -> Iterator[RunRecipe]:
    shards = {1: None, num_gpus: None}
    if num_gpus > gpus_per_domain > 1 and num_gpus % gpus_per_domain == 0:
        shards[gpus_per_domain] = None
    for dp_shard in shards:
        for policy in MEMORY_POLICIES:
            yield RunRecipe(
                dp_replicate=num_gpus // dp_shard,
                dp_shard=dp_shard,
                microbatch=microbatch,
                global_batch=microbatch * num_microbatches * num_gpus,
                memory_policy=policy,
            )


def _placed_recipe(by_hand: RunRecipe, degree: int) -> RunRecipe:
    """As many samples for as many GPUs, ``degree`` of which share theirs."""
    return replace(
        by_hand,
        dp_replicate=1,
        dp_shard=by_hand.num_gpus // degree,
        tp=degree,
        microbatch=by_hand.microbatch * degree,
        memory_policy="save_all",  # what runs again is in the placement
    )


@dataclass(slots=True, kw_only=True)
class _Trial:
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

    def placement_of(self, recipe: RunRecipe) -> PlacementPlan:
        return placement_of(
            recipe,
            self._with_loss(),
            on_meta(self.inputs, times=recipe.tp),
            self.machine,
            mixed_precision=self.mixed_precision,
        )

    def outcome_of(
        self, recipe: RunRecipe, placement: PlacementPlan | None = None
    ) -> RecipeOutcome:
        mine, loss = self._shared(recipe, placement)
        traced = _captured(mine, loss, on_meta(self.inputs, times=recipe.tp))
        passes = passes_of(recipe, layers=self.layers)
        optimize(traced, CompileConfig(verify_passes=False), passes=passes)
        facts = _facts(recipe, mine, tokens=recipe.global_batch * self.tokens_per_sample)
        run = simulate_run(traced, facts, labels={}, hardware=self.machine)
        if placement is None and recipe.memory_policy == "save_all":
            self.flops_per_token = run.graph.flops // (recipe.microbatch * self.tokens_per_sample)
        return replace(
            outcome_of_step(recipe, run),
            mfu=model_flops_utilization(
                run.tokens_per_second_per_gpu,
                flops_per_token=self.flops_per_token,
                hardware=self.machine,
            ),
        )

    def _shared(self, recipe: RunRecipe, placement: PlacementPlan | None) -> tuple[nn.Module, Loss]:
        """The module with this rank's part of its parameters, and what gives its loss."""
        mesh = mesh_of(recipe, "cpu")
        if placement is not None:
            return apply_plan(self._with_loss(), placement, mesh), loss_of_placed
        mine = _on_meta(self.model)
        shard(mine, mesh, mode=mode_of(recipe), mixed_precision=self.mixed_precision)
        return mine, self.loss

    def _with_loss(self) -> ModuleWithLoss:
        return ModuleWithLoss(_on_meta(self.model), self.loss)


def _facts(recipe: RunRecipe, model: nn.Module, *, tokens: int) -> StepFacts:
    stored = [
        each.to_local() if isinstance(each, DTensor) else each
        for each in model.parameters()
        if each.requires_grad
    ]
    return StepFacts(
        num_gpus=recipe.num_gpus,
        tokens=tokens,
        num_microbatches=recipe.num_microbatches,
        flops_per_token=0,
        num_parameters_per_rank=sum(each.numel() for each in stored),
        parameter_bytes_per_rank=sum(each.numel() * each.element_size() for each in stored),
        clips_gradients=False,
    )


def _on_meta(model: nn.Module) -> nn.Module:
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


def _check(
    model: nn.Module,
    inputs: Sequence[Tensor],
    numbers: Mapping[str, int],
    layers: str,
    tensor_parallel: Sequence[int],
    gpus_per_domain: int,
) -> None:
    problems = [
        f"{name} is {value!r}, and must be {least} or more"
        for name, value in numbers.items()
        if value < (least := 2 if name == "num_gpus" else 1)
    ]
    allowed = [
        degree
        for degree in range(2, gpus_per_domain + 1)
        if numbers["num_gpus"] % degree == 0 and numbers["num_gpus"] > degree
    ]
    problems += [
        f"tensor_parallel has {degree!r}, and may have {allowed or 'nothing'}: divisors of "
        f"{numbers['num_gpus']} GPUs, in NVLink domains of {gpus_per_domain}"
        for degree in tensor_parallel
        if degree not in allowed
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
