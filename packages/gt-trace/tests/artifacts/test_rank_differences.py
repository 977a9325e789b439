from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gt_trace.artifacts.coordinate_rules import CoordinateRule, decoded_rule, proving_ranks
from gt_trace.artifacts.rank_differences import (
    Comparison,
    compare_documents,
    document_differences,
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


def test_shapes_may_not() -> None:
    (found,) = document_differences(document(shape=4), document(shape=3))

    assert not found.is_number
    assert str(found) == "values/0/1: 4 and 3"


Place = dict[str, int]


def places_of(**sizes: int) -> list[Place]:
    ranges = [range(size) for size in sizes.values()]
    return [dict(zip(sizes, each, strict=True)) for each in itertools.product(*ranges)]


def compared(
    document_of: Callable[[Place], Any], places: list[Place], ranks: list[int] | None = None
) -> Comparison:
    """What captures of some ranks say, or of those that prove rules."""
    ranks = proving_ranks(places) if ranks is None else ranks
    documents = {rank: document_of(places[rank]) for rank in ranks}
    return compare_documents(documents, dict(enumerate(places)))


def of_number(number: Callable[[Place], int]) -> Callable[[Place], Any]:
    """Documents that differ in one number."""
    return lambda place: document(number(place))


def test_equal_documents_at_two_places_have_no_differences() -> None:
    found = compared(of_number(lambda at: 3), places_of(fsdp=128, tp=8), [0, 1023])

    assert (found.rules, found.unruled, found.reason()) == ({}, [], "")


def test_operands_that_changed_places_follow_no_rule() -> None:
    def turned(place: Place) -> Any:
        made = document()
        made["content"]["graph"]["nodes"][1][3] = [["n", place["tp"]], ["n", 1 - place["tp"]]]
        return made

    found = compared(turned, places_of(tp=2))

    assert found.rules == {}
    assert found.reason() == (
        "content/graph/nodes/1/3/0: ['n', 0] and ['n', 1]; "
        "content/graph/nodes/1/3/1: ['n', 1] and ['n', 0]"
    )


def test_another_number_of_nodes_follows_no_rule() -> None:
    def longer(place: Place) -> Any:
        made = document()
        made["content"]["graph"]["nodes"] *= 1 + place["tp"]
        return made

    assert len(compared(longer, places_of(fsdp=2, tp=2)).unruled) == 1


@pytest.mark.parametrize("ranks", [[0, 3], [0, 1, 3], [0, 1, 2]])
def test_captures_that_leave_a_doubt_give_no_rule(ranks: list[int]) -> None:
    places = places_of(fsdp=2, tp=2)
    found = compared(of_number(lambda at: 8 * at["tp"]), places, ranks)

    assert (found.rules, [each.is_number for each in found.unruled]) == ({}, [True])


@pytest.mark.parametrize("sizes", [{"fsdp": 2, "tp": 2}, {"fsdp": 128, "tp": 8}, {"tp": 3}])
def test_a_number_in_a_straight_line_becomes_a_rule(sizes: dict[str, int]) -> None:
    found = compared(of_number(lambda at: 8 * at["tp"] + 5), places_of(**sizes))

    assert found.unruled == []
    assert found.rules == {(*NODE, 3, 1): CoordinateRule(base=5, steps={"tp": 8})}
    assert found.rule_axes == ("tp",)


@pytest.mark.parametrize(
    "number",
    [
        lambda at: [0, 8, 16, 20][at["tp"]],
        lambda at: int(at["tp"] in (1, 2)),
        lambda at: at["fsdp"] * at["tp"],
        lambda at: at["fsdp"] ^ at["tp"],
        lambda at: at["fsdp"] + at["tp"] ** 2,
        lambda at: 8 * at["fsdp"] + (at["tp"] + 1) // 2,
        lambda at: max(at["fsdp"], at["tp"]),
        lambda at: (4 * at["fsdp"] + at["tp"] + 1) % 12,
        lambda at: 4 * at["fsdp"] + (at["tp"] + 1) % 4,
        lambda at: int(at == {"fsdp": 2, "tp": 3}),
        lambda at: int(at == {"fsdp": 0, "tp": 0}),
    ],
    ids=[
        "last is short",
        "middle",
        "product",
        "parity",
        "square",
        "half",
        "larger",
        "next rank",
        "neighbor",
        "last",
        "first",
    ],
)
def test_other_functions_of_places_are_no_rules(number: Any) -> None:
    found = compared(of_number(number), places_of(fsdp=3, tp=4))

    assert found.rules == {}
    assert len(found.unruled) == 1


@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [
        ({"fsdp": 2, "tp": 2}, [0, 1, 2, 3]),
        ({"fsdp": 128, "tp": 8}, [0, 1, 8, 1023]),
        ({"dp": 4, "fsdp": 16, "tp": 8}, [0, 1, 8, 128, 511]),
        ({"fsdp": 4}, [0, 1, 3]),
        ({"fsdp": 2}, [0, 1]),
        ({}, [0]),
    ],
)
def test_few_ranks_prove_rules_for_all(sizes: dict[str, int], ranks: list[int]) -> None:
    assert proving_ranks(places_of(**sizes)) == ranks


def test_ranks_of_no_whole_mesh_confirm_each_axis() -> None:
    places = [*places_of(fsdp=2, tp=8)[:8], {"fsdp": 1, "tp": 7}]
    found = compared(of_number(lambda at: at["tp"] ** 2), places)

    assert proving_ranks(places) == [0, 1, 7, 8]
    assert found.rules == {}
    places = [*places_of(fsdp=2, tp=8), {"fsdp": 2, "tp": 0}]
    assert proving_ranks(places) == [0, 1, 8, 15, 16]


def test_axes_over_the_same_ranks_are_told_apart_where_they_can_be() -> None:
    # Experts are spread over ranks that another mesh counts by data and by tensor parallelism.
    places = [{"fsdp": r // 2, "tp": r % 2, "efsdp": r // 4, "ep": r % 4} for r in range(8)]
    found = compared(of_number(lambda at: 8 * at["ep"]), places)

    assert found.unruled == []
    assert found.rule_axes == ("ep",)


def test_a_number_that_follows_two_axes_is_a_rule_unless_one_corner_differs() -> None:
    places = places_of(fsdp=2, tp=2)
    found = compared(of_number(lambda at: 5 + 64 * at["fsdp"] + 8 * at["tp"]), places)
    assert [*found.rules.values()] == [CoordinateRule(base=5, steps={"fsdp": 64, "tp": 8})]
    for corner in places:
        wrong = compared(
            of_number(lambda at, corner=corner: 64 * at["fsdp"] + 8 * at["tp"] + (at == corner)),  # type: ignore[misc]  # mypy does not take defaults of a lambda
            places,
        )
        assert wrong.rules == {}


def at_coordinates(item: Any, place: Place) -> Any:
    """The document of a rank, of one with values by coordinate."""
    if not isinstance(item, (dict, list)):
        return item
    if isinstance(item, dict):
        return {key: at_coordinates(each, place) for key, each in item.items()}
    if item[:1] == ["by"]:
        return decoded_rule(item).at(place)
    return [at_coordinates(each, place) for each in item]


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    numbers=st.lists(
        st.tuples(st.integers(-5, 50), *(st.integers(-9, 9) for _ in range(3))),
        min_size=1,
        max_size=4,
    ),
)
def test_documents_by_rule_are_those_of_each_rank(
    sizes: list[int], numbers: list[tuple[int, ...]]
) -> None:
    names = ["a", "b", "c"][: len(sizes)]
    places = places_of(**dict(zip(names, sizes, strict=True)))

    def captured(place: Place) -> Any:
        made = document()
        made["content"]["graph"]["nodes"][1][3] += [
            base + sum(step * place[name] for step, name in zip(steps, names, strict=False))
            for base, *steps in numbers
        ]
        return made

    before = copy.deepcopy(captured(places[0]))
    found = compared(captured, places)
    shared = with_rules(captured(places[0]), found.rules)

    assert found.unruled == []
    assert captured(places[0]) == before
    for place in places:
        assert at_coordinates(shared, place) == captured(place)


@given(
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    values=st.lists(st.integers(0, 3), min_size=16, max_size=16),
)
def test_a_rule_holds_on_every_rank_that_captured(
    sizes: tuple[int, int], values: list[int]
) -> None:
    places = places_of(a=sizes[0], b=sizes[1])

    def number(at: Place) -> int:
        return values[4 * at["a"] + at["b"]]

    found = compared(of_number(number), places)
    for rule in found.rules.values():
        assert all(rule.at(places[rank]) == number(places[rank]) for rank in proving_ranks(places))
