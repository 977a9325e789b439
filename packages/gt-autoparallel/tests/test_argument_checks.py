"""Functions that take a plan say what is wrong with a call, all of it at once, in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from plan_doubles import FSDP, plan_by_hand

import gt_autoparallel
from gt_autoparallel.errors import PlacementInputError
from gt_autoparallel.plan.placement_plan import PlacementPlan
from gt_autoparallel.plan_file import check_plan_fits

ap: Any = gt_autoparallel  # no type checker would let these calls pass

PLAN = "allowed: a PlacementPlan, from find_placement or a plan file"
PATH = "allowed: the path of a file"
PRICES = "allowed: prices of nodes and steps, as PlacementPrices()"


@pytest.fixture(scope="module")
def plan() -> PlacementPlan:
    return plan_by_hand(("dp", 4, FSDP))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda plan: ap.compare(None, "plan.json"),
            f"arguments of compare:\n  first is None; {PLAN}\n  second is a str; {PLAN}",
        ),
        (lambda plan: ap.plan_report(None), f"arguments of plan_report:\n  plan is None; {PLAN}"),
        (
            lambda plan: ap.write_report_page(3, None),
            f"arguments of write_report_page:\n  plan is an int; {PLAN}\n  path is None; {PATH}",
        ),
        (lambda plan: ap.audit_plan(None), f"arguments of audit_plan:\n  plan is None; {PLAN}"),
        (
            lambda plan: ap.predicted_collectives(None),
            f"arguments of predicted_collectives:\n  plan is None; {PLAN}",
        ),
        (
            lambda plan: ap.explain(None, 3),
            (
                f"arguments of explain:\n  plan is None; {PLAN}\n  name is an int; allowed: the name of "
                "a node or parameter"
            ),
        ),
        (
            lambda plan: ap.write_plan(None, 3),
            f"arguments of write_plan:\n  plan is None; {PLAN}\n  path is an int; {PATH}",
        ),
        (
            lambda plan: ap.write_plan(plan, None),
            f"arguments of write_plan:\n  path is None; {PATH}",
        ),
        (
            lambda plan: ap.write_report_page(plan, None),
            f"arguments of write_report_page:\n  path is None; {PATH}",
        ),
        (
            lambda plan: ap.find_placement(None, None, None, {"relative_gap": 0.1}),
            (
                "arguments of find_placement:\n  request is a dict; allowed: a "
                "PlacementRequest(memory_budget_bytes=..., ...), or None"
            ),
        ),
        (
            lambda plan: ap.read_plan(None, prices=None),
            f"arguments of read_plan:\n  path is None; {PATH}\n  prices is None; {PRICES}",
        ),
        (
            lambda plan: ap.decode_plan({}, "h100"),
            f"arguments of decode_plan:\n  prices is a str; {PRICES}",
        ),
        (
            lambda plan: check_plan_fits(plan, model=None, mesh=(4,), graph="g"),
            (
                "arguments of check_plan_fits:\n"
                "  model is None; allowed: a torch.nn.Module\n"
                "  mesh is a tuple; allowed: a MeshShape, as MeshShape.of(device_mesh)\n"
                "  graph is a str; allowed: a PlacementGraph, captured from the model"
            ),
        ),
        (lambda plan: ap.encode_plan(None), f"arguments of encode_plan:\n  plan is None; {PLAN}"),
        (
            lambda plan: ap.load_plan(None, None, None, None),
            (
                "arguments of load_plan:\n"
                "  model is None; allowed: a torch.nn.Module\n"
                "  mesh is None; allowed: a DeviceMesh with named axes, or a MeshShape\n"
                "  example_inputs is None; allowed: a tuple of the forward's positional arguments, as in "
                f"(tokens,)\n  path is None; {PATH}"
            ),
        ),
        (
            lambda plan: ap.apply_plan(None, None, None, experts=3, interface=4),
            (
                "arguments of apply_plan:\n"
                "  model is None; allowed: a torch.nn.Module\n"
                f"  plan is None; {PLAN}\n"
                "  mesh is None; allowed: a DeviceMesh with the axes of the plan\n"
                "  experts is an int; allowed: a mapping from names of modules to expert blocks, or None\n"
                "  interface is an int; allowed: a ModelInterface, or None"
            ),
        ),
    ],
    ids=lambda value: value.partition(":")[0] if isinstance(value, str) else "call",
)
def test_names_every_argument_that_is_not_what_it_must_be(
    call: Callable[[PlacementPlan], Any], message: str, plan: PlacementPlan
) -> None:
    with pytest.raises(PlacementInputError) as error:
        call(plan)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("names", "sizes", "message"),
    [
        (
            None,
            [2],
            (
                "names are None; allowed: a tuple of strings; sizes are [2]; allowed: a tuple of "
                "integers of at least 1"
            ),
        ),
        ("ab", (1, 2), "names are 'ab'; allowed: a tuple of strings"),
        (("a",), (True,), "sizes are (True,); allowed: a tuple of integers of at least 1"),
        (("a",), (0,), "sizes are (0,); allowed: a tuple of integers of at least 1"),
        ((), (), "0 names and 0 sizes; one size a name"),
        (("a",), (2, 2), "1 names and 2 sizes; one size a name"),
        (("a", "a"), (2, 2), "names are ('a', 'a'); each must differ"),
    ],
)
def test_refuses_what_is_no_shape_of_a_mesh(names: Any, sizes: Any, message: str) -> None:
    with pytest.raises(PlacementInputError) as error:
        ap.MeshShape(names=names, sizes=sizes)
    assert str(error.value) == f"mesh: {message}"


@pytest.mark.parametrize("strides", [(1,), (1, 2.0), [2, 1]])
def test_refuses_strides_that_are_not_those_of_its_axes(strides: Any) -> None:
    with pytest.raises(PlacementInputError) as error:
        ap.MeshShape(names=("a", "b"), sizes=(2, 2), strides=strides)
    assert str(error.value) == (
        f"mesh: strides are {strides!r}; allowed: one integer a size, or none"
    )
