"""An adversary of the verifier: edits that know nothing of its rules, judged by running them."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Iterator

import edit_campaign
import pytest
import torch
from edit_campaign import (
    EDITED_STEPS,
    Outcomes,
    draw_of,
    edited_step,
    main,
    quiet_operators,
    try_edits,
)
from mutation_graphs import StepGraph, step_graph
from random_edits import UnfitEditError, edit_at_random
from run_with_peers import are_equal_bits, random_inputs, run_with_peers
from torch.fx.experimental.proxy_tensor import make_fx

from gt_passes import PassContext, PassManager


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with quiet_operators():
        yield


@pytest.mark.parametrize("num_edits", [12, pytest.param(1500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", EDITED_STEPS)
def test_an_edit_that_is_accepted_changes_no_bit(name: str, num_edits: int) -> None:
    found = try_edits(edited_step(name), num_edits=num_edits, seed=0)
    assert not found.wrong
    assert found.num_by_outcome["accepted"] > 0
    assert found.num_by_outcome["refused"] > 0


@pytest.mark.parametrize("name", ["fsdp", "noisy-microbatches"])
def test_an_edit_that_changes_results_is_seen_by_running_it(name: str) -> None:
    """What the test above rests on: most of what is refused computes something else."""
    step = edited_step(name)
    inputs = random_inputs(step.graph_module)
    expected = run_with_peers(step.graph_module, inputs)
    differ = num_run = 0
    for number in range(40):
        graph_module = copy.deepcopy(step.graph_module)
        try:
            edit_at_random(graph_module, draw_of(step, number, seed=0))
            found = run_with_peers(graph_module, inputs)
        except UnfitEditError:
            continue
        except RuntimeError:  # sizes that only the real values have
            continue
        num_run += 1
        differ += not are_equal_bits(expected, found)
    assert num_run >= 10
    assert differ >= num_run / 4


def small_step() -> StepGraph:
    graph_module = make_fx(lambda x: x.cos(), tracing_mode="fake")(torch.ones(3))
    return step_graph("small", graph_module, PassContext.from_graph(graph_module))


def test_an_error_of_the_verifier_does_not_end_a_campaign(monkeypatch):
    step = small_step()

    def fail(*_):
        raise KeyError("lost")

    monkeypatch.setattr(PassManager, "run", fail)
    found = try_edits(step, num_edits=2, seed=5)
    assert found.num_by_outcome == {"failed": 2}
    assert found.wrong == [
        f"small, seed 5, edit {number}: []: not verified: KeyError('lost')" for number in (0, 1)
    ]


def test_what_is_accepted_and_does_not_run_does_not_end_a_campaign(monkeypatch):
    step = small_step()
    monkeypatch.setattr(edit_campaign, "edit_at_random", lambda *_, **__: "nothing")
    num_runs = 0

    def run_twice(*arguments):
        nonlocal num_runs
        num_runs += 1
        if num_runs > 2:
            raise IndexError("out of it")
        return run_with_peers(*arguments)

    monkeypatch.setattr(edit_campaign, "run_with_peers", run_twice)
    found = try_edits(step, num_edits=1, seed=5)
    assert found.num_by_outcome == {"accepted": 1}
    assert found.wrong == [
        "small, seed 5, edit 0: ['nothing']: accepted, and does not run: IndexError('out of it')"
    ]


@pytest.mark.parametrize(
    ("num_accepted", "wrong", "code"), [(0, [], 1), (1, [], 0), (1, ["an edit"], 1)]
)
def test_a_campaign_is_right_if_it_ran_something(monkeypatch, capsys, num_accepted, wrong, code):
    counts = Counter({"accepted": num_accepted, "refused": 1})
    monkeypatch.setattr(edit_campaign, "EDITED_STEPS", ("small",))
    monkeypatch.setattr(edit_campaign, "edited_step", lambda _: None)
    found = Outcomes(num_by_outcome=counts, wrong=wrong)
    monkeypatch.setattr(edit_campaign, "try_edits", lambda *_, **__: found)
    monkeypatch.setattr(sys, "argv", ["edit_campaign", "--num-cases", "1"])
    assert main() == code
    text = capsys.readouterr().out
    assert ("no edit was accepted, so none was run" in text) == (num_accepted == 0)
    assert ("WRONG: an edit" in text) == bool(wrong)
