"""Schedules in CSV files: there and back, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from expecttest import assert_expected_inline
from schedule_cases import natural_schedule

from gt_pipeline.errors import ScheduleError
from gt_pipeline.schedules import SCHEDULE_NAMES, schedule_from_csv, schedule_to_csv


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_what_is_written_is_read_back(name: str, tmp_path: Path) -> None:
    schedule = natural_schedule(name, 4, 8)
    path = tmp_path / "any.csv"
    schedule_to_csv(schedule, path)
    assert schedule_from_csv(path, name=name) == schedule


def test_bubbles_are_left_out_and_the_file_names_the_schedule(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F0,,,0B0\n,1F0,1B0,\n")
    schedule = schedule_from_csv(path)
    assert schedule.name == "mine"
    assert schedule.stage_to_rank == (0, 1)
    assert [len(actions) for actions in schedule.compute] == [2, 2]


def test_stages_lie_where_the_file_says(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("1F0,1B0\n0F0,0B0\n")
    schedule = schedule_from_csv(path)
    assert schedule.stage_to_rank == (1, 0)


def test_every_bad_cell_is_reported_by_row_and_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.csv").write_text("0F0,0SEND_F0,nonsense\n2F0,2B0,(2F0;2F1)OVERLAP_F_B\n")
    with pytest.raises(ScheduleError) as caught:
        schedule_from_csv("bad.csv")
    assert_expected_inline(
        str(caught.value),
        """\
bad.csv holds no schedule:
  - row 1, column 2: 0SEND_F0 does not compute; leave it to lower
  - row 1, column 3: 'nonsense': it is not <stage><kind>[microbatch], such as 2F0 or 1UNSHARD, nor (<forward>;<backward>)OVERLAP_F_B
  - row 2, column 3: Action(stage=2, kind=OVERLAP_F_B, microbatch=None, parts=['2F0', '2F1']): its second part must be a backward (B) or a dI (I), not 2F1: run any other action by itself""",
    )


def test_stages_that_have_no_action_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0B0\n2F0,2B0\n")
    with pytest.raises(ScheduleError, match="stage 1 has no action"):
        schedule_from_csv(path)


def test_a_file_without_actions_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.csv").write_text("")
    with pytest.raises(ScheduleError) as caught:
        schedule_from_csv("empty.csv")
    assert_expected_inline(
        str(caught.value),
        """\
empty.csv holds no schedule:
  - it has no compute action""",
    )


def test_a_schedule_that_cannot_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0B0,0F0\n")
    with pytest.raises(ScheduleError, match="0B0 before 0F0"):
        schedule_from_csv(path)
