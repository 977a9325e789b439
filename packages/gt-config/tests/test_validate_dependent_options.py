"""Options that would do nothing for want of something in the mesh, and names, with the exact text."""

import dataclasses

import pytest
from asked import EP_TOPOLOGY, found, mesh, only

from gt_config import CompileConfig, Violation


def test_a_memory_policy_needs_a_whole_step():
    assert only(CompileConfig(mode="aot_joint", memory_policy="selective")) == Violation(
        flag="--compile.memory_policy",
        value="selective",
        allowed="its default 'save_all', since in --compile.mode aot_joint "
        "--compile.joint_partitioner says what is kept and it would do nothing",
        fix="drop the option, or use --compile.mode aot_fx_trace",
    )


HOST_COPIES = (
    "copies to the host that a compiler has taken into a program go to new memory in every step, "
    "and a CUDA graph replays addresses"
)


def test_copies_to_the_host_cannot_be_recorded_in_a_compiled_step():
    config = CompileConfig(memory_policy="offload", cuda_graphs=True, inductor_compilation="full")
    assert only(config) == Violation(
        flag="--compile.inductor_compilation",
        value="full",
        allowed=f"'none' or 'regional' with offload and CUDA graphs: {HOST_COPIES}",
        fix="use regional, another --compile.memory_policy, or leave out --compile.cuda_graphs",
    )
    for changed in (
        {"memory_policy": "selective"},
        {"cuda_graphs": False},
        {"inductor_compilation": "none"},
        {"inductor_compilation": "regional"},
    ):
        assert found(dataclasses.replace(config, **changed)) == ()


def test_copies_to_the_host_cannot_be_recorded_in_compiled_modules():
    config = CompileConfig(
        memory_policy="offload",
        cuda_graphs=True,
        inductor_compilation="regional",
        regional_modules=("layers.*.feed_forward",),
    )
    assert only(config) == Violation(
        flag="--compile.regional_modules",
        value=("layers.*.feed_forward",),
        allowed=f"no modules with offload and CUDA graphs: {HOST_COPIES}",
        fix="drop the option, use another --compile.memory_policy, or leave out "
        "--compile.cuda_graphs",
    )
    assert found(dataclasses.replace(config, cuda_graphs=False)) == ()


def test_regional_modules_are_patterns():
    config = CompileConfig(
        inductor_compilation="regional", regional_modules=("layers.*.moe", "layers.[0-3]", "")
    )
    assert [(each.flag, each.value, each.allowed) for each in found(config)] == [
        (
            "--compile.regional_modules",
            text,
            "a dotted module name with * for one component, as 'layers.*.feed_forward'",
        )
        for text in ("layers.[0-3]", "")
    ]


@pytest.mark.parametrize("name", ["fsdp_second_group", "fsdp_into_dense_regions"])
def test_fsdp_schedules_need_sharded_parameters(name):
    config = CompileConfig(**{name: True})
    refused = Violation(
        flag=f"--compile.{name}",
        value=True,
        allowed="its default False, since no parameter is sharded over data-parallel ranks "
        "and it would do nothing",
        fix="drop the option, or use a dp_shard degree above 1",
    )
    assert only(config) == refused
    assert only(config, mesh(world=2, dp_replicate=2)) == refused
    assert found(config, EP_TOPOLOGY) == ()


def test_so_do_gathers_of_quantized_parameters():
    config = CompileConfig(fsdp_quantized_gathers=False)
    assert only(config) == Violation(
        flag="--compile.fsdp_quantized_gathers",
        value=False,
        allowed="its default True, since no parameter is sharded over data-parallel ranks "
        "and it would do nothing",
        fix="drop the option, or use a dp_shard degree above 1",
    )
    assert found(config, mesh(world=2, dp_shard=2)) == ()


def test_dense_regions_need_expert_parallelism():
    config = CompileConfig(fsdp_into_dense_regions=True)
    assert only(config, mesh(world=2, dp_shard=2)) == Violation(
        flag="--compile.fsdp_into_dense_regions",
        value=True,
        allowed="its default False, since no tokens are exchanged between experts "
        "and it would do nothing",
        fix="drop the option, or use an expert-parallel degree above 1",
    )
    assert found(CompileConfig(fsdp_second_group=True), mesh(world=2, dp_shard=2)) == ()


def test_a_ring_needs_ranks_that_share_a_sequence():
    ring = CompileConfig(context_parallel="ring")
    assert only(ring) == Violation(
        flag="--compile.context_parallel",
        value="ring",
        allowed="its default 'gather', since no ranks share a sequence and it would do nothing",
        fix="drop the option, or use a context-parallel degree above 1",
    )
    assert found(ring, mesh(world=2, cp=2)) == ()


def test_async_tensor_parallelism_needs_tensor_parallelism():
    config = CompileConfig(async_tensor_parallel=True)
    assert only(config) == Violation(
        flag="--compile.async_tensor_parallel",
        value=True,
        allowed="its default False, since there is no tensor parallelism and it would do nothing",
        fix="drop the option, or use a tensor-parallel degree above 1",
    )
    assert found(config, mesh(world=2, tp=2)) == ()


def test_saved_ops_are_selectors():
    config = CompileConfig(
        memory_policy="full_recompute",
        full_recompute_saved_ops=("layers.*::aten.mm", "mm", "layers"),
    )
    first, second = found(config)
    assert (first.value, second.value) == ("mm", "layers")
    assert first == Violation(
        flag="--compile.full_recompute_saved_ops",
        value="mm",
        allowed="MODULE_PATTERN::OP, as 'layers.*.attention::aten.mm': dotted module name with * "
        "for one component, then namespace.name or namespace.name.overload",
        fix="write it in that form",
    )
