"""The CPU device adapter, without any model."""

import subprocess
import sys
import textwrap
from types import ModuleType

import pytest
import torch

from gt_trainer.compile_options import TrainerCompileConfig
from gt_trainer.device import (
    CpuDevice,
    DeviceInstallError,
    DeviceUnavailableError,
    available_memory_bytes,
    install,
    installed_device_type,
    select_device_type,
)

needs_no_accelerator = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="describes a machine without an accelerator"
)


def run_python(source: str) -> str:
    finished = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@needs_no_accelerator
def test_without_an_accelerator_the_device_is_the_cpu():
    assert select_device_type(environment={}) == "cpu"
    assert select_device_type("auto", environment={"GT_DEVICE": "nonsense"}) == "cpu"


def test_the_environment_can_ask_for_the_cpu():
    assert select_device_type(environment={"GT_DEVICE": "cpu"}) == "cpu"


def test_an_unknown_device_is_refused_with_its_source():
    with pytest.raises(DeviceUnavailableError) as from_environment:
        select_device_type(environment={"GT_DEVICE": "tpu"})
    assert str(from_environment.value) == ("GT_DEVICE is 'tpu'; allowed: 'auto', 'cpu', 'cuda'")
    with pytest.raises(DeviceUnavailableError) as from_argument:
        select_device_type("gpu", environment={})
    assert str(from_argument.value) == "device is 'gpu'; allowed: 'auto', 'cpu', 'cuda'"


@needs_no_accelerator
def test_cuda_is_refused_where_there_is_none():
    with pytest.raises(DeviceUnavailableError) as refused:
        select_device_type("cuda", environment={})
    assert str(refused.value) == (
        "device 'cuda' was asked for, but torch finds no CUDA device here: choose 'cpu', or unset "
        "GT_DEVICE"
    )


def test_install_is_seen_by_torchtitan_and_can_be_repeated():
    assert install("cpu") == "cpu"
    assert install("cpu") == "cpu"
    assert installed_device_type() == "cpu"


def test_install_refuses_when_a_torchtitan_module_holds_another_device(monkeypatch):
    install("cpu")
    early = ModuleType("torchtitan.imported_too_early")
    early.device_type = "cuda"
    early.device_module = torch.cuda
    monkeypatch.setitem(sys.modules, early.__name__, early)
    with pytest.raises(DeviceInstallError) as refused:
        install("cpu")
    assert str(refused.value) == (
        "the CPU device must be installed before torchtitan's trainer is imported; these already "
        "hold other values: torchtitan.imported_too_early.device_module, "
        "torchtitan.imported_too_early.device_type. Call gt_trainer.device.install() first"
    )


def test_every_rank_of_a_machine_gets_the_one_cpu_device(monkeypatch):
    install("cpu")
    from torchtitan.tools.utils import get_local_device

    monkeypatch.setenv("LOCAL_RANK", "3")
    device = get_local_device()
    assert torch.zeros(1, device=device).device == torch.device("cpu")
    assert device.index == 0


def test_torchtitans_own_memory_monitor_and_peak_flops_work_on_the_cpu():
    printed = run_python(
        """
        from gt_trainer.device import install
        install("cpu")
        from torchtitan.components.metrics import build_device_memory_monitor
        from torchtitan.tools.utils import get_peak_flops
        monitor = build_device_memory_monitor()
        stats = monitor.get_peak_stats()
        assert 0 < stats.max_active_gib < monitor.device_capacity_gib, stats
        assert stats.num_ooms == stats.num_alloc_retries == 0
        print(get_peak_flops(monitor.device_name))
        """
    )
    assert printed.splitlines()[-1] == "inf"


def test_the_peak_of_memory_follows_an_allocation_and_is_in_bytes():
    device = CpuDevice()
    device.reset_peak_memory_stats()
    before = device.memory_stats()["active_bytes.all.peak"]
    held = torch.ones(64 * 2**20, dtype=torch.uint8)
    after = device.memory_stats()["active_bytes.all.peak"]
    assert held.nbytes * 0.9 <= after - before < held.nbytes * 2


def test_memory_snapshots_are_refused_by_name():
    with pytest.raises(DeviceUnavailableError) as refused:
        CpuDevice().memory  # noqa: B018  # the attribute itself refuses
    assert str(refused.value) == (
        "memory snapshots record the CUDA allocator and do not exist on cpu: leave out "
        "--profiler.enable_memory_snapshot"
    )


def test_torchtitan_never_calls_torch_compile_whatever_the_compile_mode():
    options = TrainerCompileConfig(mode="aot_fx_trace", inductor_compilation="full")
    assert not options.enable
    assert options.components == []
    assert not options.enable_async_tensor_parallel


def test_available_memory_is_within_a_containers_limit(monkeypatch, tmp_path):
    (tmp_path / "none").write_text("max\n")
    (tmp_path / "low").write_text("4096\n")
    limits = [str(tmp_path / name) for name in ("missing", "none")]
    monkeypatch.setattr("gt_trainer.device._CONTAINER_LIMITS", limits)
    physical = CpuDevice().get_device_properties().total_memory
    assert 4096 < available_memory_bytes() <= physical
    monkeypatch.setattr("gt_trainer.device._CONTAINER_LIMITS", [*limits, str(tmp_path / "low")])
    assert available_memory_bytes() == 4096
