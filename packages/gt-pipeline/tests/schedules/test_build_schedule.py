"""PyTorch's schedule objects: which, of what, and whether backward actions run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from schedule_cases import STAGES_PER_RANK, natural_schedule
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from gt_pipeline.errors import ScheduleError
from gt_pipeline.schedules import (
    SCHEDULE_NAMES,
    Action,
    build_pipeline_schedule,
    register_action_functions,
    schedule_of,
    schedule_to_csv,
)
from gt_pipeline.schedules.actions import ActionKind, PointToPoint, parse_action

_CLASSES = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": ScheduleZBVZeroBubble,
    "DualPipeV": ScheduleDualPipeV,
}


def _stages(indices: tuple[int, ...], *, num_stages: int, rank: int, num_ranks: int) -> list[Any]:
    """What PyTorch's constructors read of stages, which is sizes."""
    return [
        SimpleNamespace(
            stage_index=index,
            num_stages=num_stages,
            group_rank=rank,
            group_size=num_ranks,
            submod=None,
            is_first=index == 0,
            is_last=index == num_stages - 1,
            stage_index_to_group_rank={},
        )
        for index in indices
    ]


def _stages_of(name: str, rank: int = 1) -> list[Any]:
    schedule = natural_schedule(name, 4, 8)
    return _stages(
        schedule.stages_of_rank(rank), num_stages=schedule.num_stages, rank=rank, num_ranks=4
    )


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_for_autograd_it_is_pytorchs_own_class(name: str) -> None:
    schedule = build_pipeline_schedule(
        _stages_of(name), name=name.upper(), num_microbatches=8, loss_fn=nn.MSELoss()
    )
    assert type(schedule) is _CLASSES[name]
    assert schedule._has_backward
    assert schedule.scale_grads is False


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_for_autograd_without_a_loss_there_is_no_backward(name: str) -> None:
    schedule = build_pipeline_schedule(_stages_of(name), name=name, num_microbatches=8)
    assert not schedule._has_backward


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_for_explicit_backwards_it_runs_our_actions_and_has_a_backward(name: str) -> None:
    schedule: Any = build_pipeline_schedule(
        _stages_of(name), name=name, num_microbatches=8, backward_requires_autograd=False
    )
    assert schedule._loss_fn is None
    assert schedule._has_backward
    for rank, actions in enumerate(natural_schedule(name, 4, 8).compute):
        theirs = [parse_action(str(each)) for each in schedule.pipeline_order[rank]]
        assert tuple(theirs) == actions
        lowered = [
            str(each) for each in schedule.pipeline_order_with_comms[rank] if each.is_compute_op
        ]
        assert lowered == [str(each) for each in actions]


@pytest.mark.parametrize("requires_autograd", [True, False])
def test_a_csv_file_is_a_schedule_too(tmp_path: Path, requires_autograd: bool) -> None:
    path = tmp_path / "mine.csv"
    schedule_to_csv(natural_schedule("DualPipeV", 4, 8), path)
    schedule: Any = build_pipeline_schedule(
        _stages_of("DualPipeV"),
        csv_path=path,
        num_microbatches=8,
        backward_requires_autograd=requires_autograd,
    )
    by_name: Any = build_pipeline_schedule(
        _stages_of("DualPipeV"), name="DualPipeV", num_microbatches=8
    )
    assert schedule.pipeline_order_with_comms == by_name.pipeline_order_with_comms
    assert schedule.stage_index_to_group_rank == by_name.stage_index_to_group_rank
    assert schedule._has_backward is not requires_autograd


def test_arguments_that_contradict_each_other_are_reported_together() -> None:
    with pytest.raises(ScheduleError) as caught:
        build_pipeline_schedule(
            [],
            num_microbatches=8,
            loss_fn=nn.MSELoss(),
            backward_requires_autograd=False,
        )
    assert_expected_inline(
        str(caught.value),
        """\
no pipeline schedule can be built from this:
  - stages is empty: give this rank's stages
  - give a name or a csv_path, not neither
  - loss_fn is for autograd: explicit backward graphs have the loss in the last stage's forward graph""",
    )


def test_a_name_and_a_file_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match="not both"):
        build_pipeline_schedule(
            _stages_of("1F1B"), name="1F1B", csv_path=tmp_path / "a.csv", num_microbatches=8
        )


def test_a_file_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        build_pipeline_schedule(
            _stages_of("1F1B"), csv_path=tmp_path / "none.csv", num_microbatches=8
        )


def test_a_file_for_other_sizes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    schedule_to_csv(natural_schedule("Interleaved1F1B", 2, 4), "two.csv")
    with pytest.raises(ScheduleError) as caught:
        build_pipeline_schedule(_stages_of("DualPipeV"), csv_path="two.csv", num_microbatches=8)
    assert_expected_inline(
        str(caught.value),
        """\
the schedule two does not fit these stages:
  - it is for 4 microbatches
  - it is for 4 stages, not 8
  - it is for 2 ranks, not 4""",
    )


def test_stages_of_another_rank_are_refused() -> None:
    stages = _stages((1, 5), num_stages=8, rank=1, num_ranks=4)
    with pytest.raises(ScheduleError) as caught:
        build_pipeline_schedule(stages, name="ZBVZeroBubble", num_microbatches=8)
    assert_expected_inline(
        str(caught.value),
        """\
the schedule ZBVZeroBubble does not fit these stages:
  - rank 1 holds stages (1, 5), not (1, 6)""",
    )


def test_functions_cannot_run_what_pytorch_runs_by_code_or_transfers() -> None:
    schedule = build_pipeline_schedule(_stages_of("1F1B"), name="1F1B", num_microbatches=8)
    with pytest.raises(ScheduleError) as caught:
        register_action_functions(
            schedule,
            dict.fromkeys(("OVERLAP_F_B", "SEND_F"), lambda action, context: None),
        )
    assert_expected_inline(
        str(caught.value),
        """\
functions cannot run these actions:
  - SEND_F is PyTorch's to run
  - Schedule1F1B runs no actions: build it with backward_requires_autograd=False
  - OVERLAP_F_B needs FORWARD too: evaluation runs its forward alone""",
    )


@pytest.fixture(scope="module")
def one_rank_group() -> Iterator[None]:
    assert not dist.is_initialized(), "another test module left its process group behind"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _real_stages(name: str) -> list[PipelineStage]:
    num_stages = STAGES_PER_RANK[name][-1]
    stages = [
        PipelineStage(
            nn.Linear(4, 4),
            index,
            num_stages,
            torch.device("cpu"),
            input_args=torch.zeros(2, 4, requires_grad=index > 0),
            output_args=torch.zeros(2, 4, requires_grad=True),
        )
        for index in range(num_stages)
    ]
    for stage in stages:
        # torch 2.11 greets neighbours on this very rank too, which gloo refuses.
        vars(stage)["_get_init_p2p_neighbors_ops"] = list
    return stages


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
@pytest.mark.usefixtures("one_rank_group")
def test_functions_run_all_actions_without_a_loss_and_without_autograd(name: str) -> None:
    schedule: Any = build_pipeline_schedule(
        _real_stages(name), name=name, num_microbatches=6, backward_requires_autograd=False
    )
    ran: list[Action] = []
    seen: list[Tensor] = []

    def run(action: Action, context: Any) -> None:
        ran.append(action)
        if action.kind == "FORWARD" and action.stage == 0:
            seen.append(context.arg_mbs[action.microbatch][0])

    register_action_functions(
        schedule, {kind: run for kind in get_args(ActionKind) if kind not in get_args(PointToPoint)}
    )
    batch = torch.arange(48.0).reshape(12, 4)
    with torch.no_grad():
        schedule.step(batch, return_outputs=False)
    ours = schedule_of(name, num_ranks=1, num_stages=STAGES_PER_RANK[name][-1], num_microbatches=6)
    assert tuple(each for each in ran if each.is_compute) == ours.compute[0]
    forwards = [each for each in ran if each.kind == "FORWARD"]
    assert bool(forwards) == bool(seen)
    if seen:
        assert torch.equal(seen[0], batch[:2])


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
@pytest.mark.usefixtures("one_rank_group")
def test_evaluation_runs_forwards_alone_before_and_after_training(name: str) -> None:
    stages = _real_stages(name)
    schedule: Any = build_pipeline_schedule(
        stages, name=name, num_microbatches=6, backward_requires_autograd=False
    )
    ran: list[Action] = []

    def run(action: Action, context: Any) -> None:
        ran.append(action)
        if action.kind == "FORWARD" and action.stage == len(stages) - 1:
            stages[-1].output_chunks.append(torch.ones(2, 4))

    register_action_functions(
        schedule, {kind: run for kind in get_args(ActionKind) if kind not in get_args(PointToPoint)}
    )
    batch = torch.ones(12, 4)
    for _ in range(2):
        ran.clear()
        assert torch.equal(schedule.eval(batch), batch)
        kinds = [each.kind for each in ran if each.is_compute]
        assert kinds == ["FORWARD"] * (6 * len(stages))
        assert "REDUCE_GRAD" not in {each.kind for each in ran}
        schedule.step(batch, return_outputs=False)
        assert "REDUCE_GRAD" in {each.kind for each in ran}


@pytest.mark.parametrize("from_csv", [False, True])
@pytest.mark.usefixtures("one_rank_group")
def test_eager_stages_train_to_the_gradients_of_the_whole_model(
    from_csv: bool, tmp_path: Path
) -> None:
    stages = _real_stages("Interleaved1F1B")
    path = tmp_path / "interleaved.csv"
    ours = schedule_of("Interleaved1F1B", num_ranks=1, num_stages=len(stages), num_microbatches=6)
    schedule_to_csv(ours, path)
    schedule: Any = build_pipeline_schedule(
        stages,
        name=None if from_csv else ours.name,
        csv_path=path if from_csv else None,
        num_microbatches=6,
        loss_fn=nn.functional.mse_loss,
    )
    torch.manual_seed(0)
    batch, target = torch.randn(12, 4), torch.randn(12, 4)
    losses: list[Tensor] = []
    schedule.step(batch, target=target, losses=losses)
    gradients = [
        parameter.grad.clone() for stage in stages for parameter in stage.submod.parameters()
    ]
    model = nn.Sequential(*(stage.submod for stage in stages))
    model.zero_grad()
    expected = [
        nn.functional.mse_loss(model(x), y)
        for x, y in zip(batch.split(2), target.split(2), strict=True)
    ]
    for loss in expected:
        loss.backward()
    assert all(map(torch.equal, losses, expected))
    assert all(
        torch.equal(one, other.grad)
        for one, other in zip(gradients, model.parameters(), strict=True)
    )
