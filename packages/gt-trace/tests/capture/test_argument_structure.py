"""What is said of a call whose arguments have another structure than the captured ones.

Masks of FlexAttention are in ``test_flex_attention.py``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from gt_trace import InputMismatchError, trace_step


class Offsets(NamedTuple):
    """A kind of tuple."""

    starts: torch.Tensor
    longest: int


class Lengths(NamedTuple):
    """Another one, with as many fields."""

    starts: torch.Tensor
    longest: int


ONE = torch.ones(2)


def step(x: torch.Tensor, more: Any = None, **named: Any) -> torch.Tensor:
    return torch.ones(1)


def refusal(captured: tuple[Any, ...], call: Callable[[Any], Any]) -> list[str]:
    bound = trace_step(step)(*captured).bind()
    with pytest.raises(InputMismatchError) as error:
        call(bound)
    first, *lines = str(error.value).splitlines()
    assert first == "the arguments have another structure than the captured ones:"
    return [line.removeprefix("  ") for line in lines]


def test_keys_that_came_and_went_are_named_with_their_place() -> None:
    captured = {"y": ONE, "deep": {"a": [ONE, 1]}}
    now = {"z": ONE, "deep": {"a": [ONE, 1, 2]}}
    assert refusal((ONE, captured), lambda bound: bound(ONE, now)) == [
        "more['y']: missing",
        "more['z']: not captured",
        "more['deep']['a']: 3 items, captured with 2",
    ]


def test_the_same_keys_in_another_order_are_told() -> None:
    captured, now = {"a": ONE, "b": ONE}, {"b": ONE, "a": ONE}
    assert refusal((ONE, captured), lambda bound: bound(ONE, now)) == [
        "more: in the order ['b', 'a'], captured as ['a', 'b']"
    ]


def test_the_number_of_arguments_and_keywords_are_told() -> None:
    assert refusal((ONE, 2), lambda bound: bound(ONE, flag=True)) == [
        "1 positional arguments, captured with 2",
        "flag: not captured",
    ]


def test_another_kind_of_value_is_told_as_what_it_is() -> None:
    captured = (ONE, [ONE, {"a": 1}, ONE, ()])
    assert refusal(captured, lambda bound: bound(ONE, [[ONE], None, {}, (1,)])) == [
        "more[0]: list, captured as torch.float32 [2]",
        "more[1]: None, captured as dict",
        "more[2]: dict, captured as torch.float32 [2]",
        "more[3]: 1 items, captured with 0",
    ]


def test_kinds_of_mappings_and_of_named_tuples_are_told_apart() -> None:
    captured = [OrderedDict(a=ONE), Offsets(ONE, 3), ONE]
    now = [{"a": ONE}, Lengths(ONE, 3), (ONE,)]
    assert refusal((captured,), lambda bound: bound(now)) == [
        "x[0]: dict, captured as OrderedDict",
        f"x[1]: namedtuple with context {Lengths!r}, captured with {Offsets!r}",
        "x[2]: tuple, captured as torch.float32 [2]",
    ]
