"""Options that need another one, or would silently do nothing, with the exact text."""

import dataclasses

import pytest
from asked import EP_TOPOLOGY, found, mesh, only

from gt_config import CompileConfig, Violation


@pytest.mark.parametrize(
    ("settings", "default"),
    [
        ({"inductor_compilation": "full"}, "'none'"),
        ({"memory_policy": "selective"}, "'save_all'"),
        ({"passes": ("remove-dead-code",)}, "()"),
        ({"disable_passes": ("remove-dead-code",)}, "()"),
        ({"verify_passes": False}, "True"),
        ({"debug_graph_passes": True}, "False"),
        ({"fsdp_bucketing": "off"}, "'transformer_block'"),
        ({"fsdp_bucket_cap_mib": 5}, "None"),
        ({"prefetch_layers": 2}, "1"),
        ({"numerics_changing": True}, "False"),
        ({"cuda_graphs": True}, "False"),
        ({"capture_layers": "stamped"}, "'auto'"),
        ({"on_shape_change": "recapture"}, "'error'"),
    ],
)
def test_eager_mode_refuses_graph_options_and_a_trace_takes_them(settings, default):
    [(name, value)] = settings.items()
    assert found(CompileConfig(**settings)) == ()
    assert only(CompileConfig(mode="none", **settings)) == Violation(
        flag=f"--compile.{name}",
        value=value,
        allowed=f"its default {default}, since --compile.mode none captures no graph and it would "
        "do nothing",
        fix="drop the option, or use another mode",
    )


def test_eager_mode_measures_against_the_defaults_of_a_subclass():
    @dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
    class Bucketing(CompileConfig):
        fsdp_bucketing: str = "transformer_block"

    assert found(Bucketing(mode="none")) == ()
    assert only(Bucketing(mode="none", fsdp_bucketing="off")).flag == "--compile.fsdp_bucketing"


def test_a_bucket_cap_needs_bucketing():
    assert only(CompileConfig(fsdp_bucketing="off", fsdp_bucket_cap_mib=25)) == Violation(
        flag="--compile.fsdp_bucket_cap_mib",
        value=25,
        allowed="its default None, since FSDP bucketing is off and it would do nothing",
        fix="drop the option, or use --compile.fsdp_bucketing transformer_block",
    )
    with_bucketing = CompileConfig(fsdp_bucket_cap_mib=25)
    assert found(with_bucketing) == ()


@pytest.mark.parametrize("mode", ["none", "aot_fx_trace"])
def test_a_joint_partitioner_needs_a_joint_graph(mode):
    assert only(CompileConfig(mode=mode, joint_partitioner="save_all")) == Violation(
        flag="--compile.joint_partitioner",
        value="save_all",
        allowed=f"its default 'min_cut', since --compile.mode is {mode} and it would do nothing",
        fix="drop the option, or use --compile.mode aot_joint",
    )
    assert found(CompileConfig(mode="aot_joint", joint_partitioner="save_all")) == ()


def test_a_memory_policy_needs_a_whole_step():
    assert only(CompileConfig(mode="aot_joint", memory_policy="selective")) == Violation(
        flag="--compile.memory_policy",
        value="selective",
        allowed="its default 'save_all', since in --compile.mode aot_joint "
        "--compile.joint_partitioner says what is kept and it would do nothing",
        fix="drop the option, or use --compile.mode aot_fx_trace",
    )


def test_saved_ops_need_full_recompute():
    selectors = ("layers.*::aten.mm",)
    assert only(
        CompileConfig(memory_policy="selective", full_recompute_saved_ops=selectors)
    ) == Violation(
        flag="--compile.full_recompute_saved_ops",
        value=selectors,
        allowed="its default (), since memory_policy is selective and it would do nothing",
        fix="drop the option, or use --compile.memory_policy full_recompute",
    )
    recompute = CompileConfig(memory_policy="full_recompute", full_recompute_saved_ops=selectors)
    assert found(recompute) == ()


@pytest.mark.parametrize(
    ("settings", "default"),
    [
        ({"offload_host_gib": 4.0}, "None"),
        ({"offload_prefetch_layers": 2}, "1"),
        ({"offload_defer_layers": 0}, "1"),
    ],
)
def test_offload_settings_need_the_offload_policy(settings, default):
    [(name, value)] = settings.items()
    assert only(CompileConfig(memory_policy="selective", **settings)) == Violation(
        flag=f"--compile.{name}",
        value=value,
        allowed=f"its default {default}, since memory_policy is selective and it would do nothing",
        fix="drop the option, or use --compile.memory_policy offload",
    )
    assert found(CompileConfig(memory_policy="offload", **settings)) == ()


def test_regional_modules_need_regional_compilation():
    modules = ("layers.*.feed_forward",)
    assert only(CompileConfig(regional_modules=modules)) == Violation(
        flag="--compile.regional_modules",
        value=modules,
        allowed="its default (), since inductor_compilation is none and it would do nothing",
        fix="drop the option, or use --compile.inductor_compilation regional",
    )
    regional = CompileConfig(inductor_compilation="regional", regional_modules=modules)
    assert found(regional) == ()


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
