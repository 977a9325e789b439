"""The result format of the benchmarks."""

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    sys.modules.pop("report", None)
    import report

    yield report
    del sys.modules["report"]


def row(report, **changes):
    fields = {
        "workload": "w",
        "metric": "m",
        "unit": "s",
        "ours": report.Sample.of([1.0, 3.0, 2.0]),
    }
    return report.Row(**fields | changes)


def test_a_ratio_is_ours_by_the_peers_of_medians(report):
    measured = row(report, peer=report.Sample.of([4.0, 4.0, 10.0]), peer_name="p", goal=0.5)
    assert measured.ratio == 0.5
    record = measured.to_record()
    assert record["ratio"] == 0.5
    assert record["ours_min_max"] == [1.0, 3.0]
    assert record["peer_min_max"] == [4.0, 10.0]
    assert record["goal_met"] is True


def test_a_goal_without_a_ratio_is_missed(report):
    assert row(report, goal=0.5).to_record()["goal_met"] is False
    assert row(report, peer=report.Sample.of([0.0]), peer_name="p").ratio is None


def test_a_count_without_a_peer_says_so(report):
    record = row(report).to_record()
    assert record["peer"] is None
    assert record["ratio"] is None
    assert "simulated" not in record


def test_a_sample_is_not_empty(report):
    with pytest.raises(ValueError, match="at least one measurement"):
        report.Sample.of([])


def test_the_table_tells_median_range_and_goal(report):
    whole = report.Report(benchmark="b", notes=["a note"])
    whole.rows.append(row(report, peer=report.Sample.of([4.0]), peer_name="them", goal=0.4))
    assert whole.table() == (
        "w\n"
        "metric  unit  ours                  peer's  peer  ratio  goal\n"
        "------  ----  --------------------  ------  ----  -----  -------------\n"
        "m       s     2.000 [1.000, 3.000]  4.000   them  0.50   <= 0.4: missed\n\n"
        "a note"
    ).replace("-------------\n", "--------------\n")


def test_simulated_rows_are_called_so(report):
    whole = report.Report(benchmark="b", rows=[row(report, simulated=True)])
    assert "m (simulated)" in whole.table()
    assert whole.rows[0].to_record()["simulated"] is True


def test_the_file_holds_machine_versions_and_rows(report, tmp_path: Path):
    path = tmp_path / "made" / "b.json"
    report.Report(benchmark="b", rows=[row(report)], notes=["n"]).write(path)
    record = json.loads(path.read_text())
    assert list(record) == ["benchmark", "date", "machine", "versions", "notes", "rows"]
    assert record["rows"][0]["ours"] == 2.0
    assert record["machine"]["cores"] >= 1
    assert "torch" in record["versions"]


def test_a_run_adds_to_the_file_of_an_earlier_one_of_the_same_day(report, tmp_path):
    path = tmp_path / "b.json"
    first = report.Report(benchmark="b", notes=["first"], rows=[row(report)])
    first.write(path)
    second = report.Report(benchmark="b", notes=["second"], rows=[row(report, workload="v")])
    second.continue_from(path)
    second.write(path)
    assert json.loads(path.read_text())["notes"] == ["first", "second"]
    assert [each["workload"] for each in json.loads(path.read_text())["rows"]] == ["w", "v"]


def test_a_workload_that_is_run_again_takes_the_place_of_the_earlier_one(report, tmp_path):
    path = tmp_path / "b.json"
    rows = [row(report), row(report, workload="v")]
    report.Report(benchmark="b", notes=["all", "w: old", "v: kept"], rows=rows).write(path)
    again = report.Report(benchmark="b", notes=["w: new"], rows=[row(report, metric="n")])
    again.continue_from(path)
    again.write(path)
    found = json.loads(path.read_text())
    assert found["notes"] == ["all", "v: kept", "w: new"]
    assert [(each["workload"], each["metric"]) for each in found["rows"]] == [
        ("v", "m"),
        ("w", "n"),
    ]


def test_a_run_does_not_add_to_what_does_not_exist(report, tmp_path):
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the whole text is below
        report.Report(benchmark="b").continue_from(tmp_path / "b.json")
    assert str(error.value) == (
        f"{tmp_path / 'b.json'} does not exist, and nothing can be added to it"
    )


def test_a_run_does_not_add_to_another_benchmark_or_day(report, tmp_path):
    path = tmp_path / "b.json"
    record = report.Report(benchmark="b").to_record()
    path.write_text(json.dumps({**record, "date": "2020-01-01"}))
    with pytest.raises(ValueError, match=r"^.*b\.json is not of this run's benchmark and date$"):
        report.Report(benchmark="c").continue_from(path)
