"""A rank that fails ends the step on every rank, soon, by name, and nothing is kept of it."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import failing_cases
import pytest
from failing_cases import Outcome
from toy_pipeline import NUM_MICROBATCHES, train_in_one_process

from gt_pipeline.runner.failure import FailureReport
from gt_trace.testing import GlooWorkers

_SECONDS = 20.0
"""Far below any timeout, far above what a slow machine takes."""


def _check(outcomes: list[Outcome], *, rank: int, stage: int | None, action: str) -> None:
    for outcome in outcomes:
        error = outcome.error
        assert (error.rank, error.stage, error.action) == (rank, stage, action)
        assert outcome.seconds < _SECONDS
        assert outcome.gradients == 0
        assert outcome.discarded
        assert outcome.refusal.startswith("an earlier step of this runner failed: rank ")
    # Another runner trains.
    assert sum(len(each.losses_of_next_runner) for each in outcomes) == NUM_MICROBATCHES


@pytest.mark.parametrize(
    ("name", "stage", "method", "microbatch", "rank", "action"),
    [
        ("GPipe", 0, "forward", 0, 0, "0F0"),
        ("1F1B", 3, "full_backward", 7, 3, "3B7"),
        ("Interleaved1F1B", 6, "forward", 4, 2, "6F4"),
        ("InterleavedZeroBubble", 1, "backward_weight", 7, 1, "1W7"),
        ("ZBVZeroBubble", 4, "backward_input", 0, 3, "4I0"),
    ],
)
def test_every_rank_names_the_action_that_raised(
    four: GlooWorkers,
    name: str,
    stage: int,
    method: str,
    microbatch: int,
    rank: int,
    action: str,
) -> None:
    outcomes = four.run(failing_cases.fail_at, name, stage, method, microbatch)
    _check(outcomes, rank=rank, stage=stage, action=action)
    assert {each.error.reason for each in outcomes} == {"BrokenStageError: on purpose"}


def test_error_says_where_why_and_what_to_do(four: GlooWorkers) -> None:
    outcomes = four.run(failing_cases.fail_at, "1F1B", 2, "forward", 3)
    assert len({str(each.error) for each in outcomes}) == 1
    assert str(outcomes[0].error) == (
        "rank 2 failed at 2F3 of stage 2: BrokenStageError: on purpose\n"
        "The step ended on all ranks, and none has added its gradients to parameters. "
        "To go on, build another runner over the same stages."
    )


def test_another_runner_trains_after_a_failure(four: GlooWorkers) -> None:
    outcomes = four.run(failing_cases.fail_at, "1F1B", 1, "full_backward", 0)
    losses = [loss for each in outcomes for loss in each.losses_of_next_runner]
    assert losses == [loss.item() for loss in train_in_one_process(4).losses]


def test_a_tensor_of_the_wrong_size_is_not_sent(four: GlooWorkers) -> None:
    outcomes = four.run(failing_cases.send_a_wrong_shape)
    _check(outcomes, rank=1, stage=1, action="1F2")
    assert outcomes[3].error.reason == (
        "StageOutputError: 1F2 returned other tensors than its signature says:\n"
        "  - returned: float32[1, 5, 16]\n"
        "  - signature: float32[2, 5, 16]"
    )


def test_a_send_that_fails_ends_the_step_on_every_rank(four: GlooWorkers) -> None:
    outcomes = four.run(failing_cases.fail_to_send)
    assert {each.error.reason for each in outcomes} == {"BrokenStageError: the cable is loose"}
    _check(outcomes, rank=1, stage=1, action="1SEND_B1")


def test_inputs_that_do_not_split_on_one_rank_end_the_step_on_all(four: GlooWorkers) -> None:
    outcomes = four.run(failing_cases.give_an_uneven_batch)
    assert all("MicrobatchError: these inputs" in each.error.reason for each in outcomes)
    assert {each.error.action for each in outcomes} == {"splitting inputs into microbatches"}


def test_an_evaluation_that_fails_ends_on_every_rank(four: GlooWorkers) -> None:
    _check(four.run(failing_cases.fail_in_evaluation), rank=1, stage=6, action="6F3")


def test_a_rank_that_waits_in_a_collective_of_its_graph_ends(four: GlooWorkers) -> None:
    outcomes = four.run(failing_cases.wait_in_a_collective)
    _check(outcomes, rank=0, stage=0, action="0F2")


def test_a_rank_hears_of_a_failure_that_closes_nothing(four: GlooWorkers) -> None:
    first = FailureReport(rank=2, stage=5, action="5B1", reason="first")
    assert four.run(failing_cases.watch_for_a_report) == [(True, first, [False, True])] * 4


def test_pipelines_of_one_job_train_side_by_side(four: GlooWorkers) -> None:
    outcomes = four.run(failing_cases.train_two_pipelines, False)
    assert all(num_gradients and not text for num_gradients, text in outcomes)


def test_a_failure_in_one_pipeline_ends_the_step_of_the_others(four: GlooWorkers) -> None:
    outcomes = four.run(failing_cases.train_two_pipelines, True)
    assert all(text.startswith("rank 3 failed at 1B7 of stage 1: ") for _, text in outcomes)
    assert [num_gradients for num_gradients, _ in outcomes] == [0, 0, 0, 0]


def test_ranks_end_when_one_dies_without_a_word(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    processes = [
        context.Process(
            target=failing_cases.die, args=(rank, str(tmp_path / "store"), str(tmp_path))
        )
        for rank in range(4)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 240
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
    assert not hung
    for rank in (0, 1, 3):
        gradients, text = (tmp_path / str(rank)).read_text().split("\n", 1)
        assert gradients == "0 gradients"
        assert text.startswith("rank ")
        assert "failed at" in text
    assert not (tmp_path / "2").exists()
