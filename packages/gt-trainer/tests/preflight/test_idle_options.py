"""Every option does something in every composition, or is refused there by name."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from expecttest import assert_expected_inline
from torch._subclasses.fake_tensor import FakeTensorMode

from gt_config import (
    AutoParallelConfig,
    CompileConfig,
    ConfigError,
    EpOverlapConfig,
    Topology,
    Violation,
    find_violations,
)
from gt_config.compile_config import FsdpBucketing
from gt_config.graph_kinds import EVERY_GRAPH, PIPELINE_ACTIONS, GraphKind
from gt_config.option_paths import default_option, option_choices, option_paths, with_option
from gt_passes import PassContext, known_passes
from gt_trainer import trainer
from gt_trainer.artifacts import run_artifacts
from gt_trainer.decoder import eager_chunks
from gt_trainer.models import llama3
from gt_trainer.pipelines import split_model
from gt_trainer.placement import kept_plan, memory_budget, parallelize, place_decoder
from gt_trainer.preflight import pass_options, quantization_violations
from gt_trainer.preflight.pass_options import RunOptions, pass_violations
from gt_trainer.preflight.plain_settings import idle_violations
from gt_trainer.preflight.preflight import check_configuration, configuration_violations
from gt_trainer.steps import new_training_step, program, recipe
from gt_trainer.steps.recipe import Recipe

RESHARD = "--parallelism.fsdp_reshard_after_forward"
MESH = Topology(world=4, dp_shard=4, ep=2, batch_size=8, seq_len=8)
ACCUMULATED = replace(MESH, gradient_accumulation_steps=3)
STAGES = Topology(world=4, dp_shard=2, ep=2, pp=2, batch_size=8, seq_len=8)


@dataclass(frozen=True, kw_only=True)
class Composition:
    """A way to run, and the graphs that its steps capture."""

    settings: dict[str, Any]
    topology: Topology
    graphs: tuple[GraphKind, ...]


COMPOSITIONS = {
    "eager": Composition(settings={"mode": "none"}, topology=MESH, graphs=()),
    "plain": Composition(settings={}, topology=MESH, graphs=("STEP",)),
    "reduce once": Composition(
        settings={"accumulation": "reduce_once"}, topology=ACCUMULATED, graphs=("MICROBATCH",)
    ),
    "pipeline": Composition(settings={}, topology=STAGES, graphs=("STAGE", *PIPELINE_ACTIONS)),
    "aot_joint": Composition(
        settings={"mode": "aot_joint"}, topology=MESH, graphs=("JOINT_FORWARD", "JOINT_BACKWARD")
    ),
    "autoparallel": Composition(settings={"autoparallel": True}, topology=MESH, graphs=("STEP",)),
    "autoparallel_backend": Composition(
        settings={"autoparallel": True, "inductor_compilation": "autoparallel_backend"},
        topology=MESH,
        graphs=("STEP",),
    ),
}

SAMPLES: dict[str, tuple[object, ...]] = {
    "regional_modules": (("layers.*.feed_forward",),),
    "require_float8": (("layers.*.feed_forward",),),
    "autoparallel_solver.memory_budget_gib": (8.0,),
    "autoparallel_solver.time_limit_seconds": (60.0,),
    "autoparallel_solver.relative_gap": (0.01,),
    "autoparallel_solver.simulate_rivals": (False,),
    "autoparallel_solver.plan": ("placement.json",),
    "full_recompute_saved_ops": (("layers.*::aten.mm",),),
    "offload_host_gib": (4.0,),
    "offload_prefetch_layers": (2,),
    "offload_defer_layers": (2,),
    "passes": (("remove-dead-code",), ("prefetch-all-gathers",), ("offload-tagged",)),
    "disable_passes": (("delay-waits",), ("prefetch-all-gathers",), ("share-all-gathers",)),
    "fsdp_bucket_cap_mib": (25,),
    "prefetch_layers": (0, 3),
    "pipeline_gathered_gib": (4.0,),
    "pipeline_deferred_weights": (2,),
    "ep_overlap.num_chunks": (4,),
    "artifacts": ("graphs",),
    "artifacts_max_gib": (1.0,),
}
"""Values of the options whose values cannot be listed."""

COMPANIONS: dict[str, dict[str, Any]] = {
    "regional_modules": {"inductor_compilation": "regional"},
    "full_recompute_saved_ops": {"memory_policy": "full_recompute"},
    "offload_host_gib": {"memory_policy": "offload"},
    "offload_prefetch_layers": {"memory_policy": "offload"},
    "offload_defer_layers": {"memory_policy": "offload"},
    "artifacts_max_gib": {"artifacts": "graphs"},
    **{
        path: {"ep_overlap.enabled": True, "ep_overlap.module_fqn": "layers.*.moe"}
        for path in option_paths(CompileConfig)
        if path.startswith("ep_overlap.")
    },
}
"""Options without which another does nothing; each is walked with them, too."""

READERS = {
    "mode": new_training_step,
    "autoparallel": trainer,
    "bitwise": pass_options,
    "require_float8": quantization_violations,
    "context_parallel": parallelize,
    "verify_passes": recipe,
    "debug_graph_passes": recipe,
    "on_shape_change": new_training_step,
    "pipeline_gathered_gib": split_model,
    "pipeline_deferred_weights": split_model,
    "joint_partitioner": program,
    "capture_layers": program,
    "artifacts": run_artifacts,
    "artifacts_max_gib": run_artifacts,
    "ep_overlap.num_chunks": eager_chunks,
    "ep_overlap.chunk_dim": eager_chunks,
    "ep_overlap.module_fqn": eager_chunks,
    "autoparallel_solver.memory_budget_gib": memory_budget,
    "autoparallel_solver.time_limit_seconds": place_decoder,
    "autoparallel_solver.relative_gap": place_decoder,
    "autoparallel_solver.simulate_rivals": kept_plan,
    "autoparallel_solver.experts": place_decoder,
    "autoparallel_solver.plan": place_decoder,
}
"""Where the options are read that something else than passes reads."""

Check = Callable[[CompileConfig, Topology, Any], Iterator[Violation]]


def refusals(options: CompileConfig, topology: Topology, reshard: Any) -> Iterator[Violation]:
    """What is refused of these options before a run."""
    yield from find_violations(options, topology, known_passes=known_passes())
    yield from idle(options, topology, reshard)


def idle(
    options: CompileConfig,
    topology: Topology,
    reshard: Any = "default",
    asked: Collection[str] = (),
) -> Iterator[Violation]:
    """Yield the options that would do nothing."""
    passes = known_passes()
    yield from idle_violations(options, topology, reshard, passes=passes, asked=asked)
    run = RunOptions(options=options, topology=topology, reshard_after_forward=reshard)
    yield from pass_violations(run, asked=asked)


def read_elsewhere(run: RunOptions) -> Iterator[str]:
    """Yield the options that something else than passes reads, which no recipe shows."""
    options, graphs = run.options, run.graphs
    yield from ("mode", "autoparallel", "bitwise", "require_float8")
    if run.topology.cp > 1:
        yield "context_parallel"
    if options.autoparallel:
        yield from (p for p in option_paths(type(options)) if p.startswith("autoparallel_solver."))
    if graphs:
        yield from ("verify_passes", "debug_graph_passes", "on_shape_change", "artifacts")
        if options.artifacts is not None:
            yield "artifacts_max_gib"
    if "STEP" in graphs or "MICROBATCH" in graphs or "STAGE" in graphs:
        yield "capture_layers"
        if options.ep_overlap.enabled and options.ep_overlap.strategy == "eager":
            yield from (f"ep_overlap.{name}" for name in ("num_chunks", "chunk_dim", "module_fqn"))
    if "STAGE" in graphs:
        yield from ("pipeline_gathered_gib", "pipeline_deferred_weights")
    if "JOINT_FORWARD" in graphs:
        yield "joint_partitioner"


def without_the_check(
    options: CompileConfig, topology: Topology, reshard: Any
) -> Iterator[Violation]:
    """The same, if nobody looked for options that do nothing."""
    return iter(find_violations(options, topology, known_passes=known_passes()))


def values_of(config_class: type[CompileConfig], path: str) -> list[object]:
    """The values of an option that are walked."""
    choices = option_choices(config_class, path) or SAMPLES.get(path, ())
    found = [each for each in choices if each != default_option(config_class, path)]
    assert found, f"{path} has no value to walk: add some to SAMPLES"
    return found


@functools.cache
def bound_passes(
    options: CompileConfig, graphs: tuple[GraphKind, ...], reshard: Any
) -> dict[GraphKind, object]:
    """What a run's recipe binds to each of its graphs."""
    build = Recipe(options=options, reshard_after_forward=reshard)
    context = PassContext(fake_mode=FakeTensorMode())
    return {graph: build(context, graph).passes for graph in graphs}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A value of an option in a composition."""

    name: tuple[str, str, object]
    """Composition, flag, value."""

    options: CompileConfig
    reshard: Any = "default"
    others: tuple[tuple[CompileConfig, Any], ...]
    """The same with other values of the option, of which one must make a difference."""

    flags: frozenset[str]
    """Of the option and its companions: a refusal names one of them."""

    is_read: bool
    """Whether something else than passes reads it."""

    def is_ignored(self, check: Check) -> bool:
        """Return whether it is neither refused nor makes a difference."""
        composition = COMPOSITIONS[self.name[0]]
        refused = check(self.options, composition.topology, self.reshard)
        return not self.flags & {each.flag for each in refused} and not self.has_effect()

    def is_refused_in_vain(self) -> bool:
        """Return whether it is refused as one that does nothing, and does something."""
        found = idle(self.options, COMPOSITIONS[self.name[0]].topology, self.reshard)
        return self.name[1] in {each.flag for each in found} and self.has_effect()

    def has_effect(self) -> bool:
        """Return whether it makes a difference."""
        if self.is_read:
            return True
        graphs = COMPOSITIONS[self.name[0]].graphs
        given = bound_passes(self.options, graphs, self.reshard)
        return any(given != bound_passes(other, graphs, reshard) for other, reshard in self.others)


def cases(config_class: type[CompileConfig]) -> Iterator[Case]:
    """Every value of every option in every composition, alone and in company."""
    for name, composition in COMPOSITIONS.items():
        base = config_class(**composition.settings)
        for path in option_paths(config_class):
            if path in composition.settings:
                continue
            default = default_option(config_class, path)
            for value, companions in itertools.product(
                values_of(config_class, path), ({}, COMPANIONS.get(path, {}))
            ):
                company = base
                for other, setting in companions.items():
                    company = with_option(company, other, setting)
                options = with_option(company, path, value)
                run = RunOptions(options=options, topology=composition.topology)
                yield Case(
                    name=(name, f"--compile.{path}", value),
                    options=options,
                    others=((with_option(company, path, default), "default"),),
                    flags=frozenset(f"--compile.{each}" for each in (path, *companions)),
                    is_read=path in read_elsewhere(run),
                )
        every = ("default", "always", "never")
        for value in every[1:]:
            yield Case(
                name=(name, RESHARD, value),
                options=base,
                reshard=value,
                others=tuple((base, each) for each in every if each != value),
                flags=frozenset({RESHARD}),
                is_read=False,
            )


def walk(config_class: type[CompileConfig], check: Check) -> list[tuple[str, str, object]]:
    """The options that a composition accepts and ignores: (composition, flag, value)."""
    return [case.name for case in cases(config_class) if case.is_ignored(check)]


def test_what_gt_config_refuses_better_is_told_once(tmp_path):
    config = llama3.llama3_debugmodel()
    config = dataclasses.replace(
        config,
        dump_folder=str(tmp_path),
        compile=replace(config.compile, mode="aot_joint", memory_policy="selective"),
        parallelism=replace(config.parallelism, data_parallel_shard_degree=2),
    )
    flag = "--compile.memory_policy"
    found = [each for each in configuration_violations(config, 2) if each.flag == flag]
    assert ["--compile.joint_partitioner" in each.allowed for each in found] == [True]


def test_no_composition_accepts_an_option_and_ignores_it():
    assert walk(CompileConfig, refusals) == []


def test_no_option_is_refused_as_one_that_does_nothing_where_it_does_something():
    found = [case.name for case in cases(CompileConfig) if case.is_refused_in_vain()]
    assert found == []


def test_the_walk_finds_options_that_would_be_ignored():
    found = walk(CompileConfig, without_the_check)
    assert {
        ("eager", "--compile.prefetch_layers", 3),
        ("pipeline", RESHARD, "always"),
        ("pipeline", "--compile.passes", ("prefetch-all-gathers",)),
        ("aot_joint", RESHARD, "always"),
        ("aot_joint", "--compile.capture_layers", "full"),
        ("eager", "--compile.verify_passes", False),
        ("autoparallel_backend", "--compile.memory_policy", "selective"),
        ("plain", "--compile.offload_host_gib", 4.0),
    } <= {*found}
    # These have effect.
    assert not {
        ("autoparallel_backend", "--compile.fsdp_bucket_cap_mib", 25),
        ("autoparallel_backend", RESHARD, "always"),
        ("plain", RESHARD, "never"),
    } & {*found}


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted(CompileConfig):
    """With an option that nothing reads."""

    planted: bool = False


def test_an_option_that_nothing_reads_is_refused_from_the_day_it_is_declared():
    planted = "--compile.planted"
    assert {flag for _, flag, _ in walk(Planted, without_the_check)} >= {planted}
    assert walk(Planted, refusals) == []
    (violation,) = idle(Planted(planted=True), MESH)
    assert violation == Violation(
        flag=planted,
        value=True,
        allowed="its default False, since nothing in this run reads it and it would do nothing",
        fix="drop the option",
    )


def test_defaults_are_those_of_the_class_of_the_configuration():
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Bucketing(CompileConfig):
        fsdp_bucketing: FsdpBucketing = "off"

    assert not [*idle(Bucketing(mode="none"), MESH)]
    asked = Bucketing(mode="none", fsdp_bucketing="transformer_block")
    (violation,) = idle(asked, MESH)
    assert violation.flag == "--compile.fsdp_bucketing"


def test_an_option_without_values_to_walk_fails():
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Added(CompileConfig):
        added: int = 0

    with pytest.raises(AssertionError, match="added has no value to walk: add some to SAMPLES"):
        walk(Added, refusals)


def test_what_is_read_elsewhere_is_read_where_it_is_said_to_be():
    runs = [
        RunOptions(options=CompileConfig(**each.settings), topology=each.topology)
        for each in COMPOSITIONS.values()
    ]
    eager = EpOverlapConfig(enabled=True, strategy="eager")
    runs.append(RunOptions(options=CompileConfig(ep_overlap=eager), topology=MESH))
    runs.append(RunOptions(options=CompileConfig(artifacts="graphs"), topology=MESH))
    shared = replace(MESH, dp_shard=2, cp=2)
    runs.append(RunOptions(options=CompileConfig(context_parallel="ring"), topology=shared))
    assert {path for run in runs for path in read_elsewhere(run)} == {*READERS}
    for path, module in READERS.items():
        name = path.rpartition(".")[2]
        assert f".{name}" in inspect.getsource(module), path


def test_the_graphs_of_a_composition_are_those_that_its_steps_capture():
    for composition in COMPOSITIONS.values():
        options = CompileConfig(**composition.settings)
        run = RunOptions(options=options, topology=composition.topology)
        assert run.graphs == composition.graphs
    assert {graph for each in COMPOSITIONS.values() for graph in each.graphs} == EVERY_GRAPH


# ---- texts -------------------------------------------------------------------------------------


def told(topology: Topology = MESH, reshard: Any = "default", **settings: Any) -> str:
    return "\n".join(map(str, idle(CompileConfig(**settings), topology, reshard)))


def test_says_on_account_of_what_an_option_does_nothing():
    assert_expected_inline(
        "\n".join(map(str, refusals(CompileConfig(prefetch_layers=3), STAGES, "always"))),
        """\
--compile.prefetch_layers is 3
allowed: its default 1, since --parallelism.pipeline_parallel_degree is 2 and it would do nothing
fix: drop the option, or use --parallelism.pipeline_parallel_degree 1
--parallelism.fsdp_reshard_after_forward is 'always'
allowed: its default 'default', since --parallelism.pipeline_parallel_degree is 2 and it would do nothing
fix: drop the option, or use --parallelism.pipeline_parallel_degree 1""",
    )


def test_says_where_an_option_would_do_something():
    texts = (
        told(mode="none", prefetch_layers=3),
        told(regional_modules=("layers.*",)),
        told(ep_overlap=EpOverlapConfig(num_chunks=4)),
        told(autoparallel_solver=AutoParallelConfig(time_limit_seconds=3.0)),
        told(
            autoparallel=True,
            inductor_compilation="autoparallel_backend",
            memory_policy="selective",
        ),
        told(mode="none", offload_host_gib=4.0),
    )
    assert_expected_inline(
        "\n".join(texts),
        """\
--compile.prefetch_layers is 3
allowed: its default 1, since --compile.mode is 'none' and it would do nothing
fix: drop the option, or use --compile.mode aot_fx_trace or aot_joint
--compile.regional_modules is ('layers.*',)
allowed: its default (), since --compile.inductor_compilation is 'none' and it would do nothing
fix: drop the option, or use --compile.inductor_compilation regional
--compile.ep_overlap.num_chunks is 4
allowed: its default 2, since --compile.ep_overlap.enabled is False and it would do nothing
fix: drop the option, or use --compile.ep_overlap.enabled
--compile.autoparallel_solver.time_limit_seconds is 3.0
allowed: its default 120.0, since --compile.autoparallel is False and it would do nothing
fix: drop the option, or use --compile.autoparallel
--compile.memory_policy is 'selective'
allowed: its default 'save_all', since --compile.inductor_compilation is 'autoparallel_backend' and it would do nothing
fix: drop the option, or use --compile.inductor_compilation none or regional or full
--compile.offload_host_gib is 4.0
allowed: its default None, since --compile.mode is 'none' and --compile.memory_policy is 'save_all' and it would do nothing
fix: drop the option, or use --compile.mode aot_fx_trace and --compile.memory_policy offload""",
    )


ALONE = Topology(world=1, batch_size=8, seq_len=8)


@pytest.mark.parametrize(
    ("flag", "options", "reshard"),
    [
        ("--compile.prefetch_layers", {"prefetch_layers": 5}, "default"),
        ("--compile.fsdp_bucketing", {"fsdp_bucketing": "off"}, "default"),
        ("--compile.fsdp_bucket_cap_mib", {"fsdp_bucket_cap_mib": 25}, "default"),
        ("--compile.disable_passes", {"disable_passes": ("prefetch-all-gathers",)}, "default"),
        ("--compile.passes", {"passes": ("separate-reduction-group",)}, "default"),
        ("--compile.fsdp_into_dense_regions", {"fsdp_into_dense_regions": True}, "default"),
        ("--compile.async_tensor_parallel", {"async_tensor_parallel": True}, "default"),
        (RESHARD, {}, "never"),
        (RESHARD, {}, "always"),
    ],
)
def test_what_works_on_collectives_is_refused_on_one_rank_if_it_was_typed(flag, options, reshard):
    for topology, asked, expected in (
        (ALONE, {flag}, [flag]),
        (ALONE, (), []),  # a configuration is used with any number of ranks
        (replace(MESH, dp_shard=2, tp=2), {flag}, []),
    ):
        found = idle(CompileConfig(**options), topology, reshard, asked)
        assert [each.flag for each in found] == expected


def test_says_which_ranks_an_option_would_need():
    (violation,) = idle(
        CompileConfig(prefetch_layers=5), ALONE, asked={"--compile.prefetch_layers"}
    )
    assert_expected_inline(
        str(violation),
        """\
--compile.prefetch_layers is 5
allowed: its default 1, since --parallelism.data_parallel_shard_degree is 1 and it would do nothing
fix: drop the option, or use --parallelism.data_parallel_shard_degree 2""",
    )


def test_gathered_bytes_are_limited_only_where_stages_gather():
    alone = replace(STAGES, world=2, dp_shard=1, ep=1)
    options, flag = CompileConfig(pipeline_gathered_gib=4.0), "--compile.pipeline_gathered_gib"
    for topology, expected in ((alone, [flag]), (STAGES, []), (replace(alone, cp=2, world=4), [])):
        assert [each.flag for each in idle(options, topology, asked={flag})] == expected


@pytest.mark.parametrize(
    ("policy", "disabled"),
    [
        ("full_recompute", ("recompute-tagged",)),
        ("selective", ("recompute-tagged",)),
        ("selective_alternate", ("recompute-tagged",)),
        ("offload", ("recompute-tagged", "offload-tagged")),
        ("full_recompute", ("tag-saved-tensors",)),
        ("offload", ("tag-saved-tensors",)),
    ],
)
def test_a_policy_whose_tags_no_pass_writes_or_reads_is_refused(policy, disabled):
    flag = "--compile.memory_policy"
    without, with_it = (
        [
            str(each)
            for each in idle(
                CompileConfig(memory_policy=policy, disable_passes=names), ALONE, asked={flag}
            )
            if each.flag == flag
        ]
        for names in (disabled, ("merge-waits",))
    )
    assert [text.splitlines()[1] for text in without] == [
        f"allowed: its default 'save_all', since --compile.disable_passes is {disabled!r} and it would do nothing"
    ]
    assert with_it == []


def test_of_several_names_those_that_do_nothing_are_told():
    text = told(
        STAGES,
        passes=("reshard-after-forward", "remove-dead-code"),
        disable_passes=("delay-waits", "prefetch-all-gathers"),
    )
    assert_expected_inline(
        text,
        """\
--compile.passes is 'reshard-after-forward'
allowed: to leave it out, since it runs on STEP alone, and this run has none of these and it would do nothing
fix: drop it
--compile.disable_passes is 'prefetch-all-gathers'
allowed: to leave it out, since it runs on STEP, MICROBATCH, JOINT_FORWARD, JOINT_BACKWARD alone, and this run has none of these and it would do nothing
fix: drop it""",
    )


def test_names_that_fit_no_recipe_are_refused_before_the_run():
    text = told(passes=("tag-saved-tensors",), disable_passes=("reshard-after-forward",))
    assert_expected_inline(
        text,
        """\
--compile.disable_passes is ('reshard-after-forward',)
allowed: names that fit the recipe
fix: drop a name: 'reshard-after-forward' is disabled, and the recipe has only remove-dead-code, merge-waits, canonicalize-views, share-all-gathers, quantize-before-gather, bucket-all-gathers, bucket-reduce-scatters, bucket-all-reduces, delay-waits, prefetch-all-gathers""",
    )


def test_malformed_values_are_left_to_whoever_judges_values():
    assert told(prefetch_layers="x", passes=("no-such-pass",), ep_overlap=None) == ""


def test_a_preflight_tells_each_option_once(tmp_path):
    config = llama3.llama3_debugmodel()
    config = dataclasses.replace(
        config,
        dump_folder=str(tmp_path),
        compile=replace(config.compile, prefetch_layers=3),
        parallelism=replace(
            config.parallelism,
            pipeline_parallel_degree=2,
            data_parallel_shard_degree=2,
            fsdp_reshard_after_forward="always",
        ),
    )
    with pytest.raises(ConfigError) as refused:
        check_configuration(config, 4)
    assert_expected_inline(
        str(refused.value),
        """\
the configuration has 2 problems:
  1. --compile.prefetch_layers is 3
     allowed: its default 1, since --parallelism.pipeline_parallel_degree is 2 and it would do nothing
     fix: drop the option, or use --parallelism.pipeline_parallel_degree 1
  2. --parallelism.fsdp_reshard_after_forward is 'always'
     allowed: its default 'default', since --parallelism.pipeline_parallel_degree is 2 and it would do nothing
     fix: drop the option, or use --parallelism.pipeline_parallel_degree 1""",
    )
