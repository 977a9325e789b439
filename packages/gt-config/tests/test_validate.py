"""Validation: every rule by itself, the exact text, and all violations together.

Rules about options that have not landed are tested with ``unlanded=()``, as they will stand.
"""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gt_config import (
    AutoParallelConfig,
    CompileConfig,
    ConfigError,
    EpOverlapConfig,
    Topology,
    Violation,
    find_violations,
    validate,
)
from gt_config._field_types import field_hints
from gt_config._field_values import BOUNDS
from gt_config._rules import RULES
from gt_config._subject import leaf_paths

TOPOLOGY = Topology(world=1, batch_size=4, seq_len=8)
EP_TOPOLOGY = Topology(world=4, dp_shard=4, ep=2, batch_size=4, seq_len=8)
KNOWN = ("canonicalize-views", "remove-dead-code", "one-all-gather-chain")


def found(config=None, topology=TOPOLOGY, known_passes=KNOWN):
    return find_violations(
        config or CompileConfig(), topology, known_passes=known_passes, unlanded=()
    )


def only(config=None, topology=TOPOLOGY, known_passes=KNOWN):
    [violation] = found(config, topology, known_passes)
    return violation


NUM_CHUNKS = "--compile.ep_overlap.num_chunks"


def mesh(**changes):
    return dataclasses.replace(TOPOLOGY, **changes)


def overlap(**settings):
    return CompileConfig(ep_overlap=EpOverlapConfig(enabled=True, **settings))


# ---- the whole ---------------------------------------------------------------------------------


def test_accepts_the_defaults():
    validate(CompileConfig(), TOPOLOGY, known_passes=())


def test_lists_every_violation_at_once_with_its_exact_text():
    config = CompileConfig(
        mode="aot_fx_tracer",
        passes=("canonicalise-views",),
        fsdp_bucket_cap_mib=0,
        prefetch_layers=-1,
        ep_overlap=EpOverlapConfig(enabled=True, strategy="eager", chunk_dim="seq"),
    )
    topology = Topology(world=4, dp_shard=2, tp=3, ep=4, batch_size=3, seq_len=130)
    with pytest.raises(ConfigError) as error:
        validate(config, topology, known_passes=KNOWN)
    assert str(error.value) == (
        "the configuration has 9 problems:\n"
        "  1. --compile.mode is 'aot_fx_tracer'\n"
        "     allowed: 'none', 'aot_fx_trace' or 'aot_joint'\n"
        "     fix: did you mean 'aot_fx_trace'?\n"
        "  2. --compile.fsdp_bucket_cap_mib is 0\n"
        "     allowed: None, or a finite number above 0\n"
        "     fix: give None, or a finite number above 0\n"
        "  3. --compile.prefetch_layers is -1\n"
        "     allowed: 0 or more\n"
        "     fix: give 0 or more\n"
        "  4. world size is 4\n"
        "     allowed: dp_replicate 1 * dp_shard 2 * cp 1 * tp 3 * pp 1 = 6\n"
        "     fix: start 6 processes, or change a degree\n"
        "  5. --parallelism.expert_parallel_degree is 4\n"
        "     allowed: a divisor of dp_shard 2 * cp 1 * tp 3 = 6\n"
        "     fix: use one of 1, 2, 3, 6, or change the other degrees\n"
        "  6. --training.seq_len is 130\n"
        "     allowed: a multiple of 3 (tp 3)\n"
        "     fix: use 132, or smaller degrees\n"
        "  7. --compile.passes is 'canonicalise-views'\n"
        "     allowed: the registered passes: canonicalize-views, one-all-gather-chain, "
        "remove-dead-code\n"
        "     fix: did you mean 'canonicalize-views'?\n"
        "  8. --compile.ep_overlap.chunk_dim is 'seq'\n"
        "     allowed: 'seq' only with --compile.ep_overlap.module_fqn layers.*.moe, not layers.*: "
        "attention needs the whole K/V context\n"
        "     fix: use --compile.ep_overlap.module_fqn 'layers.*.moe', or chunk_dim batch\n"
        "  9. --training.seq_len is 130\n"
        "     allowed: a multiple of 6, for 2 equal chunks on each of 3 sequence shards\n"
        "     fix: use 132"
    )
    assert len(error.value.violations) == 9


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (({}, TOPOLOGY, ()), "config is {}, not a gt_config.CompileConfig"),
        ((CompileConfig(), 4, ()), "topology is 4, not a gt_config.Topology"),
        (
            (CompileConfig(), TOPOLOGY, "dce"),
            "known_passes is 'dce', not a collection of names",
        ),
    ],
)
def test_refuses_arguments_of_another_type(arguments, text):
    config, topology, known_passes = arguments
    with pytest.raises(TypeError) as error:
        validate(config, topology, known_passes=known_passes)
    assert str(error.value) == text


def test_rules_read_only_paths_that_exist():
    known = {*leaf_paths(CompileConfig, "config"), *leaf_paths(Topology, "topology")}
    assert {path for rule in RULES for path in rule.reads} <= known


# ---- one field alone ---------------------------------------------------------------------------


def test_every_numeric_field_has_a_bound():
    numeric = {
        f"{prefix}.{name}"
        for prefix, cls in (
            ("config", CompileConfig),
            ("config.ep_overlap", EpOverlapConfig),
            ("config.autoparallel_solver", AutoParallelConfig),
            ("topology", Topology),
        )
        for name, hint in field_hints(cls).items()
        if hint in (int, float, int | None, float | None)
    }
    assert numeric == set(BOUNDS)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(CompileConfig)])
def test_every_configuration_field_refuses_a_value_of_another_type(field):
    wrong = object()
    violation = only(CompileConfig(**{field: wrong}))
    assert violation.flag == f"--compile.{field}"
    assert violation.value is wrong


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Topology)])
def test_every_topology_field_refuses_a_value_of_another_type(field):
    wrong = object()
    assert only(topology=mesh(**{field: wrong})).value is wrong


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            CompileConfig(inductor_compilation="regionally"),
            Violation(
                flag="--compile.inductor_compilation",
                value="regionally",
                allowed="'none', 'regional', 'full' or 'autoparallel_backend'",
                fix="did you mean 'regional'?",
            ),
        ),
        (
            CompileConfig(memory_policy="zzz"),
            Violation(
                flag="--compile.memory_policy",
                value="zzz",
                allowed="'save_all', 'selective', 'full_recompute' or 'offload'",
                fix="give 'save_all', 'selective', 'full_recompute' or 'offload'",
            ),
        ),
        (
            CompileConfig(passes=["remove-dead-code"]),
            Violation(
                flag="--compile.passes",
                value=["remove-dead-code"],
                allowed="a tuple of strings",
                fix="give a tuple of strings",
            ),
        ),
        (
            CompileConfig(ep_overlap=None),
            Violation(
                flag="--compile.ep_overlap",
                value=None,
                allowed="an instance of EpOverlapConfig",
                fix="build it with gt_config.EpOverlapConfig(...)",
            ),
        ),
        (
            overlap(module_fqn="layers.*.mlp"),
            Violation(
                flag="--compile.ep_overlap.module_fqn",
                value="layers.*.mlp",
                allowed="'layers.*' or 'layers.*.moe'",
                fix="did you mean 'layers.*.moe'?",
            ),
        ),
    ],
)
def test_refuses_a_wrong_value_in_words(config, expected):
    assert only(config, EP_TOPOLOGY) == expected


@pytest.mark.parametrize(
    ("solver", "flag", "allowed"),
    [
        *(
            ({"memory_budget_gib": value}, "memory_budget_gib", "None, or a finite number above 0")
            for value in (0, -1.0, math.inf, math.nan)
        ),
        *(
            ({"time_limit_seconds": value}, "time_limit_seconds", "a finite number above 0")
            for value in (0, -1.0, math.inf, math.nan)
        ),
        *(
            ({"relative_gap": value}, "relative_gap", "from 0 up to, but not including, 1")
            for value in (-0.1, 1, math.nan)
        ),
    ],
)
def test_refuses_solver_limits_out_of_bounds(solver, flag, allowed):
    config = CompileConfig(autoparallel=True, autoparallel_solver=AutoParallelConfig(**solver))
    violation = only(config)
    assert violation.flag == f"--compile.autoparallel_solver.{flag}"
    assert violation.allowed == allowed


def test_accepts_solver_limits_within_bounds():
    solver = AutoParallelConfig(memory_budget_gib=64, time_limit_seconds=0.5, relative_gap=0.01)
    assert found(CompileConfig(autoparallel=True, autoparallel_solver=solver)) == ()


@pytest.mark.parametrize("num_chunks", [1, 0, -2])
def test_refuses_fewer_than_two_chunks(num_chunks):
    violation = only(overlap(num_chunks=num_chunks), EP_TOPOLOGY)
    assert violation.flag == "--compile.ep_overlap.num_chunks"
    assert violation.allowed == "2 or more"


# ---- the mesh and the batch --------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize(
    "field",
    [f.name for f in dataclasses.fields(Topology) if f.name != "sequence_parallel"],
)
def test_refuses_degrees_and_extents_below_one(field, value):
    # One violation: no rule is run on a degree that is wrong by itself.
    violation = only(topology=mesh(**{field: value}))
    assert (violation.value, violation.allowed) == (value, "1 or more")


def test_suggests_the_shard_degree_that_would_fill_the_world():
    assert only(topology=mesh(world=8, dp_shard=2, tp=2)) == Violation(
        flag="world size",
        value=8,
        allowed="dp_replicate 1 * dp_shard 2 * cp 1 * tp 2 * pp 1 = 4",
        fix="start 4 processes, or change a degree (for example "
        "--parallelism.data_parallel_shard_degree 4)",
    )


degrees = st.integers(1, 6)


@given(dp_replicate=degrees, dp_shard=degrees, cp=degrees, tp=degrees, pp=degrees, ep=degrees)
def test_accepts_exactly_the_meshes_that_fit(dp_replicate, dp_shard, cp, tp, pp, ep):
    world = dp_replicate * dp_shard * cp * tp * pp
    topology = Topology(
        world=world,
        dp_replicate=dp_replicate,
        dp_shard=dp_shard,
        cp=cp,
        tp=tp,
        pp=pp,
        ep=ep,
        batch_size=1,
        seq_len=2 * cp * tp,
    )
    fits = (dp_shard * cp * tp) % ep == 0 and (pp == 1 or tp == 1)
    assert (found(topology=topology) == ()) == fits
    too_large = dataclasses.replace(topology, world=world + 1)
    assert "world size" in {violation.flag for violation in found(topology=too_large)}


@pytest.mark.parametrize(
    ("changes", "allowed", "fix"),
    [
        (
            {"world": 4, "tp": 4, "seq_len": 10},
            "a multiple of 4 (tp 4)",
            "use 12, or smaller degrees",
        ),
        (
            {"world": 2, "cp": 2, "seq_len": 6},
            "a multiple of 4 (2 * cp 2)",
            "use 8, or smaller degrees",
        ),
        (
            {"world": 6, "cp": 2, "tp": 3, "seq_len": 20},
            "a multiple of 12 (tp 3 * 2 * cp 2)",
            "use 24, or smaller degrees",
        ),
    ],
)
def test_refuses_a_sequence_that_does_not_divide(changes, allowed, fix):
    violation = only(topology=mesh(**changes))
    assert violation.flag == "--training.seq_len"
    assert (violation.allowed, violation.fix) == (allowed, fix)


def test_without_sequence_parallelism_the_sequence_need_not_divide_over_tp():
    topology = mesh(world=4, tp=4, seq_len=10, sequence_parallel=False)
    assert found(topology=topology) == ()


# ---- options that need another, or would silently do nothing -----------------------------------


def test_autoparallel_backend_needs_autoparallel():
    assert only(CompileConfig(inductor_compilation="autoparallel_backend")) == Violation(
        flag="--compile.inductor_compilation",
        value="autoparallel_backend",
        allowed="'autoparallel_backend' only with --compile.autoparallel",
        fix="add --compile.autoparallel, or choose another inductor_compilation",
    )


def test_autoparallel_backend_needs_a_trace():
    config = CompileConfig(
        inductor_compilation="autoparallel_backend", autoparallel=True, mode="aot_joint"
    )
    assert only(config) == Violation(
        flag="--compile.inductor_compilation",
        value="autoparallel_backend",
        allowed="'autoparallel_backend' only with --compile.mode aot_fx_trace, not aot_joint",
        fix="use --compile.mode aot_fx_trace, or choose another inductor_compilation",
    )


AUTOPARALLEL = CompileConfig(autoparallel=True)


def test_autoparallel_plans_no_pipelines():
    topology = mesh(world=2, pp=2)
    assert only(AUTOPARALLEL, topology) == Violation(
        flag="--parallelism.pipeline_parallel_degree",
        value=2,
        allowed="1 with --compile.autoparallel, which plans whole models",
        fix="drop the option, or drop --compile.autoparallel",
    )


def test_autoparallel_plans_tensor_or_expert_parallel_axes():
    assert only(AUTOPARALLEL, mesh(world=4, dp_shard=2, tp=2, ep=2)) == Violation(
        flag="--parallelism.expert_parallel_degree",
        value=2,
        allowed="1 with --compile.autoparallel and --parallelism.tensor_parallel_degree 2: a plan "
        "is for one mesh, and these two axes overlap",
        fix="give the ranks to one of the two axes",
    )
    assert found(AUTOPARALLEL, mesh(world=4, dp_shard=2, tp=2)) == ()
    assert found(AUTOPARALLEL, EP_TOPOLOGY) == ()


def test_autoparallel_needs_no_joint_graph():
    assert only(CompileConfig(autoparallel=True, mode="aot_joint")) == Violation(
        flag="--compile.mode",
        value="aot_joint",
        allowed="'aot_fx_trace' or 'none' with --compile.autoparallel: the planned forward and "
        "backward are one graph already",
        fix="use --compile.mode aot_fx_trace",
    )
    assert found(CompileConfig(autoparallel=True, mode="none")) == ()


def test_autoparallel_refuses_ep_overlap():
    config = dataclasses.replace(overlap(), autoparallel=True)
    assert only(config, EP_TOPOLOGY) == Violation(
        flag="--compile.ep_overlap.enabled",
        value=True,
        allowed="False with --compile.autoparallel: chunks are cut along one dim of a batch, and a "
        "plan may cut it along another",
        fix="turn EP overlap off, or drop --compile.autoparallel",
    )


@pytest.mark.parametrize(
    ("settings", "default"),
    [
        ({"memory_policy": "selective"}, "'save_all'"),
        ({"fsdp_bucketing": "off"}, "'transformer_block'"),
        ({"prefetch_layers": 2}, "1"),
        ({"cuda_graphs": True}, "False"),
    ],
)
def test_autoparallel_backend_decides_what_the_native_recipe_is_asked_for(settings, default):
    config = CompileConfig(
        autoparallel=True, inductor_compilation="autoparallel_backend", **settings
    )
    ((name, value),) = settings.items()
    assert only(config) == Violation(
        flag=f"--compile.{name}",
        value=value,
        allowed=f"its default {default}, since --compile.inductor_compilation "
        "autoparallel_backend decides that itself and it would do nothing",
        fix="drop the option, or use another inductor_compilation",
    )


def test_accepts_the_autoparallel_backend_with_both():
    config = CompileConfig(inductor_compilation="autoparallel_backend", autoparallel=True)
    assert found(config) == ()


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
        ({"capture_layers": "stamped"}, "'full'"),
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


def test_solver_limits_need_autoparallel():
    config = CompileConfig(autoparallel_solver=AutoParallelConfig(memory_budget_gib=64.0))
    assert only(config) == Violation(
        flag="--compile.autoparallel_solver.memory_budget_gib",
        value=64.0,
        allowed="its default None, since autoparallel is off and it would do nothing",
        fix="drop the option, or use --compile.autoparallel",
    )


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


# ---- pass names --------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["passes", "disable_passes"])
def test_refuses_an_unknown_pass_and_suggests_near_ones(field):
    assert only(CompileConfig(**{field: ("remove-dead-codes",)})) == Violation(
        flag=f"--compile.{field}",
        value="remove-dead-codes",
        allowed="the registered passes: canonicalize-views, one-all-gather-chain, remove-dead-code",
        fix="did you mean 'remove-dead-code'?",
    )


def test_refuses_an_unknown_pass_that_resembles_none():
    assert only(CompileConfig(passes=("zzz",))).fix == "drop it"


def test_says_so_when_no_pass_is_registered():
    violation = only(CompileConfig(passes=("zzz",)), known_passes=())
    assert violation.allowed == "no pass is registered"


def test_refuses_a_pass_named_twice():
    config = CompileConfig(passes=("remove-dead-code", "remove-dead-code"))
    assert only(config) == Violation(
        flag="--compile.passes",
        value="remove-dead-code",
        allowed="each pass once",
        fix="name it once; it is named 2 times",
    )


def test_refuses_a_pass_both_asked_for_and_disabled():
    config = CompileConfig(passes=("remove-dead-code",), disable_passes=("remove-dead-code",))
    assert only(config) == Violation(
        flag="--compile.disable_passes",
        value="remove-dead-code",
        allowed="passes that --compile.passes does not name",
        fix="drop it from one of the two",
    )


def test_accepts_known_passes():
    assert found(CompileConfig(passes=KNOWN[:1], disable_passes=KNOWN[1:])) == ()


# ---- expert-parallel overlap -------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"module_fqn": "layers.*.moe"},
        {"module_fqn": "layers.*.moe", "chunk_dim": "seq", "num_chunks": 4},
        {"strategy": "eager"},
        {"disable_early_grad_accumulation": True},
    ],
)
def test_accepts_ep_overlap_choices_that_fit(settings):
    assert found(overlap(**settings), EP_TOPOLOGY) == ()


def test_ep_overlap_needs_expert_parallelism():
    assert only(overlap()) == Violation(
        flag="--compile.ep_overlap.enabled",
        value=True,
        allowed="True only with --parallelism.expert_parallel_degree above 1; it is 1",
        fix="raise --parallelism.expert_parallel_degree, or turn EP overlap off",
    )


@pytest.mark.parametrize("mode", ["none", "aot_joint"])
def test_ep_overlap_needs_a_trace(mode):
    config = dataclasses.replace(overlap(), mode=mode)
    assert only(config, EP_TOPOLOGY) == Violation(
        flag="--compile.ep_overlap.enabled",
        value=True,
        allowed=f"True only with --compile.mode aot_fx_trace, not {mode}",
        fix="use --compile.mode aot_fx_trace, or turn EP overlap off",
    )


def test_sequence_chunking_needs_moe_roots():
    assert only(overlap(chunk_dim="seq"), EP_TOPOLOGY) == Violation(
        flag="--compile.ep_overlap.chunk_dim",
        value="seq",
        allowed="'seq' only with --compile.ep_overlap.module_fqn layers.*.moe, not layers.*: "
        "attention needs the whole K/V context",
        fix="use --compile.ep_overlap.module_fqn 'layers.*.moe', or chunk_dim batch",
    )


def test_the_eager_strategy_takes_two_chunks_only():
    assert only(overlap(strategy="eager", num_chunks=4), EP_TOPOLOGY) == Violation(
        flag="--compile.ep_overlap.num_chunks",
        value=4,
        allowed="2, with --compile.ep_overlap.strategy eager",
        fix="use 2 chunks, or --compile.ep_overlap.strategy graph",
    )


def test_the_eager_strategy_never_accumulates_early():
    config = overlap(strategy="eager", disable_early_grad_accumulation=True)
    assert only(config, EP_TOPOLOGY) == Violation(
        flag="--compile.ep_overlap.disable_early_grad_accumulation",
        value=True,
        allowed="its default False, since the eager strategy never accumulates early",
        fix="drop the option, or use --compile.ep_overlap.strategy graph",
    )


@pytest.mark.parametrize("batch_size", [1, 3])
def test_refuses_a_batch_that_does_not_split_into_equal_chunks(batch_size):
    topology = dataclasses.replace(EP_TOPOLOGY, batch_size=batch_size)
    assert only(overlap(), topology) == Violation(
        flag="--training.local_batch_size",
        value=batch_size,
        allowed="a multiple of 2, for 2 equal chunks",
        fix=f"use {batch_size + 1}" + ("" if batch_size == 1 else f", or {NUM_CHUNKS} 3"),
    )


def test_refuses_more_chunks_than_samples_and_offers_the_nearest_number_that_fits():
    topology = dataclasses.replace(EP_TOPOLOGY, batch_size=6)
    assert only(overlap(num_chunks=8), topology).fix == f"use 8, or {NUM_CHUNKS} 6"
    assert only(overlap(num_chunks=4), topology).fix == f"use 8, or {NUM_CHUNKS} 3"


def test_offers_no_other_number_of_chunks_where_there_is_none():
    topology = dataclasses.replace(EP_TOPOLOGY, batch_size=3)
    assert only(overlap(strategy="eager"), topology).fix == "use 4"


def test_refuses_a_sequence_that_does_not_split_into_equal_chunks_on_each_shard():
    topology = Topology(world=4, tp=4, ep=4, batch_size=1, seq_len=12)
    config = overlap(chunk_dim="seq", module_fqn="layers.*.moe", strategy="eager")
    assert only(config, topology) == Violation(
        flag="--training.seq_len",
        value=12,
        allowed="a multiple of 8, for 2 equal chunks on each of 4 sequence shards",
        fix="use 16",
    )
    whole = dataclasses.replace(topology, sequence_parallel=False)
    assert found(config, whole) == ()


@pytest.mark.parametrize(
    ("degree", "flag"),
    [("pp", "pipeline_parallel_degree"), ("cp", "context_parallel_degree")],
)
def test_ep_overlap_is_refused_with_pipelines_and_with_context_parallelism(degree, flag):
    topology = dataclasses.replace(EP_TOPOLOGY, world=2 * EP_TOPOLOGY.world, **{degree: 2})
    (violation,) = (
        each for each in found(overlap(), topology) if each.flag == "--compile.ep_overlap.enabled"
    )
    assert violation == Violation(
        flag="--compile.ep_overlap.enabled",
        value=True,
        allowed=f"True only with --parallelism.{flag} 1; it is 2: "
        "the two have not been tested together",
        fix=f"use --parallelism.{flag} 1, or turn EP overlap off",
    )


def test_chunks_on_the_graph_are_refused_with_tensor_parallelism():
    topology = dataclasses.replace(EP_TOPOLOGY, world=2 * EP_TOPOLOGY.world, tp=2)
    assert only(overlap(), topology) == Violation(
        flag="--compile.ep_overlap.strategy",
        value="graph",
        allowed="'eager' with --parallelism.tensor_parallel_degree 2: "
        "the graph strategy has no rules for the collectives of tensor parallelism yet",
        fix="use eager, or --parallelism.tensor_parallel_degree 1",
    )
    assert found(overlap(strategy="eager"), topology) == ()


def test_ep_overlap_is_refused_with_full_inductor_compilation():
    config = dataclasses.replace(overlap(), inductor_compilation="full")
    assert only(config, EP_TOPOLOGY) == Violation(
        flag="--compile.inductor_compilation",
        value="full",
        allowed="'none' or 'regional' with EP overlap: in one compiled program "
        "nobody has tested that one chunk still hides another",
        fix="use regional, or turn EP overlap off",
    )
    assert found(dataclasses.replace(config, inductor_compilation="regional"), EP_TOPOLOGY) == ()


def test_ep_overlap_is_refused_with_what_only_a_gpu_can_prove():
    config = dataclasses.replace(
        overlap(strategy="eager"), cuda_graphs=True, async_tensor_parallel=True
    )
    topology = dataclasses.replace(EP_TOPOLOGY, world=2 * EP_TOPOLOGY.world, tp=2)
    assert found(config, topology) == tuple(
        Violation(
            flag=f"--compile.{name}",
            value=True,
            allowed="False with EP overlap: no GPU has run the two together yet",
            fix="leave the flag out, or turn EP overlap off",
        )
        for name in ("cuda_graphs", "async_tensor_parallel")
    )


@pytest.mark.parametrize(
    ("name", "value", "default"),
    [
        ("num_chunks", 4, "2"),
        ("chunk_dim", "seq", "'batch'"),
        ("strategy", "eager", "'graph'"),
        ("module_fqn", "layers.*.moe", "'layers.*'"),
        ("disable_early_grad_accumulation", True, "False"),
    ],
)
def test_ep_overlap_settings_need_it_enabled(name, value, default):
    config = CompileConfig(ep_overlap=EpOverlapConfig(**{name: value}))
    assert only(config, EP_TOPOLOGY) == Violation(
        flag=f"--compile.ep_overlap.{name}",
        value=value,
        allowed=f"its default {default}, since EP overlap is off and it would do nothing",
        fix="drop the option, or use --compile.ep_overlap.enabled",
    )


# ---- pipelines ---------------------------------------------------------------------------------


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
            {"memory_policy": "offload"},
            "--compile.memory_policy",
            "offload",
            (
                "'save_all' or 'selective' or 'full_recompute' with "
                "--parallelism.pipeline_parallel_degree 2: several microbatches are under way, and "
                "copies to the host are planned for one"
            ),
            "use full_recompute, or --parallelism.pipeline_parallel_degree 1",
        ),
        (
            {"capture_layers": "compared"},
            "--compile.capture_layers",
            "compared",
            (
                "'full' with --parallelism.pipeline_parallel_degree 2: stages are short, and "
                "captured in full"
            ),
            "use full, or --parallelism.pipeline_parallel_degree 1",
        ),
        (
            {"on_shape_change": "recapture"},
            "--compile.on_shape_change",
            "recapture",
            (
                "'error' with --parallelism.pipeline_parallel_degree 2: every microbatch has the "
                "shapes of the first"
            ),
            "use error, or --parallelism.pipeline_parallel_degree 1",
        ),
        (
            {"fsdp_second_group": True},
            "--compile.fsdp_second_group",
            True,
            (
                "False with --parallelism.pipeline_parallel_degree 2: gradients are reduced once, "
                "after all microbatches"
            ),
            "use False, or --parallelism.pipeline_parallel_degree 1",
        ),
        (
            {"fsdp_into_dense_regions": True},
            "--compile.fsdp_into_dense_regions",
            True,
            (
                "False with --parallelism.pipeline_parallel_degree 2: parameters are gathered between "
                "the actions"
            ),
            "use False, or --parallelism.pipeline_parallel_degree 1",
        ),
        (
            {"cuda_graphs": True},
            "--compile.cuda_graphs",
            True,
            (
                "False with --parallelism.pipeline_parallel_degree 2: no GPU has run the two together "
                "yet"
            ),
            "use False, or --parallelism.pipeline_parallel_degree 1",
        ),
    ],
)
def test_refuses_with_a_pipeline_what_needs_a_whole_step(settings, flag, value, allowed, fix):
    topology = mesh(world=8, dp_replicate=2, dp_shard=2, pp=2, tp=1, ep=2)
    violations = {v.flag: v for v in found(CompileConfig(**settings), topology)}
    assert violations[flag] == Violation(flag=flag, value=value, allowed=allowed, fix=fix)


def test_a_pipeline_has_no_tensor_parallelism_yet():
    assert only(topology=mesh(world=8, dp_shard=2, pp=2, tp=2)) == Violation(
        flag="--parallelism.tensor_parallel_degree",
        value=2,
        allowed="1 with --parallelism.pipeline_parallel_degree 2: activations of tensor "
        "parallelism do not travel between stages yet",
        fix="use 1, or --parallelism.pipeline_parallel_degree 1",
    )


def test_joint_graphs_are_not_stamped():
    assert only(CompileConfig(mode="aot_joint", capture_layers="stamped")) == Violation(
        flag="--compile.capture_layers",
        value="stamped",
        allowed="its default 'full', since --compile.mode aot_joint exports every layer "
        "and it would do nothing",
        fix="drop the option, or use --compile.mode aot_fx_trace",
    )
