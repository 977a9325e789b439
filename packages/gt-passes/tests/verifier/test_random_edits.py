"""An adversary of the verifier: edits that know nothing of its rules, judged by running them."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
from edit_campaign import EDITED_STEPS, draw_of, edited_step, quiet_operators, try_edits
from random_edits import UnfitEditError, edit_at_random
from run_with_peers import are_equal_bits, random_inputs, run_with_peers


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
