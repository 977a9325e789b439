"""Capturing once, and again for other shapes where that is configured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gt_trace import InputMismatchError
from gt_trainer.steps.program_step import PerShape


class Captures:
    """Captures functions of a string that only take strings of one length."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., str]:
        length = len(args[0])
        self.lengths.append(length)

        def bound(text: str, *, mark: str) -> str:
            if len(text) != length:
                raise InputMismatchError(f"{text!r} does not have length {length}")
            return f"{text}{mark}"

        return bound


def test_captures_on_the_first_call_and_not_again() -> None:
    captures = Captures()
    call = PerShape(captures, policy="error")
    assert captures.lengths == []
    assert [call("ab", mark="!"), call("cd", mark="?")] == ["ab!", "cd?"]
    assert captures.lengths == [2]


def test_another_shape_is_an_error_and_captures_nothing() -> None:
    captures = Captures()
    call = PerShape(captures, policy="error")
    call("ab", mark="!")
    with pytest.raises(InputMismatchError, match="'abc' does not have length 2"):
        call("abc", mark="!")
    assert captures.lengths == [2]


def test_recapture_keeps_what_was_captured_before() -> None:
    captures = Captures()
    call = PerShape(captures, policy="recapture")
    texts = ["ab", "abc", "cd", "c", "def"]
    assert [call(text, mark="!") for text in texts] == [f"{text}!" for text in texts]
    assert captures.lengths == [2, 3, 1]


def test_an_error_of_the_capture_leaves_nothing_behind() -> None:
    def failing(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        raise ValueError("cannot be captured")

    call = PerShape(failing, policy="recapture")
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot be captured"):
            call("ab")
