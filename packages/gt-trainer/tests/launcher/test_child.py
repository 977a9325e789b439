"""A function in a forked child: what it returns, what it raises, and how it ends."""

from __future__ import annotations

import os
import signal
import time
from functools import partial

import pytest

from gt_trainer.launcher.child import ChildFailedError, run_in_child


def test_returns_what_the_child_returns_and_keeps_nothing_else():
    changed = []

    def change() -> int:
        changed.append(1)
        return os.getpid()

    assert run_in_child(change, timeout_seconds=60) != os.getpid()
    assert changed == []


def test_an_exception_is_told_with_the_childs_traceback():
    def fail() -> None:
        raise KeyError("no such stage")

    with pytest.raises(ChildFailedError, match=r"(?s)in fail\n.*KeyError: 'no such stage'") as told:
        run_in_child(fail, timeout_seconds=60)
    assert told.value.reason == "KeyError: 'no such stage'"


def test_the_reason_is_what_an_exception_begins_with():
    def fail() -> None:
        raise ValueError("two things are wrong:\n  this\n  that\nhint: try something else")

    with pytest.raises(ChildFailedError) as told:
        run_in_child(fail, timeout_seconds=60)
    assert told.value.reason == "ValueError: two things are wrong: this"


def test_an_exception_without_words_is_told_by_its_name():
    class SilentError(Exception):
        def __str__(self) -> str:
            raise KeyError

    def fail(error: Exception) -> None:
        raise error

    reasons = []
    for error in (ValueError(), SilentError()):
        with pytest.raises(ChildFailedError) as told:
            run_in_child(partial(fail, error), timeout_seconds=60)
        reasons.append(told.value.reason)
    nameless, silent = reasons
    assert nameless == "ValueError"
    assert "SilentError" in silent


def test_a_child_that_is_killed_is_told():
    with pytest.raises(ChildFailedError, match=r"^a child process ended with status -9$") as told:
        run_in_child(lambda: os.kill(os.getpid(), signal.SIGKILL), timeout_seconds=60)
    assert told.value.reason == str(told.value)


def test_a_child_that_takes_too_long_is_killed():
    with pytest.raises(ChildFailedError, match=r"^it was not done after 0.2 s$"):
        run_in_child(lambda: time.sleep(60), timeout_seconds=0.2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_child_that_is_ended_with_its_parent_says_nothing(capfd, number):
    def raise_in_child(number, frame):
        raise KeyboardInterrupt

    previous = signal.signal(number, raise_in_child)
    try:
        with pytest.raises(ChildFailedError, match=f"ended with status -{number}$"):
            run_in_child(lambda: os.kill(os.getpid(), number), timeout_seconds=60)
    finally:
        signal.signal(number, previous)
    assert capfd.readouterr().err == ""


def test_a_child_ignores_what_its_parent_ignores():
    numbers = (signal.SIGTERM, signal.SIGINT)
    previous = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        sent = run_in_child(
            lambda: [os.kill(os.getpid(), number) for number in numbers], timeout_seconds=60
        )
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)
    assert sent == [None, None]
