"""Ranks share a graph as far as captures at other places agree, and are divided where they do not."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest

from gt_trainer.artifacts.alike_ranks import (
    NUM_ROUNDS,
    AlikeRanks,
    Coordinates,
    RankGroup,
    groups_text,
    judge,
    ranks_text,
)


def mesh(**sizes: int) -> AlikeRanks:
    """All ranks of a mesh, the last axis fastest."""
    places = itertools.product(*map(range, sizes.values()))
    return AlikeRanks(
        coordinates={rank: dict(zip(sizes, at, strict=True)) for rank, at in enumerate(places)}
    )


def document(*numbers: object) -> dict[str, Any]:
    """A graph of one node with these arguments."""
    return {"content": {"graph": {"nodes": [["c", "name", 0, list(numbers), {}, []]]}}}


def judged(alike: AlikeRanks, graph_of: Any, *, only_round: int | None = None) -> Any:
    """What captures say, of all rounds that it takes or of one of them."""
    for number in range(NUM_ROUNDS):
        captures = {rank: graph_of(alike.coordinates[rank]) for rank in alike.witnesses(number)}
        judgement = judge(alike, captures, round_number=number)
        if number == only_round or (only_round is None and not judgement.needs_more):
            return judgement
    raise AssertionError("more witnesses were wanted than there are")


def test_the_lowest_and_the_highest_rank_come_first():
    assert mesh(fsdp=2, tp=4).witnesses(0) == (0, 7)
    assert [mesh(tp=1).witnesses(number) for number in range(NUM_ROUNDS)] == [(0,)] * 3


def test_equal_captures_at_two_places_settle_a_class():
    alike = mesh(fsdp=128, tp=8)
    judgement = judged(alike, lambda at: document(1, 2), only_round=0)
    assert not judgement.needs_more
    assert judgement.rules == {}
    assert judgement.divided_by == ()


def test_ranks_of_tensor_parallelism_begin_with_those_who_would_be_asked_next():
    assert mesh(fsdp=2, tp=4).first_round == 1
    assert mesh(fsdp=4, tp=1).first_round == 0


def test_a_difference_asks_for_more_witnesses():
    alike = mesh(fsdp=2, tp=2)
    judgement = judged(alike, lambda at: document(at["tp"]), only_round=0)
    assert judgement.needs_more
    assert len(alike.witnesses(1)) == 3


@pytest.mark.parametrize("sizes", [{"fsdp": 2, "tp": 2}, {"fsdp": 128, "tp": 8}, {"tp": 3}])
def test_a_number_in_a_straight_line_becomes_a_rule(sizes: dict[str, int]):
    alike = mesh(**sizes)
    judgement = judged(alike, lambda at: document(7, 100 * at["tp"] + 5))
    assert judgement.divided_by == ()
    (rule,) = judgement.rules.values()
    assert (rule.base, dict(rule.steps)) == (5, {"tp": 100})
    assert len(alike.witnesses(1)) <= 6


def test_a_number_that_follows_two_axes_asks_for_still_more_witnesses_and_becomes_a_rule():
    alike = mesh(fsdp=4, tp=2)
    graph_of = partial(_two_axes, wrong=None)
    assert judged(alike, graph_of, only_round=1).needs_more
    (rule,) = judged(alike, graph_of).rules.values()
    assert (rule.base, dict(rule.steps)) == (3, {"fsdp": 16, "tp": 4})


def test_a_number_that_follows_two_axes_but_for_one_corner_divides():
    judgement = judged(mesh(fsdp=2, tp=2), partial(_two_axes, wrong=(1, 0)))
    assert judgement.rules == {}
    assert judgement.divided_by


def _two_axes(at: Coordinates, *, wrong: tuple[int, int] | None) -> Any:
    is_wrong = (at["fsdp"], at["tp"]) == wrong
    return document(3 + 16 * at["fsdp"] + 4 * at["tp"] + is_wrong)


def test_a_number_in_no_straight_line_divides_along_its_axis():
    alike = mesh(fsdp=2, tp=4)
    judgement = judged(alike, lambda at: document(at["tp"] ** 2))
    assert judgement.divided_by == ("tp",)
    assert judgement.examples
    assert [part.ranks for part in alike.divided(judgement.divided_by)] == [
        (0, 4),
        (1, 5),
        (2, 6),
        (3, 7),
    ]


def test_what_is_no_number_divides_and_rules_along_another_axis_stay_for_the_parts():
    def graph_of(at: Coordinates) -> Any:
        return document("first" if at["fsdp"] == 0 else "later", 10 * at["tp"])

    alike = mesh(fsdp=2, tp=2)
    judgement = judged(alike, graph_of)
    assert judgement.divided_by == ("fsdp",)
    for part in alike.divided(judgement.divided_by):
        inner = judged(part, graph_of)
        assert inner.rule_axes == ["tp"]
        assert inner.divided_by == ()


def test_a_difference_of_two_axes_at_once_divides_by_both():
    alike = mesh(fsdp=2, tp=2)
    judgement = judged(alike, lambda at: document(f"{at['fsdp']} {at['tp']}"))
    assert judgement.divided_by == ("fsdp", "tp")


def test_another_number_of_nodes_divides():
    def graph_of(at: Coordinates) -> Any:
        found = document(1)
        if at["tp"]:
            found["content"]["graph"]["nodes"] *= 2
        return found

    assert judged(mesh(fsdp=2, tp=2), graph_of).divided_by == ("tp",)


def test_axes_that_tell_the_same_ranks_apart_count_once():
    places = {rank: {"fsdp": rank, "ep": rank, "tp": 0} for rank in range(4)}
    assert AlikeRanks(coordinates=places).axes == ("fsdp",)


def test_groups_are_told_with_their_reasons():
    groups = [
        RankGroup(
            ranks=(0, 1, 2, 4, 5, 6),
            captured_by=(0, 1, 6),
            num_rules=3,
            rule_axes=("tp",),
        ),
        RankGroup(ranks=(3, 7), captured_by=(3,), reason="other ranks have another batch"),
        RankGroup(ranks=(8,), captured_by=()),
    ]
    assert groups_text(groups) == (
        "3 groups of ranks\n"
        "  ranks 0-2, 4-6: captured by 0, compared with ranks 1, 6; 3 numbers follow from the place "
        "along tp\n"
        "  ranks 3, 7: captured by 3; apart because other ranks have another batch\n"
        "  rank 8: captured before"
    )


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((5,), "rank 5"),
        ((0, 1), "ranks 0-1"),
        ((0, 2), "ranks 0, 2"),
        ((0, 2, 4, 6), "ranks 0-6 by 2"),
        ((0, 1, 2, 3, 9), "ranks 0-3, 9"),
        ((0, 8, 16, 17), "ranks 0-16 by 8, 17"),
    ],
)
def test_ranks_in_a_row_are_written_as_spans(ranks: tuple[int, ...], text: str):
    assert ranks_text(ranks) == text
