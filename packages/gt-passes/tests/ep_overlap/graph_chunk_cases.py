"""What gloo workers run for the tests of graph chunks."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from inductor_cases import COMPILER
from moe_steps import StepCase, capture, make_inputs, make_model
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.fx import GraphModule

from gt_config import EpChunkDim
from gt_config.node_keys import ChunkAnnotation
from gt_passes import (
    ChunkModules,
    CompileWholeGraph,
    MergeWaits,
    PassContext,
    PassManager,
    ScheduleEpOverlap,
)
from gt_passes.ep_overlap import (
    ChunkRegions,
    check_joins,
    chunk_forwards,
    chunk_graph,
    settle_chunk_annotations,
)
from gt_passes.ep_overlap.graph_chunks import Join
from gt_trace import TracedStep, read_annotation

Place = tuple[str, str, str, int | None]
"""Region, direction, role and chunk of a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What one rank saw."""

    worst: float
    """Largest relative difference of loss and gradients from those of the unchunked graph."""

    equal_buffers: bool
    counts: dict[str, int]
    """What the pass reports."""

    places: frozenset[Place]
    unannotated: tuple[str, ...]
    """Nodes that read a body and that nothing is said about, by operator."""


def chunk(
    step: TracedStep,
    modules: str,
    chunk_dim: EpChunkDim,
    num_chunks: int,
    *,
    preserve_eager_order: bool = False,
) -> Any:
    """Chunk a captured step through a verifying pass manager; the report of the pass."""
    chunk_modules = ChunkModules(
        module_patterns=(modules,),
        chunk_dim=chunk_dim,
        num_chunks=num_chunks,
        preserve_eager_order=preserve_eager_order,
    )
    manager = PassManager([MergeWaits(), chunk_modules], context=PassContext.of_step(step))
    return manager.run(step.graph_module).records[-1].report


def places(graph_module: GraphModule) -> frozenset[Place]:
    found = (read_annotation(node, ChunkAnnotation) for node in graph_module.graph.nodes)
    return frozenset(
        (each.region_root, each.direction, each.role, each.chunk_id)
        for each in found
        if each is not None
    )


def compare_with_whole(
    case: StepCase, modules: str, chunk_dim: EpChunkDim, num_chunks: int
) -> Comparison:
    """Chunked against unchunked, in one run."""
    inputs = make_inputs(case)
    whole, chunked = make_model(case), make_model(case)
    expected = capture(whole, inputs).bind(whole)(*inputs)
    step = capture(chunked, inputs)
    report = chunk(step, modules, chunk_dim, num_chunks)
    ChunkRegions.of(step.graph_module)  # raises what the scheduler would
    found = step.bind(chunked)(*inputs)
    loose = [
        str(node.target)
        for node in step.graph_module.graph.nodes
        if read_annotation(node, ChunkAnnotation) is None
        and any(
            annotation is not None and annotation.role == "body"
            for source in node.all_input_nodes
            for annotation in [read_annotation(source, ChunkAnnotation)]
        )
    ]
    return Comparison(
        worst=max(map(relative_difference, expected, found)),
        equal_buffers=all(map(torch.equal, whole.buffers(), chunked.buffers())),
        counts=dict(report.counts),
        places=places(step.graph_module),
        unannotated=tuple(loose),
    )


def relative_difference(expected: torch.Tensor, found: torch.Tensor) -> float:
    return float((expected - found).norm() / expected.norm().clamp_min(1e-20))


def compare_with_eager(
    modules: str, chunk_dim: EpChunkDim
) -> tuple[list[bool], frozenset[Place], frozenset[Place]]:
    """Which of loss and gradients are bitwise those of the eager producer; the metadata of both."""
    case = StepCase()
    inputs = make_inputs(case)
    eager, chunked = make_model(case), make_model(case)
    with chunk_forwards(eager, modules=modules, chunk_dim=chunk_dim):
        eager_step = capture(eager, inputs)
    settle_chunk_annotations(eager_step.graph_module)
    step = capture(chunked, inputs)
    chunk(step, modules, chunk_dim, 2, preserve_eager_order=True)
    expected, found = eager_step.bind(eager)(*inputs), step.bind(chunked)(*inputs)
    return (
        list(map(torch.equal, expected, found)),
        places(eager_step.graph_module),
        places(step.graph_module),
    )


def compile_chunks(modules: str) -> tuple[float, list[int], list[int]]:
    """Chunks, scheduled and then compiled in one program, against the unchunked graph.

    Returns:
        The largest relative difference of loss and gradients, and for each exchange of tokens the
        number of products between its launch and its wait, in the graph and in the program.
    """
    case = StepCase()
    inputs = make_inputs(case)
    whole, chunked = make_model(case), make_model(case)
    expected = capture(whole, inputs).bind(whole)(*inputs)
    step = capture(chunked, inputs)
    chunk(step, modules, "batch", 2)
    PassManager([ScheduleEpOverlap()], context=PassContext.of_step(step)).run(step.graph_module)
    in_graph = _products_behind_exchanges(step.graph_module.code)
    manager = PassManager([CompileWholeGraph(compiler=COMPILER)], context=PassContext.of_step(step))
    with fresh_cache():
        _, (program,) = run_and_get_code(manager.run, step.graph_module)
        found = step.bind(chunked)(*inputs)
    in_program = _products_behind_exchanges(program[program.index("def call(") :])
    return max(map(relative_difference, expected, found)), in_graph, in_program


def _products_behind_exchanges(code: str) -> list[int]:
    """Of each exchange whose sizes depend on data, in the order of their launches."""
    launched: dict[str, int] = {}
    found: dict[str, int] = {}
    num_products = 0
    for line in code.splitlines():
        num_products += bool(re.search(r"\b(\w*mm|\w*mm\.default)\(", line))
        if launch := re.search(r"(\w+) = .*all_to_all_single\w*(\.default)?\(\w+, \[[a-z_]", line):
            launched[launch[1]] = num_products
            continue
        wait = re.search(r"wait_tensor\w*(?:\.default)?\((\w+)\)", line)
        if wait and wait[1] in launched:
            found[wait[1]] = num_products - launched[wait[1]]
    assert found.keys() == launched.keys()
    return [found[name] for name in launched]


def joins_checked() -> tuple[int, list[str], list[str]]:
    """Number of joins, those that are wrong, and those found wrong when two are mixed up."""
    case = StepCase()
    inputs = make_inputs(case)
    model = make_model(case)
    step = capture(model, inputs)
    unchunked = copy.deepcopy(step.graph_module)
    chunks = chunk_graph(
        step.graph_module,
        patterns=["layers.*.moe"],
        fake_mode=step.fake_mode,
        num_static_inputs=step.num_static_inputs,
    )
    step.graph_module.recompile()
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    values = [tensors[entry.name] for entry in step.inputs[: step.num_static_inputs]]
    values = [value.detach() for value in values] + list(inputs)

    def wrong(joins: tuple[Join, ...]) -> list[str]:
        found = check_joins(unchunked, step.graph_module, joins, values)
        return [each.join.unchunked for each in found]

    first, second = [join for join in chunks.joins if join.kind == "cat"][:2]
    mixed = (replace(first, joined=second.joined),)
    return len(chunks.joins), wrong(chunks.joins), wrong(mixed)
