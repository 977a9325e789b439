"""Memory over a step rises through the forward and falls through the backward, to what stays."""

from __future__ import annotations

import torch
from plan_doubles import FSDP, S0, TENSOR_PARALLEL, plan_by_hand
from planned_models import MESH, Stack, example, model, plan

from gt_autoparallel.find import PlacementRequest, find_placement
from gt_autoparallel.plan.report import plan_report
from gt_autoparallel.plan.report_page import memory_over_step, report_page
from gt_autoparallel.problem.constraints import Constraints


def test_saved_values_grow_to_what_the_plan_counts_and_are_all_given_back() -> None:
    found = plan()
    moments = memory_over_step(found)
    windows = [each.window for each in moments]
    forward = [each for each in windows if each.endswith(" forward")]
    assert windows[: len(forward)] == forward
    assert all(each.endswith(" backward") for each in windows[len(forward) :])
    saved = [each.parts["saved activations"] for each in moments]
    peak = found.memory.saved_activations
    assert peak > 0
    assert max(saved) == saved[len(forward) - 1] == peak
    assert saved[: len(forward)] == sorted(saved[: len(forward)])
    assert saved[len(forward) :] == sorted(saved[len(forward) :], reverse=True)
    assert saved[-1] < peak
    assert max(each.total for each in moments) <= found.memory.total


def test_layers_stand_as_they_run_whatever_they_are_called() -> None:
    with torch.device("meta"):
        arguments = (torch.empty(256, 128),)
        found = find_placement(Stack(3, 128, runs=(2, 0, 1)), MESH, arguments, PlacementRequest())
    windows = [each.window for each in memory_over_step(found)]
    assert [window for window in windows if window.startswith("layers")] == [
        *("layers.2 forward", "layers.0 forward", "layers.1 forward"),
        *("layers.1 backward", "layers.0 backward", "layers.2 backward"),
    ]


def test_the_loss_is_a_moment_between_forward_and_backward_without_gradients() -> None:
    of_loss = 2**26
    request = PlacementRequest(constraints=Constraints(inputs={"x": [S0]}), loss_bytes=of_loss)
    found = find_placement(model(), MESH, example(), request)
    moments = memory_over_step(found)
    windows = [each.window for each in moments]
    (at,) = [place for place, window in enumerate(windows) if window == "loss"]
    assert windows[at - 1].endswith(" forward")
    assert windows[at + 1].endswith(" backward")
    assert moments[at].total == found.memory.total == sum(found.memory.at_loss.values())
    assert moments[at].parts["loss"] == of_loss
    assert "gradients" not in moments[at].parts
    gradients = [each.parts.get("gradients", 0) for each in moments[at + 1 :]]
    assert gradients == sorted(gradients)
    assert gradients[-1] == found.memory.gradients > gradients[0]
    assert found.memory.in_backward.keys() == moments[-1].parts.keys()
    assert "Most is there at the loss; in the backward it is " in str(plan_report(found))


def test_the_page_has_a_column_for_each_moment() -> None:
    by_hand = plan_by_hand(("dp", 2, FSDP), ("tp", 2, TENSOR_PARALLEL))
    page = report_page(by_hand)
    for each in memory_over_step(by_hand):
        assert f'<div title="{each.window}: ' in page
