"""The benchmark of steps on a GPU, on a CPU: that it runs, says what is missing, and counts right."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gt_passes import CudaGraphs
from gt_passes.cuda_graphs.cuda_graph_safety import CaptureTarget
from gt_passes.testing import FakeRecorder

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
_OURS = ("bench_gpu_step", "gpu_step", "report", "sustained")


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The modules of the benchmark, which are on no path of their own."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    sys.modules.pop("report", None)
    import bench_gpu_step
    from gpu_step import measurement

    yield SimpleNamespace(bench=bench_gpu_step, measurement=measurement)
    for name in [name for name in sys.modules if name.split(".")[0] in _OURS]:
        del sys.modules[name]


def imitated_graphs() -> CudaGraphs:
    """Recordings as on a GPU, of collectives that do nothing."""
    target = CaptureTarget(device_type="cpu", capturable_backends=frozenset({"fake"}))
    return CudaGraphs(target=target, new_recorder=FakeRecorder)


@pytest.mark.slow  # compiles with Inductor
def test_a_sharded_step_is_run_in_every_way(tool, tmp_path: Path) -> None:
    path = tmp_path / "gpu_step.json"
    small = ["--workload=TP 2", "--layers=2", "--width=64", "--seq=16", "--samples=1"]
    arguments = ["--device", "cpu", *small, "--json", str(path), "--sustained", "0.01"]
    assert tool.bench.main(arguments, graphs=imitated_graphs()) == 0
    record = json.loads(path.read_text())
    assert not any("failed" in note or "cannot be made" in note for note in record["notes"])
    timed = [row for row in record["rows"] if row["metric"] == "gpu_step_time"]
    names = [row["workload"].rpartition("seq 16, ")[2] for row in timed]
    ours = [
        f"ours, {kind}{graphs}"
        for kind in ("none", "regional", "full")
        for graphs in ("", ", graphs")
    ]
    assert names == ["torch.compile", "graph_trainer, its tracer and clean-up", *ours]
    assert all(row["ours"] > 0 and row["peer_name"] == "eager" for row in timed)
    assert {row["metric"] for row in record["rows"]} == {
        "gpu_step_time",
        "sustained_step_time",
        "simulated_compute",
        "simulated_host",
        "host_per_operator",
        "launches",
    }
    assert any(note.endswith("ours, none, graphs: 1 pieces") for note in record["notes"])


def test_a_contestant_that_cannot_be_made_is_a_note(tool) -> None:
    report = SimpleNamespace(notes=[])
    workload = SimpleNamespace(name="w")

    def without_torchtitan() -> None:
        raise ImportError("No module named 'torchtitan'")

    def broken() -> None:
        raise RuntimeError("two\nlines")

    assert tool.bench._made(without_torchtitan, workload, report) is None
    assert tool.bench._made(broken, workload, report) is None
    assert report.notes == [
        "w: a peer is not here: ImportError: No module named 'torchtitan'",
        "w: a contestant cannot be made: RuntimeError: two",
    ]


def test_what_cannot_be_measured_is_told_before_a_model_is_built(tool, capsys) -> None:
    for flags, told in {
        ("--float8", "rowwise"): "--float8 is measured without tensor parallelism: take",
        ("--sustained", "0"): "--sustained must be more than 0 seconds",
    }.items():
        with pytest.raises(SystemExit):
            tool.bench.main([*flags])
        assert told in capsys.readouterr().err


def test_a_workload_that_fails_is_told_and_does_not_end_the_others(
    tool, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(workload, *_: object) -> None:
        raise RuntimeError(f"no memory for {workload.name.partition(',')[0]}")

    monkeypatch.setattr(tool.bench, "_measure", broken)
    assert tool.bench.main(["--device", "cpu"]) == 1
    printed = capsys.readouterr()
    for name in ("8B", "1B", "8 layers of 8B"):
        assert f"failed: RuntimeError: no memory for {name}" in printed.out
    assert printed.err == "bench_gpu_step: nothing was measured; the notes say why\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_machine_without_cuda_is_told_in_one_line(
    tool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.bench.main([]) == 2
    assert capsys.readouterr() == (
        "",
        "bench_gpu_step: needs a CUDA device, and this machine has none\n",
    )


@pytest.mark.parametrize(
    ("spans", "idle"),
    [
        ([], None),
        ([(0, 4)], 0.0),
        ([(0, 2), (3, 4)], 0.25),
        ([(3, 4), (0, 2), (1, 2)], 0.25),  # unordered, and two streams at once
        ([(0, 4), (1, 2), (8, 10)], 0.4),
        ([(5, 5)], 0.0),
    ],
)
def test_idle_is_what_no_kernel_covers(tool, spans, idle) -> None:
    assert tool.measurement.idle_part(spans) == (None if idle is None else pytest.approx(idle))
