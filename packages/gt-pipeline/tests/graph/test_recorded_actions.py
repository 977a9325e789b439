"""Actions recorded as CUDA graphs: one launch each, no bit changed; recordings are imitated."""

from __future__ import annotations

import pytest
import torch
from recorded_stages import (
    NUM_MICROBATCHES,
    NUM_STEPS,
    SCHEDULES,
    inputs_of_a_microbatch,
    new_stages,
    planned_schedule,
    same_bits,
    same_steps,
    trained,
)
from sharded_stages import train_recorded_like_eager
from torch import Tensor, nn

from gt_passes.errors import CudaGraphAddressError
from gt_passes.testing import FakeRecorder
from gt_pipeline.errors import PipelineStepError
from gt_pipeline.graph import GraphPipelineStage
from gt_pipeline.graph.recorded_actions import SlotMemory, StageRecordings
from gt_pipeline.runner import GraphPPRunner
from gt_pipeline.schedules import peak_live
from gt_trace.testing import GlooWorkers


@pytest.fixture(autouse=True)
def no_whole_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a rank some action of which cannot be recorded."""
    monkeypatch.setattr(GraphPipelineStage, "step_replayer", lambda self, stages: None)


@pytest.mark.parametrize("name", SCHEDULES)
def test_replayed_steps_keep_every_bit_and_launch_once_for_each_action(name: str) -> None:
    num_stages = 1 if name in ("GPipe", "1F1B") else 2
    expected = trained(new_stages(num_stages, None), name)
    recorder = FakeRecorder()
    stages = new_stages(num_stages, recorder)
    launches: list[int] = []
    recordings: list[int] = []

    def count() -> None:
        launches.append(recorder.num_replays - sum(launches))
        recordings.append(recorder.num_recorded)

    found = trained(stages, name, after_step=count)
    for one, other in zip(expected, found, strict=True):
        assert len(one) == len(other) > 10
        assert all(map(same_bits, one, other))
    # The first run of each action warms up; what its microbatch kept is read as it is, too.
    num_actions = len(planned_schedule(name, num_stages).compute[0])
    assert launches[0] < num_actions
    assert launches[2:] == [num_actions] * (NUM_STEPS - 2)
    assert len({*recordings[2:]}) == 1, "nothing is recorded in later steps"
    assert recordings[-1] <= 2 * num_actions
    num_places = sum(stage._recordings.num_places for stage in stages)
    (live,) = peak_live(planned_schedule(name, num_stages))
    assert num_places == live if num_stages == 1 else live <= num_places <= num_stages * live


def test_with_one_place_for_all_microbatches_gradients_would_be_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That the test above can fail: a later forward overwrites what an earlier one kept."""
    expected = trained(new_stages(1, None), "1F1B")
    one_place = SlotMemory()
    monkeypatch.setattr(StageRecordings, "enter", lambda self, microbatch: one_place)
    monkeypatch.setattr(StageRecordings, "place", lambda self, microbatch: one_place)
    monkeypatch.setattr(StageRecordings, "leave", lambda self, microbatch: None)
    # With a schedule of one live microbatch, one place is enough.
    assert same_steps(trained(new_stages(1, FakeRecorder()), "1F1B"), expected)
    expected = trained(new_stages(1, None), "GPipe")
    assert not same_steps(trained(new_stages(1, FakeRecorder()), "GPipe"), expected)


def test_gradients_that_a_step_gave_stay_as_they_are() -> None:
    stages = new_stages(1, FakeRecorder())
    planned = planned_schedule("1F1B", 1)
    kept: list[list[Tensor]] = []
    with GraphPPRunner(stages, planned) as runner:
        for _ in range(4):
            x = torch.randn(4 * NUM_MICROBATCHES, 8)
            losses = runner.step(x, target=x + 1).losses
            given = [*losses, *(p.grad for p in stages[0].parameters().values())]
            kept.append([each for each in given if each is not None])
            kept.append([each.clone() for each in kept[-1]])
            for parameter in stages[0].parameters().values():
                parameter.grad = None
    assert all(all(map(same_bits, a, b)) for a, b in zip(kept[::2], kept[1::2], strict=True))


def test_a_replaced_parameter_is_recorded_anew_until_it_was_replaced_too_often() -> None:
    recorder = FakeRecorder()
    (stage,) = new_stages(1, recorder)
    (reference,) = new_stages(1, None)
    x = torch.randn(4 * NUM_MICROBATCHES, 8)
    runners = [GraphPPRunner([each], planned_schedule("1F1B", 1)) for each in (stage, reference)]

    def step() -> None:
        for runner in runners:
            runner.step(x, target=x + 1)

    for _ in range(3):
        step()
    num_recorded = recorder.num_recorded
    for number in range(1, 8):
        bias = torch.full((8,), float(number))
        for each in (stage, reference):
            each._module.down.bias = nn.Parameter(bias.clone())
        step()
        step()
        assert recorder.num_recorded > num_recorded
        num_recorded = recorder.num_recorded
        found, expected = (each._module.down.weight.grad for each in (stage, reference))
        assert same_bits(found, expected)
    stage._module.down.bias = nn.Parameter(torch.ones(8))
    with pytest.raises(PipelineStepError) as caught:
        runners[0].step(x, target=x + 1)
    assert isinstance(caught.value.__cause__, CudaGraphAddressError)
    assert "down.bias: the address has changed again, after 8 recordings" in str(caught.value)


def test_a_step_that_failed_leaves_every_place_free() -> None:
    recorder = FakeRecorder()
    (stage,) = new_stages(1, recorder)
    for _ in range(3):
        for number in range(2):
            stage.forward(number, (), inputs_of_a_microbatch())
        stage.discard()
    assert stage._recordings.num_places == 2


def test_a_step_that_fails_drops_recordings() -> None:
    recorder = FakeRecorder()
    x = torch.randn(4 * NUM_MICROBATCHES, 8)
    runner = GraphPPRunner(new_stages(1, recorder), planned_schedule("1F1B", 1))
    for _ in range(2):
        runner.step(x, target=x)
    assert recorder.num_replays > 0
    assert recorder.num_resets == 0
    with pytest.raises(PipelineStepError):
        runner.step(x[:-1], target=x)
    assert recorder.num_resets == 1


def test_released_recordings_are_made_anew() -> None:
    recorder = FakeRecorder()
    (stage,) = new_stages(1, recorder)
    trained([stage], "1F1B")
    stage.release_recordings()
    (reference,) = new_stages(1, None)
    trained([reference], "1F1B")
    assert same_steps(trained([stage], "1F1B"), trained([reference], "1F1B"))


def test_a_sharded_stage_reads_gathered_parameters_where_they_were(two: GlooWorkers) -> None:
    for differing, num_owned in two.run(train_recorded_like_eager):
        assert differing == []
        assert num_owned == 6
