"""The calibration recovers the constants of a machine that has them, and overwrites nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from gt_passes.simulation import MatmulShape, h100_sxm
from gt_passes.simulation.compute_model import matmul_us
from gt_passes.simulation.hardware import load_hardware

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
BASE = h100_sxm()
TRUTH = replace(
    BASE,
    host_kernel_us=11.0,
    host_view_us=3.0,
    host_collective_us=40.0,
    host_wait_us=6.0,
    kernel_fixed_us=1.5,
    launch_latency_us=5.0,
    graph_replay_kernel_us=0.4,
    matmul_efficiency=0.7,
    matmul_fp8_efficiency=0.65,
    grouped_matmul_efficiency=0.5,
    attention_forward_efficiency=0.4,
    attention_backward_efficiency=0.3,
    hbm_streaming_efficiency=0.85,
    hbm_irregular_efficiency=0.6,
    pcie_efficiency=0.8,
)


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The modules of the benchmark, which are on no path of their own."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import calibrate_simulation
    from calibration import constants, machine

    yield SimpleNamespace(main=calibrate_simulation, constants=constants, machine=machine)
    for name in [name for name in sys.modules if name.split(".")[0].startswith("calibrat")]:
        del sys.modules[name]


class KnownMachine:
    """Answers by the constants of ``TRUTH``, and now and then is interrupted."""

    device_name = "a known machine"

    def __init__(self) -> None:
        self._num_answers = 0

    def issue_us(self, work) -> float:
        each = {
            "kernel": TRUTH.host_kernel_us,
            "view": TRUTH.host_view_us,
            "collective": TRUTH.host_collective_us,
            "wait": TRUTH.host_wait_us,
        }
        return self._disturbed(work.count * each[work.kind])

    def run_us(self, work) -> float:
        return self._disturbed(work.count * (self._work_us(work) + TRUTH.kernel_fixed_us))

    def replay_us(self, work) -> float:
        gap_us = TRUTH.graph_replay_kernel_us
        return self._disturbed(work.count * (TRUTH.kernel_fixed_us + gap_us))

    def answer_us(self, work) -> float:
        times = (TRUTH.host_kernel_us, TRUTH.launch_latency_us, TRUTH.kernel_fixed_us)
        return self._disturbed(sum(times))

    def _work_us(self, work) -> float:
        match work.kind:
            case "matmul":
                m, n, k = work.shape
                return matmul_us(MatmulShape(m=m, n=n, k=k), torch.bfloat16, TRUTH)
            case "float8_matmul":
                m, n, k = work.shape
                return matmul_us(MatmulShape(m=m, n=n, k=k), torch.float8_e4m3fn, TRUTH)
            case "grouped_matmul":
                m, n, k, groups = work.shape
                shape = MatmulShape(m=m // groups, n=n, k=k, batch=groups)
                efficiency = TRUTH.grouped_matmul_efficiency
                return matmul_us(shape, torch.bfloat16, TRUTH, efficiency=efficiency)
            case "attention_forward" | "attention_backward":
                heads, length, dim = work.shape
                products = 2 if work.kind == "attention_forward" else 5
                flops = products * 2 * heads * length * length * dim / 2  # causal
                efficiency = getattr(TRUTH, f"{work.kind}_efficiency")
                return 1e6 * flops / (TRUTH.peak_bf16_flops_per_s * efficiency)
            case "gather":
                _, width, rows = work.shape
                rate = TRUTH.hbm_bytes_per_s * TRUTH.hbm_irregular_efficiency
                return 1e6 * rows * (4 * width + 8) / rate
            case "copy":
                rate = TRUTH.hbm_bytes_per_s * TRUTH.hbm_streaming_efficiency
                return 2e6 * work.num_bytes / rate
            case "to_host" | "from_host":
                slower = 0.9 if work.kind == "from_host" else 1.0
                rate = TRUTH.pcie_bytes_per_s * TRUTH.pcie_efficiency
                return 1e6 * work.num_bytes / (rate / slower)
        return 0.0

    def _disturbed(self, time_us: float) -> float:
        self._num_answers += 1
        return time_us * (1.0 if self._num_answers % 7 else 5.0)


def test_the_constants_of_a_known_machine_are_found_although_it_is_interrupted(tool) -> None:
    found = tool.constants.calibrate(KnownMachine(), BASE, tool.constants.Scale(samples=31))
    wanted = {name: getattr(TRUTH, name) for name in found}
    assert {name: each.value for name, each in found.items()} == pytest.approx(wanted, rel=1e-6)
    differing = {name for name in BASE.constants if getattr(BASE, name) != getattr(TRUTH, name)}
    assert differing == set(found)
    assert found["host_kernel_us"].high > 2 * found["host_kernel_us"].value


def test_the_file_says_what_was_measured_and_how(tool, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    tool.main.write_calibration(KnownMachine(), BASE, path, tool.constants.Scale(samples=31))
    hardware = load_hardware(path.read_text())
    assert hardware.name == "H100 SXM, calibrated on a known machine"
    assert hardware.host_kernel_us == 11.0
    measured = hardware.constants["host_kernel_us"]
    assert (measured.kind, measured.unit, measured.scales_with) == (
        "own measurement",
        "us",
        "latency",
    )
    assert measured.source.startswith("host time of 200 small element-wise operators, called by")
    assert f"a known machine, torch {torch.__version__}" in measured.source
    assert "median of 31, 11 to 55" in measured.source
    assert hardware.constants["nic_bytes_per_s"] == BASE.constants["nic_bytes_per_s"]


def test_an_efficiency_above_one_is_refused_with_what_to_do(tool) -> None:
    slow = replace(BASE, hbm_bytes_per_s=1e12)
    with pytest.raises(tool.constants.CalibrationError) as caught:
        tool.constants.calibrate(KnownMachine(), slow, tool.constants.Scale(samples=31))
    assert str(caught.value) == (
        "hbm_irregular_efficiency is 2.01; hbm_streaming_efficiency is 2.85: fractions of the "
        "data-sheet values of 'H100 SXM', so that is not what 'a known machine' is. Name the hardware "
        "file of this machine"
    )


def test_no_file_is_overwritten_least_of_all_the_published_one(
    tool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import gt_passes.simulation

    published = Path(gt_passes.simulation.__file__).with_name("h100_sxm.json")
    before = published.read_text()
    assert tool.main.main(["--out", str(published)]) == 2
    assert published.read_text() == before
    assert "which holds what was published: name another" in capsys.readouterr().err
    taken = tmp_path / "taken.json"
    taken.write_text("mine")
    assert tool.main.main(["--out", str(taken)]) == 2
    assert taken.read_text() == "mine"
    assert capsys.readouterr().err == (
        f"calibrate_simulation: --out {taken} exists: name a file that does not\n"
    )
    assert tool.main.problem_with_output(tmp_path / "no" / "such.json") == (
        f"--out {tmp_path / 'no' / 'such.json'} is in a folder that does not exist"
    )
    assert tool.main.problem_with_output(tmp_path / "new.json") is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_machine_without_cuda_is_told_in_one_line(
    tool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main.main(["--out", str(tmp_path / "mine.json")]) == 2
    assert capsys.readouterr().err == (
        "calibrate_simulation: needs a CUDA device, and this machine has none\n"
    )


def test_torch_does_the_work_that_a_calibration_asks_for(tool) -> None:
    """On the CPU, which is no machine that the model describes: only that all of it runs."""
    scale = tool.constants.Scale(
        samples=2,
        calls=8,
        copy_bytes=1 << 12,
        host_copy_bytes=1 << 12,
        matmuls=((8, 8, 8),),
        grouped=(16, 8, 8, 2),
        attention=(2, 16, 8),
        gather=(32, 8, 16),
    )
    fast = replace(BASE, hbm_bytes_per_s=1e30, pcie_bytes_per_s=1e30, peak_bf16_flops_per_s=1e30)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ticks = iter(range(1_000_000))
    try:
        machine = tool.machine.TorchMachine(torch.device("cpu"), clock=lambda: 1e-6 * next(ticks))
        found = tool.constants.calibrate(machine, fast, scale)
    finally:
        dist.destroy_process_group()
    # Between two looks at this clock lies a microsecond, whatever was done.
    assert found["host_view_us"].value == pytest.approx(1 / 8)
    assert found["host_wait_us"].value == pytest.approx(1 / 2)
    assert found["launch_latency_us"].value == pytest.approx(1 - 2 / 8)


def test_the_table_tells_base_and_measured(tool) -> None:
    found = {"host_view_us": tool.constants.Measured(
        value=3.0, low=2.5, high=4.0, num_samples=3, method="m"
    )}  # fmt: skip
    assert tool.main._table(replace(BASE, host_view_us=2.0), found) == (
        "constant                        base  measured   range\n"
        "host_view_us                       2         3   2.5 to 4"
    )
