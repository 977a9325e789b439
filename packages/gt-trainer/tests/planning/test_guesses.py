"""Guesses at what bounds leave out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning.small_problems import small_problem

from gt_passes.simulation import Hardware, h100_sxm
from gt_trainer.planning.guesses import _bubble_us, _kept_bytes, _weights_us, guessed_us
from gt_trainer.planning.pipeline_layouts import PipelineLayouts
from gt_trainer.planning.run_recipe import RunRecipe
from gt_trainer.planning.step_bounds import step_bound

_SMALL = small_problem(0, num_recipes=1).model
_DENSE = replace(_SMALL.layers[0], expert_parameters=0)
_MODEL = replace(
    _SMALL,
    layers=(_DENSE,) * len(_SMALL.layers),
    num_experts=None,
    seq_len=128,
    products_dtype="bfloat16",
)


_MACHINE = h100_sxm()
_AT_ONCE = replace(_MACHINE, nccl_ring_network_ll128_us=0.0, nccl_ring_nvlink_ll128_us=0.0)


def _guess(recipe: RunRecipe, machine: Hardware = _MACHINE) -> float:
    layout = PipelineLayouts(_MODEL).of(recipe)
    bound = step_bound(recipe, _MODEL, layout, machine)
    return guessed_us(recipe, _MODEL, layout, bound, machine)


def test_a_ring_of_thousands_costs_its_latencies_in_every_layer():
    recipe = RunRecipe(dp_shard=4096, microbatch=1, global_batch=4096, memory_policy="save_all")
    # 512 nodes of 8: gathered and reduced in each layer.
    steps_us = 511 * _MACHINE.nccl_ring_network_ll128_us
    steps_us += (4096 - 512) * _MACHINE.nccl_ring_nvlink_ll128_us
    more = _guess(recipe, _MACHINE) - _guess(recipe, _AT_ONCE)
    assert 0 < more <= 2 * len(_MODEL.layers) * steps_us
    assert _guess(recipe, _MACHINE) > 2 * _guess(recipe, _AT_ONCE)
    small = replace(recipe, dp_shard=8, global_batch=8)
    assert _guess(small, _MACHINE) < 1.1 * _guess(small, _AT_ONCE)


def test_chunks_of_the_loss_and_sums_of_gradients_take_their_time_for_every_microbatch():
    def weights_us(num_microbatches: int, **changed: int | bool) -> float:
        recipe = RunRecipe(
            microbatch=1, global_batch=num_microbatches, memory_policy="save_all", **changed
        )
        return _weights_us(recipe, _MODEL, PipelineLayouts(_MODEL).of(recipe), _MACHINE)

    logits = 15 * _MODEL.loss_chunks * _MODEL.output_products
    rate = _MACHINE.hbm_bytes_per_s * _MACHINE.hbm_streaming_efficiency
    assert weights_us(1) == pytest.approx(1e6 * logits / rate)
    assert weights_us(4) == pytest.approx(4 * weights_us(1))
    assert weights_us(1, tp=2) == pytest.approx(weights_us(1) / 2)
    summed = 8 * _MODEL.num_parameters
    more = weights_us(2, reduces_once=True) - weights_us(2)
    assert more == pytest.approx(2 * 1e6 * summed / rate)


def test_few_microbatches_leave_every_schedule_of_a_pipeline_waiting():
    def waiting(schedule: str, num_microbatches: int) -> float:
        recipe = RunRecipe(
            pp=2,
            schedule=schedule,
            microbatch=1,
            global_batch=num_microbatches,
            memory_policy="save_all",
        )
        bound = step_bound(recipe, _MODEL, PipelineLayouts(_MODEL).of(recipe), _MACHINE)
        return _bubble_us(recipe, bound) / bound.compute_us

    assert waiting("1F1B", 1) >= 1.0
    assert waiting("ZBVZeroBubble", 1) >= 0.5
    assert waiting("ZBVZeroBubble", 8) < waiting("Interleaved1F1B", 8) < waiting("1F1B", 8)


def test_what_tensor_parallelism_gathers_is_kept_unless_all_is_computed_again():
    (stage,) = (
        PipelineLayouts(_MODEL).of(RunRecipe(microbatch=1, global_batch=1, memory_policy="")).stages
    )
    gathered = 2 * 8 * len(_MODEL.layers) * _MODEL.dim * _MODEL.activation_bytes
    for policy, more in (("save_all", gathered), ("selective", gathered), ("full_recompute", 0)):
        alone = _kept_bytes(policy, _MODEL, stage, 1)
        assert _kept_bytes(policy, _MODEL, stage, 8) == pytest.approx(alone + more)
