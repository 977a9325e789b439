"""Validation as a whole: all violations together, and each field alone, with the exact text."""

import dataclasses
import math
import re
from pathlib import Path

import pytest
from asked import EP_TOPOLOGY, KNOWN, TOPOLOGY, found, mesh, only, overlap

import gt_config.refusals
from gt_config import (
    AutoParallelConfig,
    CompileConfig,
    ConfigError,
    EpOverlapConfig,
    Topology,
    Violation,
    malformed_options,
    validate,
)
from gt_config._field_types import field_hints
from gt_config.option_paths import leaf_paths
from gt_config.refusals import TABLE
from gt_config.topology import TOPOLOGY_FLAGS
from gt_config.validate import _FLAG, BOUNDS

# ---- the whole ---------------------------------------------------------------------------------


def test_accepts_the_defaults():
    validate(CompileConfig(), TOPOLOGY, known_passes=())


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "none"},
        {"mode": "aot_joint"},
        {"verify_passes": False},
        {"on_shape_change": "recapture"},
        {"capture_layers": "stamped"},
        {"inductor_compilation": "regional"},
        {"memory_policy": "offload"},
        {"fsdp_bucketing": "off"},
        {"prefetch_layers": 0},
        {"cuda_graphs": True},
        {"autoparallel": True, "inductor_compilation": "autoparallel_backend"},
    ],
)
def test_accepts_what_can_be_combined(settings):
    validate(CompileConfig(**settings), TOPOLOGY, known_passes=())


def test_names_the_options_that_are_wrong_by_themselves():
    config = CompileConfig(
        mode="aot_fx_tracer",
        passes=("canonicalise-views",),
        prefetch_layers=-1,
        inductor_compilation="autoparallel_backend",  # wrong with the others only
        ep_overlap=EpOverlapConfig(enabled=True, num_chunks=1),
    )
    assert malformed_options(config, known_passes=KNOWN) == (
        "mode",
        "prefetch_layers",
        "ep_overlap.num_chunks",
        "passes",
    )


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
        "     allowed: None, or a number above 0, at most 1e9\n"
        "     fix: give None, or a number above 0, at most 1e9\n"
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
        "     fix: use --compile.ep_overlap.module_fqn 'layers.*.moe', or --compile.ep_overlap.chunk_dim batch\n"
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


def test_rows_refuse_only_paths_that_exist():
    known = {*leaf_paths(CompileConfig, "config"), *leaf_paths(Topology, "topology")}
    assert {row.path for row in TABLE} <= known


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
                allowed="'save_all', 'selective', 'selective_alternate', 'full_recompute' or 'offload'",
                fix="give 'save_all', 'selective', 'selective_alternate', 'full_recompute' or 'offload'",
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
            (
                {"memory_budget_gib": value},
                "memory_budget_gib",
                "None, or a number above 0, at most 1e9",
            )
            for value in (0, -1.0, 1e300, math.inf, math.nan)
        ),
        *(
            ({"time_limit_seconds": value}, "time_limit_seconds", "a number above 0, at most 1e9")
            for value in (0, -1.0, 1e300, math.inf, math.nan)
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


# ---- under other names -------------------------------------------------------------------------


def their_flag(flag: str) -> str:
    theirs = {"--parallelism.tensor_parallel_degree": "--tp", "world size": "--gpus"}
    return theirs.get(flag, flag.replace("--compile.", "--graph-").replace("_", "-"))


def test_a_trainer_with_other_flags_gets_errors_with_its_names():
    config = CompileConfig(
        mode="none", autoparallel=True, inductor_compilation="autoparallel_backend", passes=("x",)
    )
    with pytest.raises(ConfigError) as error:
        validate(config, mesh(world=4, tp=3), known_passes=KNOWN, name_flag=their_flag)
    assert (
        str(error.value)
        == """\
the configuration has 4 problems:
  1. --gpus is 4
     allowed: dp_replicate 1 * dp_shard 1 * cp 1 * tp 3 * pp 1 = 3
     fix: start 3 processes, or change a degree
  2. --training.seq-len is 8
     allowed: a multiple of 3 (tp 3)
     fix: use 9, or smaller degrees
  3. --graph-passes is 'x'
     allowed: the registered passes: canonicalize-views, one-all-gather-chain, remove-dead-code
     fix: drop it
  4. --graph-inductor-compilation is 'autoparallel_backend'
     allowed: 'autoparallel_backend' only with --graph-mode aot_fx_trace: it orders one graph of forward \
and backward, and --graph-mode none has none
     fix: use --graph-mode aot_fx_trace, or choose another --graph-inductor-compilation"""
    )


def test_every_flag_that_a_rule_names_can_be_given_another_name():
    options = {f"--compile.{path.partition('.')[2]}" for path in leaf_paths(CompileConfig, "c")}
    of_a_batch = {"--training.global_batch_size"}  # of which a topology has the microbatches
    known = options | {*TOPOLOGY_FLAGS.values()} | of_a_batch
    source = Path(gt_config.refusals.__file__).read_text(encoding="utf-8")
    named = {*re.findall(r"--[\w.-]+\w", source)}
    assert "--compile.mode" in named
    assert named <= known | {"--compile", "--compile.ep_overlap"}
    assert all(_FLAG.fullmatch(flag) for flag in known if flag.startswith("--"))
