"""Whole steps of a rank as one CUDA graph: one launch, no bit changed; recordings are imitated."""

from __future__ import annotations

from typing import NoReturn

import pytest
import torch
from recorded_stages import (
    NUM_MICROBATCHES,
    NUM_STEPS,
    SCHEDULES,
    new_stages,
    planned_schedule,
    same_bits,
    same_steps,
    trained,
)
from sharded_stages import replay_whole_steps
from torch import Tensor, nn

from gt_passes.errors import CudaGraphAddressError
from gt_passes.testing import FakeRecorder, FakeRecording
from gt_pipeline.errors import PipelineStepError, RunnerSetupError
from gt_pipeline.graph import GraphPipelineStage
from gt_pipeline.graph.stage_inputs import MicrobatchReader
from gt_pipeline.runner import GraphPPRunner, connections
from gt_trace.capture.bound_inputs import BoundInputs
from gt_trace.testing import GlooWorkers


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_replayed_step_is_one_launch_and_keeps_every_bit(name: str) -> None:
    num_stages = 1 if name in ("GPipe", "1F1B") else 2
    expected = trained(new_stages(num_stages, None), name)
    recorder = FakeRecorder()
    stages = new_stages(num_stages, recorder)
    launches: list[int] = []
    found = trained(stages, name, after_step=lambda: launches.append(recorder.num_replays))
    assert same_steps(found, expected)
    assert launches == [*range(NUM_STEPS)], "the first step runs as it is"
    assert recorder.num_recorded == 1
    assert not any(stage._recordings.is_used for stage in stages)


def test_gradients_add_up_over_steps_and_stay_as_they_are() -> None:
    x = torch.randn(4 * NUM_MICROBATCHES, 8)
    sums = []
    for recorder in (None, FakeRecorder()):
        (stage,) = new_stages(1, recorder)
        kept = []
        with GraphPPRunner([stage], planned_schedule("1F1B", 1)) as runner:
            for number in range(4):
                result = runner.step(x + number, target=x)
                kept += [*result.losses]
        sums.append([*kept, *(p.grad for p in stage.parameters().values())])
    assert len(sums[0]) > 4 * NUM_MICROBATCHES
    assert all(same_bits(a, b) for a, b in zip(*sums, strict=True))


def test_evaluation_and_measured_steps_between_replays_run_as_they_are() -> None:
    recorder = FakeRecorder()
    stages, references = new_stages(2, recorder), new_stages(2, None)
    planned = planned_schedule("ZBVZeroBubble", 2)
    x = torch.randn(4 * NUM_MICROBATCHES, 8)
    with GraphPPRunner(stages, planned) as runner, GraphPPRunner(references, planned) as plain:
        assert runner.replays_steps
        assert not plain.replays_steps
        for number in range(4):
            runner.record_steps = number == 2
            losses = [each.step(x + number, target=x).losses for each in (runner, plain)]
            assert all(same_bits(a, b) for a, b in zip(*losses, strict=True))
            evaluated = [each.eval(x - number, target=x).losses for each in (runner, plain)]
            assert all(same_bits(a, b) for a, b in zip(*evaluated, strict=True))
    assert recorder.num_replays == 2


def test_a_replaced_parameter_is_recorded_anew_until_it_was_replaced_too_often() -> None:
    recorder = FakeRecorder()
    (stage,), (reference,) = new_stages(1, recorder), new_stages(1, None)
    x = torch.randn(4 * NUM_MICROBATCHES, 8)
    planned = planned_schedule("1F1B", 1)
    runners = [GraphPPRunner([each], planned) for each in (stage, reference)]
    for number in range(8):
        bias = torch.full((8,), float(number))
        for each in (stage, reference):
            each._module.down.bias = nn.Parameter(bias.clone())
            each._module.down.weight.grad = None
        for runner in runners:
            runner.step(x, target=x + 1)
            runner.step(x, target=x + 1)
        found, expected = (each._module.down.weight.grad for each in (stage, reference))
        assert same_bits(found, expected)
    assert recorder.num_recorded == 8
    stage._module.down.bias = nn.Parameter(torch.ones(8))
    with pytest.raises(PipelineStepError) as caught:
        runners[0].step(x, target=x + 1)
    assert isinstance(caught.value.__cause__, CudaGraphAddressError)
    text = str(caught.value)
    assert text.startswith("rank 0 failed at replaying the step: CudaGraphAddressError: ")
    assert "stage 0, parameter down.bias: the address has changed again, after 8" in text


def replaying() -> tuple[GraphPipelineStage, GraphPPRunner, FakeRecorder, Tensor]:
    """A runner of one stage that has replayed a step, and the batch that it was given."""
    recorder = FakeRecorder()
    (stage,) = new_stages(1, recorder)
    x = torch.randn(4 * NUM_MICROBATCHES, 8)
    runner = GraphPPRunner([stage], planned_schedule("1F1B", 1))
    for _ in range(2):
        runner.step(x, target=x)
    assert recorder.num_replays == 1
    return stage, runner, recorder, x


def test_gradients_go_to_the_parameter_that_stands_there_now() -> None:
    stage, runner, recorder, x = replaying()
    before = stage._module.down.weight
    expected = before.grad.clone()
    stage._module.down.weight = now = nn.Parameter(before.data)  # over the same memory
    runner.step(x, target=x)
    assert recorder.num_recorded == 1
    assert same_bits(before.grad, expected)
    assert now.grad is not None


def test_a_replay_reads_neither_the_module_nor_microbatches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An imitated replay runs Python again, which could read what a recording has not."""
    _, runner, recorder, x = replaying()
    replay, num_blind = FakeRecording.replay, 0

    def forbidden(*_: object) -> NoReturn:
        raise AssertionError("a replay reads live values")

    def blind(recording: FakeRecording) -> None:
        nonlocal num_blind
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MicrobatchReader, "read", forbidden)
            patch.setattr(BoundInputs, "static_tensors", forbidden)
            replay(recording)
        num_blind += 1

    monkeypatch.setattr(FakeRecording, "replay", blind)
    runner.step(x + 1, target=x)
    assert (num_blind, recorder.num_recorded) == (1, 1)


def test_a_microbatch_of_another_shape_is_refused_before_a_launch() -> None:
    _, runner, recorder, x = replaying()
    with pytest.raises(PipelineStepError, match=r"args\[0\]: torch.float32 \[5, 8\], captured as"):
        runner.step(torch.randn(5 * NUM_MICROBATCHES, 8), target=x)
    assert recorder.num_replays == 1


def test_a_mode_that_changed_is_refused_before_a_launch() -> None:
    stage, runner, recorder, x = replaying()
    stage._module.eval()
    with pytest.raises(PipelineStepError, match="StateMismatchError"):
        runner.step(x, target=x)
    assert recorder.num_replays == 1


def test_a_step_that_fails_drops_the_recording_before_groups_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, runner, recorder, x = replaying()
    resets: list[int] = []
    monkeypatch.setattr(connections, "close_group", lambda *_: resets.append(recorder.num_resets))
    monkeypatch.setattr(runner._connections, "_collective_groups", ("a group",))
    with pytest.raises(PipelineStepError):
        runner.step(x[:-1], target=x)
    assert resets == [1]


def test_where_one_graph_cannot_be_recorded_actions_are() -> None:
    recorder = FakeRecorder()
    stages = new_stages(2, recorder)
    stages[1]._executables.marks[0] = None
    with GraphPPRunner(stages, planned_schedule("Interleaved1F1B", 2)) as runner:
        assert not runner.replays_steps
    assert all(stage._recordings.is_used for stage in stages)


def test_actions_that_are_recorded_keep_gathered_parameters_which_no_bound_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(GraphPipelineStage, "unsharded_bytes", 100)
    stages = new_stages(2, FakeRecorder())
    planned = planned_schedule("Interleaved1F1B", 2)
    with GraphPPRunner(stages, planned, max_unsharded_bytes=100) as runner:
        assert runner.replays_steps
    stages[1]._executables.marks[0] = None
    with pytest.raises(RunnerSetupError) as caught:
        GraphPPRunner(stages, planned, max_unsharded_bytes=100)
    assert caught.value.problems == tuple(
        f"rank 0: max_unsharded_bytes is 100: actions of stage {index} are recorded one by one, "
        "and such recordings read gathered parameters at addresses that stay, so that nothing "
        "frees them"
        for index in range(2)
    )
    with GraphPPRunner(stages, planned) as runner:
        assert not runner.replays_steps


def test_a_closed_runner_has_dropped_its_recording() -> None:
    recorder = FakeRecorder()
    stages = new_stages(1, recorder)
    found = trained(stages, "1F1B")
    assert recorder.num_resets == 1
    expected = trained(references := new_stages(1, None), "1F1B")
    assert same_steps(found, expected)
    assert same_steps(trained(stages, "1F1B"), trained(references, "1F1B"))


def test_sharded_stages_of_two_ranks_are_gathered_and_reduced_in_the_recording(
    two: GlooWorkers,
) -> None:
    for differing, launches in two.run(replay_whole_steps):
        assert differing == []
        assert launches == [0, 1, 1]
