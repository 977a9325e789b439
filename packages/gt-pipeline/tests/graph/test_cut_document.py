"""Stages and microbatches as JSON: what is read again runs like what was captured, or is refused."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accumulated_steps import cut, through_json, train_like_eager
from exchange_stages import load_like_captured
from stage_models import ACTIVATION, Block, CountingBlock, Selecting, same_bits, squared_error
from test_accumulated_step import batches
from test_offloaded_stages import offload, trained
from torch import Tensor, nn
from torch.fx import GraphModule

from gt_passes import PassContext, PassManager, RemoveDeadCode
from gt_pipeline.errors import StageCaptureError
from gt_pipeline.graph import (
    MICROBATCHES_FORM,
    STAGE_FORM,
    AccumulatedStep,
    AccumulationGraphs,
    GraphPipelineStage,
    RewrittenStage,
    capture_stage,
)
from gt_pipeline.runner import MicrobatchInputs
from gt_trace import graph_text
from gt_trace.artifacts.encoded_document import DocumentForm
from gt_trace.artifacts.mesh_axes import MeshAxes
from gt_trace.artifacts.rank_differences import document_differences
from gt_trace.errors import ArtifactError
from gt_trace.stamping.compare_steps import step_differences
from gt_trace.testing import GlooWorkers

NO_AXES = MeshAxes.of()


def new_stage(module: nn.Module, **options: Any) -> GraphPipelineStage:
    options = {"stage_index": 1, "num_stages": 3, "activations": [ACTIVATION], **options}
    return GraphPipelineStage(module, **options)


def stored(stage: GraphPipelineStage) -> tuple[str, Any]:
    encoded = STAGE_FORM.encode(stage.rewritten, NO_AXES)
    return json.dumps(encoded.document), encoded.blobs.__getitem__


def loaded(stage: GraphPipelineStage, **options: Any) -> RewrittenStage:
    text, blob = stored(stage)
    return STAGE_FORM.decode(json.loads(text), NO_AXES, blob=blob, **options)


def test_capture_cut_and_changed_actions_come_back_as_they_were() -> None:
    stage = new_stage(CountingBlock(), transform=swap_additions)
    again = loaded(stage)
    new_stage(CountingBlock(), rewritten=again, transform=_fail)
    assert step_differences(stage.capture.traced, again.graphs.capture.traced) == []
    for name in set(stage.capture.__slots__) - {"traced"}:
        assert getattr(stage.capture, name) == getattr(again.graphs.capture, name), name
    for kind, action in stage.rewritten.actions.items():
        found = again.actions[kind]
        assert str(found.graph_module.graph) == str(action.graph_module.graph), kind
        assert (found.inputs, found.outputs) == (action.inputs, action.outputs), kind
    graphs = json.loads(stored(stage)[0])["content"]["graphs"]
    assert [kind for kind, graph in graphs.items() if graph is not None] == ["FORWARD"]


def swap_additions(graph_module: GraphModule, kind: str, context: PassContext) -> None:
    """A pass that changes forwards only: the operands of additions."""
    PassManager([RemoveDeadCode()], context=context).run(graph_module)
    if kind == "FORWARD":
        for node in graph_module.graph.find_nodes(
            op="call_function", target=torch.ops.aten.add.Tensor
        ):
            node.args = node.args[::-1]
        graph_module.recompile()


@pytest.mark.parametrize("prepare", [None, offload])
def test_a_loaded_stage_trains_with_whole_and_split_backwards_and_pairs(prepare: Any) -> None:
    captured = new_stage(_layers(), prepare_capture=prepare)
    again = new_stage(_layers(), rewritten=loaded(captured), prepare_capture=_fail)
    results = trained(captured), trained(again)
    assert len(results[0]) > 20
    assert same_bits(*results)


def _layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), CountingBlock(), Selecting())


def _fail(*_: object) -> None:
    raise AssertionError("something was captured or rewritten")


def test_stages_loaded_with_one_fake_mode_overlap() -> None:
    def run(stage: GraphPipelineStage, other: GraphPipelineStage) -> list[Tensor]:
        torch.manual_seed(0)
        rows = [(torch.randn(4, 8),) for _ in range(3)]
        other.forward(0, rows[0], MicrobatchInputs())
        outputs, gradients = stage.overlap(
            1,
            rows[1],
            MicrobatchInputs(),
            backward_stage=other,
            backward_kind="BACKWARD_INPUT",
            backward_microbatch=0,
            output_gradients=rows[2],
        )
        return [*outputs, *gradients]

    first = new_stage(_layers())
    second = new_stage(_layers(), stage_index=2, fake_mode=first.fake_mode)
    first_again = new_stage(_layers(), rewritten=loaded(first))
    shared = loaded(second, fake_mode=first_again.fake_mode)
    second_again = new_stage(_layers(), stage_index=2, rewritten=shared)
    assert same_bits(run(first, second), run(first_again, second_again))


def test_a_loaded_stage_captures_its_evaluation_when_it_is_asked_for() -> None:
    stage = new_stage(nn.Sequential(Block(), nn.Dropout(0.5)))
    module = nn.Sequential(Block(), nn.Dropout(0.5)).eval()
    again = new_stage(module.train(), rewritten=loaded(stage))
    module.eval()
    rows = torch.randn(4, 8)
    assert torch.equal(again.evaluate(0, (rows,), MicrobatchInputs())[0], module(rows))


def test_a_microbatch_may_state_a_default_that_was_left_out() -> None:
    class Scaled(Block):
        def forward(self, x: Tensor, scale: float = 0.5, *, name: str | None = None) -> Tensor:
            return super().forward(x) * scale

    again = new_stage(Scaled(), rewritten=loaded(new_stage(Scaled())))
    rows = (torch.randn(4, 8),)
    again.forward(0, rows, MicrobatchInputs(kwargs={"scale": float("0.5"), "name": None}))
    with pytest.raises(ValueError, match=r"kwargs\['scale'\] was not given when it was captured"):
        again.forward(1, rows, MicrobatchInputs(kwargs={"scale": 0.25}))


def test_gathers_reductions_and_exchanges_are_those_of_the_loading_rank(two: GlooWorkers) -> None:
    assert two.run(load_like_captured) == [(True, []), (True, [])]


class Layers(nn.Module):
    """Some layers of a model, by the names that the model has for them."""

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): Block() for number in numbers})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def test_equal_stages_have_one_document_but_for_names() -> None:
    first = new_stage(Layers(3, 4), num_stages=4)
    # Captured behind the first: autograd's numbers go on, and nothing knows of it.
    second = new_stage(Layers(5, 6), num_stages=4, stage_index=2, fake_mode=first.fake_mode)
    text, other = stored(first)[0], stored(second)[0]
    for number, instead in ((3, 5), (4, 6)):
        text = re.sub(rf"(?<=layers[._]){number}(?=[._\"])", str(instead), text)
    renamed = json.loads(text)
    renamed["content"]["facts"]["stage_index"] = 2
    assert document_differences(renamed, json.loads(other)) == []


def test_graphs_of_another_stage_are_refused() -> None:
    last = new_stage(
        Block(),
        stage_index=2,
        inputs=MicrobatchInputs(target=torch.randn(4, 8)),
        loss_fn=squared_error,
    )
    with pytest.raises(StageCaptureError) as raised:
        new_stage(Block(), num_stages=4, rewritten=loaded(last))
    assert str(raised.value) == (
        "stage 1 cannot run graphs that were made before:\n"
        "  - stage_index: 2 of the graphs, 1 of the stage\n"
        "  - num_stages: 3 of the graphs, 4 of the stage\n"
        "  - loss inside: True of the graphs, False of the stage"
    )


def test_an_evaluation_alone_is_no_stage_to_train() -> None:
    capture = capture_stage(
        Block(), stage_index=1, num_stages=3, activations=[ACTIVATION], differentiate=False
    )
    stage = new_stage(Block())
    only_forward = RewrittenStage(
        graphs=type(stage.graphs)(
            capture=capture, unshard=stage.graphs.unshard, forward=stage.graphs.forward
        ),
        actions={each.kind: each for each in (stage.graphs.unshard, stage.graphs.forward)},
    )
    with pytest.raises(StageCaptureError, match="a backward: False of the graphs, True of"):
        new_stage(Block(), rewritten=only_forward)


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
    again = through_json(graphs, NO_AXES)

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


Content = dict[str, Any]


def stage_document() -> Any:
    return json.loads(_stored_with_a_changed_forward()[0])


def microbatches_document() -> Any:
    _, graphs = rewritten(2)
    return json.loads(json.dumps(MICROBATCHES_FORM.encode(graphs, NO_AXES).document))


def _results_swapped(content: Content) -> None:
    results = content["facts"]["results"]
    results[0], results[1] = results[1], results[0]


def _one_result_less(content: Content) -> None:
    content["facts"]["results"].pop()


def _another_action(content: Content) -> None:
    content["graphs"]["OVERLAP_F_B"] = content["graphs"]["FORWARD"]


def _backward_for_forward(content: Content) -> None:
    content["graphs"]["FULL_BACKWARD"] = content["graphs"]["FORWARD"]


def _unknown_slot(content: Content) -> None:
    content["facts"]["results"][0][0] = "saved value"


def _no_last(content: Content) -> None:
    del content["graphs"]["last"]


def _swapped(content: Content) -> None:
    graphs = content["graphs"]
    graphs["first"], graphs["last"] = graphs["last"], graphs["first"]


def _one_microbatch(content: Content) -> None:
    content["facts"]["num_microbatches"] = 1


def _more_results(content: Content) -> None:
    content["facts"]["num_results"] = 100


def _results_less(content: Content) -> None:
    content["facts"]["num_results"] = 0


def _another_form(content: Content) -> None:
    content["form"] = "training step"


@pytest.mark.parametrize(
    ("form", "damage", "message"),
    [
        (STAGE_FORM, _results_swapped, "a stage that cannot be: .*cannot be cut into actions"),
        (STAGE_FORM, _one_result_less, "results are described"),
        (STAGE_FORM, _another_action, r"graphs of .*OVERLAP_F_B are stored, and not of \['UNSHARD"),
        (STAGE_FORM, _backward_for_forward, "the FULL_BACKWARD graph of stage 1 wrongly"),
        (STAGE_FORM, _unknown_slot, "a result of a stage is a 'saved value'"),
        (STAGE_FORM, _another_form, "is of a 'training step', and not of a 'pipeline stage'"),
        (
            MICROBATCHES_FORM,
            _no_last,
            r"graphs of first are stored, and not of \['first', 'last'\]",
        ),
        (MICROBATCHES_FORM, _swapped, "the first graph of a step of microbatches wrongly"),
        (MICROBATCHES_FORM, _one_microbatch, "a step of 1 microbatches is not cut"),
        (MICROBATCHES_FORM, _more_results, "a step has 100 results of each microbatch"),
        (MICROBATCHES_FORM, _results_less, "the last graph of a step of microbatches wrongly"),
    ],
)
def test_a_document_that_contradicts_itself_is_refused(
    form: DocumentForm[Any], damage: Callable[[Content], None], message: str
) -> None:
    document = stage_document() if form is STAGE_FORM else microbatches_document()
    damage(document["content"])
    with pytest.raises(ArtifactError, match=message):
        form.decode(document, NO_AXES, blob={}.__getitem__)


_STORED: list[tuple[str, Any]] = []


def _stored_with_a_changed_forward() -> tuple[str, Any]:
    if not _STORED:
        _STORED.append(stored(new_stage(Block(), transform=swap_additions)))
    return copy.deepcopy(_STORED[0])


def test_a_whole_graph_that_lies_about_shapes_is_refused() -> None:
    text, blob = _stored_with_a_changed_forward()
    document = json.loads(text)
    nodes = document["content"]["whole"]["graph"]["nodes"]
    product = next(n for n in nodes if n[0] == "c" and n[1].startswith(("addmm", "mm")))
    other = next(n for n in nodes if n[0] == "p")
    value = next(pair for pair in product[5] if pair[0] == "val")
    value[1] = next(pair[1] for pair in other[5] if pair[0] == "val")
    with pytest.raises(ArtifactError, match="describes the whole graph of stage 1 wrongly"):
        STAGE_FORM.decode(document, NO_AXES, blob=blob)
