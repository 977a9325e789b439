"""Names and sizes: what is refused, with every reason, and that PyTorch refuses the same."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from schedule_cases import SLOW_MACHINES

from gt_pipeline._torch_internals import torch_table
from gt_pipeline.errors import ScheduleError
from gt_pipeline.schedules import SCHEDULE_NAMES, schedule_of
from gt_pipeline.schedules.schedule_rules import check_sizes


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_names_are_taken_in_any_case(name: str) -> None:
    for spelled in (name, name.lower(), name.upper()):
        rules = (
            check_sizes(spelled, num_ranks=1, num_stages=2, num_microbatches=2)
            if (name not in ("GPipe", "1F1B"))
            else check_sizes(spelled, num_ranks=2, num_stages=2, num_microbatches=2)
        )
        assert rules.name == name


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ScheduleError) as caught:
        schedule_of("2F2B", num_ranks=4, num_stages=4, num_microbatches=4)
    assert_expected_inline(
        str(caught.value),
        """\
no schedule is called '2F2B':
  - there are GPipe, 1F1B, Interleaved1F1B, InterleavedZeroBubble, ZBVZeroBubble, DualPipeV
  - one of your own is read from CSV""",
    )


def test_every_size_that_does_not_fit_is_reported() -> None:
    with pytest.raises(ScheduleError) as caught:
        check_sizes("dualpipev", num_ranks=4, num_stages=12, num_microbatches=6)
    assert_expected_inline(
        str(caught.value),
        """\
DualPipeV cannot have 4 ranks, 12 stages and 6 microbatches:
  - num_stages must be 8: 2 on each of 4 ranks
  - num_microbatches must be at least num_stages, 12""",
    )
    with pytest.raises(ScheduleError) as caught:
        check_sizes("Interleaved1F1B", num_ranks=4, num_stages=6, num_microbatches=9)
    assert_expected_inline(
        str(caught.value),
        """\
Interleaved1F1B cannot have 4 ranks, 6 stages and 9 microbatches:
  - num_stages must be a multiple of num_ranks, 4, such as 4 or 8
  - num_microbatches must divide into 2 equal rounds (one per num_ranks microbatches); multiples of num_ranks do, such as 8 or 12""",
    )


def test_sizes_below_one_are_reported_together() -> None:
    with pytest.raises(ScheduleError) as caught:
        check_sizes("GPipe", num_ranks=0, num_stages=-1, num_microbatches=0)
    assert_expected_inline(
        str(caught.value),
        """\
GPipe cannot have 0 ranks, -1 stages and 0 microbatches:
  - num_ranks must be at least 1, not 0
  - num_stages must be at least 1, not -1
  - num_microbatches must be at least 1, not 0""",
    )


@SLOW_MACHINES
@given(
    st.sampled_from([name for name in SCHEDULE_NAMES if name not in ("GPipe", "1F1B")]),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 24),
)
def test_pytorch_takes_exactly_the_sizes_that_we_take(
    name: str, num_ranks: int, stages_per_rank: int, num_microbatches: int
) -> None:
    sizes = {
        "num_ranks": num_ranks,
        "num_stages": num_ranks * stages_per_rank,
        "num_microbatches": num_microbatches,
    }

    def refuses(make: object) -> bool:
        try:
            make(name, **sizes)  # type: ignore[operator] # either of two functions
        except ValueError:
            return True
        return False

    assert refuses(check_sizes) == refuses(torch_table)
