"""The benchmark of operators on a GPU, on a CPU: that it runs, and tells what a device lacks."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
_OURS = ("bench_gpu_operators", "gpu_operators", "calibration", "report", "sustained")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The benchmark, which is on no path of its own."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    sys.modules.pop("report", None)
    import bench_gpu_operators

    yield bench_gpu_operators
    for name in [name for name in sys.modules if name.split(".")[0] in _OURS]:
        del sys.modules[name]


def test_each_operator_has_a_row_or_the_reason_why_not(
    bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # FlexAttention runs as it is: compiling it for a CPU takes longer than all else.
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    path = tmp_path / "operators.json"
    arguments = ["--device", "cpu", "--shrink", "256", "--samples", "1", "--json", str(path)]
    assert bench.main([*arguments, "--sustained", "0.01"]) == 0
    record = json.loads(path.read_text())
    from gpu_operators.operator_cases import operator_cases

    cases = [name for name, _ in operator_cases(torch.device("cpu"), shrink=256)]
    metrics = [row["metric"] for row in record["rows"]]
    measured = metrics[::2]
    assert metrics[1::2] == [f"{name}, sustained" for name in measured]
    told = [note.partition(": ")[0] for note in record["notes"]]
    assert [name for name in told[1:] if not name.endswith(", sustained")] == cases
    assert any(note.endswith("TFLOP/s, clock unknown") for note in record["notes"])
    assert set(measured) < set(cases)  # a CPU has no cuDNN
    assert all(row["ours"] > 0 and row["peer"] > 0 and row["simulated"] for row in record["rows"])
    assert "mm, bfloat16, 32x32x32" in measured
    assert "SDPA, FlashAttention, causal, 32 heads of 128, 32 tokens, backward" in measured
    (cudnn, *_) = (note for note in record["notes"] if note.startswith("SDPA, cuDNN"))
    assert "RuntimeError: No viable backend" in cudnn


def test_one_kind_alone_and_no_time_are_asked_for(bench, capsys, tmp_path: Path) -> None:
    path = tmp_path / "operators.json"
    small = ["--device", "cpu", "--shrink", "256", "--samples", "1", "--json", str(path)]
    assert bench.main([*small, "--only", "mm, bfloat16, 64"]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["metric"] == "mm, bfloat16, 64x16x16"
    capsys.readouterr()
    assert bench.main([*small, "--only", "no such"]) == 1
    assert "bench_gpu_operators: nothing was measured; the notes" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench.main(["--sustained", "0"])
    assert "--sustained must be more than 0 seconds" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_machine_without_cuda_is_told_in_one_line(
    bench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main([]) == 2
    assert capsys.readouterr() == (
        "",
        "bench_gpu_operators: needs a CUDA device, and this machine has none\n",
    )
