"""What modules cost."""

from __future__ import annotations

from itertools import count

import pytest
import torch
from split_models import DECODER_NAMING, Decoder, Nested

from gt_pipeline.errors import StageNamesError
from gt_pipeline.split import measure_module_costs, module_names_by_cost, parameter_bytes


def test_bytes_are_those_of_the_parameters_of_each_module():
    model = Decoder(2)
    sizes = parameter_bytes(model, DECODER_NAMING.names_of(model))
    assert sizes == {
        "embed": 16 * 8 * 4,
        "layers.0": (8 * 8 + 8) * 4,
        "layers.1": (8 * 8 + 8) * 4,
        "norm": 2 * 8 * 4,
        "head": 16 * 8 * 4,
    }
    assert module_names_by_cost(sizes, num_stages=3)[0] == ("embed",)


def test_bytes_are_known_on_the_meta_device_and_of_single_parameters():
    with torch.device("meta"):
        model = Nested()
    assert parameter_bytes(model, ["position", "dropout"]) == {"position": 32, "dropout": 0}


def test_a_measured_cost_is_the_least_time_between_entry_and_exit_of_the_runs_that_count():
    model = Decoder(1)
    now = {"seconds": 0.0}
    # Each reading of the clock is later than the one before by this; the first run does not count.
    paces = iter([0.5, 9.0, 2.0, 3.0])
    pace = {"seconds": 0.0}

    def clock() -> float:
        now["seconds"] += pace["seconds"]
        return now["seconds"]

    def step() -> None:
        pace["seconds"] = next(paces)
        model(torch.zeros(1, dtype=torch.long))

    costs = measure_module_costs(model, ["embed", "layers.0"], step, num_runs=3, clock=clock)
    assert costs == {"embed": 2.0, "layers.0": 2.0}


def test_calls_of_one_step_add_up():
    model = Decoder(1)
    ticks = count()

    def step() -> None:
        model(torch.zeros(1, dtype=torch.long))
        model(torch.zeros(1, dtype=torch.long))

    clock = lambda: float(next(ticks))  # noqa: E731
    assert measure_module_costs(model, ["norm"], step, clock=clock) == {"norm": 2.0}


def test_a_real_clock_gives_every_module_a_cost_and_leaves_no_hook():
    model = Decoder(2)
    names = DECODER_NAMING.names_of(model)
    costs = measure_module_costs(
        model, names, lambda: model(torch.zeros(4, 4, dtype=torch.long)), num_runs=1
    )
    assert list(costs) == list(names)
    assert all(cost > 0 for cost in costs.values())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_refuses_names_that_cannot_be_measured():
    model = Nested()
    with pytest.raises(StageNamesError) as caught:
        measure_module_costs(model, ["position", "dropouts"], lambda: None)
    assert str(caught.value) == (
        "costs of parts of Nested:\n"
        "  - there is no 'dropouts': Nested has towers, dropout, position, seen; did you mean "
        "'dropout'?"
    )
    with pytest.raises(StageNamesError) as caught:
        measure_module_costs(model, ["position"], lambda: None, num_runs=0)
    assert str(caught.value) == (
        "costs of parts of Nested:\n"
        "  - 'position' is no module\n"
        "  - num_runs is 0, must be at least 1"
    )
    with pytest.raises(StageNamesError, match="the step does not call 'dropout'"):
        measure_module_costs(model, ["dropout"], lambda: None)
    with pytest.raises(StageNamesError, match="there is no 'nothing'"):
        parameter_bytes(model, ["nothing"])
