"""What no step of a recipe can take less than, in the simulator: time, and memory of a rank.

Every bound follows from how ``gt_passes.simulation`` prices and schedules, so that what is cut by
one could not have won there:

- The compute stream runs one operator after another, and a matrix product takes at least
  flops / (peak * efficiency); an attention likewise. A rank of a pipeline also waits for the first
  microbatch to come through the stages before its own, and where backwards are whole, the step goes
  on until the last one's gradients have gone back through them.
- A process group has a stream of its own, and what it carries takes at least bytes / bandwidth.
- The optimizer runs after all of it, and reads and writes its states.
- When the backward begins, parameters, the optimizer's states and the inputs of all layers are
  there; when it has ended, parameters, states and gradients. A stage of a pipeline holds its
  gradients whole until they are reduced, beside the parameters that its last backward reads.

Pure arithmetic on plain data; hardware is read by the names of its constants.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gt_trainer.planning.candidates import MEMORY_POLICIES
from gt_trainer.planning.model_counts import ModelCounts, PipelineLayout, StageParts
from gt_trainer.planning.rank_placement import ranks_by_domain
from gt_trainer.planning.run_recipe import RunRecipe

if TYPE_CHECKING:
    from gt_passes.simulation import Hardware

ADAM_STATES = 2
SPLIT_BACKWARDS = frozenset({"ZBVZeroBubble", "DualPipeV", "InterleavedZeroBubble"})
"""Schedules in which gradients of weights may run after those of inputs have left."""

_REPEATS = "full_recompute"
"""The one policy that surely multiplies again."""

_IN_8_BITS = "float8_rowwise"
"""One of them."""

_NO_BANDWIDTH = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBound:
    """Lower bounds of one step. Microseconds and bytes."""

    compute_us: float
    """The fullest rank's operators, without waiting."""

    bubble_us: float
    """What its pipeline adds to that at least."""

    carried_us: Mapping[str, float]
    """What process groups carry, by mesh axis."""

    optimizer_us: float
    state_bytes: int
    """Parameters and states of the optimizer on the fullest rank."""

    peak_bytes: int

    @property
    def step_us(self) -> float:
        """The most binding of them, and the optimizer."""
        streams = (self.compute_us + self.bubble_us, *self.carried_us.values())
        return max(streams) + self.optimizer_us


def step_bound(
    recipe: RunRecipe, model: ModelCounts, layout: PipelineLayout, hardware: Hardware
) -> StepBound:
    """Bound a step of ``recipe``, whose stages are laid out as ``layout`` says."""
    times = ProductTimes(recipe, model, hardware)
    ranks = [layout.of_rank(rank) for rank in range(len(layout.by_rank))]
    compute_us, waits_us = max(_ranks_us(recipe, layout, times), key=sum)
    shards = recipe.dp_shard * recipe.cp * recipe.tp
    parameters = (
        sum(each.dense_parameters + each.layers.expert_parameters for each in stages)
        for stages in ranks
    )
    stored = max(parameters) / shards
    layers = max(sum(each.num_layers for each in stages) for stages in ranks)
    tokens = recipe.microbatch * model.seq_len // (recipe.tp * recipe.cp)
    inputs = layers * tokens * model.dim * model.activation_bytes
    state_bytes = int(stored * model.parameter_bytes * (1 + ADAM_STATES))
    held = max(inputs, int(stored * model.parameter_bytes))
    if recipe.pp > 1:
        held = max(held, *(_whole_bytes(stage, recipe, model) for stage in layout.stages))
    return StepBound(
        compute_us=compute_us,
        bubble_us=waits_us,
        carried_us=dict(_carried(recipe, model, ranks, hardware)),
        optimizer_us=_optimizer_us(stored, model, hardware),
        state_bytes=state_bytes,
        peak_bytes=state_bytes + held,
    )


def seen_by_bounds(recipe: RunRecipe) -> RunRecipe:
    """The same for recipes that have the same bounds.

    Of memory policies they know the fullest, of precisions whether it has 8 bits.
    """
    policy = recipe.memory_policy if recipe.memory_policy == _REPEATS else MEMORY_POLICIES[0]
    linears = recipe.linears if recipe.linears == "none" else _IN_8_BITS
    return replace(recipe, memory_policy=policy, ep_overlap=False, linears=linears)


class ProductTimes:
    """How long the products of one microbatch take at least, on one rank.

    Args:
        recipe: its microbatch is divided among tp and cp.
        model: the model.
        hardware: the machine.
    """

    def __init__(self, recipe: RunRecipe, model: ModelCounts, hardware: Hardware) -> None:
        self._model = model
        self._tokens = recipe.microbatch * model.seq_len / (recipe.tp * recipe.cp)
        peak = _peak_flops_per_s(model.products_dtype, hardware)
        best = max(hardware.matmul_efficiency, hardware.grouped_matmul_efficiency)
        own = peak * hardware.matmul_efficiency
        in_8_bits = max(own, hardware.peak_fp8_flops_per_s * hardware.matmul_fp8_efficiency)
        self._ends_us = 2e6 * self._tokens / own
        self._dense_us = 2e6 * self._tokens / (in_8_bits if recipe.linears != "none" else own)
        self._experts_us = 2e6 * self._tokens / (peak * best)
        pairs = self._tokens * model.seq_len * min(1.0, hardware.attention_mask_density)
        self._attention_us = 2e6 * pairs / (peak * hardware.attention_forward_efficiency)
        self._attention_back_us = 2e6 * pairs / (peak * hardware.attention_backward_efficiency)
        self._repeats = recipe.memory_policy == _REPEATS

    def forward_us(self, stage: StageParts) -> float:
        """A forward."""
        return self._products_us(stage) + self.attention_us(stage)

    def attention_us(self, stage: StageParts) -> float:
        """Of a forward, its attention: scores, and their product with the values."""
        return (stage.layers.query_width + stage.layers.attention_width) * self._attention_us

    def dense_us(self, stage: StageParts) -> float:
        """Return the part of a forward in dense products of layers."""
        return stage.layers.dense_products * self._dense_us

    def backward_us(self, stage: StageParts) -> float:
        """Gradients of inputs and weights, and what is computed again."""
        return self.inputs_us(stage) + self._products_us(stage)

    def inputs_us(self, stage: StageParts) -> float:
        """Of a backward, gradients of inputs and what is computed again."""
        layers = stage.layers
        # Scores again, and gradients of probabilities, values, queries and keys.
        width = 3 * layers.query_width + 2 * layers.attention_width
        inputs = self._products_us(stage) + width * self._attention_back_us
        if self._repeats:
            inputs += layers.repeated_dense * self._dense_us
            inputs += layers.repeated_experts * self._experts_us
        return inputs

    def _products_us(self, stage: StageParts) -> float:
        layers = stage.layers
        total = layers.dense_products * self._dense_us + layers.expert_products * self._experts_us
        return total + stage.output_products * self._ends_us


def _ranks_us(
    recipe: RunRecipe, layout: PipelineLayout, times: ProductTimes
) -> Iterator[tuple[float, float]]:
    """What each rank computes in a step, and what it waits for at both ends."""
    is_whole = recipe.schedule not in SPLIT_BACKWARDS
    through = [
        times.forward_us(stage) + is_whole * times.inputs_us(stage) for stage in layout.stages
    ]
    waits = [0.0, *itertools.accumulate(through)]
    each = [times.forward_us(stage) + times.backward_us(stage) for stage in layout.stages]
    for stages in layout.by_rank:
        mine = sum(each[stage] for stage in stages)
        yield recipe.num_microbatches * mine, waits[min(stages)]


def _whole_bytes(stage: StageParts, recipe: RunRecipe, model: ModelCounts) -> int:
    """A stage's gradients before they are reduced, and its gathered parameters beside them."""
    whole = stage.dense_parameters / recipe.tp
    is_gathered = recipe.dp_shard * recipe.cp > 1
    if recipe.ep > 1:
        whole += stage.layers.expert_parameters / recipe.ep
    else:  # however tensor parallelism places them
        whole += stage.layers.expert_parameters / recipe.tp
    return int(whole * (model.activation_bytes + is_gathered * _gathered_bytes(recipe, model)))


def _gathered_bytes(recipe: RunRecipe, model: ModelCounts) -> int:
    """Of a gathered parameter at least: linear layers in 8 bits may gather them so."""
    return model.activation_bytes if recipe.linears == "none" else 1


def _optimizer_us(stored: float, model: ModelCounts, hardware: Hardware) -> float:
    """Adam without clipping: gradient and parameter read, states read and written, written back."""
    rate = hardware.hbm_bytes_per_s * hardware.hbm_streaming_efficiency
    return 1e6 * (3 + 2 * ADAM_STATES) * stored * model.parameter_bytes / rate


def _carried(
    recipe: RunRecipe,
    model: ModelCounts,
    ranks: Sequence[Sequence[StageParts]],
    hardware: Hardware,
) -> Iterator[tuple[str, float]]:
    """What process groups carry in a step at least, in microseconds."""
    # A pipeline gathers and reduces once, in lanes that may run side by side.
    once = recipe.pp > 1 or recipe.reduces_once
    times = 1 if once else recipe.num_microbatches
    # Gathered and reduced, or in a pipeline the more of both.
    each_bytes = model.activation_bytes
    if recipe.pp == 1:
        each_bytes += _gathered_bytes(recipe, model)
    dense = max(sum(each.dense_parameters for each in stages) for stages in ranks)
    experts = max(sum(each.layers.expert_parameters for each in stages) for stages in ranks)
    shards = recipe.dp_shard * recipe.cp
    together = dense if recipe.ep > 1 else dense + experts
    gathered = together / recipe.tp * each_bytes * times
    yield "fsdp", ring_us(gathered, shards, recipe.tp, hardware)
    if recipe.ep > 1:
        gathered = experts / recipe.ep * each_bytes * times
        yield "efsdp", ring_us(gathered, shards * recipe.tp // recipe.ep, recipe.ep, hardware)
        tokens = recipe.sequences * model.seq_len / (recipe.tp * recipe.cp)
        copies = max(sum(each.layers.sent_copies for each in stages) for stages in ranks)
        # Dispatch and combine, forward and backward.
        sent = 4 * tokens * copies * model.dim * model.activation_bytes
        yield "ep", exchange_us(sent, recipe.ep, hardware)


def ring_us(num_bytes: float, size: int, stride: int, hardware: Hardware) -> float:
    """To gather so many bytes on each rank of a group; 0 for a group of one.

    Args:
        num_bytes: of the gathered tensor.
        size: ranks of the group.
        stride: from one of its ranks to the next.
        hardware: the machine.
    """
    if size < 2:
        return 0.0
    bus = _bus_bytes_per_s(size, stride, hardware)
    return 1e6 * num_bytes * (size - 1) / size / bus


def exchange_us(num_bytes: float, size: int, hardware: Hardware) -> float:
    """To exchange so many bytes from each of neighbouring ranks."""
    inside = min(size, hardware.gpus_per_node)
    stays = num_bytes * (inside - 1) / size / hardware.nvlink_bus_bytes_per_s
    leaves = num_bytes * (size - inside) / size / hardware.nic_effective_bytes_per_s
    return 1e6 * max(stays, leaves)


def _bus_bytes_per_s(size: int, stride: int, hardware: Hardware) -> float:
    on_node = _most_on_a_node(size, stride, hardware.gpus_per_node)
    nvlink = hardware.nvlink_bus_bytes_per_s if on_node > 1 else _NO_BANDWIDTH
    if size == on_node:
        return hardware.nvlink_bus_bytes_per_s
    return min(nvlink, on_node * hardware.nic_effective_bytes_per_s)


@functools.cache
def _most_on_a_node(size: int, stride: int, gpus_per_node: int) -> int:
    return max(ranks_by_domain(size, stride, gpus_per_node).values())


def _peak_flops_per_s(dtype: str, hardware: Hardware) -> float:
    if dtype == "float32":
        return hardware.peak_fp32_flops_per_s
    return hardware.peak_bf16_flops_per_s
