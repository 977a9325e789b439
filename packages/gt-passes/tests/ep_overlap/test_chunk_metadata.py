"""Regions are read from metadata, and a graph whose metadata contradict themselves is refused."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from pass_graphs import capture, collectives
from torch.fx import GraphModule, Node

from gt_config.node_keys import (
    ChunkAnnotation,
    FsdpCollectiveAnnotation,
    PhaseAnnotation,
)
from gt_passes.ep_overlap import ChunkRegions, settle_chunk_annotations
from gt_passes.errors import ChunkMetadataError
from gt_trace import annotate, read_annotation, write_annotation


def of_chunk(
    chunk_id: int | None = None, *, role: str = "body", direction: str = "forward", **changes: str
) -> ChunkAnnotation:
    return ChunkAnnotation(
        **{
            "region_root": "moe",
            "role": role,
            "chunk_id": chunk_id,
            "direction": direction,
            "producer": "eager",
            **changes,
        }
    )


def two_chunks(group: str) -> GraphModule:
    """Cut, exchange in each chunk, join."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        with annotate(of_chunk(role="split_boundary")):
            parts = [x.narrow(0, 0, 2), x.narrow(0, 2, 2)]
        outputs = []
        for chunk, part in enumerate(parts):
            with annotate(of_chunk(chunk)):
                sent = collectives.all_to_all_single(part + 1, [2], [2], group)
                outputs.append(collectives.wait_tensor(sent) * 2)
        with annotate(of_chunk(role="materialization")):
            return torch.cat(outputs)

    return capture(forward, torch.zeros(4, 3))


def node(graph_module: GraphModule, name: str) -> Node:
    return next(each for each in graph_module.graph.nodes if each.name == name)


def refusal(graph_module: GraphModule) -> str:
    with pytest.raises(ChunkMetadataError) as caught:
        ChunkRegions.of(graph_module)
    return str(caught.value)


def test_reads_a_region(one_rank_group: str):
    regions = ChunkRegions.of(two_chunks(one_rank_group))
    (region,) = regions.regions
    assert regions.find("moe", "forward") is region
    assert regions.find("moe", "backward") is None
    assert [n.name for n in region.splits] == ["slice_1", "slice_2"]
    assert [[n.name for n in chunk] for chunk in region.chunks] == [
        ["add", "all_to_all_single", "wait_tensor", "mul"],
        ["add_1", "all_to_all_single_1", "wait_tensor_1", "mul_1"],
    ]
    assert [n.name for n in region.materializations] == ["cat"]
    assert [n.name for n in region.launches(1)] == ["all_to_all_single_1"]


def test_refuses_chunk_ids_with_a_gap(one_rank_group: str):
    graph_module = two_chunks(one_rank_group)
    for each in graph_module.graph.nodes:
        if read_annotation(each, ChunkAnnotation) == of_chunk(1):
            write_annotation(each, of_chunk(2))
    assert_expected_inline(
        refusal(graph_module),
        """\
the chunks of this graph cannot be scheduled:
  - moe forward: its chunks are 0, 2, with a gap (node add_1 is of chunk 2); ids go from 0 up""",
    )


def test_refuses_a_single_chunk(one_rank_group: str):
    graph_module = two_chunks(one_rank_group)
    for each in graph_module.graph.nodes:
        if read_annotation(each, ChunkAnnotation) == of_chunk(1):
            write_annotation(each, of_chunk(0))
    assert_expected_inline(
        refusal(graph_module),
        """\
the chunks of this graph cannot be scheduled:
  - moe forward: it has 1 chunk; a region has two or more""",
    )


def test_refuses_a_chunk_that_reads_another(one_rank_group: str):
    graph_module = two_chunks(one_rank_group)
    node(graph_module, "mul_1").args = (node(graph_module, "wait_tensor"), 2)
    assert_expected_inline(
        refusal(graph_module),
        """\
the chunks of this graph cannot be scheduled:
  - moe forward: node mul_1 of chunk 1 reads wait_tensor of chunk 0; chunks are independent of each other""",
    )


def test_refuses_a_launch_without_a_wait(one_rank_group: str):
    graph_module = two_chunks(one_rank_group)
    node(graph_module, "mul").args = (node(graph_module, "add"), 2)
    graph_module.graph.erase_node(node(graph_module, "wait_tensor"))
    assert_expected_inline(
        refusal(graph_module),
        """\
the chunks of this graph cannot be scheduled:
  - moe forward: node all_to_all_single of chunk 0 needs one wait, and has none""",
    )


def test_refuses_two_waits_for_one_launch(one_rank_group: str):
    graph_module = two_chunks(one_rank_group)
    wait = node(graph_module, "wait_tensor")
    with graph_module.graph.inserting_after(wait):
        second = graph_module.graph.node_copy(wait, lambda each: each)
    second.meta = dict(wait.meta)
    assert_expected_inline(
        refusal(graph_module),
        """\
the chunks of this graph cannot be scheduled:
  - moe forward: node all_to_all_single of chunk 0 needs one wait, and has wait_tensor, wait_tensor_2""",
    )


def test_refuses_a_wait_outside_of_its_chunk(one_rank_group: str):
    graph_module = two_chunks(one_rank_group)
    write_annotation(node(graph_module, "wait_tensor"), of_chunk(role="materialization"))
    assert_expected_inline(
        refusal(graph_module),
        """\
the chunks of this graph cannot be scheduled:
  - moe forward: node wait_tensor waits for all_to_all_single of chunk 0 outside of the chunk""",
    )


def test_refuses_chunks_that_launch_different_collectives(one_rank_group: str):
    graph_module = two_chunks(one_rank_group)
    node(graph_module, "mul").args = (node(graph_module, "add"), 2)
    for name in ("wait_tensor", "all_to_all_single"):
        graph_module.graph.erase_node(node(graph_module, name))
    assert_expected_inline(
        refusal(graph_module),
        """\
the chunks of this graph cannot be scheduled:
  - moe forward: chunks differ: chunk 0 launches none, and chunk 1 _c10d_functional.all_to_all_single.default""",
    )


def test_refuses_fsdp_nodes_wrong_directions_and_two_producers_at_once(one_rank_group: str):
    graph_module = two_chunks(one_rank_group)
    write_annotation(
        node(graph_module, "add"),
        FsdpCollectiveAnnotation(kind="unshard", parameter_names=("w",), mesh_axis="dp"),
    )
    write_annotation(node(graph_module, "mul"), PhaseAnnotation(phase="backward"))
    write_annotation(node(graph_module, "mul_1"), of_chunk(1, producer="graph"))
    assert_expected_inline(
        refusal(graph_module),
        """\
the chunks of this graph cannot be scheduled:
  - moe forward: node add belongs to FSDP, which runs once and in no chunk
  - moe forward: node mul is of the phase backward; was settle_chunk_annotations called?
  - moe forward: it has two producers (eager made slice_1, graph made mul_1); a region has one""",
    )


def test_refuses_a_backward_without_its_forward(one_rank_group: str):
    graph_module = two_chunks(one_rank_group)
    for each in graph_module.graph.nodes:
        found = read_annotation(each, ChunkAnnotation)
        if found is not None:
            write_annotation(each, of_chunk(found.chunk_id, role=found.role, direction="backward"))
    assert_expected_inline(
        refusal(graph_module),
        """\
the chunks of this graph cannot be scheduled:
  - moe backward: there is no such region forward""",
    )


def test_settling_takes_what_no_chunk_decides_out_of_chunks():
    def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with annotate(of_chunk(role="split_boundary")):
            parts = [x.narrow(0, 0, 2), x.narrow(0, 2, 2)]
        outputs = []
        for chunk, part in enumerate(parts):
            with annotate(of_chunk(chunk)):
                outputs.append(part @ weight.t())
        with annotate(of_chunk(role="materialization")):
            return torch.cat(outputs)

    graph_module = capture(forward, torch.zeros(4, 3), torch.zeros(3, 3))
    settle_chunk_annotations(graph_module)
    chunks = {
        each.name: None if found is None else found.chunk_id
        for each in graph_module.graph.nodes
        if each.op == "call_function"
        for found in [read_annotation(each, ChunkAnnotation)]
        if found is None or found.role == "body"
    }
    assert chunks == {"t": None, "mm": 0, "t_1": None, "mm_1": 1}


def test_settling_names_the_modules_that_left_no_node():
    graph_module = capture(lambda x: x + 1, torch.zeros(2))
    with pytest.raises(ChunkMetadataError) as caught:
        settle_chunk_annotations(graph_module, roots=("moe", "layers.7.moe"))
    assert_expected_inline(
        str(caught.value),
        """\
the chunks of this graph cannot be scheduled:
  - moe: it was to run in chunks, and left no node in the graph; was its forward called?
  - layers.7.moe: it was to run in chunks, and left no node in the graph; was its forward called?""",
    )


def test_settling_takes_modules_that_left_nodes():
    settle_chunk_annotations(two_chunks("0"), roots=("moe",))
