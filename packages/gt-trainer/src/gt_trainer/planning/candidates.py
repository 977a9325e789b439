"""All recipes for a number of GPUs and a global batch that the search looks at.

Degrees are powers of two and whatever else divides the GPUs, by divisibility alone: which of them a
run may really have is asked of preflight, of each that comes up. Tensor parallelism stays within an
NVLink domain, where alone its exchanges in every layer are affordable.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gt_trainer.planning.model_counts import ModelCounts
from gt_trainer.planning.run_recipe import RunRecipe

SCHEDULES = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV")
"""Of pipelines: one stage on a rank, several, and with gradients of weights put off."""

MEMORY_POLICIES = ("save_all", "selective", "selective_alternate", "full_recompute")
_MOST_CP = 64
_MOST_SEQUENCES = 16
"""Of one microbatch."""


class NoRecipeError(ValueError):
    """What was asked for cannot be; the text says what is nearest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What is to be planned, in numbers."""

    num_gpus: int
    global_batch: int
    """Sequences of one step."""

    gpus_per_node: int
    """Of one NVLink domain."""

    linears: Sequence[str] = ("none",)
    """Precisions of linear layers to look at."""

    skipped: tuple[str, ...] = ()
    """Linear layers that are never in 8 bits."""

    fixed: Mapping[str, object]
    """Values that were asked for, by flag; recipes with another value are left out."""


def candidates(request: PlanRequest, model: ModelCounts) -> Iterator[RunRecipe]:
    """Every recipe of the space, each once, in a fixed order."""
    for degrees in _degrees(request, model):
        for policy in MEMORY_POLICIES:
            for linears in request.linears:
                skipped = request.skipped if linears != "none" else ()
                of_degrees = replace(
                    degrees, memory_policy=policy, linears=linears, skipped=skipped
                )
                yield from (each for each in _variants(of_degrees) if _has(each, request.fixed))


def divides(request: PlanRequest, model: ModelCounts) -> bool:
    """Whether some degrees divide the batch among the GPUs."""
    return next(_degrees(request, model), None) is not None


def _degrees(request: PlanRequest, model: ModelCounts) -> Iterator[RunRecipe]:
    """Degrees and microbatches, with whatever policy."""
    gpus, num_layers = request.num_gpus, len(model.layers)
    for tp in _divisors(math.gcd(gpus, model.max_tp), at_most=request.gpus_per_node):
        for pp in _divisors(gpus // tp, at_most=num_layers):
            for cp in _powers_of_two(gpus // (tp * pp), at_most=_MOST_CP):
                data = gpus // (tp * pp * cp)
                if request.global_batch % data:
                    continue
                sequences = request.global_batch // data
                for microbatch in _powers_of_two(sequences, at_most=_MOST_SEQUENCES):
                    for dp_replicate in _divisors(data):
                        shared = RunRecipe(
                            dp_replicate=dp_replicate,
                            dp_shard=data // dp_replicate,
                            cp=cp,
                            tp=tp,
                            pp=pp,
                            microbatch=microbatch,
                            global_batch=request.global_batch,
                            memory_policy=MEMORY_POLICIES[0],
                        )
                        for ep in _expert_degrees(shared, model):
                            yield replace(shared, ep=ep)


def _expert_degrees(recipe: RunRecipe, model: ModelCounts) -> list[int]:
    if model.num_experts is None:
        return [1]
    return _divisors(math.gcd(recipe.dp_shard * recipe.cp * recipe.tp, model.num_experts))


def _variants(recipe: RunRecipe) -> Iterator[RunRecipe]:
    """Schedules, EP overlap, and whether microbatches share gathering and reduction."""
    overlaps = (False, True) if recipe.ep > 1 else (False,)
    for ep_overlap in overlaps:
        of_overlap = replace(recipe, ep_overlap=ep_overlap)
        if recipe.pp > 1:
            yield from (replace(of_overlap, schedule=schedule) for schedule in SCHEDULES)
            continue
        yield of_overlap
        if recipe.num_microbatches > 1:
            yield replace(of_overlap, reduces_once=True)


def _has(recipe: RunRecipe, fixed: Mapping[str, object]) -> bool:
    if not fixed:
        return True
    settings = recipe.settings()
    return all(settings.get(flag, value) == value for flag, value in fixed.items())


def _divisors(number: int, *, at_most: int | None = None) -> list[int]:
    most = number if at_most is None else min(number, at_most)
    return [each for each in range(1, most + 1) if number % each == 0]


def _powers_of_two(number: int, *, at_most: int) -> list[int]:
    """Powers of two that divide a number."""
    return [
        1 << n for n in range(at_most.bit_length()) if 1 << n <= at_most and number % (1 << n) == 0
    ]
