"""Plans of several parts: alike ones share a search, and each plan is of its own part."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from planned_models import MESH, WIDTH, Block
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from gt_autoparallel import (
    Constraints,
    OpenSearchWarning,
    PartToPlace,
    PlacementError,
    PlacementPlan,
    PlacementRequest,
    find_placements,
)
from gt_autoparallel.audit import audit_plan
from gt_autoparallel.solver import Solution, solve
from gt_passes.simulation import CostModel, h100_sxm

S0, R = Shard(0), Replicate()


class Stage(nn.Module):
    """Some layers of a model, called as in all of it."""

    def __init__(self, *layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(each): Block(WIDTH) for each in layers})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def part(
    *layers: int, needs_gradient: bool = True, output: object = S0, **request: object
) -> PartToPlace:
    x = torch.empty(256, WIDTH, device="meta", requires_grad=needs_gradient)
    lines: list[str] = request.pop("lines", [])
    with torch.device("meta"):
        return PartToPlace(
            model=Stage(*layers),
            example_inputs=(x,),
            request=PlacementRequest(
                constraints=Constraints(inputs={"x": [S0]}, outputs={"output": [output]}),
                progress=lines.append,
                **request,
            ),
        )


def found(*parts: PartToPlace) -> tuple[list[PlacementPlan], list[bool]]:
    """The plans of parts, and of which of them the search was their own."""
    plans = find_placements(dict(enumerate(parts)), MESH)
    solvers = [plan.solver for plan in plans.values()]
    return list(plans.values()), [solver not in solvers[:i] for i, solver in enumerate(solvers)]


def test_so_do_parts_that_are_asked_for_with_cost_models_that_say_the_same() -> None:
    models = [CostModel(h100_sxm()) for _ in range(2)]
    other = CostModel(replace(h100_sxm(), peak_bf16_flops_per_s=1e12))
    parts = (part(0), part(1), part(2))
    for each, model in zip(parts, [*models, other], strict=True):
        object.__setattr__(each, "request", replace(each.request, cost_model=model))
    assert found(*parts)[1] == [True, False, True]


def test_parts_that_differ_in_names_of_layers_share_a_plan() -> None:
    (first, second, last), searched = found(part(0, 1), part(2, 3), part(10, 11))
    assert searched == [True, False, False]
    assert first.options == second.options == last.options
    assert set(second.parameter_layouts()) == {
        f"layers.{layer}.{name}.weight" for layer in (2, 3) for name in ("up", "down")
    }
    windows = {window.name.partition(" ")[0] for window in last.windows}
    assert windows == {"model", "layers.10", "layers.11"}
    assert audit_plan(last).total_us == pytest.approx(audit_plan(first).total_us)


def test_parts_that_differ_in_more_do_not() -> None:
    _, searched = found(
        part(0, 1),
        part(2, 3, 4),
        part(5, 6, needs_gradient=False),
        part(7, 8, output=R),
        part(9, 10, memory_budget_bytes=2**40),
    )
    assert searched == [True] * 5


def test_the_gradient_of_an_input_lies_as_the_input() -> None:
    (plan,), _ = found(part(0))
    (gradient,) = plan.graph.of_kind("input_gradient")
    assert gradient.target == "x"
    assert plan.options[gradient.index].operands == ((S0,),)
    (unasked,), _ = found(part(0, needs_gradient=False))
    assert unasked.graph.of_kind("input_gradient") == ()


def test_a_search_that_is_left_open_is_warned_of_once_with_the_name_of_its_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hurried(*args: Any, **kwargs: Any) -> Solution:
        return replace(solve(*args, **kwargs), proven=False)

    monkeypatch.setattr("gt_autoparallel.planner.solve", hurried)
    with pytest.warns(OpenSearchWarning) as warned:
        found(part(0, 1), part(2, 3))  # which are alike
    (said,) = warned
    assert str(said.message).startswith("the search for a placement of part 0 ended with a gap of ")


def test_an_error_says_of_which_part_it_is() -> None:
    with pytest.raises(PlacementError) as error:
        found(part(0), part(1, memory_budget_bytes=1000))
    assert error.value.__notes__ == ["while 1 was planned"]
