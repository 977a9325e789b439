"""A stage of graphs keeps the protocol, and computes what eager stages do, in every bit."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from stage_models import ACTIVATION, Block, CountingBlock, ReadsWritten, squared_error
from torch import Tensor, nn

from gt_passes import Verifier
from gt_pipeline.errors import StageGraphError, StageInputError, StageOrderError
from gt_pipeline.graph import GraphPipelineStage
from gt_pipeline.runner import MicrobatchInputs, PipelineStageGraphs

NOTHING = MicrobatchInputs()


def middle(module: nn.Module, **options: Any) -> GraphPipelineStage:
    options = {"stage_index": 1, "num_stages": 3, "activations": [ACTIVATION], **options}
    return GraphPipelineStage(module, **options)


def rows() -> Tensor:
    return torch.randn(4, 8)


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 8)

    def forward(self, tokens: Tensor, *, shift: Tensor) -> Tensor:
        return self.table(tokens) + shift


def microbatch() -> MicrobatchInputs:
    return MicrobatchInputs(
        args=(torch.randint(0, 5, (4,)),),
        kwargs={"shift": torch.randn(8), "unknown": object()},
        target=rows(),
    )


@pytest.fixture(scope="module")
def block() -> GraphPipelineStage:
    return middle(Block())


def test_three_stages_compute_what_the_model_does() -> None:
    modules = [Embedding(), CountingBlock(), CountingBlock()]
    inputs = [microbatch() for _ in range(3)]
    stages: list[GraphPipelineStage] = []
    for index, module in enumerate(modules):
        stages.append(
            GraphPipelineStage(
                module,
                stage_index=index,
                num_stages=3,
                activations=stages[-1].output_signature if stages else (),
                inputs=inputs[0],
                loss_fn=squared_error if index == 2 else None,
            )
        )
    results = [_forward_through(stages, number, each) for number, each in enumerate(inputs)]
    for number in range(3):
        gradients: tuple[Tensor, ...] = (torch.tensor(1 / 3),)
        for stage in reversed(stages):
            gradients = stage.backward_input(number, gradients)
        assert gradients == ()
    for number in range(3):
        for stage in stages:
            stage.backward_weight(number)
    found: dict[str, Tensor] = {}
    for stage in stages:
        stage.reduce_gradients()
        found |= {f"{stage.stage_index}.{n}": g for n, g in stage.gradients().items()}
    counts = [modules[1].seen.clone(), modules[2].seen.clone()]
    for module in modules[1:]:
        module.seen.zero_()
    for number, each in enumerate(inputs):
        x = modules[0](*each.args, shift=each.kwargs["shift"])
        loss = squared_error(modules[2](modules[1](x)), each.target)
        (loss / 3).backward()
        assert torch.equal(results[number], loss)
    expected = {n: p.grad for n, p in nn.ModuleList(modules).named_parameters()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert torch.equal(counts[0], modules[1].seen)
    assert torch.equal(counts[1], modules[2].seen)


def _forward_through(
    stages: list[GraphPipelineStage], number: int, inputs: MicrobatchInputs
) -> Tensor:
    activations: tuple[Tensor, ...] = ()
    for stage in stages:
        activations = stage.forward(number, activations, inputs)
    return activations[0]


def test_a_backward_reads_a_buffer_as_its_own_forward_left_it() -> None:
    stage = middle(ReadsWritten())
    for number in range(3):
        stage.forward(number, (rows(),), NOTHING)
    for number, scale in ((1, 3.0), (0, 2.0), (2, 4.0)):
        (gradient,) = stage.full_backward(number, (torch.ones(4, 8),))
        assert torch.equal(gradient, torch.full((4, 8), scale))


def test_it_is_what_the_runner_asks_for(block: GraphPipelineStage) -> None:
    assert isinstance(block, PipelineStageGraphs)
    assert block.input_signature == block.output_signature == (ACTIVATION,)
    assert list(block.parameters()) == [name for name, _ in Block().named_parameters()]


def test_saved_values_are_freed_by_their_backward(block: GraphPipelineStage) -> None:
    saved = _saved_by_a_forward(block)
    assert block.num_saved == 1
    block.backward_input(0, (rows(),))
    assert block.num_saved == 1
    block.backward_weight(0)
    gc.collect()
    assert block.num_saved == 0
    assert [each() for each in saved if each() is not None] == []
    block.discard()


def _saved_by_a_forward(stage: GraphPipelineStage) -> list[weakref.ref[Tensor]]:
    stage.forward(0, (rows(),), NOTHING)
    return [weakref.ref(each) for each in stage._saved[0]]


def test_saved_values_hold_no_parameter(block: GraphPipelineStage) -> None:
    block.forward(0, (rows(),), NOTHING)
    parameters = {p.untyped_storage().data_ptr() for p in block.parameters().values()}
    saved = {each.untyped_storage().data_ptr() for each in block._saved[0]}
    block.discard()
    assert not parameters & saved


def test_evaluation_keeps_nothing_and_follows_the_modules_mode() -> None:
    module = nn.Sequential(Block(), nn.Dropout(0.5))
    stage = middle(module)
    x = rows()
    module.eval()
    (evaluated,) = stage.evaluate(0, (x,), NOTHING)
    assert stage.num_saved == 0
    with torch.no_grad():
        assert torch.equal(evaluated, module(x))
    module.train()
    torch.manual_seed(3)
    (trained,) = stage.evaluate(0, (x,), NOTHING)
    torch.manual_seed(3)
    with torch.no_grad():
        assert torch.equal(trained, module(x))


def test_a_replaced_parameter_is_read_at_the_next_step(block: GraphPipelineStage) -> None:
    stage = middle(Block())
    x = rows()
    stage.forward(0, (x,), NOTHING)
    stage.discard()
    stage._module.down.bias = nn.Parameter(torch.ones(8))
    (after,) = stage.forward(0, (x,), NOTHING)
    with torch.no_grad():
        assert torch.equal(after, stage._module(x))


def test_discard_forgets_a_step_that_failed() -> None:
    stage = middle(Block())
    for number in range(2):
        stage.forward(number, (rows(),), NOTHING)
    stage.full_backward(0, (rows(),))
    stage.discard()
    stage.reduce_gradients()
    assert stage.gradients() == {}
    assert stage.num_saved == 0
    x, gradient = rows(), rows()
    stage.forward(0, (x,), NOTHING)
    stage.full_backward(0, (gradient,))
    stage.reduce_gradients()
    stage._module(x).backward(gradient)
    for name, parameter in stage._module.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(stage.gradients()[name], parameter.grad)


def test_discard_forgets_what_is_between_the_halves_of_a_backward(
    block: GraphPipelineStage,
) -> None:
    block.forward(0, (rows(),), NOTHING)
    block.backward_input(0, (rows(),))
    block.discard()
    assert block.num_saved == 0
    with pytest.raises(StageOrderError, match=r"without its BACKWARD_INPUT; it holds \[\]"):
        block.backward_weight(0)


def test_evaluation_reads_a_parameter_that_was_replaced_since_the_last_one() -> None:
    module = Block()
    stage = middle(module)
    x = rows()
    stage.evaluate(0, (x,), NOTHING)
    module.down.bias = nn.Parameter(torch.ones(8))
    (found,) = stage.evaluate(0, (x,), NOTHING)
    with torch.no_grad():
        assert torch.equal(found, module(x))


def test_a_parameter_without_gradient_is_missing() -> None:
    module = Block()
    module.unused = nn.Parameter(torch.zeros(2))
    module.norm.requires_grad_(False)
    stage = middle(module)
    stage.forward(0, (rows(),), NOTHING)
    stage.full_backward(0, (rows(),))
    stage.reduce_gradients()
    assert sorted(stage.gradients()) == ["down.bias", "down.weight", "up.bias", "up.weight"]


def test_a_transform_edits_every_graph_that_computes() -> None:
    kinds = []

    def note(graph_module: torch.fx.GraphModule, kind: str, context: Any) -> None:
        kinds.append(kind)
        assert Verifier().verify(graph_module).problems == ()

    stage = middle(Block(), transform=note)
    assert kinds == ["FORWARD", "FULL_BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT"]
    stage.prepare_overlap(stage, "FULL_BACKWARD")
    assert kinds[-1] == "OVERLAP_F_B"


def test_refuses_a_transform_that_breaks_a_graph() -> None:
    def lose_an_output(graph_module: torch.fx.GraphModule, kind: str, context: Any) -> None:
        if kind == "BACKWARD_WEIGHT":
            output = graph_module.graph.output_node()
            output.args = (output.args[0][:-1],)

    with pytest.raises(StageGraphError) as caught:
        middle(Block(), transform=lose_an_output)
    text = str(caught.value)
    assert text.startswith("the transform broke BACKWARD_WEIGHT of stage 1:\n  - ")
    assert "the number of outputs changed" in text


def test_refuses_calls_in_an_impossible_order(block: GraphPipelineStage) -> None:
    with pytest.raises(StageOrderError) as caught:
        block.full_backward(3, (rows(),))
    assert str(caught.value) == (
        "stage 1 was asked for FULL_BACKWARD of microbatch 3 without its FORWARD; it holds []"
    )
    block.forward(0, (rows(),), NOTHING)
    with pytest.raises(StageOrderError) as caught:
        block.forward(0, (rows(),), NOTHING)
    assert str(caught.value) == (
        "stage 1 was asked for FORWARD of microbatch 0 again, before its backward; discard() ends "
        "a step that failed"
    )
    with pytest.raises(StageOrderError) as caught:
        block.backward_weight(0)
    assert str(caught.value) == (
        "stage 1 was asked for BACKWARD_WEIGHT of microbatch 0 without its BACKWARD_INPUT; it "
        "holds []"
    )
    block.discard()


def test_refuses_a_microbatch_that_differs_and_lists_how(block: GraphPipelineStage) -> None:
    with pytest.raises(StageInputError) as caught:
        block.forward(0, (torch.zeros(3, 8, dtype=torch.float64),), NOTHING)
    assert str(caught.value) == (
        "this microbatch is not as the one that stage 1 was captured with:\n"
        "  - activations[0]: torch.float64 [3, 8], captured as torch.float32 [4, 8]"
    )
    with pytest.raises(StageInputError) as caught:
        block.forward(0, (), NOTHING)
    assert "0 activations, captured with 1" in str(caught.value)
    block.forward(0, (rows(),), NOTHING)
    with pytest.raises(StageInputError) as caught:
        block.full_backward(0, ())
    assert str(caught.value) == (
        "FULL_BACKWARD of stage 1 cannot run:\n  - 0 output gradients, and 1 outputs require one"
    )
    assert block.num_saved == 1, "a refused call leaves what is saved"
    block.discard()


def test_refuses_arguments_that_differ_and_lists_how() -> None:
    stage = GraphPipelineStage(Embedding(), stage_index=0, num_stages=3, inputs=microbatch())
    with pytest.raises(StageInputError) as caught:
        stage.forward(0, (), MicrobatchInputs(args=(torch.zeros(4, dtype=torch.int64),)))
    assert "kwargs['shift'] is missing" in str(caught.value)
    wrong = MicrobatchInputs(args=(torch.zeros(5, dtype=torch.int64),), kwargs={"shift": 1.0})
    with pytest.raises(StageInputError) as caught:
        stage.forward(0, (), wrong)
    assert str(caught.value) == (
        "this microbatch is not as the one that stage 0 was captured with:\n"
        "  - args[0]: torch.int64 [5], captured as torch.int64 [4]\n"
        "  - kwargs['shift']: 1.0, captured as torch.float32 [8]"
    )


def test_refuses_to_overlap_with_a_stage_of_another_kind(block: GraphPipelineStage) -> None:
    with pytest.raises(TypeError, match="overlaps with another, and this is a SimpleNamespace"):
        block.overlap(
            0,
            (rows(),),
            NOTHING,
            backward_stage=__import__("types").SimpleNamespace(),
            backward_kind="FULL_BACKWARD",
            backward_microbatch=0,
            output_gradients=(),
        )
