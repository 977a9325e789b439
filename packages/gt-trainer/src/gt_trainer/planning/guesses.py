"""Guesses at the time and memory of a step, which order the search.

Bounds say which recipes may be cut. Guesses only say which recipe is simulated next. They add what
no bound can prove: communication that nothing hides, activations that a memory policy keeps, and
microbatches in flight. Their terms are counts of bytes and messages. The simulated results of
similar recipes correct them (``search``), so that few constants are fitted.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gt_trainer.planning.model_counts import ModelCounts, PipelineLayout, StageParts
from gt_trainer.planning.rank_placement import ranks_by_domain
from gt_trainer.planning.run_recipe import RunRecipe
from gt_trainer.planning.step_bounds import SPLIT_BACKWARDS, ProductTimes, StepBound, ring_us

if TYPE_CHECKING:
    from gt_passes.simulation import Hardware

_ALL_KEPT = 2.6
"""Bytes that ``save_all`` keeps, over the results of all products. Fitted to captured layers."""

_TOUCHED_BYTES = 14
"""Bytes read and written per weight and microbatch: it is unpacked for forward and backward (2 + 2
each), and its gradient read (2) and written in float32 (4). Sums of gradients take about as many,
and so does each chunk of the loss."""

_COPIED_BYTES = 75
"""Bytes read and written beside products, per element of a token, expert that it is sent to, and
pass. Fitted to captured layers of DeepSeek-V3 671B."""

_EXPOSED = 0.21
"""Part of the token exchanges that EP overlap exposes. Fitted to a simulated layer of the same."""

_LAST_PRODUCT_BYTES = 10
"""Bytes per weight of the projection to logits while its gradient is made: both, and their sums."""

_LOGITS_BYTES = 8
"""Bytes per logit of a chunk of the loss: the logit in float32 and its gradient."""


def guessed_us(
    recipe: RunRecipe,
    model: ModelCounts,
    layout: PipelineLayout,
    bound: StepBound,
    hardware: Hardware,
) -> float:
    """Return the time that a step is expected to take."""
    stages = layout.of_rank(len(layout.by_rank) // 2)
    layers = len(model.layers) / recipe.pp
    repeats = recipe.memory_policy == "full_recompute"
    passes = 3 if repeats else 2
    times = ProductTimes(recipe, model, hardware)
    attention_us = recipe.num_microbatches * sum(map(times.attention_us, stages))
    dense_us = recipe.num_microbatches * sum(map(times.dense_us, stages))
    computing = bound.compute_us + _weights_us(recipe, model, stages, hardware)
    computing += _experts_us(recipe, model, stages, hardware)
    if repeats:
        computing += attention_us
    if recipe.memory_policy == "selective_alternate":
        computing += dense_us / 2
    # Collectives take multiprocessors from the products beside them (decision 0075).
    carried_us = min(computing, sum(bound.carried_us.values()))
    computing += carried_us * hardware.collective_sms / hardware.num_sms
    # Inside layers: tensor parallelism gathers and scatters twice in a pass, context parallelism
    # gathers keys and values or scatters their gradients, and the host reads counts of tokens.
    tokens = recipe.sequences * model.seq_len / recipe.cp
    gathered = (
        tokens * recipe.cp / recipe.tp * sum(each.layers.keys_values_width for each in stages)
    )
    element = model.activation_bytes
    inside = passes * (
        4 * layers * ring_us(tokens * model.dim * element, recipe.tp, 1, hardware)
        + ring_us(gathered * element, recipe.cp, recipe.tp, hardware)
    )
    if recipe.ep > 1:
        chunks = (1 + recipe.ep_overlap) * recipe.num_microbatches
        read_us = 2 * (recipe.ep * hardware.host_scalar_us + hardware.host_sync_us)
        inside += chunks * read_us * sum(each.layers.expert_layers for each in stages)
        inside += bound.carried_us["ep"] * passes / 2 * (_EXPOSED if recipe.ep_overlap else 1)
    working = computing + inside
    total = working + _bubble_us(recipe, bound, working)
    sharding_us = bound.carried_us["fsdp"] + bound.carried_us.get("efsdp", 0.0)
    latencies_us = _latencies_us(recipe, layers, hardware)
    if recipe.pp > 1:
        total += sharding_us + latencies_us
    else:  # gathered once or twice in 2 bytes, reduced in 4; a bound has 2 of each
        moved = sharding_us * (1.5 if recipe.memory_policy == "save_all" else 2) + latencies_us
        total += max(moved / layers, moved - computing)
    replicas_us = ring_us(
        2 * bound.state_bytes / 3,
        recipe.dp_replicate,
        recipe.num_gpus // recipe.dp_replicate,
        hardware,
    )
    return total + replicas_us + bound.optimizer_us


def _weights_us(
    recipe: RunRecipe, model: ModelCounts, stages: Sequence[StageParts], hardware: Hardware
) -> float:
    """Return the time in which memory reads and writes weights and gradients, for any tokens."""
    touched = model.loss_chunks * model.output_products / recipe.tp
    if recipe.num_gpus > recipe.tp or recipe.reduces_once:
        touched += _weights(recipe, stages)
    rate = hardware.hbm_bytes_per_s * hardware.hbm_streaming_efficiency
    return 1e6 * recipe.num_microbatches * _TOUCHED_BYTES * touched / rate


def _experts_us(
    recipe: RunRecipe, model: ModelCounts, stages: Sequence[StageParts], hardware: Hardware
) -> float:
    """Return the time that experts take beyond their bound.

    Their products run as fast as grouped ones, where the bound has the faster of both kinds. The
    tokens that they are sent are sorted, copied, scaled and added.
    """
    repeats = recipe.memory_policy == "full_recompute"
    tokens = recipe.sequences * model.seq_len / (recipe.tp * recipe.cp)
    products = 3 * sum(each.layers.expert_products for each in stages)
    products += repeats * sum(each.layers.repeated_experts for each in stages)
    grouped = hardware.grouped_matmul_efficiency
    slower = 1 / grouped - 1 / max(hardware.matmul_efficiency, grouped)
    products_us = 2e6 * tokens * products * slower / hardware.peak_bf16_flops_per_s
    copied = (2 + repeats) * _COPIED_BYTES * sum(each.layers.sent_copies for each in stages)
    rate = hardware.hbm_bytes_per_s * hardware.hbm_streaming_efficiency
    return products_us + 1e6 * tokens * copied * model.dim / rate


def _weights(recipe: RunRecipe, stages: Sequence[StageParts]) -> float:
    """Return the gathered weights of a rank."""
    dense = sum(each.dense_parameters for each in stages) / recipe.tp
    return dense + sum(each.layers.expert_parameters for each in stages) / recipe.ep


def _bubble_us(recipe: RunRecipe, bound: StepBound, working_us: float) -> float:
    """Return the time that a rank waits: one microbatch of each other rank, or less if filled."""
    stages_per_rank = 1 if recipe.schedule == "1F1B" else 2
    of_one_us = working_us / recipe.num_microbatches / stages_per_rank
    is_filled = recipe.schedule in SPLIT_BACKWARDS and recipe.num_microbatches >= 2 * recipe.pp
    return max(bound.bubble_us, (recipe.pp - 1) * of_one_us / (3 if is_filled else 1))


def _latencies_us(recipe: RunRecipe, layers: float, hardware: Hardware) -> float:
    """Return the latency of gathering and reducing each layer in a ring of all shards."""
    is_once = recipe.pp > 1 or recipe.reduces_once
    each = 2 if recipe.memory_policy == "save_all" else 3
    size = recipe.dp_shard * recipe.cp
    domains = _num_domains(size, recipe.tp, hardware.gpus_per_node)
    network_us = (domains - 1) * hardware.nccl_ring_network_ll128_us
    ring_us = network_us + (size - domains) * hardware.nccl_ring_nvlink_ll128_us
    return each * layers * ring_us * (1 if is_once else recipe.num_microbatches)


@functools.cache
def _num_domains(size: int, stride: int, gpus_per_domain: int) -> int:
    return len(ranks_by_domain(size, stride, gpus_per_domain))


def guessed_bytes(
    recipe: RunRecipe, model: ModelCounts, layout: PipelineLayout, bound: StepBound
) -> float:
    """Return the memory that the fullest rank is expected to hold."""
    tokens = recipe.microbatch * model.seq_len / (recipe.tp * recipe.cp)
    ranks = (layout.of_rank(rank) for rank in range(len(layout.by_rank)))
    stages = max(ranks, key=lambda each: sum(stage.layers.outputs_width for stage in each))
    again = tokens * max(
        (_kept_bytes("save_all", model, each, recipe) - _kept_bytes(None, model, each, recipe))
        / max(1, each.num_layers)
        for each in stages
    )
    gradients = bound.state_bytes / 3
    weights = _weights(recipe, stages)
    if recipe.pp > 1 or recipe.reduces_once:  # with sums of whole gradients in float32
        whole = weights * (model.activation_bytes + 4)
        whole *= 1 + 2 / 3 / len(stages)  # and the gradients of one stage
    else:
        at_once = 1.0 if recipe.memory_policy == "save_all" else 2 / len(model.layers)
        ends = model.embedding_parameters + model.output_parameters
        whole = (weights - ends / recipe.tp) * at_once + model.output_parameters / recipe.tp
        whole *= model.activation_bytes
        logits = tokens / model.loss_chunks * model.output_products / model.dim
        last = _LAST_PRODUCT_BYTES * model.output_products / recipe.tp
        again = max(again, _LOGITS_BYTES * logits, last)
        gradients *= min(2, recipe.num_microbatches)
    # Beside what is kept, a layer and its gradients hold a few tensors as wide as its input.
    per_token = _in_flight_bytes(recipe, model, stages) + 8 * model.dim * model.activation_bytes
    return bound.state_bytes + gradients + whole + again + tokens * per_token


def _kept_bytes(
    policy: str | None, model: ModelCounts, stage: StageParts, recipe: RunRecipe
) -> float:
    """Return the bytes that a stage keeps for one token, by the recipe's policy or another one.

    A selective policy keeps results of products and attention, tokens sent to experts, and what is
    gathered: by tensor parallelism twice a layer, by context parallelism keys and values.
    """
    layers = stage.layers
    policy = policy or recipe.memory_policy
    if policy == "full_recompute":
        return stage.num_layers * model.dim * model.activation_bytes
    width = layers.outputs_width + layers.attention_width + layers.sent_copies * model.dim
    if policy == "save_all":
        width = _ALL_KEPT * layers.outputs_width
    elif policy == "selective_alternate":
        width -= (layers.outputs_width - layers.expert_outputs_width) / 2
    if recipe.tp > 1:
        width += 2 * recipe.tp * stage.num_layers * model.dim
    return (width + (recipe.cp - 1) * layers.keys_values_width) * model.activation_bytes


def _in_flight_bytes(recipe: RunRecipe, model: ModelCounts, stages: Sequence[StageParts]) -> float:
    """Return the bytes for one token that a rank holds of all microbatches in flight."""
    kept = sum(_kept_bytes(None, model, stage, recipe) for stage in stages)
    if recipe.schedule is None:
        return kept
    # Gradients of weights that are put off need inputs of products and gradients of results.
    put_off = 0.0
    for stage in stages:
        width = 2 * stage.layers.outputs_width
        if recipe.tp > 1:  # gathered inputs and gradients
            width += 4 * recipe.tp * stage.num_layers * model.dim
        put_off += width * model.activation_bytes
    num_kept, num_put_off = most_in_flight(recipe.schedule, recipe.pp, recipe.num_microbatches)
    return max(num_kept * kept, num_put_off * put_off) / len(stages)


def most_in_flight(schedule: str, pp: int, num_microbatches: int) -> tuple[int, int]:
    """Return the microbatches in flight of the fullest rank's stages, counted together.

    Returns:
        Those whose forward waits for its backward, and those whose gradients of weights are put
        off: the most of either.
    """
    if schedule == "1F1B":
        return min(num_microbatches, pp), 0
    if schedule == "Interleaved1F1B":
        return min(2 * num_microbatches, 3 * pp - (num_microbatches % pp == 0)), 0
    if schedule == "DualPipeV":
        return 2 * pp + 1, pp
    drained = max(0, 2 * (num_microbatches - pp))
    return 2 * min(num_microbatches, pp), min(drained + 1, 2 * pp - 1)
