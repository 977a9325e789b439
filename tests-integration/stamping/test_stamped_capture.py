"""A stamped capture of torchtitan's models is the full one, on every mesh and at every depth.

Stamped and full captures are compared in everything that a pass or a run can see
(``step_differences``), then the passes run on the stamped graph with the verifier. Two
cells stand for all in CI, and one of two trainings on four processes, which must be bitwise those
of eager; the others are slow.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from capture.cases import compare_variants
from flex_attention.cases import compare_stamped, own_flex_attention
from stamping.cases import MESHES, MODELS, cell_of, compared_capture, passed_both_ways
from training_cases import NUM_STEPS, NUM_UNSEEN_BATCHES, Case

from gt_config import EpOverlapConfig
from gt_passes.analysis.outlined_region import nodes_with_bodies, region_of
from gt_trace.stamping import step_differences
from gt_trace.testing import GlooWorkers
from gt_trainer.steps.captured_step import WholeStepProgram
from gt_trainer.steps.program import CaptureReport

DEPTHS = (5, 6, 8, 32)
QUICK = (("llama3", "FSDP x TP", 5), ("deepseek_v3", "EP on all of FSDP", 6))
WITH_EXPERTS = ("qwen3-MoE", "deepseek_v3")
# The first layer of deepseek_v3 is dense, and traced beside the others.
NUM_TRACED = {"deepseek_v3": 5}


def cells() -> list[object]:
    return [
        pytest.param(
            model,
            mesh,
            depth,
            marks=[] if (model, mesh, depth) in QUICK else [pytest.mark.slow],
            id=f"{model}, {mesh}, {depth} layers",
        )
        for model in MODELS
        for mesh in MESHES
        for depth in DEPTHS
        if model in WITH_EXPERTS or "EP" not in mesh
    ]


@pytest.mark.parametrize(("model", "mesh", "depth"), cells())
def test_stamped_capture_is_the_full_one(model: str, mesh: str, depth: int) -> None:
    stamping, capture = compared_capture(cell_of(model, mesh, depth))
    num_traced = NUM_TRACED.get(model, 4)
    if depth <= num_traced:
        assert stamping.refusal is not None
        assert "no more than 4 that are alike repeat in a row" in stamping.refusal
        return
    assert stamping.refusal is None
    assert stamping.compared
    assert stamping.num_layers_traced == num_traced
    assert capture.passes[0].verified


SAVED_PRODUCTS = ("layers.*.attention::aten.mm",)


def overlap(module_fqn: str, chunk_dim: str, strategy: str = "eager") -> EpOverlapConfig:
    return EpOverlapConfig(
        enabled=True, strategy=strategy, module_fqn=module_fqn, chunk_dim=chunk_dim
    )


# Chunks change what is captured; everything else only what passes do with it.
OPTIONS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "selective": ("llama3", "FSDP x TP", {"memory_policy": "selective"}),
    "every second product": ("llama3", "FSDP x TP", {"memory_policy": "selective_alternate"}),
    "saved products": (
        "llama3",
        "FSDP x TP",
        {"memory_policy": "full_recompute", "full_recompute_saved_ops": SAVED_PRODUCTS},
    ),
    "offload": ("llama3", "FSDP x TP", {"memory_policy": "offload"}),
    "prefetch": ("llama3", "FSDP", {"fsdp_second_group": True, "prefetch_layers": 2}),
    "compiled": ("llama3", "FSDP", {"inductor_compilation": "full", "cuda_graphs": True}),
    "regional": (
        "llama3",
        "FSDP x TP",
        {"inductor_compilation": "regional", "regional_modules": ("layers.*.feed_forward",)},
    ),
    "asynchronous TP": ("llama3", "FSDP x TP", {"async_tensor_parallel": True}),
    "numerics": ("llama3", "FSDP x TP", {"numerics_changing": True}),
    "blocks in chunks": (
        "deepseek_v3",
        "FSDP x EP",
        {"ep_overlap": overlap("layers.*", "batch"), "fsdp_into_dense_regions": True},
    ),
    "blocks in chunks, TP": (
        "deepseek_v3",
        "FSDP x TP x EP",
        {"ep_overlap": overlap("layers.*", "batch"), "memory_policy": "full_recompute"},
    ),
    "experts in chunks, TP": (
        "deepseek_v3",
        "FSDP x TP x EP",
        {"ep_overlap": overlap("layers.*.moe", "batch"), "fsdp_second_group": True},
    ),
    "experts in chunks of the sequence": (
        "qwen3-MoE",
        "FSDP x EP",
        {"ep_overlap": overlap("layers.*.moe", "seq"), "memory_policy": "full_recompute"},
    ),
    "chunks on the graph": (
        "deepseek_v3",
        "FSDP x EP",
        {"ep_overlap": overlap("layers.*", "batch", "graph"), "memory_policy": "selective"},
    ),
}
QUICK_OPTIONS = ("selective",)


def assert_same_graphs(
    stamped: CaptureReport[WholeStepProgram], full: CaptureReport[WholeStepProgram]
) -> None:
    """In everything; of regions for Inductor, which are objects of their own, in their bodies."""
    differences = step_differences(stamped.program.captured, full.program.captured)
    assert [line for line in differences if not line.startswith("attributes")] == []
    assert regions_of(stamped) == regions_of(full)
    assert bool(differences) == bool(regions_of(full))


def regions_of(report: CaptureReport[WholeStepProgram]) -> dict[str, str]:
    """The code of the body of each region, by the name of the node that calls it."""
    nodes = report.program.captured.graph_module.graph.nodes
    regions = {node.name: region_of(node) for node in nodes}
    return {name: region.body.code for name, region in regions.items() if region is not None}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK_OPTIONS else [pytest.mark.slow])
        for name in OPTIONS
    ],
)
def test_passes_make_the_same_of_a_stamped_graph(name: str) -> None:
    model, mesh, options = OPTIONS[name]
    stamped, full = passed_both_ways(cell_of(model, mesh, 7, options))
    assert stamped.stamping is not None
    assert stamped.stamping.refusal is None
    assert full.num_nodes != full.num_nodes_captured
    assert_same_graphs(stamped, full)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "mesh", "depth", "options"),
    [
        ("llama3", "FSDP x TP", 5, {"memory_policy": "full_recompute"}),
        ("qwen3", "FSDP", 6, {"inductor_compilation": "regional"}),
        ("qwen3-MoE", "FSDP x TP x EP", 6, {}),
        ("deepseek_v3", "FSDP x EP", 7, {"memory_policy": "selective"}),
        ("deepseek_v3", "FSDP x EP", 7, {"ep_overlap": overlap("layers.*", "batch", "graph")}),
    ],
)
def test_layers_with_torchtitans_own_attention_are_stamped_alike(
    model: str, mesh: str, depth: int, options: dict[str, Any]
) -> None:
    cell = cell_of(model, mesh, depth, options)
    with own_flex_attention():
        stamping, _ = compared_capture(cell)
        assert stamping.refusal is None
        assert stamping.compared
        stamped, full = passed_both_ways(cell)
    assert_same_graphs(stamped, full)
    names = [str(node.target) for node in nodes_with_bodies(stamped.program.captured.graph_module)]
    assert names.count("flex_attention_backward") >= depth


def test_stamped_training_with_torchtitans_own_attention_equals_eager(
    one: GlooWorkers, tmp_path: Path
) -> None:
    case = Case(module="llama3", config="llama3_debugmodel", num_layers=5)
    (found,) = one.run(compare_stamped, case, str(tmp_path))
    assert found.differences == ()
    assert found.stamped
    assert found.verified


BITWISE = {
    "llama3, FSDP 2 x TP 2": Case(
        module="llama3",
        config="llama3_debugmodel",
        num_layers=5,
        parallelism={"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2},
    ),
    "deepseek_v3, FSDP 2 x TP 2 x EP 2": Case(
        module="deepseek_v3",
        config="deepseek_v3_debugmodel",
        num_layers=6,
        parallelism={
            "data_parallel_shard_degree": 2,
            "tensor_parallel_degree": 2,
            "expert_parallel_degree": 2,
        },
    ),
    # Of four shards, gloo sums buckets in another order than eager does parameters.
    "deepseek_v3, FSDP 4 x EP 2": Case(
        module="deepseek_v3",
        config="deepseek_v3_debugmodel",
        num_layers=6,
        parallelism={"data_parallel_shard_degree": 4, "expert_parallel_degree": 2},
        fsdp_bucketing="off",
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        "llama3, FSDP 2 x TP 2",
        pytest.param("deepseek_v3, FSDP 2 x TP 2 x EP 2", marks=pytest.mark.slow),
        pytest.param("deepseek_v3, FSDP 4 x EP 2", marks=pytest.mark.slow),
    ],
)
def test_stamped_training_equals_eager_on_four_ranks(
    name: str, four: GlooWorkers, tmp_path: Path
) -> None:
    variants = {"stamped": {"capture_layers": "stamped"}}
    for rank, found in enumerate(
        four.run(compare_variants, BITWISE[name], str(tmp_path), variants)
    ):
        result = found["stamped"]
        assert result.differences == (), f"rank {rank}"
        assert result.stamped
        assert result.verified
        assert len(set(result.losses)) == NUM_STEPS + NUM_UNSEEN_BATCHES
