"""Which stages a rank has."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gt_pipeline.errors import StageLayoutError
from gt_pipeline.split import stage_indices_of_rank
from gt_pipeline.split.stage_indices import stages_by_rank


def test_a_loop_goes_around_the_ranks():
    assert stages_by_rank(4, 8) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert stage_indices_of_rank(1, 2, 6, style="loop") == (1, 3, 5)


def test_a_v_goes_down_the_ranks_and_up_again():
    assert stages_by_rank(4, 8, style="v") == ((0, 7), (1, 6), (2, 5), (3, 4))
    assert stage_indices_of_rank(3, 4, 8, style="v") == (3, 4)


def test_stages_can_be_given_rank_by_rank_and_need_not_be_even():
    assert stage_indices_of_rank(1, 2, 3, style=[[0, 2], [1]]) == (1,)


@settings(deadline=None)
@given(pp_degree=st.integers(1, 12), stages_per_rank=st.integers(1, 5))
def test_each_stage_is_on_one_rank_and_ranks_are_even(pp_degree: int, stages_per_rank: int):
    num_stages = pp_degree * stages_per_rank
    for style in ("loop", "v") if stages_per_rank == 2 else ("loop",):
        by_rank = stages_by_rank(pp_degree, num_stages, style=style)
        assert sorted(stage for stages in by_rank for stage in stages) == list(range(num_stages))
        assert {len(stages) for stages in by_rank} == {stages_per_rank}
        assert all(list(stages) == sorted(stages) for stages in by_rank)
        assert by_rank == tuple(
            stage_indices_of_rank(rank, pp_degree, num_stages, style=style)
            for rank in range(pp_degree)
        )


@settings(deadline=None)
@given(pp_degree=st.integers(2, 12))
def test_neighbouring_stages_of_a_v_are_on_neighbouring_ranks_or_on_one(pp_degree: int):
    by_rank = stages_by_rank(pp_degree, 2 * pp_degree, style="v")
    rank_of = {stage: rank for rank, stages in enumerate(by_rank) for stage in stages}
    steps = [rank_of[stage + 1] - rank_of[stage] for stage in range(2 * pp_degree - 1)]
    assert steps == [1] * (pp_degree - 1) + [0] + [-1] * (pp_degree - 1)


@pytest.mark.parametrize(
    ("arguments", "style", "text"),
    [
        (
            (0, 0, 0),
            "loop",
            (
                "0 stages on 0 ranks:\n"
                "  - pp_degree is 0, must be at least 1\n"
                "  - num_stages is 0, must be at least 1"
            ),
        ),
        (
            (0, 4, 6),
            "loop",
            (
                "6 stages on 4 ranks:\n"
                "  - the stages do not divide evenly; give the stages of each rank as style"
            ),
        ),
        (
            (0, 2, 6),
            "v",
            "6 stages on 2 ranks:\n  - style 'v' has 2 stages on a rank, not 3",
        ),
        (
            (0, 2, 5),
            "zigzag",
            (
                "5 stages on 2 ranks:\n"
                "  - style is 'zigzag', must be 'loop', 'v' or the stages of each rank\n"
                "  - the stages do not divide evenly; give the stages of each rank as style"
            ),
        ),
        ((4, 4, 8), "loop", "stages of pipeline rank 4:\n  - ranks are 0 to 3"),
        ((-1, 4, 8), "v", "stages of pipeline rank -1:\n  - ranks are 0 to 3"),
        (
            (0, 2, 4),
            [[0, 0], [9], []],
            (
                "4 stages on 2 ranks, rank by rank ((0, 0), (9,), ()):\n"
                "  - stages are given for 3 ranks\n"
                "  - rank 1 has stage 9, stages are 0 to 3\n"
                "  - rank 2 has no stage\n"
                "  - stage 0 is given 2 times, on ranks [0, 0]\n"
                "  - stage 1 is on no rank\n"
                "  - stage 2 is on no rank\n"
                "  - stage 3 is on no rank"
            ),
        ),
    ],
)
def test_refuses_what_does_not_fit_and_lists_every_reason(arguments, style, text: str):
    with pytest.raises(StageLayoutError) as caught:
        stage_indices_of_rank(*arguments, style=style)
    assert str(caught.value) == text
    assert isinstance(caught.value, ValueError)
