"""A model's forward as captured graphs, on a model small enough to run here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gt_config import ShapeChangePolicy
from gt_config.graph_kinds import GraphKind
from gt_passes import PassContext, PassManager, RemoveDeadCode
from gt_trace import InputMismatchError
from gt_trainer.startup import StartupClock
from gt_trainer.steps.captured_joint import JointProgram
from gt_trainer.steps.program import CaptureReport, TracingOptions
from gt_trainer.steps.program_step import CaptureSetup, JointStep
from gt_trainer.steps.training_step import num_operators


def recipe(context: PassContext, graph: GraphKind) -> PassManager:
    return PassManager([RemoveDeadCode()], context=context)


def joint_forward(
    model: nn.Module, *, on_shape_change: ShapeChangePolicy = "error"
) -> tuple[Any, list[CaptureReport[JointProgram]], StartupClock]:
    reports: list[CaptureReport[JointProgram]] = []
    clock = StartupClock()
    setup = CaptureSetup(
        clock=clock,
        on_capture=reports.append,
        on_shape_change=on_shape_change,
        tracing=TracingOptions(),
    )
    step = JointStep(
        model, None, recipe=recipe, preparation=None, setup=setup
    )  # the loss is not asked for
    return step.forward, reports, clock


class Scaled(nn.Module):
    """Hidden states of (B, D), times a scale that comes with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh() * scale


def test_captures_once_and_gives_the_gradients_of_the_model() -> None:
    model, scale = Scaled(), torch.rand(4)
    forward, reports, clock = joint_forward(model)
    for _ in range(2):
        x = torch.rand(2, 4)
        mine = torch.autograd.grad(forward(x, scale=scale).sum(), list(model.parameters()))
        theirs = torch.autograd.grad(model(x, scale=scale).sum(), list(model.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert len(reports) == 1
    assert clock.seconds("capture") > 0
    assert clock.seconds("passes") > 0


def test_passes_run_on_both_graphs_and_the_report_tells_of_both() -> None:
    forward, reports, _ = joint_forward(Scaled())
    forward(torch.rand(2, 4), scale=torch.rand(4))
    (report,) = reports
    assert [p.records[0].name for p in report.passes] == ["remove-dead-code"] * 2
    assert all(p.verified for p in report.passes)
    parts = report.program.captured
    assert report.graph_modules == (parts.forward, parts.backward)
    sizes = [record.after.num_ops for p in report.passes for record in p.records]
    assert sizes == list(map(num_operators, (parts.forward, parts.backward)))


def test_another_shape_is_an_error_or_another_capture() -> None:
    model, scale = Scaled(), torch.rand(4)
    forward, reports, _ = joint_forward(model)
    forward(torch.rand(2, 4), scale=scale)
    with pytest.raises(InputMismatchError, match=r"captured as torch.float32 \[2, 4\]"):
        forward(torch.rand(3, 4), scale=scale)
    forward, reports, _ = joint_forward(model, on_shape_change="recapture")
    for rows in (2, 3, 2):
        x = torch.rand(rows, 4)
        assert torch.equal(forward(x, scale=scale), model(x, scale=scale))
    assert len(reports) == 2
