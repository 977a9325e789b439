from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gt_trace.artifacts.coordinate_rules import (
    CoordinateRule,
    telling_ranks,
    telling_ranks_of_sums,
)
from gt_trace.artifacts.rank_differences import (
    at_coordinates,
    document_differences,
    rules_of,
    with_rules,
)


def document(offset: int = 0, *, name: str = "sub", place: int = 0, shape: int = 4) -> Any:
    """A graph of one node that subtracts ``offset``, of a piece that begins at ``place``."""
    meta = [["val", ["T", 0, 0, place]]]
    nodes = [["p", "x", "x", [], {}, []], ["c", name, 0, [["n", 0], offset], {}, meta]]
    return {"content": {"graph": {"nodes": nodes}}, "values": [["t", shape]]}


NODE = ("content", "graph", "nodes", 1)


def test_equal_documents_do_not_differ_and_names_of_nodes_do_not_count() -> None:
    assert document_differences(document(3), document(3)) == []
    assert document_differences(document(3), document(3, name="sub_1")) == []


def test_numbers_that_a_node_takes_and_places_of_pieces_may_follow_a_rule() -> None:
    found = document_differences(document(0, place=0), document(8, place=64))

    assert [(each.path, each.ours, each.theirs, each.is_number) for each in found] == [
        ((*NODE, 3, 1), 0, 8, True),
        ((*NODE, 5, 0, 1, 3), 0, 64, True),
    ]


def test_operands_that_changed_places_follow_no_rule() -> None:
    places = places_of(tp=2)
    captures = []
    for place in places:
        made = document()
        made["content"]["graph"]["nodes"][1][3] = [["n", place["tp"]], ["n", 1 - place["tp"]]]
        captures.append((place, made))

    rules, unruled = rules_of(captures, places)

    assert rules == {}
    assert [str(each) for each in unruled] == [
        "content/graph/nodes/1/3/0: ['n', 0] and ['n', 1]",
        "content/graph/nodes/1/3/1: ['n', 1] and ['n', 0]",
    ]


def test_shapes_may_not() -> None:
    (found,) = document_differences(document(shape=4), document(shape=3))

    assert not found.is_number
    assert str(found) == "values/0/1: 4 and 3"


def places_of(**sizes: int) -> list[dict[str, int]]:
    ranges = [range(size) for size in sizes.values()]
    return [dict(zip(sizes, each, strict=True)) for each in itertools.product(*ranges)]


def test_two_captures_that_do_not_tell_two_axes_apart_give_no_rule() -> None:
    places = places_of(fsdp=2, tp=2)
    captures = [(place, document(8 * place["tp"])) for place in places]

    rules, unruled = rules_of([captures[0], captures[3]], places)
    assert (rules, [each.is_number for each in unruled]) == ({}, [True])

    rules, unruled = rules_of([captures[0], captures[3], captures[1]], places)
    assert unruled == []
    assert rules == {(*NODE, 3, 1): CoordinateRule(base=0, steps={"tp": 8})}


def test_what_is_no_straight_line_follows_no_rule() -> None:
    places = places_of(tp=4)
    last_is_short = [0, 8, 16, 20]
    captures = [(place, document(last_is_short[place["tp"]])) for place in places]

    rules, unruled = rules_of([captures[rank] for rank in telling_ranks(places)], places)

    assert rules == {}
    assert len(unruled) == 1


def test_what_only_ranks_in_the_middle_have_is_found() -> None:
    places = places_of(tp=4)
    captures = [(place, document(int(place["tp"] in (1, 2)))) for place in places]

    _, unruled = rules_of([captures[rank] for rank in telling_ranks(places)], places)

    assert len(unruled) == 1


@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [
        ({"fsdp": 2, "tp": 2}, [0, 3, 1]),
        ({"fsdp": 128, "tp": 8}, [0, 1023, 8, 1]),
        ({"fsdp": 4}, [0, 3, 1]),
        ({"fsdp": 2}, [0, 1]),
        ({}, [0]),
    ],
)
def test_few_ranks_tell_of_all(sizes: dict[str, int], ranks: list[int]) -> None:
    assert telling_ranks(places_of(**sizes)) == ranks


def test_axes_over_the_same_ranks_are_told_apart_where_they_can_be() -> None:
    # Experts are spread over ranks that another mesh counts by data and by tensor parallelism.
    places = [{"fsdp": r // 2, "tp": r % 2, "efsdp": r // 4, "ep": r % 4} for r in range(8)]
    captures = [(place, document(8 * place["ep"])) for place in places]

    rules, unruled = rules_of([captures[rank] for rank in telling_ranks(places)], places)

    assert unruled == []
    assert [[*rule.steps] for rule in rules.values()] == [["ep"]]


def found_of(sums: Any, places: list[dict[str, int]], ranks: list[int]) -> Any:
    """What captures of ``ranks`` say of a number that is ``sums`` of a place."""
    return rules_of([(places[rank], document(sums(places[rank]))) for rank in ranks], places)


def test_what_follows_two_axes_at_once_is_a_rule_if_a_rank_at_each_corner_has_it() -> None:
    places = places_of(fsdp=2, tp=2)

    def place_in_memory(at: dict[str, int]) -> int:
        return 5 + 64 * at["fsdp"] + 8 * at["tp"]

    _, unruled = found_of(place_in_memory, places, telling_ranks(places))
    assert len(unruled) == 1

    rules, unruled = found_of(place_in_memory, places, telling_ranks_of_sums(places))
    assert unruled == []
    assert [*rules.values()] == [CoordinateRule(base=5, steps={"fsdp": 64, "tp": 8})]


@pytest.mark.parametrize(
    "number",
    [
        lambda at: at["fsdp"] * at["tp"],
        lambda at: at["fsdp"] ^ at["tp"],
        lambda at: at["fsdp"] + at["tp"] ** 2,
        lambda at: 8 * at["fsdp"] + (at["tp"] + 1) // 2,
    ],
    ids=["product", "parity", "square", "half"],
)
def test_what_is_no_sum_of_steps_is_no_rule(number: Any) -> None:
    places = places_of(fsdp=3, tp=4)
    rules, unruled = found_of(number, places, telling_ranks_of_sums(places))

    assert rules == {}
    assert len(unruled) == 1


@pytest.mark.parametrize(
    ("sizes", "num_ranks"),
    [
        ({"fsdp": 2, "tp": 2}, 4),
        ({"fsdp": 128, "tp": 8}, 6),
        ({"dp": 4, "fsdp": 16, "tp": 8}, 10),
        ({"fsdp": 4}, 3),
        ({}, 1),
    ],
)
def test_ranks_that_tell_sums_are_few_and_those_that_tell_lines_are_among_them(
    sizes: dict[str, int], num_ranks: int
) -> None:
    places = places_of(**sizes)
    found = telling_ranks_of_sums(places)

    assert len(found) == num_ranks
    assert found[: len(telling_ranks(places))] == telling_ranks(places)


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    steps=st.lists(st.integers(-9, 9), min_size=3, max_size=3),
    base=st.integers(-5, 50),
)
def test_documents_by_sums_are_those_of_each_rank(
    sizes: list[int], steps: list[int], base: int
) -> None:
    names = ["a", "b", "c"][: len(sizes)]
    places = places_of(**dict(zip(names, sizes, strict=True)))

    def number(at: dict[str, int]) -> int:
        return base + sum(step * at[name] for step, name in zip(steps, names, strict=False))

    rules, unruled = found_of(number, places, telling_ranks_of_sums(places))
    shared = with_rules(document(number(places[0])), rules)

    assert unruled == []
    assert [at_coordinates(shared, at) for at in places] == [document(number(at)) for at in places]


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    lines=st.lists(
        st.tuples(st.integers(0, 2), st.integers(-5, 50), st.integers(-9, 9)),
        min_size=1,
        max_size=4,
    ),
)
def test_documents_by_rule_are_those_of_each_rank(
    sizes: list[int], lines: list[tuple[int, int, int]]
) -> None:
    names = ["a", "b", "c"][: len(sizes)]
    places = places_of(**dict(zip(names, sizes, strict=True)))

    def captured(place: dict[str, int]) -> Any:
        made = document()
        arguments = made["content"]["graph"]["nodes"][1][3]
        arguments += [base + step * place[names[n % len(names)]] for n, base, step in lines]
        return made

    telling = telling_ranks(places)
    before = copy.deepcopy([captured(places[rank]) for rank in telling])
    captures = [(places[rank], captured(places[rank])) for rank in telling]
    rules, unruled = rules_of(captures, places)
    shared = with_rules(captures[0][1], rules)

    assert unruled == []
    assert [document for _, document in captures] == before
    for place in places:
        assert at_coordinates(shared, place) == captured(place)
