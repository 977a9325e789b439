"""A captured step that runs modules in chunks computes what it computed whole."""

from __future__ import annotations

from collections.abc import Iterator

import graph_chunk_cases as cases
import pytest
from moe_steps import NUM_LAYERS, StepCase

from gt_trace.testing import GlooWorkers


@pytest.fixture(scope="module")
def workers() -> Iterator[GlooWorkers]:
    with GlooWorkers(2, timeout=600) as started:
        yield started


@pytest.mark.parametrize(
    ("case", "modules", "chunk_dim", "num_chunks"),
    [
        (StepCase(), "layers.*.moe", "batch", 2),
        (StepCase(), "layers.*", "batch", 2),
        (StepCase(), "layers.*.moe", "seq", 2),
        (StepCase(batch=5), "layers.*", "batch", 3),
        (StepCase(sequence=7), "layers.*.moe", "seq", 3),
        (StepCase(closed_experts=(1,)), "layers.*.moe", "batch", 2),
        (StepCase(closed_experts=(2, 3)), "layers.*", "batch", 2),
    ],
    ids=[
        "experts-batch",
        "layers-batch",
        "experts-sequence",
        "uneven-batch-in-3",
        "uneven-sequence-in-3",
        "expert-without-token",
        "rank-without-token",
    ],
)
def test_chunks_give_what_the_whole_gives(
    workers: GlooWorkers, case: StepCase, modules: str, chunk_dim: str, num_chunks: int
):
    for seen in workers.run(cases.compare_with_whole, case, modules, chunk_dim, num_chunks):
        assert seen.worst < 1e-5
        assert seen.equal_buffers
        num_regions = 2 * NUM_LAYERS
        # Layers that follow each other pass their chunks along.
        num_joined = 2 if modules == "layers.*" else num_regions
        assert seen.counts["regions"] == num_regions
        assert seen.counts["splits"] == seen.counts["concatenations"] == num_joined
        bodies = {
            (region.replace("*", str(layer)), direction, "body", chunk)
            for region in [modules]
            for layer in range(NUM_LAYERS)
            for direction in ("forward", "backward")
            for chunk in range(num_chunks)
        }
        assert {place for place in seen.places if place[2] == "body"} == bodies
        # What reads a chunk is the chunk's, or makes it whole: sums alone, which exist already
        # in the first chunk, may be read as they are.
        assert seen.unannotated == ()


@pytest.mark.slow  # compiles with Inductor
def test_one_compiled_program_computes_the_same_and_hides_less(workers: GlooWorkers):
    """Which is why gt-config refuses the two together: a reason that ends when this fails."""
    for worst, in_graph, in_program in workers.run(cases.compile_chunks, "layers.*"):
        assert worst < 1e-4
        assert len(in_graph) == NUM_LAYERS * 2 * 2 * 2  # there and back, both phases, two chunks
        assert sum(num_products > 0 for num_products in in_graph) > len(in_graph) // 2
        assert len(in_program) == len(in_graph)
        assert sum(in_program) < sum(in_graph)


@pytest.mark.parametrize(
    ("modules", "chunk_dim"),
    [("layers.*.moe", "batch"), ("layers.*", "batch"), ("layers.*.moe", "seq")],
)
def test_eager_order_gives_the_bits_and_the_metadata_of_the_eager_producer(
    workers: GlooWorkers, modules: str, chunk_dim: str
):
    for equal, eager, graph in workers.run(cases.compare_with_eager, modules, chunk_dim):
        assert all(equal)
        # Eagerly, each layer joins its chunks and the next cuts them again.
        assert {place for place in eager if place[2] == "body"} == {
            place for place in graph if place[2] == "body"
        }
        assert graph <= eager
        if modules != "layers.*":
            assert graph == eager


def test_joins_are_the_unchunked_values_and_a_wrong_one_is_found(workers: GlooWorkers):
    for num_joins, wrong, mixed_up in workers.run(cases.joins_checked):
        assert num_joins > 2 * NUM_LAYERS
        assert wrong == []
        assert len(mixed_up) == 1
