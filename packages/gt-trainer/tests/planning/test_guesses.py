"""Guesses at what bounds leave out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from planning.small_problems import small_problem

from gt_passes.simulation import Hardware, h100_sxm
from gt_pipeline.schedules import Action, schedule_of
from gt_trainer.planning.candidates import SCHEDULES
from gt_trainer.planning.guesses import (
    _bubble_us,
    _experts_us,
    _in_flight_bytes,
    _kept_bytes,
    _weights_us,
    guessed_bytes,
    guessed_us,
    most_in_flight,
)
from gt_trainer.planning.planner import PipelineLayouts
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


def test_weights_and_chunks_of_the_loss_take_their_time_for_every_microbatch():
    def weights_us(num_microbatches: int, **changed: int | bool) -> float:
        recipe = RunRecipe(
            microbatch=1, global_batch=num_microbatches, memory_policy="save_all", **changed
        )
        layout = PipelineLayouts(_MODEL).of(recipe)
        return _weights_us(recipe, _MODEL, layout.stages, _MACHINE)

    logits = 14 * _MODEL.loss_chunks * _MODEL.output_products
    rate = _MACHINE.hbm_bytes_per_s * _MACHINE.hbm_streaming_efficiency
    assert weights_us(1) == pytest.approx(1e6 * logits / rate)
    assert weights_us(4) == pytest.approx(4 * weights_us(1))
    assert weights_us(1, tp=2) == pytest.approx(weights_us(1) / 2)
    touched = 14 * _MODEL.num_parameters
    more = weights_us(2, reduces_once=True) - weights_us(2)
    assert more == pytest.approx(2 * 1e6 * touched / rate)
    copied = weights_us(4, dp_shard=4) - weights_us(1)
    assert copied == pytest.approx(1e6 * touched / rate)


_EXPERTS = replace(
    _MODEL,
    num_experts=8,
    layers=(replace(_DENSE, expert_products=3e6, sent_copies=2.0, expert_layers=1),),
)


def test_products_of_experts_take_as_long_as_grouped_ones_and_their_tokens_are_copied():
    def experts_us(policy: str, machine: Hardware = _MACHINE) -> float:
        recipe = RunRecipe(microbatch=1, global_batch=1, memory_policy=policy)
        return _experts_us(recipe, _EXPERTS, PipelineLayouts(_EXPERTS).of(recipe).stages, machine)

    tokens, peak = _EXPERTS.seq_len, _MACHINE.peak_bf16_flops_per_s
    as_fast = replace(_MACHINE, grouped_matmul_efficiency=_MACHINE.matmul_efficiency)
    slower = 1 / _MACHINE.grouped_matmul_efficiency - 1 / _MACHINE.matmul_efficiency
    more = experts_us("save_all") - experts_us("save_all", as_fast)
    assert more == pytest.approx(1e6 * 2 * tokens * 3 * 3e6 / peak * slower)
    assert experts_us("full_recompute", as_fast) == pytest.approx(
        3 / 2 * experts_us("save_all", as_fast)
    )


def test_attention_is_computed_again_at_the_rate_of_forwards():
    again = RunRecipe(microbatch=1, global_batch=1, memory_policy="full_recompute")
    layout = PipelineLayouts(_MODEL).of(again)
    bound = step_bound(again, _MODEL, layout, _MACHINE)
    pairs = _MODEL.seq_len**2 * _MACHINE.attention_mask_density
    widths = sum(layer.query_width + layer.attention_width for layer in _MODEL.layers)
    rate = _MACHINE.peak_bf16_flops_per_s * _MACHINE.attention_forward_efficiency
    more = _guess(again) - bound.step_us
    more -= _weights_us(again, _MODEL, layout.stages, _MACHINE)
    more -= _experts_us(again, _MODEL, layout.stages, _MACHINE)
    assert more == pytest.approx(1e6 * 2 * pairs * widths / rate)


def test_collectives_take_multiprocessors_from_what_computes_beside_them():
    recipe = RunRecipe(dp_shard=8, microbatch=1, global_batch=8, memory_policy="selective")
    bound = step_bound(recipe, _MODEL, PipelineLayouts(_MODEL).of(recipe), _MACHINE)
    more = _guess(recipe) - _guess(recipe, replace(_MACHINE, collective_sms=0))
    carried_us = sum(bound.carried_us.values())
    assert 0 < more <= 1.001 * carried_us * _MACHINE.collective_sms / _MACHINE.num_sms
    alone = replace(recipe, dp_shard=1, global_batch=1)
    assert _guess(alone) == _guess(alone, replace(_MACHINE, collective_sms=0))


def test_a_policy_that_computes_half_of_the_products_again_takes_longer():
    recipe = RunRecipe(microbatch=1, global_batch=1, memory_policy="selective")
    assert _guess(recipe) < _guess(replace(recipe, memory_policy="selective_alternate"))


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
        return _bubble_us(recipe, bound, bound.compute_us) / bound.compute_us

    assert waiting("1F1B", 1) >= 1.0
    assert waiting("ZBVZeroBubble", 1) >= 0.5
    assert waiting("ZBVZeroBubble", 8) < waiting("Interleaved1F1B", 8) < waiting("1F1B", 8)


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_microbatches_in_flight_are_those_of_the_schedule(schedule: str, pp: int) -> None:
    num_stages = pp if schedule == "1F1B" else 2 * pp
    for num_microbatches in range(2 * pp if schedule == "DualPipeV" else pp, 5 * pp, pp):
        lists = schedule_of(
            schedule, num_ranks=pp, num_stages=num_stages, num_microbatches=num_microbatches
        ).compute
        held = [most for actions in lists for most in _in_flight(actions)]
        expected = (max(kept for kept, _ in held), max(put_off for _, put_off in held))
        assert most_in_flight(schedule, pp, num_microbatches) == expected


def _in_flight(actions: Sequence[Action]) -> Iterator[tuple[int, int]]:
    kept = put_off = 0
    for action in actions:
        for part in action.compute_parts:
            kept += {"FORWARD": 1, "FULL_BACKWARD": -1, "BACKWARD_INPUT": -1}.get(part.kind, 0)
            put_off += {"BACKWARD_INPUT": 1, "BACKWARD_WEIGHT": -1}.get(part.kind, 0)
            yield kept, put_off


def test_gradients_of_weights_that_are_put_off_are_held_whatever_is_computed_again() -> None:
    def held(schedule: str, policy: str) -> float:
        recipe = RunRecipe(
            pp=2, schedule=schedule, microbatch=1, global_batch=8, memory_policy=policy
        )
        layout = PipelineLayouts(_MODEL).of(recipe)
        ranks = [layout.of_rank(rank) for rank in range(2)]
        return max(_in_flight_bytes(recipe, _MODEL, stages) for stages in ranks)

    assert held("Interleaved1F1B", "full_recompute") < 0.3 * held("Interleaved1F1B", "selective")
    for policy in ("selective", "selective_alternate", "full_recompute"):
        assert held("ZBVZeroBubble", policy) > held("Interleaved1F1B", "selective")
    for policy in ("selective_alternate", "full_recompute"):
        assert held("DualPipeV", policy) < held("ZBVZeroBubble", policy)


def test_what_is_gathered_is_kept_unless_all_is_computed_again():
    alone = RunRecipe(microbatch=1, global_batch=1, memory_policy="")
    (stage,) = PipelineLayouts(_MODEL).of(alone).stages
    gathered = 2 * 8 * len(_MODEL.layers) * _MODEL.dim * _MODEL.activation_bytes
    keys_values = 3 * stage.layers.keys_values_width * _MODEL.activation_bytes
    for degrees, kept in (({"tp": 8}, gathered), ({"cp": 4}, keys_values)):
        shared = replace(alone, **degrees)
        for policy, more in (("save_all", kept), ("selective", kept), ("full_recompute", 0)):
            own = _kept_bytes(policy, _MODEL, stage, alone)
            assert _kept_bytes(policy, _MODEL, stage, shared) == pytest.approx(own + more)


def test_the_host_reads_counts_of_every_rank_for_each_chunk():
    def more_us(ep: int, *, overlap: bool) -> float:
        recipe = RunRecipe(
            dp_shard=8, ep=ep, microbatch=1, global_batch=8, memory_policy="", ep_overlap=overlap
        )
        layout = PipelineLayouts(_EXPERTS).of(recipe)
        guesses = [
            guessed_us(
                recipe, _EXPERTS, layout, step_bound(recipe, _EXPERTS, layout, machine), machine
            )
            for machine in (_MACHINE, replace(_MACHINE, host_scalar_us=_MACHINE.host_scalar_us + 1))
        ]
        return guesses[1] - guesses[0]

    assert more_us(1, overlap=False) == 0.0
    assert more_us(8, overlap=False) == pytest.approx(2 * 8)
    assert more_us(4, overlap=False) == pytest.approx(2 * 4)
    assert more_us(8, overlap=True) == pytest.approx(2 * more_us(8, overlap=False))


def test_logits_of_a_whole_sequence_are_held():
    def held(loss_chunks: int) -> float:
        model = replace(_MODEL, seq_len=8192, loss_chunks=loss_chunks)
        recipe = RunRecipe(microbatch=1, global_batch=1, memory_policy="full_recompute")
        layout = PipelineLayouts(model).of(recipe)
        return guessed_bytes(recipe, model, layout, step_bound(recipe, model, layout, _MACHINE))

    logits = 8192 * _MODEL.output_products / _MODEL.dim
    assert held(1) == pytest.approx(held(2) + 8 * logits / 2)
