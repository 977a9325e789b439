"""One runtime for every degree: a pipeline of one rank needs no process group."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from eager_stage import EagerStage
from runner_cases import schedule
from torch import Tensor, nn
from toy_pipeline import (
    MICROBATCH_SIZE,
    NUM_MICROBATCHES,
    batch,
    eager_stages,
    gradients_of,
    train_in_one_process,
)

from gt_pipeline.errors import (
    MicrobatchError,
    PipelineStepError,
    RunnerClosedError,
    RunnerSetupError,
    StageOutputError,
)
from gt_pipeline.runner import ActivationSignature, GraphPPRunner, MicrobatchInputs
from gt_pipeline.runner.stage_protocol import Tensors
from gt_pipeline.schedules import Schedule, schedule_of, write_chrome_trace


def _planned(name: str = "Interleaved1F1B") -> Schedule:
    return schedule(name, num_ranks=1)


def _stages() -> list[EagerStage]:
    return eager_stages(_planned(), 0)


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_one_rank_computes_what_eager_does(name: str) -> None:
    planned = _planned(name)
    stages = eager_stages(planned, 0)
    tokens, target = batch()
    losses = GraphPPRunner(stages, planned).step(tokens, target=target).losses
    expected = train_in_one_process(planned.num_stages)
    assert torch.equal(torch.stack(losses), torch.stack(expected.losses))
    gradients = gradients_of([stage.module for stage in stages])
    assert all(torch.equal(gradients[name], each) for name, each in expected.gradients.items())


def test_gradients_of_the_sum_of_losses_if_asked() -> None:
    stages = _stages()
    tokens, target = batch()
    GraphPPRunner(stages, _planned(), loss_reduction="sum").step(tokens, target=target)
    expected = train_in_one_process(2, loss_gradient=1.0).gradients
    gradients = gradients_of([stage.module for stage in stages])
    assert all(torch.equal(gradients[name], each) for name, each in expected.items())


def test_a_mistyped_reduction_is_refused() -> None:
    with pytest.raises(RunnerSetupError, match="loss_reduction is 'means'; allowed: 'sum' or 'mea"):
        GraphPPRunner(_stages(), _planned(), loss_reduction="means")  # type: ignore[arg-type]


def test_a_gradient_that_does_not_fit_its_parameter_fails_the_step_before_any_is_added() -> None:
    stages = _stages()
    tokens, target = batch()
    runner = GraphPPRunner(stages, _planned())
    gradients = stages[1].gradients
    stages[1].gradients = lambda: {  # type: ignore[method-assign] # only of this object
        name: each.double() if name == "head.weight" else each for name, each in gradients().items()
    }
    message = r"stage 1: of head\.weight, float32\[11, 16\] on cpu, is float64\[11, 16\] on cpu"
    with pytest.raises(PipelineStepError, match=message) as caught:
        runner.step(tokens, target=target)
    assert isinstance(caught.value.__cause__, StageOutputError)
    assert not gradients_of([stage.module for stage in stages])


def test_a_failed_step_keeps_no_activations() -> None:
    stages = _stages()
    tokens, target = batch()
    kept: list[weakref.ref[Tensor]] = []

    def remember(module: nn.Module, args: object, output: Tensor) -> None:
        kept.append(weakref.ref(output))
        if len(kept) == 3:
            raise ValueError("enough")

    stages[0].module.register_forward_hook(remember)
    runner = GraphPPRunner(stages, _planned())
    with pytest.raises(PipelineStepError):
        runner.step(tokens, target=target)
    gc.collect()
    assert [each() for each in kept if each() is not None] == []


def test_a_step_keeps_no_inputs() -> None:
    runner = GraphPPRunner(_stages(), _planned())
    tokens, target = batch()
    kept = [weakref.ref(tokens), weakref.ref(target)]
    runner.step(tokens, target=target)
    del tokens, target
    gc.collect()
    assert [each() for each in kept] == [None, None]


def _change_outputs(stage: EagerStage, change: Callable[[Tensor], Tensor]) -> None:
    forward = stage.forward

    def changed(number: int, activations: Tensors, inputs: MicrobatchInputs) -> Tensors:
        return tuple(change(each) for each in forward(number, activations, inputs))

    stage.forward = changed  # type: ignore[method-assign] # only of this object


def test_the_next_stage_of_a_rank_is_given_contiguous_tensors_too() -> None:
    stages = _stages()
    _change_outputs(stages[0], lambda each: each.transpose(1, 2).contiguous().transpose(1, 2))
    given: list[bool] = []
    stages[1].module.register_forward_pre_hook(
        lambda _, args: given.append(args[0].is_contiguous())
    )
    tokens, target = batch()
    GraphPPRunner(stages, _planned()).step(tokens, target=target)
    assert given == [True] * NUM_MICROBATCHES


def test_an_output_of_another_dtype_than_the_signature_says_fails_the_step() -> None:
    stages = _stages()
    _change_outputs(stages[0], Tensor.double)
    tokens, target = batch()
    with pytest.raises(
        PipelineStepError, match=r"0F0 returned other tensors.*\n.*float64\[2, 5, 16"
    ):
        GraphPPRunner(stages, _planned()).step(tokens, target=target)


def test_a_pair_that_cannot_be_made_ready_is_refused_when_the_runner_is_made() -> None:
    planned = _planned("DualPipeV")
    stages = eager_stages(planned, 0)

    def refuse(backward_stage: object, backward_kind: str) -> None:
        raise ValueError(f"no {backward_kind}")

    for stage in stages:
        stage.prepare_overlap = refuse  # type: ignore[attr-defined]
        stage.collectives = dict  # type: ignore[attr-defined]
        stage.prepare_evaluation = lambda: None  # type: ignore[attr-defined]
    with pytest.raises(RunnerSetupError) as caught:
        GraphPPRunner(stages, planned)
    assert caught.value.problems[0] == (
        "rank 0: forward of stage 0 and FULL_BACKWARD of stage 1 cannot overlap: ValueError: no "
        "FULL_BACKWARD"
    )


def test_a_kwarg_that_no_stage_takes_fails_the_step() -> None:
    stages = _stages()
    stages[0].known_kwargs = frozenset({"mask"})  # type: ignore[attr-defined]
    stages[1].known_kwargs = frozenset({"mask", "bias"})  # type: ignore[attr-defined]
    tokens, target = batch()
    ones = torch.ones(len(tokens))
    message = r"kwargs\['msak'\] is not among those that stages take: bias, mask"
    with pytest.raises(PipelineStepError, match=message) as caught:
        GraphPPRunner(stages, _planned()).step(tokens, target=target, msak=ones, mask=ones)
    assert isinstance(caught.value.__cause__, MicrobatchError)
    assert "'mask'" not in str(caught.value)


@pytest.mark.parametrize("known", [None, frozenset({"mask"})])
def test_a_kwarg_that_some_stage_may_take_is_left_to_the_stages(known: frozenset[str]) -> None:
    stages = _stages()
    stages[0].known_kwargs = frozenset()  # type: ignore[attr-defined]
    stages[1].known_kwargs = known  # type: ignore[attr-defined]
    tokens, target = batch()
    result = GraphPPRunner(stages, _planned()).step(
        tokens, target=target, mask=torch.ones(len(tokens))
    )
    assert len(result.losses) == NUM_MICROBATCHES


def test_gradients_are_reduced_once_after_the_last_backward_and_discarded_at_the_end() -> None:
    stages = _stages()
    tokens, target = batch()
    GraphPPRunner(stages, _planned()).step(tokens, target=target)
    for stage in stages:
        last_backward = stage.calls.index(f"full_backward {NUM_MICROBATCHES - 1}")
        assert stage.calls.count("reduce_gradients") == 1
        assert stage.calls.index("reduce_gradients") > last_backward
        assert stage.calls[0] == "unshard"
        assert stage.calls[-2:] == ["reshard", "discard"]


def test_evaluation_leaves_gradients_alone() -> None:
    stages = _stages()
    tokens, target = batch()
    runner = GraphPPRunner(stages, _planned())
    runner.step(tokens, target=target)
    before = {name: each.clone() for name, each in gradients_of([s.module for s in stages]).items()}
    runner.eval(tokens, target=target)
    after = gradients_of([stage.module for stage in stages])
    assert all(torch.equal(after[name], each) for name, each in before.items())
    assert not any(stage.num_saved for stage in stages)


def test_outputs_beside_the_loss_are_returned_by_microbatch() -> None:
    planned = schedule_of("GPipe", num_ranks=1, num_stages=1, num_microbatches=2)
    (stage,) = eager_stages(planned, 0)
    stage.output_signature += (
        ActivationSignature(shape=(), dtype=torch.int64, requires_grad=False),
    )
    forward = stage.forward

    def forward_and_count(number: int, activations: Tensors, inputs: MicrobatchInputs) -> Tensors:
        return (*forward(number, activations, inputs), inputs.target.sum())

    stage.forward = forward_and_count  # type: ignore[method-assign] # only of this object
    tokens, target = (each[: 2 * MICROBATCH_SIZE] for each in batch())
    result = GraphPPRunner([stage], planned).step(tokens, target=target)
    assert len(result.losses) == 2
    assert [outputs[0].item() for outputs in result.outputs] == [
        part.sum().item() for part in target.chunk(2)
    ]


def test_microbatches_can_be_given_split() -> None:
    stages, others = _stages(), _stages()
    tokens, target = batch()
    parts = [
        MicrobatchInputs(args=(some,), target=other)
        for some, other in zip(tokens.split(2), target.split(2), strict=True)
    ]
    given = GraphPPRunner(stages, _planned()).step_microbatches(parts)
    split = GraphPPRunner(others, _planned()).step(tokens, target=target)
    assert torch.equal(torch.stack(given.losses), torch.stack(split.losses))
    evaluated = GraphPPRunner(others, _planned()).eval_microbatches(parts)
    assert torch.equal(torch.stack(evaluated.losses), torch.stack(split.losses))


def test_refuses_another_number_of_microbatches() -> None:
    runner = GraphPPRunner(_stages(), _planned())
    with pytest.raises(PipelineStepError) as caught:
        runner.step_microbatches([MicrobatchInputs()])
    assert isinstance(caught.value.__cause__, MicrobatchError)
    assert caught.value.reason == (
        "MicrobatchError: 1 microbatches were given:\n  - the schedule is for 8"
    )


def test_a_closed_runner_refuses_and_its_stages_serve_another() -> None:
    stages = _stages()
    tokens, target = batch()
    runner = GraphPPRunner(stages, _planned())
    runner.close()
    runner.close()
    with pytest.raises(RunnerClosedError, match="this runner was closed; build another"):
        runner.step(tokens, target=target)
    assert GraphPPRunner(stages, _planned()).eval(tokens, target=target).losses


def test_an_interrupt_ends_the_step_as_itself() -> None:
    stages = _stages()
    tokens, target = batch()
    runner = GraphPPRunner(stages, _planned())

    def interrupted(*_: object) -> Tensors:
        raise KeyboardInterrupt

    # The action's callable was bound when the runner was made: stop inside of the module.
    stages[1].module.register_forward_pre_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        runner.step(tokens, target=target)
    assert not gradients_of([stage.module for stage in stages])
    with pytest.raises(RunnerClosedError, match="KeyboardInterrupt"):
        runner.step(tokens, target=target)


def test_a_recorded_step_is_a_trace_for_perfetto(tmp_path: Path) -> None:
    tokens, target = batch()
    runner = GraphPPRunner(_stages(), _planned())
    assert runner.step(tokens, target=target).record is None
    runner.record_steps = True
    record = runner.step(tokens, target=target).record
    assert record is not None
    write_chrome_trace(record.spans, tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text()
    assert all(f'"name": "{name}"' in text for name in ("0F0", "1B7", "0UNSHARD", "1REDUCE_GRAD"))
