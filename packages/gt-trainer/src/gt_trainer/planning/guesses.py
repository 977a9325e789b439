"""What a recipe is thought to take and to hold, so that the likely best is simulated first.

Bounds say what may be cut; these guesses say in which order the rest is looked at. They add to a
bound what it leaves out because it cannot be proven: communication that nothing hides, activations
that a memory policy keeps, microbatches that are in flight, gradients of weights that are put off.
Their factors were read off dry runs of Llama 3 8B and 405B and of DeepSeek-V3 16B and 671B; a wrong
one costs time, never the answer, and what was simulated corrects it (``learned_order``).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gt_trainer.planning.model_counts import ModelCounts, PipelineLayout, StageParts
from gt_trainer.planning.rank_placement import ranks_by_domain
from gt_trainer.planning.run_recipe import RunRecipe
from gt_trainer.planning.step_bounds import SPLIT_BACKWARDS, ProductTimes, StepBound, ring_us

if TYPE_CHECKING:
    from gt_passes.simulation import Hardware

_BESIDE_PRODUCTS = 1.12
"""All operators, over matrix products and attention."""

_ALL_KEPT = 2.6
"""What is kept if everything is, over all products' results. As the next two, of captured layers of
Llama 3 8B and DeepSeek-V3 16B."""

_ALTERNATE_DROPS = 0.43
"""Of the results of dense products, what is computed again if every second one is."""

_ALTERNATE_REPEATS = 1.07
"""Time of its operators, over that of a policy which computes no product again."""

_PUT_OFF = 2.35
"""What a layer holds for its put-off gradients of weights, over all products' results: the inputs
of these products and gradients of their results. As the next two, of 405B's captured stages."""

_BESIDE_A_PAIR = 0.65
"""Of exchanges inside of layers, what DualPipeV exposes: the other half of a pair computes."""

_EXPOSED_ENDS = 0.5
"""Of what a pipeline gathers and reduces, once each: its first gathers and last reductions."""

_LAST_PRODUCT_BYTES = 10
"""For each weight of the projection to logits, while its gradient is made: both, and their sums."""

_LOGITS_BYTES = {True: 8, False: 12}
"""For each logit of a chunk of the loss: itself, in float32, its gradient. Where Inductor does not
fuse them, that in float32 too."""

_CHUNK_BYTES = 15
"""For each weight of that projection and each chunk of the loss: of it and its gradient, read and
written. As the next one, of the captured stages of Llama 3 405B, 512 tokens on a rank."""

_SUMMED_BYTES = 8
"""For each weight of a stage and each microbatch, whose gradients are added to whole sums."""

_BUCKET_BYTES = 4
"""For each weight in float32, to pack its gradient: written. All else of a bucket, unpacked or
packed, is read and written in the run's precision."""

_CAST_BYTES = {True: 8, False: 33}
"""For each element that an 8-bit product reads, in each of its two layouts. Fused: read for its
largest, read and written. Alone: that and each step between in float32, read and written."""

_COPIED_BYTES = 75
"""For each element of a token and each expert that it is sent to, forward or backward: read and
written beside products. Of captured layers of DeepSeek-V3 671B."""

_EXPOSED_EXCHANGES = {False: 1.0, True: 0.21}
"""Of token exchanges, without EP overlap and with it. 0.21 is fitted: a simulated layer of
DeepSeek-V3 671B exposes 4.0 of 19.4 ms over 256 ranks (0.8 of 10.0 over 32, which is 0.08)."""

_LAUNCHES = 120
"""Of a layer, forward and backward."""

_EXPERT_LAUNCHES = {False: 100, True: 210}
"""Of a layer with experts beside them, without EP overlap and with it. As the next one, counted in
captured layers of DeepSeek-V3 671B."""

_AFTER_COUNTS = 16
"""Launches from when the host knows counts of tokens to the first product of experts, for which the
device waits: it has nothing else to do then."""

_SHARED_LAUNCHES = 20
"""What tensor parallelism adds to them, and as many context parallelism."""

_SURE = {True: 0.9, False: 0.7}
"""Part of a device's memory within which a recipe is thought to fit, for guesses may be wrong. Less
while nothing is known to fit: guesses at first ones were 17 and 18 % too low, once by half (405B).
0.7 is a choice; ``test_learned_order.py`` says what else was tried."""


def guessed_us(
    recipe: RunRecipe,
    model: ModelCounts,
    layout: PipelineLayout,
    bound: StepBound,
    hardware: Hardware,
) -> float:
    """What a step is thought to take; more if it is not thought to fit."""
    layers = len(model.layers) / recipe.pp
    tokens = recipe.sequences * model.seq_len / recipe.cp
    activations = tokens * model.dim * model.activation_bytes
    repeats = recipe.memory_policy == "full_recompute"
    # Each layer gathers and scatters twice in either direction.
    tensor_us = (12 if repeats else 8) * layers * ring_us(activations, recipe.tp, 1, hardware)
    middle = layout.of_rank(len(layout.by_rank) // 2)
    gathered = sum(stage.layers.keys_values_width for stage in middle) * model.activation_bytes
    # Keys and values gathered, and their gradients scattered.
    context_us = (3 if repeats else 2) * ring_us(
        tokens * recipe.cp * gathered / recipe.tp, recipe.cp, recipe.tp, hardware
    )
    computing = bound.compute_us * _BESIDE_PRODUCTS
    if recipe.memory_policy == "selective_alternate":
        computing *= _ALTERNATE_REPEATS
    computing += _weights_us(recipe, model, layout, hardware)
    computing += _experts_us(recipe, model, layout, hardware)
    computing += _casts_us(recipe, model, layout, hardware)
    exchanges = bound.carried_us.get("ep", 0.0) * _EXPOSED_EXCHANGES[recipe.ep_overlap]
    carried = sum(bound.carried_us.values())
    # What computes beside collectives lacks their multiprocessors (decision 0075).
    computing += min(carried, computing) * hardware.collective_sms / hardware.num_sms
    if repeats:
        computing += _attention_us(recipe, model, layout, hardware)
        exchanges *= 3 / 2
    inside = tensor_us + context_us + exchanges
    if recipe.schedule == "DualPipeV":
        inside *= _BESIDE_A_PAIR
    waiting_us = _counts_us(recipe, layout, hardware)
    working = max(computing + inside + waiting_us, _launches_us(recipe, model, layout, hardware))
    total = working + _bubble_us(recipe, bound, working)
    sharding_us = bound.carried_us.get("fsdp", 0.0) + bound.carried_us.get("efsdp", 0.0)
    latencies_us = _latencies_us(recipe, layers, hardware)
    if recipe.pp > 1:
        total += _EXPOSED_ENDS * (sharding_us + latencies_us)
    else:
        hidden = sharding_us * (2 if recipe.memory_policy != "save_all" else 1.5) + latencies_us
        total += max(0.0, hidden - computing)
    replicas_us = ring_us(
        2 * bound.state_bytes / 3,
        recipe.dp_replicate,
        recipe.num_gpus // recipe.dp_replicate,
        hardware,
    )
    return total + replicas_us + bound.optimizer_us


def _launches_us(
    recipe: RunRecipe, model: ModelCounts, layout: PipelineLayout, hardware: Hardware
) -> float:
    """What the host takes to launch a step that nobody records: computation waits for it."""
    if recipe.pp == 1 and recipe.ep == 1 and not recipe.reduces_once:
        return 0.0
    shared = _SHARED_LAUNCHES * ((recipe.tp > 1) + (recipe.cp > 1))
    launches: float = (_LAUNCHES + shared) * len(model.layers) / recipe.pp
    launches += _EXPERT_LAUNCHES[recipe.ep_overlap] * _expert_layers(layout)
    if recipe.memory_policy == "full_recompute":
        launches *= 4 / 3
    return launches * recipe.num_microbatches * hardware.host_kernel_us


def _counts_us(recipe: RunRecipe, layout: PipelineLayout, hardware: Hardware) -> float:
    """For how long the device waits for the host, which reads what each rank sends and receives."""
    if recipe.ep == 1:
        return 0.0
    chunks = (2 if recipe.ep_overlap else 1) * recipe.num_microbatches
    read_us = 2 * (recipe.ep * hardware.host_scalar_us + hardware.host_sync_us)
    launches_us = _AFTER_COUNTS * hardware.host_kernel_us
    return chunks * _expert_layers(layout) * (read_us + launches_us)


def _expert_layers(layout: PipelineLayout) -> int:
    """Layers with experts on a rank."""
    stages = layout.of_rank(len(layout.by_rank) // 2)
    return sum(stage.layers.expert_layers for stage in stages)


def _weights_us(
    recipe: RunRecipe, model: ModelCounts, layout: PipelineLayout, hardware: Hardware
) -> float:
    """What weights and sums of their gradients take of memory's time, however few the tokens are.

    Of a pipeline all wait for the rank that has the projection to logits.
    """
    num_bytes = _CHUNK_BYTES * model.loss_chunks * model.output_products / recipe.tp
    stages = layout.of_rank(len(layout.by_rank) // 2)
    dense = sum(stage.dense_parameters for stage in stages) / recipe.tp
    experts = sum(stage.layers.expert_parameters for stage in stages) / recipe.ep
    if recipe.pp > 1 or recipe.reduces_once:
        num_bytes += _SUMMED_BYTES * (dense + experts)
    else:
        # Gathered for forward and backward, read and written; its gradient read and written.
        unpacked = 2 if recipe.memory_policy == "save_all" else 4
        copied = (unpacked + 1) * model.activation_bytes + _BUCKET_BYTES
        shards = recipe.dp_shard * recipe.cp
        num_bytes += copied * dense * (shards > 1)
        num_bytes += copied * experts * (shards * recipe.tp > recipe.ep)
    rate = hardware.hbm_bytes_per_s * hardware.hbm_streaming_efficiency
    return 1e6 * recipe.num_microbatches * num_bytes / rate


def _attention_us(
    recipe: RunRecipe, model: ModelCounts, layout: PipelineLayout, hardware: Hardware
) -> float:
    """What forwards of attention take on a rank: again, where layers are computed again."""
    times = ProductTimes(recipe, model, hardware)
    stages = layout.of_rank(len(layout.by_rank) // 2)
    return recipe.num_microbatches * sum(times.attention_us(stage) for stage in stages)


def _experts_us(
    recipe: RunRecipe, model: ModelCounts, layout: PipelineLayout, hardware: Hardware
) -> float:
    """What experts take beyond their bound, of all stages of a rank.

    Their products run as fast as grouped ones do, where the bound has the faster of both kinds. And
    the tokens that they are sent are put in order, copied, scaled and added.
    """
    stages = layout.of_rank(len(layout.by_rank) // 2)
    tokens = recipe.sequences * model.seq_len / (recipe.tp * recipe.cp)
    products = 3 * sum(stage.layers.expert_products for stage in stages)
    forwards = 1
    if recipe.memory_policy == "full_recompute":
        products += sum(stage.layers.repeated_experts for stage in stages)
        forwards = 2
    slower = 1 / hardware.grouped_matmul_efficiency - 1 / max(
        hardware.matmul_efficiency, hardware.grouped_matmul_efficiency
    )
    products_us = 2e6 * tokens * products * slower / hardware.peak_bf16_flops_per_s
    copied = (forwards + 1) * _COPIED_BYTES * sum(stage.layers.sent_copies for stage in stages)
    rate = hardware.hbm_bytes_per_s * hardware.hbm_streaming_efficiency
    return products_us + 1e6 * tokens * copied * model.dim / rate


def _casts_us(
    recipe: RunRecipe, model: ModelCounts, layout: PipelineLayout, hardware: Hardware
) -> float:
    """What casting to 8 bits takes: inputs of dense products, and gradients of their results."""
    if recipe.linears == "none":
        return 0.0
    stages = layout.of_rank(len(layout.by_rank) // 2)
    tokens = recipe.sequences * model.seq_len / (recipe.tp * recipe.cp)
    width = sum(
        stage.layers.inputs_width + stage.layers.outputs_width - stage.layers.expert_outputs_width
        for stage in stages
    )
    rate = hardware.hbm_bytes_per_s * hardware.hbm_streaming_efficiency
    return 2e6 * tokens * width * _CAST_BYTES[model.is_fused] / rate


def _bubble_us(recipe: RunRecipe, bound: StepBound, working_us: float) -> float:
    """A rank waits for a microbatch on each of the others, and for less where halves fill it.

    Args:
        recipe: how many microbatches there are, and who waits for them.
        bound: of it.
        working_us: of all microbatches on a rank.
    """
    stages_per_rank = 1 if recipe.schedule == "1F1B" else 2
    of_one_us = working_us / recipe.num_microbatches / stages_per_rank
    is_filled = recipe.schedule in SPLIT_BACKWARDS and recipe.num_microbatches >= 2 * recipe.pp
    return max(bound.bubble_us, (recipe.pp - 1) * of_one_us / (3 if is_filled else 1))


def _latencies_us(recipe: RunRecipe, layers: float, hardware: Hardware) -> float:
    """Of gathering and reducing each layer in a ring of all shards, whatever the bytes."""
    is_once = recipe.pp > 1 or recipe.reduces_once
    each = 2 if recipe.memory_policy == "save_all" else 3
    size = recipe.dp_shard * recipe.cp
    domains = _num_domains(size, recipe.tp, hardware.gpus_per_node)
    network_us = (domains - 1) * hardware.nccl_ring_network_ll128_us
    ring_us = network_us + (size - domains) * hardware.nccl_ring_nvlink_ll128_us
    return each * layers * ring_us * (1 if is_once else recipe.num_microbatches)


@functools.cache
def _num_domains(size: int, stride: int, gpus_per_domain: int) -> int:
    """NVLink domains over which a group is spread."""
    return len(ranks_by_domain(size, stride, gpus_per_domain))


def guessed_bytes(
    recipe: RunRecipe, model: ModelCounts, layout: PipelineLayout, bound: StepBound
) -> float:
    """What the fullest rank is thought to hold."""
    state = bound.state_bytes * 4 / 3
    tokens = recipe.microbatch * model.seq_len / (recipe.tp * recipe.cp)
    ranks = (layout.of_rank(rank) for rank in range(len(layout.by_rank)))
    stages = max(ranks, key=lambda each: sum(stage.layers.outputs_width for stage in each))
    again = tokens * max(_again_bytes(model, stage, recipe) for stage in stages)
    dense = sum(stage.dense_parameters for stage in stages) / recipe.tp
    experts = sum(stage.layers.expert_parameters for stage in stages) / recipe.ep
    if recipe.pp > 1 or recipe.reduces_once:  # gathered parameters, and sums of whole gradients
        whole = (dense + experts) * (model.activation_bytes + 4)
        whole *= 1 + 2 / 3 / len(stages)  # what the backward of one stage has just made
    else:
        # Gathered once where everything is kept; else two layers at a time, or one and the logits'.
        at_once = 1.0 if recipe.memory_policy == "save_all" else 2 / len(model.layers)
        ends = model.embedding_parameters + model.output_parameters
        whole = (dense - ends / recipe.tp + experts) * model.activation_bytes * at_once
        whole += model.output_parameters / recipe.tp * model.activation_bytes
        # The loss comes before any layer is computed again.
        logits = tokens / model.loss_chunks * model.output_products / model.dim
        loss = _LOGITS_BYTES[model.is_fused] * logits
        again = max(again, loss, _LAST_PRODUCT_BYTES * model.output_products / recipe.tp)
        if recipe.num_microbatches > 1:
            state += bound.state_bytes / 3
    beside = 8 * tokens * model.dim * model.activation_bytes
    return state + tokens * _in_flight_bytes(recipe, model, stages) + again + whole + beside


def order(
    guesses_us: NDArray[np.float64],
    guesses_bytes: NDArray[np.float64],
    hardware: Hardware,
    *,
    is_proven: bool = True,
) -> NDArray[np.float64]:
    """By what is thought to take least; the less likely it is to fit, the later it comes.

    Args:
        guesses_us: of steps.
        guesses_bytes: that they hold.
        hardware: the machine.
        is_proven: whether anything is known to fit, whatever its policy: then a plan has an answer,
            and may spend time on what holds nearly all there is.
    """
    part = guesses_bytes / hardware.hbm_capacity_bytes
    sure = _SURE[is_proven]
    within = 1 + 5 * np.maximum(0.0, part - sure)
    beyond = 2 * part + 5 * (_SURE[True] - sure)
    places: NDArray[np.float64] = guesses_us * np.where(part > 1, beyond, within)
    return places


def _again_bytes(model: ModelCounts, stage: StageParts, recipe: RunRecipe) -> float:
    """For one token, what one layer has when it has been computed again, beyond what it kept."""
    more = _kept_bytes("save_all", model, stage, recipe)
    more -= _kept_bytes(recipe.memory_policy, model, stage, recipe)
    return more / max(1, stage.num_layers)


def _kept_bytes(policy: str, model: ModelCounts, stage: StageParts, recipe: RunRecipe) -> float:
    """For one token of one microbatch.

    A selective policy keeps results of products and attention, tokens sent to experts, and what is
    gathered: by tensor parallelism twice a layer, by context parallelism keys and values, tokens of
    all their ranks.
    """
    layers = stage.layers
    if policy == "save_all":
        width = _ALL_KEPT * layers.outputs_width
    elif policy == "full_recompute":
        width = float(stage.num_layers * model.dim)
    else:
        width = layers.outputs_width + layers.attention_width + layers.sent_copies * model.dim
        if policy == "selective_alternate":
            width -= _ALTERNATE_DROPS * (layers.outputs_width - layers.expert_outputs_width)
    if recipe.tp > 1 and policy != "full_recompute":
        width += 2 * recipe.tp * stage.num_layers * model.dim
    if policy != "full_recompute":
        width += (recipe.cp - 1) * layers.keys_values_width
    return width * model.activation_bytes


def _put_off_bytes(policy: str, model: ModelCounts, stage: StageParts, tp: int) -> float:
    """For one token of one microbatch, from gradients of inputs to gradients of weights."""
    width = _PUT_OFF * stage.layers.outputs_width
    if tp > 1:  # gathered inputs and gradients, and what a forward has kept for longer
        gathered = 4 if policy == "full_recompute" else 5
        width += gathered * tp * stage.num_layers * model.dim
    return width * model.activation_bytes


def _in_flight_bytes(recipe: RunRecipe, model: ModelCounts, stages: Sequence[StageParts]) -> float:
    """For one token of a microbatch, what the stages of a rank hold of all that are under way."""
    policy = recipe.memory_policy
    kept = sum(_kept_bytes(policy, model, stage, recipe) for stage in stages)
    if recipe.schedule is None:
        return kept
    put_off = sum(_put_off_bytes(policy, model, stage, recipe.tp) for stage in stages)
    num_kept, num_put_off = most_in_flight(recipe.schedule, recipe.pp, recipe.num_microbatches)
    return max(num_kept * kept, num_put_off * put_off) / len(stages)


def most_in_flight(schedule: str, pp: int, num_microbatches: int) -> tuple[int, int]:
    """Microbatches of each of the fullest rank's stages, counted together.

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
