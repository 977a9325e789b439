"""Two ranks capture for all alike ones, or those that prove what numbers follow from."""

from __future__ import annotations

import itertools

import pytest

from gt_trainer.artifacts.alike_ranks import AlikeRanks, RankGroup, groups_text, ranks_text


def mesh(*, is_placed: bool = False, **sizes: int) -> AlikeRanks:
    """All ranks of a mesh, the last axis fastest."""
    places = itertools.product(*map(range, sizes.values()))
    return AlikeRanks(
        coordinates={rank: dict(zip(sizes, at, strict=True)) for rank, at in enumerate(places)},
        is_placed=is_placed,
    )


def test_the_lowest_and_the_highest_rank_capture():
    assert mesh(fsdp=128).witnesses == (0, 127)
    assert mesh(dp_replicate=4, fsdp=16, tp=1).witnesses == (0, 63)
    assert mesh(tp=1).witnesses == (0,)


def test_ranks_of_tensor_parallelism_begin_with_all_who_prove_rules():
    assert mesh(fsdp=128, tp=8).witnesses == (0, 1, 8, 1023)
    assert mesh(fsdp=2, tp=2).witnesses == (0, 1, 2, 3)
    assert mesh(tp=2).witnesses == (0, 1)


def test_ranks_of_a_placed_model_begin_with_all_who_prove_rules():
    assert mesh(fsdp=128, is_placed=True).witnesses == (0, 1, 127)
    assert mesh(fsdp=8, ep=4, is_placed=True).witnesses == (0, 1, 4, 31)


def test_the_lowest_of_ranks_that_run_the_very_same_graph():
    alike = mesh(pp=2, fsdp=2, tp=2)
    assert alike.first_of_its_kind(7, ()) == 4
    assert alike.first_of_its_kind(7, ("tp",)) == 5
    assert mesh(fsdp=4).first_of_its_kind(3, ()) == 0


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
        RankGroup(ranks=(9, 10), captured_by=(9, 10), is_shared=False, reason="shape: 4 and 3"),
        RankGroup(ranks=(11, 12), captured_by=(), is_shared=False),
    ]
    assert groups_text(groups) == (
        "5 groups of ranks\n"
        "  ranks 0-2, 4-6: captured by 0, compared with ranks 1, 6; 3 numbers follow from the place "
        "along tp\n"
        "  ranks 3, 7: captured by 3; apart because other ranks have another batch\n"
        "  rank 8: captured before\n"
        "  ranks 9-10: each has its own graph, captured by ranks 9-10; apart because shape: 4 and 3\n"
        "  ranks 11-12: each has its own graph, captured before"
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
