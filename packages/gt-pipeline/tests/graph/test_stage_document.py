"""A stage's graphs as JSON: what is read again runs like what was captured, or is refused."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exchange_stages import load_like_captured
from stage_models import ACTIVATION, Block, CountingBlock, Selecting, same_bits, squared_error
from test_offloaded_stages import offload, trained
from torch import Tensor, nn
from torch.fx import GraphModule

from gt_passes import PassContext, PassManager, RemoveDeadCode
from gt_pipeline.errors import StageCaptureError
from gt_pipeline.graph import (
    GraphPipelineStage,
    RewrittenStage,
    capture_stage,
    decode_stage,
    encode_stage,
)
from gt_pipeline.runner import MicrobatchInputs
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
    encoded = encode_stage(stage.rewritten, NO_AXES)
    return json.dumps(encoded.document), encoded.blobs.__getitem__


def loaded(stage: GraphPipelineStage, **options: Any) -> RewrittenStage:
    text, blob = stored(stage)
    return decode_stage(json.loads(text), NO_AXES, blob=blob, **options)


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
    changed = json.loads(stored(stage)[0])["content"]["changed_actions"]
    assert list(changed) == ["FORWARD"]


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
    renamed["content"]["stage_index"] = 2
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


def _results_swapped(content: dict[str, Any]) -> None:
    results = content["results"]
    results[0], results[1] = results[1], results[0]


def _one_result_less(content: dict[str, Any]) -> None:
    content["results"].pop()


def _another_action(content: dict[str, Any]) -> None:
    content["changed_actions"]["OVERLAP_F_B"] = content["changed_actions"]["FORWARD"]


def _backward_for_forward(content: dict[str, Any]) -> None:
    content["changed_actions"]["FULL_BACKWARD"] = content["changed_actions"]["FORWARD"]


def _unknown_slot(content: dict[str, Any]) -> None:
    content["results"][0][0] = "saved value"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_results_swapped, "a stage that cannot be: .*cannot be cut into actions"),
        (_one_result_less, "results are described"),
        (_another_action, "no graphs of OVERLAP_F_B"),
        (_backward_for_forward, "describes FULL_BACKWARD of stage 1 wrongly"),
        (_unknown_slot, "a result of a stage is a 'saved value'"),
    ],
)
def test_a_document_that_contradicts_itself_is_refused(
    damage: Callable[[dict[str, Any]], None], message: str
) -> None:
    text, blob = _stored_with_a_changed_forward()
    document = json.loads(text)
    damage(document["content"])
    with pytest.raises(ArtifactError, match=message):
        decode_stage(document, NO_AXES, blob=blob)


_STORED: list[tuple[str, Any]] = []


def _stored_with_a_changed_forward() -> tuple[str, Any]:
    if not _STORED:
        _STORED.append(stored(new_stage(Block(), transform=swap_additions)))
    return copy.deepcopy(_STORED[0])


def test_a_joint_graph_that_lies_about_shapes_is_refused() -> None:
    text, blob = _stored_with_a_changed_forward()
    document = json.loads(text)
    nodes = document["content"]["joint"]["graph"]["nodes"]
    product = next(n for n in nodes if n[0] == "c" and n[1].startswith(("addmm", "mm")))
    other = next(n for n in nodes if n[0] == "p")
    value = next(pair for pair in product[5] if pair[0] == "val")
    value[1] = next(pair[1] for pair in other[5] if pair[0] == "val")
    with pytest.raises(ArtifactError, match="describes the joint graph of stage 1 wrongly"):
        decode_stage(document, NO_AXES, blob=blob)
