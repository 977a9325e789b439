"""Starts are one history, as metrics are: those from which nothing is left are dropped."""

from pathlib import Path

from gt_trainer.metrics.metrics_history import read_metrics, record_start


def starts(folder: Path) -> list[tuple[int, object]]:
    return [(each["step"], each["num_ranks"]) for each in read_metrics(folder / "starts.jsonl")]


def test_starts_are_added_in_the_order_of_their_steps(tmp_path: Path):
    for step, num_ranks in ((1, 2), (5, 2), (9, 4)):
        record_start(tmp_path, step=step, facts={"num_ranks": num_ranks})
    assert starts(tmp_path) == [(1, 2), (5, 2), (9, 4)]
    assert all(each["time"] > 0 for each in read_metrics(tmp_path / "starts.jsonl"))


def test_a_start_from_an_older_checkpoint_drops_those_after_it(tmp_path: Path):
    for step in (1, 5, 9, 5):
        record_start(tmp_path, step=step, facts={"num_ranks": step})
    assert starts(tmp_path) == [(1, 1), (5, 5)]


def test_a_new_run_in_an_old_folder_begins_anew(tmp_path: Path):
    for num_ranks in (2, 4):
        record_start(tmp_path, step=1, facts={"num_ranks": num_ranks})
    assert starts(tmp_path) == [(1, 4)]
