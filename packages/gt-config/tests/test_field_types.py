"""Matching values against the type hints of configuration fields."""

from typing import Literal

import pytest

from gt_config._field_types import describe_hint, matches_hint


@pytest.mark.parametrize(
    ("hint", "words", "accepted", "refused"),
    [
        (bool, "True or False", [True, False], [0, 1, "True", None]),
        (int, "an integer", [0, -3], [True, 1.0, "1", None]),
        (float, "a number", [0.5, 2], [True, "0.5", None]),
        (str, "a string", ["", "a"], [b"a", 1, None]),
        (int | None, "an integer or None", [1, None], [False, "1"]),
        (Literal["a", "b"], "'a' or 'b'", ["a"], ["c", 1, None]),
        (Literal["a", "b", "c"], "'a', 'b' or 'c'", ["c"], ["d"]),
        (Literal[1], "1", [1], [True, 1.0]),
        (tuple[str, ...], "a tuple of strings", [(), ("a", "b")], [["a"], ("a", 1), "a"]),
    ],
)
def test_describes_and_matches(hint, words, accepted, refused):
    assert describe_hint(hint) == words
    assert [value for value in accepted if not matches_hint(value, hint)] == []
    assert [value for value in refused if matches_hint(value, hint)] == []


@pytest.mark.parametrize("hint", [list[str], bytes, tuple[int, ...], dict[str, int]])
def test_refuses_a_hint_that_no_field_uses(hint):
    with pytest.raises(TypeError, match="configuration fields do not use the type hint"):
        describe_hint(hint)
    with pytest.raises(TypeError, match="configuration fields do not use the type hint"):
        matches_hint(1, hint)
