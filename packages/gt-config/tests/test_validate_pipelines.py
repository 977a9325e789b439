"""Rules of pipelines, one by one, with the exact text."""

import pytest
from asked import found, mesh

from gt_config import CompileConfig, Violation


@pytest.mark.parametrize(
    ("settings", "flag", "value", "allowed", "fix"),
    [
        (
            {"mode": "aot_joint"},
            "--compile.mode",
            "aot_joint",
            (
                "'none' or 'aot_fx_trace' with --parallelism.pipeline_parallel_degree 2: stages are "
                "captured with their backward, or eager"
            ),
            "use aot_fx_trace, or --parallelism.pipeline_parallel_degree 1",
        ),
        (
            {"cuda_graphs": True, "pipeline_gathered_gib": 4.0},
            "--compile.pipeline_gathered_gib",
            4.0,
            (
                "None with --compile.cuda_graphs and expert parallelism: a step that exchanges "
                "tokens is recorded action by action, and those recordings read gathered "
                "parameters at addresses that stay, so that nothing frees them"
            ),
            "leave out one of the two",
        ),
        (
            {"fsdp_into_dense_regions": True},
            "--compile.fsdp_into_dense_regions",
            True,
            (
                "False with --parallelism.pipeline_parallel_degree 2: gathering and reducing are "
                "actions of their own, and the schedule says when they run"
            ),
            "use False, or --parallelism.pipeline_parallel_degree 1",
        ),
        (
            {"cuda_graphs": True, "memory_policy": "offload"},
            "--compile.cuda_graphs",
            True,
            (
                "False with --compile.memory_policy offload in a pipeline: each microbatch has host "
                "memory of its own, and a CUDA graph copies to one address"
            ),
            "leave the flag out, or use another --compile.memory_policy",
        ),
    ],
)
def test_refuses_with_a_pipeline_what_needs_a_whole_step(settings, flag, value, allowed, fix):
    topology = mesh(world=8, dp_replicate=2, dp_shard=2, pp=2, tp=1, ep=2)
    violations = {v.flag: v for v in found(CompileConfig(**settings), topology)}
    assert violations[flag] == Violation(flag=flag, value=value, allowed=allowed, fix=fix)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"cuda_graphs": True},
        {"pipeline_gathered_gib": 4.0},
        {"on_shape_change": "recapture"},
        {"memory_policy": "offload"},
        {"async_tensor_parallel": True},
    ],
)
def test_takes_a_pipeline_with_tensor_and_expert_parallelism(settings):
    assert found(CompileConfig(**settings), mesh(world=8, dp_shard=2, pp=2, tp=2, ep=2)) == ()


def test_takes_recorded_steps_that_gather_within_a_bound():
    """Without exchanges whole steps are recorded, and free what they gathered."""
    config = CompileConfig(cuda_graphs=True, pipeline_gathered_gib=4.0)
    assert found(config, mesh(world=8, dp_shard=2, pp=2, tp=2)) == ()
