"""Canonical text: what is the same, what differs, what is refused and where."""

import dataclasses
import enum
import math
from collections import OrderedDict
from types import MappingProxyType

import pytest

from gt_config import graph_neutral
from gt_config.errors import FingerprintTypeError
from gt_config.fingerprint import flatten


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    rate: float = 0.5
    label: str = dataclasses.field(default="", metadata=graph_neutral("only a label"))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SameFieldsAsInner:
    rate: float = 0.5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    inner: Inner = dataclasses.field(default_factory=Inner)
    names: tuple[str, ...] = ("a", "b")
    hidden: int = dataclasses.field(default=3, repr=False, compare=False)
    derived: int = dataclasses.field(init=False, default=7)


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class OtherColor(enum.Enum):
    RED = 1


def same(a, b):
    return flatten(a, path="x") == flatten(b, path="x")


def test_flattens_to_one_entry_a_field():
    assert flatten(Outer(), path="root") == {
        "root": f"{__name__}.Outer",
        "root.inner": f"{__name__}.Inner",
        "root.inner.rate": "0.5",
        "root.names": "sequence of 2",
        "root.names[0]": '"a"',
        "root.names[1]": '"b"',
        "root.hidden": "3",
        "root.derived": "7",
    }


def test_flattens_mappings_by_the_canonical_text_of_their_keys():
    assert flatten({"a.b": {1: None, "1": True}}, path="m") == {
        "m": "mapping of 1",
        'm["a.b"]': "mapping of 2",
        'm["a.b"][1]': "null",
        'm["a.b"]["1"]': "true",
    }


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a": 1}, OrderedDict(a=1)),
        ({"a": 1}, MappingProxyType({"a": 1})),
        ([1, 2], (1, 2)),
        (math.nan, float("nan")),
        (Inner(label="a"), Inner(label="b")),
    ],
)
def test_same_meaning_has_the_same_text(a, b):
    assert same(a, b)


DISTINCT = [
    None,
    False,
    True,
    0,
    1,
    0.0,
    -0.0,
    1.0,
    math.nan,
    math.inf,
    -math.inf,
    0.1,
    math.nextafter(0.1, 1),
    "",
    "1",
    "null",
    "None",
    "é",  # composed and decomposed: two texts, not normalized
    "e\N{COMBINING ACUTE ACCENT}",
    (),
    ("",),
    (1,),
    (True,),
    ((),),
    ([1], 2),
    ([1, 2],),
    {},
    {"": ""},
    {1: 0},
    {"1": 0},
    {True: 0},
    {1.0: 0},
    {None: 0},
    {0: 1},
    {"a": {"b": 0}},
    {'a"]["b': 0},
    Inner(),
    Inner(rate=1.0),
    SameFieldsAsInner(),
    {"rate": 0.5},
    Color.RED,
    Color.BLUE,
    OtherColor.RED,
]


def test_different_meanings_have_different_texts():
    texts = [tuple(sorted(flatten(value, path="x").items())) for value in DISTINCT]
    collisions = [
        (DISTINCT[i], DISTINCT[j])
        for i in range(len(texts))
        for j in range(i)
        if texts[i] == texts[j]
    ]
    assert collisions == []


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "path", "type_name"),
    [
        ({1, 2}, "x", "builtins.set"),
        (b"a", "x", "builtins.bytes"),
        (1j, "x", "builtins.complex"),
        (Text("a"), "x", f"{__name__}.Text"),
        ({"a": [0, {"b": object()}]}, 'x["a"][1]["b"]', "builtins.object"),
        (Outer(names=(frozenset(),)), "x.names[0]", "builtins.frozenset"),
        (Inner, "x", "builtins.type"),
        ({(1, 2): 3}, "a key of x", "builtins.tuple"),
    ],
)
def test_refuses_anything_else_and_names_its_path(value, path, type_name):
    with pytest.raises(FingerprintTypeError) as error:
        flatten(value, path="x")
    assert str(error.value) == (
        f"{path} is of type {type_name}, which has no canonical form; give plain data: "
        "dataclasses, mappings, lists, tuples, enums, str, int, float, bool and None"
    )


def test_refuses_data_that_contains_itself():
    loop: list[object] = [1]
    loop.append({"again": loop})
    with pytest.raises(FingerprintTypeError) as error:
        flatten(loop, path="x")
    assert str(error.value) == 'x[1]["again"] contains itself, so it has no canonical form'


def test_accepts_one_object_in_two_places():
    shared = [1]
    assert same({"a": shared, "b": shared}, {"a": [1], "b": [1]})


def test_refuses_text_that_is_no_valid_unicode():
    # Written as escapes, a pair of lone surrogates would equal the character they encode.
    with pytest.raises(
        FingerprintTypeError, match=r"x is '.ud83d.ude00', which is no valid Unicode"
    ):
        flatten("\ud83d\ude00", path="x")
