"""Every way in which one layer may differ from the others is noticed: nothing is stamped then.

The third of six layers is made to differ; it is one of the two that would have been stamped. The
control without a difference is stamped, so each refusal is due to the difference alone.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.fx.traceback
from seeded_models import (
    HERE,
    ODD,
    SEEDED,
    Doubled,
    LazyTable,
    Scaled,
    of_odd_layer,
    one_dropout_rate,
)
from stamp_models import Block, Toy, differences, stamp
from torch import Tensor, nn

from gt_trace import CaptureError
from gt_trace.stamping.report import NotStampable


@pytest.mark.parametrize("name", SEEDED)
def test_difference_is_found_and_nothing_stamped(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    build, reason = SEEDED[name]
    with caplog.at_level(logging.WARNING, "gt_trace.stamping"):
        captured = stamp(build(), known_functions=HERE)
    assert captured.report.refusal is not None
    assert reason in captured.report.refusal
    assert captured.report.num_layers_traced == captured.report.num_layers == 6
    # The whole step all the same, and one line that says why.
    names = [entry.name for entry in captured.step.state]
    assert {f"layers.{index}.down.weight" for index in range(6)} <= set(names)
    assert [record.message for record in caplog.records if record.name.startswith("gt_trace")] == [
        f"layers are not stamped, all are traced: {captured.report.refusal}"
    ]


def test_at_least_twenty_differences_are_seeded() -> None:
    assert len(SEEDED) >= 20


def test_model_without_a_difference_is_stamped() -> None:
    model = Toy()
    captured = stamp(model)
    assert captured.report.refusal is None
    assert captured.report.num_layers_traced == 4
    assert differences(model, captured) == []


def test_refused_capture_is_the_full_one() -> None:
    model = of_odd_layer(one_dropout_rate)()
    assert differences(model, stamp(model)) == []


def test_backward_call_inside_the_step_is_refused_as_the_full_trace_does() -> None:
    model = Toy()

    def step(batch: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        return loss.detach()

    with pytest.raises(Exception, match=r"\.grad were written"):
        stamp(model, step)


@pytest.mark.parametrize("function", [Doubled, Scaled])
def test_functions_of_unknown_packages_are_a_reason_to_trace_all(function: Any) -> None:
    class Everywhere(Toy):
        def run_layers(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = function.apply(layer(x), *((3,) if function is Scaled else ()))
            return x

    captured = stamp(Everywhere())
    name = f"{function.__module__}.{function.__qualname__}"
    assert captured.report.refusal == (
        f"layers.1 runs {name}, whose backward is not known to be the same in all layers"
    )
    model = Everywhere()
    known = stamp(model, known_functions=HERE)
    assert known.report.refusal is None
    assert differences(model, known) == []


def test_what_a_forward_sets_on_modules_is_taken_back_before_the_full_trace() -> None:
    class Counting(Block):
        steps = 0

        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            return super().forward(x)

    model = LazyTable(block=Counting)
    with pytest.raises(CaptureError) as error:
        stamp(model)
    assert isinstance(error.value.__context__, NotStampable)
    assert str(error.value.__context__).startswith("the forward sets ")
    assert "module.table is new: a tensor of shape [4]" in str(error.value)
    assert "module.layers.0.steps is new: 1" in str(error.value)
    assert [layer.steps for layer in model.layers] == [0] * 6
    assert model.table is None


def test_what_a_forward_sets_once_is_set_by_the_full_trace() -> None:
    class Measuring(Block):
        length = 0

        def forward(self, x: Tensor) -> Tensor:
            self.length = x.shape[1]
            return super().forward(x)

    model = Toy(block=Measuring)
    captured = stamp(model)
    assert captured.report.refusal is not None
    assert captured.report.refusal.startswith("the forward sets layers.")
    assert captured.report.refusal.endswith(".length")
    again = stamp(model)
    assert again.report.refusal is None
    assert differences(model, again) == []


def test_gradients_of_other_parameters_of_one_layer_are_a_reason_to_trace_all() -> None:
    model = Toy()

    def step(batch: Tensor) -> Any:
        loss = nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
        wanted = [p for name, p in model.named_parameters() if name != f"layers.{ODD}.up.weight"]
        return loss, torch.autograd.grad(loss, wanted)

    captured = stamp(model, step)
    assert captured.report.refusal == (
        "the step asks for gradients of other parameters of layers.3 than of layers.1"
    )
