"""What ``gt-train plan`` shows, and what ends it."""

from __future__ import annotations

import logging
import os
import signal

import pytest
from planning.outcomes import outcome, report

from gt_trainer.command_line import plan_command
from gt_trainer.command_line.command_line import UsageError, parse_command_line
from gt_trainer.command_line.overrides import apply_overrides
from gt_trainer.models.llama3 import llama3_debugmodel


class _Ended(BaseException):
    pass


@pytest.fixture
def ends_by_sigterm():
    def end(number, frame):
        raise _Ended

    previous = signal.signal(signal.SIGTERM, end)
    yield
    signal.signal(signal.SIGTERM, previous)


def _asked(monkeypatch, tmp_path, make_plan, shown):
    """Ask for a plan that is made so, and for a page; what is shown is added to a list."""
    page = str(tmp_path / "plan.html")
    command = parse_command_line(["plan", "--config", "llama3_8b", "--gpus", "8", "--page", page])
    monkeypatch.setattr(plan_command, "make_plan", make_plan)
    monkeypatch.setattr(plan_command, "write_plan_page", lambda *args, **options: [page])
    plan_command.asked_plan(None, command, tell=lambda line: None, show=shown.append)


@pytest.mark.usefixtures("ends_by_sigterm")
@pytest.mark.parametrize("times", [1, 2], ids=["once", "to_the_process_and_to_its_group"])
def test_sigterm_ends_the_search_and_the_process_when_what_was_found_is_shown(
    monkeypatch, tmp_path, times
):
    shown = []

    def make_plan(config, question, *, is_stopped, **options):
        assert not is_stopped()
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGTERM)
        assert is_stopped()
        return report((outcome(8),), num_left=3)

    with pytest.raises(_Ended):
        _asked(monkeypatch, tmp_path, make_plan, shown)
    (text,) = shown
    assert "  time was up      one of those left may be faster" in text


@pytest.mark.usefixtures("ends_by_sigterm")
def test_sigterm_again_after_a_while_ends_the_process_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr(plan_command, "_SAME_SECONDS", 0.0)

    def make_plan(config, question, **options):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("it goes on")

    with pytest.raises(_Ended):
        _asked(monkeypatch, tmp_path, make_plan, [])


@pytest.mark.usefixtures("ends_by_sigterm")
def test_nobody_is_ended_who_was_not_asked_to(monkeypatch, tmp_path):
    shown: list[str] = []
    _asked(monkeypatch, tmp_path, lambda *args, **options: report((outcome(8),)), shown)
    assert shown[0].startswith("Plan of llama3 8B on 8 H100 SXM")
    assert shown[1] == f"written: {tmp_path / 'plan.html'}\n"


def test_what_is_logged_afterwards_is_logged(monkeypatch, tmp_path):
    disabled = []

    def make_plan(*args, **options):
        disabled.append(logging.root.manager.disable)
        return report((outcome(8),))

    _asked(monkeypatch, tmp_path, make_plan, [])
    assert [*disabled, logging.root.manager.disable] == [logging.INFO, logging.NOTSET]


def test_an_answer_that_cannot_be_run_is_shown_before_it_is_an_error(monkeypatch, tmp_path):
    too_large, shown = report((outcome(8, gib=90),)), []
    with pytest.raises(UsageError, match=r"^none of the 1 recipes that were simulated fits$"):
        _asked(monkeypatch, tmp_path, lambda *args, **options: too_large, shown)
    assert "  nothing fits     the least that was simulated needs 90.0 GiB of 74.0" in shown[0]


def _asked_beside(typed, *flags):
    """The question of a plan with these flags, and these beside; nothing is planned."""
    questions = []

    def make_plan(config, question, **options):
        questions.append(question)
        return report((outcome(8),))

    command = parse_command_line(
        ["plan", "--config", "llama3_debugmodel", "--gpus", "8", "--beside", typed, *flags]
    )
    config = apply_overrides(llama3_debugmodel(), command.overrides)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(plan_command, "make_plan", make_plan)
        plan_command.asked_plan(config, command, tell=lambda line: None, show=lambda text: None)
    (question,) = questions
    return question


def test_a_run_beside_has_the_flags_of_the_plan_and_its_own():
    question = _asked_beside(
        "--parallelism.pipeline_parallel_microbatch_size 2 --batch 8", "--seq-len", "128"
    )
    assert question.beside.flags == (
        *("--training.seq_len", "128"),
        *("--parallelism.pipeline_parallel_microbatch_size", "2"),
        *("--training.local_batch_size", "8"),
    )
    assert question.beside.asked == {*question.beside.flags[::2]}
    training = question.beside.config.training
    assert (training.seq_len, training.local_batch_size) == (128, 8)
    assert question.fixed == {}
    assert question.further == ("--training.seq_len", "128")


def test_unknown_flags_beside_are_refused():
    with pytest.raises(UsageError) as raised:
        _asked_beside("--parallelism.tensor_parallel_degre 8")
    assert str(raised.value) == (
        "--beside: no flag '--parallelism.tensor_parallel_degre'. Did you mean "
        "'--parallelism.tensor_parallel_degree'?\ngt-train --help-all lists every flag"
    )
