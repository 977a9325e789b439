"""Options of ``--compile`` in pipelines of torchtitan's models, on several processes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from pipelines.cases import (
    PipelineCase,
)
from pipelines.option_cases import (
    OptionCase,
    compare_and_count,
    compare_and_count_launches,
    evaluated_at_half_the_length,
    trained,
    trained_with_symmetric_memory,
)
from training_cases import Case

from gt_trace.testing import GlooWorkers

LLAMA3 = Case(module="llama3", config="llama3_debugmodel", num_layers=4, seq_len=32)
NOT_WEIGHTED = {
    "pipeline_parallel_first_stage_less_layers": 0,
    "pipeline_parallel_last_stage_less_layers": 0,
}
"""Embedding and output projection count as no layers."""
TP = dataclasses.replace(LLAMA3, parallelism={"tensor_parallel_degree": 2})


@pytest.mark.slow
def test_asynchronous_tensor_parallelism_trains_as_collectives_do(
    four: GlooWorkers, tmp_path: Path
):
    plain = PipelineCase(model=TP, schedule="ZBVZeroBubble")
    fused = dataclasses.replace(plain, options={"async_tensor_parallel": True})
    expected = four.run(trained, plain, str(tmp_path / "plain"))
    found = four.run(trained_with_symmetric_memory, fused, str(tmp_path / "fused"))
    for each in found:
        assert each.counts["async-tensor-parallel: all_gathers_fused"] > 0
        assert each.counts["async-tensor-parallel: reduce_scatters_fused"] > 0
    assert len(found[0].losses) == 2
    assert found[0].losses == pytest.approx(expected[0].losses, rel=1e-5)


@pytest.mark.slow
def test_compiled_regions_of_stages_train_within_their_tolerance(four: GlooWorkers, tmp_path: Path):
    model = dataclasses.replace(LLAMA3, parallelism={"data_parallel_shard_degree": 2})
    plain = PipelineCase(model=model, schedule="ZBVZeroBubble")
    regions = ("layers.*.feed_forward", "layers.*.attention_norm")
    options = {"inductor_compilation": "regional", "regional_modules": regions}
    compiled = dataclasses.replace(plain, options=options)
    expected = four.run(trained, plain, str(tmp_path / "plain"))
    found = four.run(trained, compiled, str(tmp_path / "compiled"))
    for each in found:
        assert each.counts["compile-regions: compiled"] > 0, each.counts
    assert len(found[0].losses) == 2
    # The tolerance that the pass states.
    assert found[0].losses == pytest.approx(expected[0].losses, rel=1e-5)


@pytest.mark.slow
def test_reductions_over_a_second_group_keep_every_bit(four: GlooWorkers, tmp_path: Path):
    """Of eight stages, each rank has four, of which it gathers three at once."""
    model = dataclasses.replace(LLAMA3, num_layers=8, parallelism={"data_parallel_shard_degree": 2})
    case = OptionCase(
        model=model,
        schedule="Interleaved1F1B",
        options={"fsdp_second_group": True},
        parallelism={"pipeline_parallel_layers_per_stage": 1, **NOT_WEIGHTED},
    )
    for found, counts in four.run(compare_and_count, case, str(tmp_path)):
        assert found.differences == ()
        assert found.num_gradients > 10
        assert counts["separate-reduction-group: reductions_moved"] > 0


@pytest.mark.slow
def test_offloading_stages_keep_every_bit(four: GlooWorkers, tmp_path: Path):
    model = dataclasses.replace(LLAMA3, parallelism={"data_parallel_shard_degree": 2})
    case = OptionCase(model=model, schedule="ZBVZeroBubble", options={"memory_policy": "offload"})
    for found, counts in four.run(compare_and_count, case, str(tmp_path)):
        assert found.differences == ()
        assert found.num_gradients > 10
        assert counts["offload-tagged: tensors_offloaded"] > 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("memory_policy", "strategy"),
    [
        ("selective", "gather"),
        ("selective_alternate", "gather"),
        ("full_recompute", "gather"),
        ("offload", "gather"),
        ("full_recompute", "ring"),
        ("offload", "ring"),
    ],
)
def test_every_memory_policy_keeps_every_bit_where_ranks_share_sequences(
    memory_policy: str, strategy: str, four: GlooWorkers, tmp_path: Path
):
    model = dataclasses.replace(LLAMA3, parallelism={"context_parallel_degree": 2})
    options = {"memory_policy": memory_policy, "context_parallel": strategy}
    case = OptionCase(model=model, schedule="1F1B", options=options)
    for found, counts in four.run(compare_and_count, case, str(tmp_path)):
        assert found.differences == ()
        assert found.num_gradients > 10
        if memory_policy == "offload":
            assert counts["offload-tagged: tensors_offloaded"] > 4
        else:
            assert counts["recompute-tagged: recomputed"] > 4


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False])
def test_replayed_steps_keep_every_bit(whole: bool, four: GlooWorkers, tmp_path: Path):
    """Recordings are imitated. Whole steps are one launch; else each action that computes is."""
    model = dataclasses.replace(LLAMA3, parallelism={"data_parallel_shard_degree": 2})
    case = OptionCase(model=model, schedule="ZBVZeroBubble", options={"cuda_graphs": True})
    for found, launches, num_actions in four.run(
        compare_and_count_launches, case, str(tmp_path), whole
    ):
        assert found.differences == ()
        assert found.num_gradients > 10
        if whole:
            assert launches[0] == 0
            assert {*launches[1:]} == {1}
        else:
            assert launches[0] < launches[1] == num_actions


@pytest.mark.slow
def test_samples_of_another_length_are_captured_anew(four: GlooWorkers, tmp_path: Path):
    case = OptionCase(
        model=TP, schedule="Interleaved1F1B", options={"on_shape_change": "recapture"}
    )
    for differences, num_captured in four.run(evaluated_at_half_the_length, case, str(tmp_path)):
        assert differences == []
        assert num_captured == 4  # two stages of a rank, for two lengths
