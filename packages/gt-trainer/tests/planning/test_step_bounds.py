"""Bounds of a model that is small enough to be worked out by hand."""

from dataclasses import replace

import pytest

from gt_passes.simulation import h100_sxm
from gt_passes.simulation.collective_model import CollectiveModel
from gt_trainer.planning.model_counts import LayerCounts, ModelCounts
from gt_trainer.planning.planner import PipelineLayouts
from gt_trainer.planning.run_recipe import RunRecipe
from gt_trainer.planning.step_bounds import exchange_us, ring_us, step_bound

_LAYER = LayerCounts(
    dense_parameters=12_000_000,
    dense_products=12_000_000,
    repeated_dense=8_000_000,
    attention_width=1000,
    query_width=1500,
    keys_values_width=2500,
    outputs_width=12_000,
)
_MODEL = ModelCounts(
    layers=(_LAYER,) * 6,
    embedding_parameters=3_000_000,
    output_parameters=3_000_000,
    output_products=3_000_000,
    loss_chunks=1,
    dim=1000,
    seq_len=1000,
    products_dtype="bfloat16",
    parameter_bytes=4,
    flops_per_token=1,
    max_tp=8,
    num_experts=None,
)
# A machine of round numbers: attention is free, 1e15 FLOP/s are 0.001 us for each million.
_MACHINE = replace(
    h100_sxm(),
    peak_bf16_flops_per_s=1e15,
    matmul_efficiency=1.0,
    matmul_fp8_efficiency=1.0,
    attention_mask_density=1e-12,
    nvlink_bus_bytes_per_s=100e9,
    nic_effective_bytes_per_s=10e9,
    gpus_per_node=4,
)
_RECIPE = RunRecipe(dp_shard=4, microbatch=2, global_batch=16, memory_policy="save_all")


def _bound(recipe, model=_MODEL, machine=_MACHINE):
    return step_bound(recipe, model, PipelineLayouts(model).of(recipe), machine)


def test_a_rank_multiplies_every_token_with_every_weight_three_times():
    tokens = 4 * 1000
    products = 6 * 12e6 + 3e6
    assert _bound(_RECIPE).compute_us == pytest.approx(6 * tokens * products / 1e9)


def test_layers_that_are_recomputed_multiply_again_but_for_their_last_product():
    repeated = _bound(replace(_RECIPE, memory_policy="full_recompute")).compute_us
    assert repeated - _bound(_RECIPE).compute_us == pytest.approx(2 * 4000 * 6 * 8e6 / 1e9)


def test_attention_counts_half_of_its_pairs():
    machine = replace(_MACHINE, attention_mask_density=0.5)
    bound = _bound(_RECIPE, machine=machine)
    pairs = 4000 * 1000 / 2
    forward = 2 * pairs * (1500 + 1000) * 6 / (1e15 * machine.attention_forward_efficiency)
    backward = (
        2 * pairs * (3 * 1500 + 2 * 1000) * 6 / (1e15 * machine.attention_backward_efficiency)
    )
    more = bound.compute_us - _bound(_RECIPE).compute_us
    assert more == pytest.approx(1e6 * (forward + backward), rel=1e-6)


def test_the_fullest_rank_waits_for_the_stages_before_it():
    pipeline = replace(_RECIPE, dp_shard=2, pp=2, schedule="1F1B")
    assert [stage.num_layers for stage in PipelineLayouts(_MODEL).of(pipeline).stages] == [3, 3]
    bound = _bound(pipeline)
    forward = 2 * 2000 * 3 * 12e6 / 1e9
    inputs = forward
    assert bound.bubble_us == pytest.approx(forward + inputs)
    assert bound.compute_us == pytest.approx(4 * 6 * 2000 * (3 * 12e6 + 3e6) / 1e9)


def test_gradients_of_weights_that_are_put_off_fill_the_end():
    pipeline = replace(_RECIPE, dp_shard=2, pp=2, schedule="ZBVZeroBubble")
    whole = replace(pipeline, schedule="Interleaved1F1B")
    assert _bound(pipeline).bubble_us < _bound(whole).bubble_us


def test_states_and_gradients_are_sixteen_bytes_a_parameter():
    parameters = _MODEL.num_parameters / 4
    bound = _bound(replace(_RECIPE, microbatch=1, global_batch=4))
    assert bound.state_bytes == 12 * parameters
    assert bound.peak_bytes == 16 * parameters


def test_stages_hold_their_gradients_whole_beside_their_parameters():
    bound = _bound(replace(_RECIPE, dp_shard=8, pp=2, schedule="1F1B"))
    largest = 3 * 12e6 + 3e6
    assert bound.state_bytes == 12 * largest / 8
    assert bound.peak_bytes == bound.state_bytes + 4 * largest


def test_parameters_that_may_be_gathered_in_8_bits_count_as_one_byte():
    quantized = replace(_RECIPE, linears="float8_tensorwise")
    pipeline = replace(quantized, dp_shard=8, pp=2, schedule="1F1B")
    bound = _bound(pipeline)
    assert bound.peak_bytes == bound.state_bytes + 3 * (3 * 12e6 + 3e6)
    own = _bound(_RECIPE).carried_us["fsdp"]
    assert _bound(quantized).carried_us["fsdp"] == pytest.approx(own * 3 / 4)


def test_inputs_of_layers_count_where_they_are_more_than_gradients():
    model = replace(_MODEL, seq_len=1_000_000)
    bound = _bound(_RECIPE, model)
    assert bound.peak_bytes - bound.state_bytes == 6 * 2 * 1_000_000 * 1000 * 2


def test_parameters_are_gathered_and_reduced_for_each_microbatch_or_once():
    every = _bound(_RECIPE).carried_us["fsdp"]
    num_bytes = _MODEL.num_parameters * 2 * 2
    assert every == pytest.approx(2 * 1e6 * num_bytes * 3 / 4 / 100e9)
    assert _bound(replace(_RECIPE, reduces_once=True)).carried_us["fsdp"] == every / 2


def test_exchanges_between_nodes_go_over_nics():
    experts = replace(_LAYER, expert_parameters=80_000_000, expert_products=2e7, sent_copies=2.0)
    model = replace(_MODEL, layers=(experts,) * 6, num_experts=8)
    recipe = replace(_RECIPE, dp_shard=8, ep=8)
    sent = 4 * 2000 * 2 * 6 * 1000 * 2
    assert _bound(recipe, model).carried_us["ep"] == pytest.approx(1e6 * sent / 2 / 10e9)


@pytest.mark.parametrize("stride", [1, 2, 4, 8])
@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_no_collective_is_faster_than_its_bound(size, stride):
    model, ranks = CollectiveModel(hardware=_MACHINE), list(range(0, size * stride, stride))
    for num_bytes in (1_000, 10_000_000, 10_000_000_000):
        least = ring_us(num_bytes, size, stride, _MACHINE)
        assert model.time_us("all_gather", num_bytes, ranks) > least
        assert model.time_us("reduce_scatter", num_bytes, ranks) > least
        if stride == 1:
            exchanged = exchange_us(num_bytes, size, _MACHINE)
            assert model.time_us("all_to_all", num_bytes, ranks) > exchanged
