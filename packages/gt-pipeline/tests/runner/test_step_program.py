"""What a bound program does that no whole step shows reliably."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch

from gt_pipeline.runner.stage_protocol import Tensors
from gt_pipeline.runner.step_program import StepProgram
from gt_pipeline.schedules.actions import parse_action


class _ForgottenWork:
    """A send that never ends, as gloo leaves one if a connection is closed while it is begun."""

    def __init__(self) -> None:
        self.limits: list[timedelta | None] = []

    def wait(self, limit: timedelta | None = None) -> None:
        self.limits.append(limit)
        raise RuntimeError("closed, or out of time")


def _program(works: list[Any], *, on_host: bool) -> StepProgram:
    send = parse_action("0SEND_F0")
    return StepProgram(
        actions=(send,),
        runs=(),
        results=[],
        pending={send: ((), works)},
        waiting=([((), [*works])],),
        on_host=on_host,
    )


@pytest.mark.parametrize(("on_host", "limit"), [(True, timedelta(seconds=1)), (False, None)])
def test_a_send_that_never_ends_is_given_a_second_with_gloo(
    on_host: bool, limit: timedelta | None
) -> None:
    works = [_ForgottenWork(), _ForgottenWork()]
    program = _program(works, on_host=on_host)
    program.let_go()
    assert [work.limits for work in works] == [[limit, limit]] * 2
    assert not program.pending


def test_what_waits_to_be_used_is_let_go_too() -> None:
    waiting: list[tuple[Tensors, Sequence[Any]]] = [((torch.ones(1),), ()), ((), ())]
    dataclasses.replace(_program([], on_host=True), waiting=(waiting,)).let_go()
    assert waiting == [((), ()), ((), ())]
