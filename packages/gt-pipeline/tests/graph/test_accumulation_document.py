"""A step of several microbatches through JSON: it runs like what was cut, or is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accumulated_steps import cut, through_json, train_like_eager
from stage_models import CountingBlock
from test_accumulated_step import batches

from gt_passes import PassContext, PassManager, RemoveDeadCode
from gt_pipeline.graph import (
    AccumulatedStep,
    AccumulationGraphs,
    decode_accumulation,
    encode_accumulation,
)
from gt_trace import graph_text
from gt_trace.artifacts.mesh_axes import MeshAxes
from gt_trace.errors import ArtifactError
from gt_trace.stamping.compare_steps import step_differences
from gt_trace.testing import GlooWorkers


def rewritten(num_microbatches: int) -> tuple[CountingBlock, AccumulationGraphs]:
    torch.manual_seed(0)
    module = CountingBlock()
    graphs = cut(module, num_microbatches)
    for each in graphs.graphs:
        context = PassContext(
            fake_mode=graphs.traced.fake_mode, static_input_names=each.static_input_names
        )
        PassManager([RemoveDeadCode()], context=context).run(each.graph_module)
    return module, graphs


@pytest.mark.parametrize("num_microbatches", [2, 3])
def test_a_loaded_step_is_the_captured_one_and_computes_the_same_bits(
    num_microbatches: int,
) -> None:
    module, graphs = rewritten(num_microbatches)
    again = through_json(graphs, MeshAxes.of())

    assert step_differences(graphs.traced, again.traced) == []
    for field in (f.name for f in dataclasses.fields(graphs) if f.name.startswith("num_")):
        assert getattr(again, field) == getattr(graphs, field), field
    for ours, theirs in zip(graphs.graphs, again.graphs, strict=True):
        assert graph_text(theirs.graph_module) == graph_text(ours.graph_module)
        assert dataclasses.replace(theirs, graph_module=ours.graph_module) == ours
    loaded_module = CountingBlock()
    loaded_module.load_state_dict(module.state_dict())
    steps = AccumulatedStep(graphs, module), AccumulatedStep(again, loaded_module)
    results = [step(batches(num_microbatches)) for step in steps]
    for field in ("results", "gradients"):
        pairs = zip(*(getattr(each, field) for each in results), strict=True)
        assert all(
            torch.equal(*pair) if field == "gradients" else pair[0] == pair[1] for pair in pairs
        )
    assert torch.equal(module.seen, loaded_module.seen)


def test_a_loaded_step_gathers_and_reduces_once(two: GlooWorkers) -> None:
    captured, loaded = (two.run(train_like_eager, 3, is_stored) for is_stored in (False, True))
    assert [differing for differing, _ in loaded] == [[], []]
    assert loaded == captured


def _no_last(content: dict[str, Any]) -> None:
    del content["graphs"]["last"]


def _swapped(content: dict[str, Any]) -> None:
    graphs = content["graphs"]
    graphs["first"], graphs["last"] = graphs["last"], graphs["first"]


def _one_microbatch(content: dict[str, Any]) -> None:
    content["num_microbatches"] = 1


def _more_results(content: dict[str, Any]) -> None:
    content["num_results"] = 100


def _results_less(content: dict[str, Any]) -> None:
    content["num_results"] = 0


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_no_last, r"graphs of first are stored, and not of \['first', 'last'\]"),
        (_swapped, "the document describes the first microbatch wrongly"),
        (_one_microbatch, "a step of 1 microbatches is not cut"),
        (_more_results, "a step has 100 results of each microbatch"),
        (_results_less, "the document describes the last microbatch wrongly"),
    ],
)
def test_a_document_that_contradicts_itself_is_refused(
    damage: Callable[[dict[str, Any]], None], message: str
) -> None:
    _, graphs = rewritten(2)
    document = json.loads(json.dumps(encode_accumulation(graphs, MeshAxes.of()).document))
    damage(document["content"])
    with pytest.raises(ArtifactError, match=message):
        decode_accumulation(document, MeshAxes.of(), blob={}.__getitem__)
