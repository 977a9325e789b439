"""The default recipe, and how users add to it and leave out of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from expecttest import assert_expected_inline
from pass_graphs import capture
from torch.fx import GraphModule

from gt_config import CompileConfig, EpOverlapConfig
from gt_config.compile_config import InductorCompilation
from gt_config.graph_kinds import EVERY_GRAPH, PIPELINE_ACTIONS, GraphKind
from gt_config.numerics import Numerics
from gt_passes import (
    GraphPass,
    InductorCompiler,
    PassContext,
    PassManager,
    PassReport,
    RecipeError,
    ShareAllGathers,
    default_passes,
    default_recipe,
    register_pass,
    registry,
)
from gt_passes.errors import UnknownPassError


@pytest.fixture
def context() -> PassContext:
    return PassContext.from_graph(capture(lambda x: x.cos(), torch.ones(2)))


def recipe(context: PassContext, **options: object) -> PassManager:
    return default_recipe(CompileConfig(**options), context=context)


def names(context: PassContext, **options: object) -> list[str]:
    return [graph_pass.name for graph_pass in recipe(context, **options).passes]


CLEAN_UP = ["remove-dead-code", "merge-waits", "canonicalize-views", "share-all-gathers"]
QUANTIZE = "quantize-before-gather"
BUCKETS = ["bucket-all-gathers", "bucket-reduce-scatters", "bucket-all-reduces"]
OVERLAP = ["delay-waits", "prefetch-all-gathers"]


def test_the_recipe_of_a_whole_step(context: PassContext):
    assert names(context) == [*CLEAN_UP, QUANTIZE, *BUCKETS, *OVERLAP]


@pytest.mark.parametrize(
    ("compilation", "expected"),
    [
        ("none", ["compile-flex-attention"]),
        ("regional", ["compile-flex-attention", "compile-regions"]),
        ("full", ["compile-whole-graph"]),
    ],
)
def test_flex_attention_is_compiled_whatever_else_is_if_the_model_does_so(
    context: PassContext, compilation: InductorCompilation, expected: list[str]
):
    options = CompileConfig(inductor_compilation=compilation, cuda_graphs=True)
    asked = default_recipe(options, context=context, flex_attention_options={"max_autotune": True})
    found = {each.name: each for each in asked.passes}
    assert [*found] == [*CLEAN_UP, QUANTIZE, *BUCKETS, *OVERLAP, *expected, "cuda-graphs"]
    if compilation != "full":
        flex_attention = found["compile-flex-attention"]
        assert flex_attention.options == {"max_autotune": True}
        # Eager is not asked to round between operators either.
        assert flex_attention.compiler == InductorCompiler(eager_rounding=False)
    left_out = CompileConfig(disable_passes=("compile-flex-attention",))
    passes = default_recipe(left_out, context=context, flex_attention_options={}).passes
    assert [each.name for each in passes] == [*CLEAN_UP, QUANTIZE, *BUCKETS, *OVERLAP]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"fsdp_bucketing": "off", "prefetch_layers": 0}, [*CLEAN_UP, QUANTIZE]),
        (
            {"memory_policy": "full_recompute"},
            [
                *CLEAN_UP,
                "tag-saved-tensors",
                "recompute-tagged",
                "reshard-after-forward",
                QUANTIZE,
                *BUCKETS,
                *OVERLAP,
            ],
        ),
        (
            {"memory_policy": "offload"},
            [
                *CLEAN_UP,
                "tag-saved-tensors",
                "recompute-tagged",
                "offload-tagged",
                "reshard-after-forward",
                QUANTIZE,
                *BUCKETS,
                *OVERLAP,
            ],
        ),
        (
            {"fsdp_second_group": True, "fsdp_into_dense_regions": True},
            [
                *CLEAN_UP,
                QUANTIZE,
                *BUCKETS,
                *OVERLAP,
                "separate-reduction-group",
                "schedule-fsdp-into-dense-regions",
            ],
        ),
        (
            {"ep_overlap": EpOverlapConfig(enabled=True), "fsdp_into_dense_regions": True},
            [
                *CLEAN_UP,
                "chunk-modules",
                QUANTIZE,
                *BUCKETS,
                *OVERLAP,
                "schedule-ep-overlap",
                "separate-exchange-group",
                "schedule-fsdp-into-dense-regions",
            ],
        ),
        (
            {
                "async_tensor_parallel": True,
                "numerics_changing": True,
                "inductor_compilation": "full",
                "cuda_graphs": True,
                "passes": ("remove-dead-code",),
            },
            [
                *CLEAN_UP,
                QUANTIZE,
                *BUCKETS,
                *OVERLAP,
                "async-tensor-parallel",
                "fuse-parallel-matmuls",
                "remove-dead-code",
                "compile-whole-graph",
                "cuda-graphs",
            ],
        ),
        (
            {"inductor_compilation": "regional"},
            [*CLEAN_UP, QUANTIZE, *BUCKETS, *OVERLAP, "compile-regions"],
        ),
    ],
)
def test_options_choose_passes(context: PassContext, options: dict, expected: list[str]):
    assert names(context, **options) == expected


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        ("STAGE", [*CLEAN_UP, "tag-saved-tensors", "recompute-tagged", QUANTIZE]),
        ("UNSHARD", [*CLEAN_UP[:3], "bucket-all-gathers", "delay-waits"]),
        ("FORWARD", [*CLEAN_UP[:3], "fuse-parallel-matmuls", "compile-regions"]),
        ("OVERLAP_F_B", [*CLEAN_UP[:3], "fuse-parallel-matmuls", "compile-regions"]),
        (
            "REDUCE_GRAD",
            [*CLEAN_UP[:3], "bucket-reduce-scatters", "bucket-all-reduces", "delay-waits"],
        ),
        (
            "MICROBATCH",
            [
                *CLEAN_UP,
                "tag-saved-tensors",
                "recompute-tagged",
                *BUCKETS,
                *OVERLAP,
                "fuse-parallel-matmuls",
                "compile-regions",
            ],
        ),
        (
            "JOINT_FORWARD",
            [
                *CLEAN_UP,
                "bucket-all-gathers",
                *OVERLAP,
                "fuse-parallel-matmuls",
                "compile-regions",
            ],
        ),
        (
            "JOINT_BACKWARD",
            [*CLEAN_UP, *BUCKETS, *OVERLAP, "fuse-parallel-matmuls", "compile-regions"],
        ),
    ],
)
def test_a_graph_gets_the_passes_that_run_on_its_kind(graph: GraphKind, expected: list[str]):
    options = CompileConfig(
        memory_policy="selective", numerics_changing=True, inductor_compilation="regional"
    )
    assert [each.name for each in default_passes(options, graph=graph)] == expected


def test_chunks_of_a_stage_are_made_and_put_in_order_before_its_cut():
    options = CompileConfig(
        memory_policy="selective", ep_overlap=EpOverlapConfig(enabled=True, strategy="graph")
    )
    of_step, of_stage, *of_actions = (
        {each.name: each for each in default_passes(options, graph=graph)}
        for graph in ("STEP", "STAGE", *PIPELINE_ACTIONS)
    )
    overlap = ["chunk-modules", "schedule-ep-overlap", "separate-exchange-group"]
    policy = ["tag-saved-tensors", "recompute-tagged"]
    expected = [*CLEAN_UP, overlap[0], *policy, QUANTIZE, *overlap[1:]]
    assert list(of_stage) == expected
    assert not any(of_action.keys() & set(overlap) for of_action in of_actions)
    # Which passes know that a stage is a part of a model.
    assert [name for name in overlap if of_stage[name] != of_step[name]] == overlap[:2]


def test_an_added_pass_runs_where_it_declares_to():
    options = CompileConfig(passes=("prefetch-all-gathers", "remove-dead-code"), prefetch_layers=0)
    step = [each.name for each in default_passes(options, graph="STEP")]
    assert step[-2:] == ["prefetch-all-gathers", "remove-dead-code"]
    unshard = [each.name for each in default_passes(options, graph="UNSHARD")]
    assert unshard == [*CLEAN_UP[:3], "bucket-all-gathers", "remove-dead-code"]


def test_passes_that_mean_the_same_are_equal():
    every = CompileConfig(async_tensor_parallel=True, numerics_changing=True, cuda_graphs=True)
    assert default_passes(every, graph="STEP") == default_passes(every, graph="STEP")


def test_the_options_of_another_memory_policy_change_no_pass():
    selective = CompileConfig(memory_policy="selective")
    changed = replace(
        selective, offload_host_gib=1.0, full_recompute_saved_ops=("layers.*::aten.mm",)
    )
    assert default_passes(changed, graph="STEP") == default_passes(selective, graph="STEP")


@pytest.mark.parametrize(
    ("memory_policy", "asked", "resharded"),
    [
        ("save_all", None, False),
        ("selective", None, True),
        ("save_all", True, True),
        ("selective", False, False),
    ],
)
def test_parameters_are_gathered_again_unless_everything_is_saved(
    context: PassContext, memory_policy: str, asked: bool | None, resharded: bool
):
    manager = default_recipe(
        CompileConfig(memory_policy=memory_policy), context=context, reshard_after_forward=asked
    )
    assert ("reshard-after-forward" in [each.name for each in manager.passes]) == resharded


def test_options_of_options_reach_their_passes(context: PassContext):
    options = {
        "memory_policy": "offload",
        "offload_host_gib": 0.5,
        "offload_prefetch_layers": 3,
        "offload_defer_layers": 2,
        "fsdp_bucket_cap_mib": 25,
        "prefetch_layers": 2,
        "inductor_compilation": "regional",
        "regional_modules": ("layers.*.feed_forward",),
    }
    passes = {each.name: each for each in recipe(context, **options).passes}
    assert passes["tag-saved-tensors"].host_budget_bytes == 2**29
    assert passes["offload-tagged"].prefetch_layers == 3
    assert passes["offload-tagged"].defer_layers == 2
    assert [passes[name].cap_mib for name in BUCKETS] == [25, 25, 25]
    assert passes["prefetch-all-gathers"].blocks_ahead == 2
    assert passes["compile-regions"].module_patterns == ("layers.*.feed_forward",)


def test_passes_can_be_left_out(context: PassContext):
    assert names(context, disable_passes=("canonicalize-views", QUANTIZE, *BUCKETS, *OVERLAP)) == [
        "remove-dead-code",
        "merge-waits",
        "share-all-gathers",
    ]


def test_added_passes_run_at_the_end_also_a_second_time(context: PassContext):
    found = names(context, passes=("remove-dead-code",))
    assert found == [*CLEAN_UP, QUANTIZE, *BUCKETS, *OVERLAP, "remove-dead-code"]


def test_all_unknown_names_are_one_error(context: PassContext):
    with pytest.raises(UnknownPassError) as error:
        names(context, passes=("remove-code",), disable_passes=("canonicalise-views",))
    assert error.value.names == ("remove-code", "canonicalise-views")


def test_contradictions_are_one_error(context: PassContext, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry, "_PASSES", dict(registry._PASSES))

    @register_pass
    @dataclass(frozen=True, kw_only=True)
    class CapBuckets(GraphPass):
        name: ClassVar[str] = "cap-buckets"
        numerics: ClassVar[Numerics] = "bitwise"
        runs_on: ClassVar[frozenset[GraphKind]] = EVERY_GRAPH

        cap_bytes: int

        def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
            return PassReport(changed=False)

    with pytest.raises(RecipeError) as error:
        names(context, passes=("cap-buckets", "remove-dead-code"),
              disable_passes=("cap-buckets", "remove-dead-code"))  # fmt: skip
    assert_expected_inline(
        str(error.value),
        """\
the recipe cannot be built:
  - 'cap-buckets' is disabled, and the recipe has only remove-dead-code, merge-waits, canonicalize-views, share-all-gathers, quantize-before-gather, bucket-all-gathers, bucket-reduce-scatters, bucket-all-reduces, delay-waits, prefetch-all-gathers
  - 'cap-buckets' is both added and disabled
  - 'remove-dead-code' is both added and disabled
  - 'cap-buckets' cannot be added by name, for want of cap_bytes: give PassManager an instance""",
    )


def test_options_reach_the_pass_manager(context: PassContext, tmp_path):
    graph_module = capture(lambda x: x.cos(), torch.ones(2))
    manager = default_recipe(
        CompileConfig(verify_passes=False),
        context=context,
        dump_directory=tmp_path,
        estimate_peak_bytes=lambda gm: 5,
    )
    report = manager.run(graph_module)
    assert not report.verified
    assert report.records[0].before.peak_memory_bytes == 5
    assert len(list(tmp_path.glob("*-after.txt"))) == len(manager.passes)


def test_gatherings_are_shared_within_a_phase_where_a_plan_gathers_again() -> None:
    scopes = {
        is_planned: [
            each.scope
            for each in default_passes(CompileConfig(autoparallel=is_planned), graph="STEP")
            if isinstance(each, ShareAllGathers)
        ]
        for is_planned in (False, True)
    }
    assert scopes == {False: ["step"], True: ["phase"]}
