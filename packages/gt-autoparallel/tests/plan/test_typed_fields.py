"""Fields are of the kinds of their annotations, or all that are not are named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from gt_autoparallel.errors import PlanMismatchError
from gt_autoparallel.plan.plan_encoding import of_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    count: int = 0
    time_us: float = 0.0
    limit: int | None = None
    is_on: bool = False
    names: Mapping[str, str]
    items: tuple[int, ...] = ()


def test_makes_what_the_fields_say():
    assert of_fields(Fields, {"names": {}, "time_us": 1, "items": (2,)}) == Fields(
        names={}, time_us=1.0, items=(2,)
    )
    assert of_fields(Fields, {"names": {}, "limit": 3}).limit == 3
    assert of_fields(Fields, {"names": {}, "limit": None}).limit is None


def test_names_every_field_of_another_kind():
    content = {"count": True, "time_us": "1", "limit": 1.5, "is_on": 1, "names": []}
    with pytest.raises(PlanMismatchError) as error:
        of_fields(Fields, content)
    assert str(error.value) == (
        "Fields: count is True; allowed: int; time_us is '1'; allowed: float; limit is 1.5; "
        "allowed: int or NoneType; is_on is 1; allowed: bool; names is []; allowed: Mapping"
    )


def test_unknown_and_missing_fields_are_the_dataclass_s_to_refuse():
    for content in ({"names": {}, "speed": 1}, {}):
        with pytest.raises(TypeError):
            of_fields(Fields, content)
