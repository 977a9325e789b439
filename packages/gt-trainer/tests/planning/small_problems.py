"""Random small problems, and a cost of their recipes that runs real schedules."""

import itertools
import math
import random
import zlib
from dataclasses import dataclass, replace

from gt_passes.simulation import Hardware, h100_sxm
from gt_pipeline.errors import GtPipelineError
from gt_pipeline.schedules import Action, lower, schedule_of, simulate
from gt_trainer.planning.candidates import PlanRequest, candidates
from gt_trainer.planning.guesses import guessed_bytes, guessed_us
from gt_trainer.planning.model_counts import (
    LayerCounts,
    ModelCounts,
    PipelineLayout,
)
from gt_trainer.planning.planner import PipelineLayouts
from gt_trainer.planning.run_recipe import RunRecipe
from gt_trainer.planning.search import BoundedCandidate
from gt_trainer.planning.step_bounds import ProductTimes, step_bound


@dataclass(frozen=True)
class SmallProblem:
    """A model, a machine that is now and then too small, and all recipes."""

    model: ModelCounts
    hardware: Hardware
    recipes: tuple[RunRecipe, ...]
    layouts: PipelineLayouts

    def candidates(self) -> list[BoundedCandidate[RunRecipe]]:
        """With bounds and guesses, as the planner has them."""
        return [self._candidate(recipe) for recipe in self.recipes]

    def cost(self, recipe: RunRecipe) -> float:
        """By a schedule that is run: its actions take the least that they can, or more."""
        layout = self.layouts.of(recipe)
        bound = step_bound(recipe, self.model, layout, self.hardware)
        stretch = 1 + zlib.crc32(str(recipe).encode()) % 100 / 200
        if bound.peak_bytes * stretch > self.hardware.hbm_capacity_bytes:
            return math.inf
        times = ProductTimes(recipe, self.model, self.hardware)
        if recipe.pp == 1:
            stage = layout.stages[0]
            each = times.forward_us(stage) + times.backward_us(stage)
            computing = recipe.num_microbatches * each
        else:
            computing = _makespan(recipe, layout, times)
        carried = sum(bound.carried_us.values()) / 2
        return max(computing, *bound.carried_us.values()) * stretch + carried + bound.optimizer_us

    def _candidate(self, recipe: RunRecipe) -> BoundedCandidate[RunRecipe]:
        layout = self.layouts.of(recipe)
        bound = step_bound(recipe, self.model, layout, self.hardware)
        fits = bound.peak_bytes <= self.hardware.hbm_capacity_bytes
        return BoundedCandidate(
            item=recipe,
            bounds_us=(bound.step_us if fits else math.inf,),
            guesses_us=(guessed_us(recipe, self.model, layout, bound, self.hardware),),
            guess_bytes=guessed_bytes(recipe, self.model, layout, bound),
        )


def small_problem(seed: int, *, num_recipes: int) -> SmallProblem:
    """The same for the same seed."""
    draw = random.Random(seed)
    model = small_model(draw)
    num_gpus = draw.choice([2, 4, 8, 16])
    request = PlanRequest(
        num_gpus=num_gpus,
        global_batch=draw.choice([4, 8, 16, 24]),
        gpus_per_node=draw.choice([2, 4, 8]),
        fixed={},
    )
    hardware = replace(
        h100_sxm(),
        gpus_per_node=request.gpus_per_node,
        nic_effective_bytes_per_s=draw.choice([1e9, 10e9, 47e9]),
        hbm_capacity_bytes=int(model.num_parameters * 16 / num_gpus * draw.uniform(1.05, 6)),
    )
    recipes = list(candidates(request, model))
    draw.shuffle(recipes)
    layouts = PipelineLayouts(model)
    existing = (each for each in recipes if _exists(each, layouts))
    kept = tuple(itertools.islice(existing, num_recipes))
    return SmallProblem(model=model, hardware=hardware, recipes=kept, layouts=layouts)


def small_model(draw: random.Random) -> ModelCounts:
    """Of a few layers, with experts or without."""
    dim = draw.choice([512, 1024, 2048])
    experts = draw.choice([None, 4, 8])
    dense = dim * dim * 12
    layer = LayerCounts(
        dense_parameters=dense,
        expert_parameters=0 if experts is None else experts * 3 * dim * dim,
        dense_products=dense,
        expert_products=0 if experts is None else 2 * 3 * dim * dim,
        repeated_dense=dense * 2 // 3,
        repeated_experts=0 if experts is None else 2 * 2 * dim * dim,
        attention_width=dim,
        query_width=dim,
        keys_values_width=2 * dim,
        outputs_width=dim * 12,
        sent_copies=0 if experts is None else 2,
        expert_layers=0 if experts is None else 1,
    )
    return ModelCounts(
        layers=(layer,) * draw.choice([4, 7, 8, 12]),
        embedding_parameters=32_000 * dim,
        output_parameters=32_000 * dim,
        output_products=32_000 * dim,
        loss_chunks=8,
        dim=dim,
        seq_len=draw.choice([1024, 4096]),
        products_dtype=draw.choice(["bfloat16", "float32"]),
        parameter_bytes=4,
        flops_per_token=1,
        max_tp=8,
        num_experts=experts,
    )


def _exists(recipe: RunRecipe, layouts: PipelineLayouts) -> bool:
    try:
        layout = layouts.of(recipe)
        if recipe.schedule is not None:
            schedule_of(
                recipe.schedule,
                num_ranks=recipe.pp,
                num_stages=len(layout.stages),
                num_microbatches=recipe.num_microbatches,
            )
    except GtPipelineError:
        return False
    return True


def _makespan(recipe: RunRecipe, layout: PipelineLayout, times: ProductTimes) -> float:
    assert recipe.schedule is not None
    schedule = schedule_of(
        recipe.schedule,
        num_ranks=recipe.pp,
        num_stages=len(layout.stages),
        num_microbatches=recipe.num_microbatches,
    )

    def cost(action: Action) -> float:
        if action.parts is not None:
            return sum(map(cost, action.parts))
        stage = layout.stages[action.stage]
        inputs = times.inputs_us(stage)
        by_kind = {
            "FORWARD": times.forward_us(stage),
            "FULL_BACKWARD": times.backward_us(stage),
            "BACKWARD_INPUT": inputs,
            "BACKWARD_WEIGHT": times.backward_us(stage) - inputs,
        }
        return by_kind.get(action.kind, 0.0)

    return simulate(lower(schedule, unshards=True, reduces=True), cost).makespan
