"""Which captures of a training step are stamped, by ``--compile.capture_layers``."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gt_config import CaptureLayers
from gt_trace.stamping import StampReport
from gt_trainer.steps.captured_step import trace_training_step
from gt_trainer.steps.program import TracingOptions


class Layers(nn.Module):
    """Linear layers one after another."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def loss_of(prediction: Tensor, _labels: Tensor, _tokens: Tensor, **_: Any) -> Any:
    return prediction.square().mean(), {}


def traced(num_layers: int, capture_layers: CaptureLayers) -> StampReport | None:
    x = torch.rand(2, 4)
    step = (Layers(num_layers), loss_of, x, x, torch.tensor(2), {})
    return trace_training_step(*step, options=TracingOptions(capture_layers=capture_layers))[1]


@pytest.mark.parametrize(
    ("num_layers", "capture_layers", "num_traced"),
    [(12, "auto", 4), (6, "stamped", 4), (11, "auto", 11), (4, "stamped", 4)],
)
def test_layers_are_stamped_where_it_was_asked_for_or_pays(
    num_layers: int, capture_layers: CaptureLayers, num_traced: int
) -> None:
    report = traced(num_layers, capture_layers)
    assert report is not None
    assert report.num_layers_traced == num_traced
    assert report.stamped == (num_traced < num_layers)


def test_deep_model_that_cannot_be_stamped_is_told_without_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Layers(12)
    for index in (3, 7):
        model.layers[index] = nn.Linear(4, 4)
    x = torch.rand(2, 4)
    with caplog.at_level(logging.INFO, "gt_trace.stamping"):
        report = trace_training_step(model, loss_of, x, x, torch.tensor(2), {})[1]
    assert report is not None
    assert report.num_layers_traced == 12
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "all are traced: of 12 layers" in record.message
    assert "layers.3.bias" in record.message


def test_full_capture_is_not_reported_on() -> None:
    assert traced(12, "full") is None


@pytest.mark.parametrize(
    ("capture_layers", "level", "reason"),
    [
        ("auto", logging.DEBUG, "4 layers are fewer than 12"),
        (
            "stamped",
            logging.WARNING,
            "of 4 layers, no more than 4 that are alike repeat in a row",
        ),
    ],
)
def test_shallow_model_is_a_warning_only_to_who_asked_for_stamping(
    capture_layers: CaptureLayers, level: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "gt_trace.stamping"):
        traced(4, capture_layers)
    assert [(record.levelno, record.message) for record in caplog.records] == [
        (level, f"layers are not stamped, all are traced: {reason}")
    ]
