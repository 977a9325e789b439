"""Forwards that run in two chunks give what they gave whole, and their metadata say what ran."""

from __future__ import annotations

from collections.abc import Iterator

import eager_chunk_cases as cases
import pytest
import torch
from chunked_models import SmallModel, batch
from expecttest import assert_expected_inline

from gt_config import CompileConfig
from gt_config.node_keys import ChunkAnnotation, FsdpCollectiveAnnotation
from gt_passes import PassContext, default_recipe
from gt_passes.ep_overlap import (
    ChunkRegions,
    settle_chunk_annotations,
)
from gt_trace import phase_of, read_annotation
from gt_trace.testing import GlooWorkers, fake_world

ROOTS = (("layers.*", "batch"), ("layers.*.moe", "batch"), ("layers.*.moe", "seq"))


@pytest.fixture(scope="module")
def workers() -> Iterator[GlooWorkers]:
    with GlooWorkers(2) as started:
        yield started


# ---- numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fsdp", [False, True], ids=["replicated", "sharded"])
@pytest.mark.parametrize(("modules", "chunk_dim"), ROOTS)
def test_chunks_give_what_the_whole_gives(
    workers: GlooWorkers, modules: str, chunk_dim: str, fsdp: bool
):
    for chunked, whole in workers.run(cases.chunked_and_whole, modules, chunk_dim, fsdp):
        assert chunked.keys() == whole.keys()
        for name, expected in whole.items():
            torch.testing.assert_close(
                chunked[name], expected, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )


def test_buffers_count_every_token_once(workers: GlooWorkers):
    for chunked, whole in workers.run(cases.chunked_and_whole, "layers.*", "batch", False):
        for name in ("layers.0.moe.tokens_per_expert_E", "layers.1.moe.tokens_per_expert_E"):
            assert torch.equal(chunked[name], whole[name])
            assert chunked[name].sum() == batch()[0].numel()


def test_undoing_restores_every_bit(workers: GlooWorkers):
    for before, chunked, after in workers.run(cases.eager_before_and_after_undo, "layers.*"):
        assert all(torch.equal(before[name], after[name]) for name in before)
        # Chunks sum in another order, so the wrapper did something in between.
        assert not all(torch.equal(before[name], chunked[name]) for name in before)


# ---- metadata ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fsdp", [False, True], ids=["replicated", "sharded"])
@pytest.mark.parametrize(("modules", "chunk_dim"), ROOTS)
def test_every_root_has_two_chunks_in_each_direction(modules: str, chunk_dim: str, fsdp: bool):
    with fake_world(rank=0, world_size=2):
        step = cases.capture(cases.new_model(fsdp=fsdp), modules, chunk_dim)
        settle_chunk_annotations(step.graph_module)
        regions = ChunkRegions.of(step.graph_module).regions
    roots = [modules.replace("*", str(layer)) for layer in range(2)]
    assert [(r.root, r.direction, r.producer, r.num_chunks) for r in regions] == [
        (roots[0], "forward", "eager", 2),
        (roots[1], "forward", "eager", 2),
        (roots[1], "backward", "eager", 2),
        (roots[0], "backward", "eager", 2),
    ]
    for region in regions:
        assert all(len(region.launches(chunk)) >= 2 for chunk in range(2))
        assert region.splits
        assert region.materializations


def test_forward_and_backward_of_a_region_are_what_they_are():
    """Cut, two bodies, join; in backward two sums of each parameter's gradients besides."""
    with fake_world(rank=0, world_size=2):
        step = cases.capture(cases.new_model(fsdp=False), "layers.*.moe")
        settle_chunk_annotations(step.graph_module)
        regions = ChunkRegions.of(step.graph_module)
    forward = regions.find("layers.1.moe", "forward")
    backward = regions.find("layers.1.moe", "backward")
    assert forward is not None
    assert backward is not None
    lines = []
    for region in (forward, backward):
        lines.append(f"{region}")
        lines.append(f"  splits {' '.join(str(node.target) for node in region.splits)}")
        for chunk in range(2):
            launches = " ".join(node.target.__name__ for node in region.launches(chunk))
            lines.append(f"  chunk {chunk}: {launches}")
        lines.append(
            f"  joins {' '.join(sorted(str(node.target) for node in region.materializations))}"
        )
    assert_expected_inline(
        "\n".join(lines),
        """\
layers.1.moe forward
  splits aten.slice.Tensor aten.slice.Tensor
  chunk 0: all_to_all_single.default all_to_all_single.default all_to_all_single.default
  chunk 1: all_to_all_single.default all_to_all_single.default all_to_all_single.default
  joins aten.cat.default
layers.1.moe backward
  splits aten.slice.Tensor aten.slice.Tensor
  chunk 0: all_to_all_single.default all_to_all_single.default
  chunk 1: all_to_all_single.default all_to_all_single.default
  joins aten.add.Tensor aten.add.Tensor aten.add.Tensor aten.add.Tensor aten.cat.default""",
    )


def test_gathered_parameters_and_what_follows_from_them_alone_are_in_no_chunk():
    with fake_world(rank=0, world_size=2):
        step = cases.capture(cases.new_model(fsdp=True), "layers.*")
        settle_chunk_annotations(step.graph_module)
    gathers: dict[tuple[str, ...], int] = {}
    for node in step.graph_module.graph.nodes:
        collective = read_annotation(node, FsdpCollectiveAnnotation)
        if collective is None:
            continue
        assert read_annotation(node, ChunkAnnotation) is None
        if "all_gather" in str(node.target):
            names = collective.parameter_names
            gathers[names] = gathers.get(names, 0) + 1
    assert len(gathers) == len(list(SmallModel(2).parameters()))
    assert set(gathers.values()) == {1}


def test_directions_are_the_phases():
    with fake_world(rank=0, world_size=2):
        step = cases.capture(cases.new_model(fsdp=True), "layers.*")
        settle_chunk_annotations(step.graph_module)
    directions = [
        (phase_of(node), annotation.direction)
        for node in step.graph_module.graph.nodes
        if (annotation := read_annotation(node, ChunkAnnotation)) is not None
    ]
    assert set(directions) == {("forward", "forward"), ("backward", "backward")}


def test_settling_twice_changes_nothing():
    with fake_world(rank=0, world_size=2):
        step = cases.capture(cases.new_model(fsdp=True), "layers.*")
    settle_chunk_annotations(step.graph_module)
    before = [read_annotation(n, ChunkAnnotation) for n in step.graph_module.graph.nodes]
    settle_chunk_annotations(step.graph_module)
    assert before == [read_annotation(n, ChunkAnnotation) for n in step.graph_module.graph.nodes]


@pytest.mark.parametrize("policy", ["selective", "full_recompute"])
def test_what_is_recomputed_stays_in_its_chunk(policy: str):
    with fake_world(rank=0, world_size=2):
        step = cases.capture(cases.new_model(fsdp=True), "layers.*")
        settle_chunk_annotations(step.graph_module)
        before = ChunkRegions.of(step.graph_module).regions
        names = tuple(entry.name for entry in step.inputs[: step.num_static_inputs])
        context = PassContext(fake_mode=step.fake_mode, static_input_names=names)
        default_recipe(CompileConfig(memory_policy=policy), context=context).run(step.graph_module)
        after = ChunkRegions.of(step.graph_module).regions
    assert [str(region) for region in after] == [str(region) for region in before]
    assert any("_recomputed" in node.name for node in step.graph_module.graph.nodes)


def test_a_graph_without_chunks_stays_as_it_is():
    with fake_world(rank=0, world_size=2):
        step = cases.capture(cases.new_model(fsdp=False), None)
    before = [dict(node.meta) for node in step.graph_module.graph.nodes]
    settle_chunk_annotations(step.graph_module)
    assert before == [node.meta for node in step.graph_module.graph.nodes]
    assert ChunkRegions.of(step.graph_module).regions == ()
