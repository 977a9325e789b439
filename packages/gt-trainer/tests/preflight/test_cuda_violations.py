"""What would end a run on CUDA late is refused first, on a machine that pretends to have a GPU."""

import dataclasses
import subprocess
import sysconfig
from types import SimpleNamespace

import pytest
from refused_configurations import changed, refusal

from gt_trainer.device import intended_for
from gt_trainer.models import deepseek_v3, llama3
from gt_trainer.preflight import cuda_violations
from gt_trainer.preflight.preflight import check_configuration

PROBLEM = "the configuration has 1 problem:\n  1. {}\n     allowed: {}\n     fix: {}"


@pytest.fixture
def devices(monkeypatch):
    """A machine with one H100, of which nothing is missing; what a test takes away, it says."""
    machine = SimpleNamespace(capabilities="9.0\n", programs={"gcc"})
    monkeypatch.setattr(
        "gt_trainer.preflight.machine_violations.installed_device_type", lambda: "cuda"
    )
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 1)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    monkeypatch.delenv("CC", raising=False)

    def run(command, **options):
        assert command[0] == "nvidia-smi"
        if machine.capabilities is None:
            raise FileNotFoundError(command[0])
        return SimpleNamespace(stdout=machine.capabilities)

    monkeypatch.setattr(
        cuda_violations,
        "subprocess",
        SimpleNamespace(run=run, SubprocessError=subprocess.SubprocessError),
    )
    monkeypatch.setattr(
        cuda_violations.shutil, "which", lambda name: name if name in machine.programs else None
    )
    monkeypatch.setattr(cuda_violations.importlib.util, "find_spec", lambda name: object())
    exists = cuda_violations.Path.exists
    monkeypatch.setattr(
        cuda_violations.Path, "exists", lambda path: path.name == "Python.h" or exists(path)
    )
    return machine


def for_cuda(folder, **sections):
    """The debug model as it is made for CUDA: with FlexAttention, in float32."""
    with intended_for("cuda"):
        config = llama3.llama3_debugmodel()
    return changed(config, folder, **sections)


def test_a_run_for_which_all_is_there_is_accepted(devices, tmp_path):
    config = for_cuda(tmp_path, training={"mixed_precision_param": "bfloat16"})
    check_configuration(config, 1, num_local_ranks=1)


def test_a_ring_of_scaled_dot_products_is_refused_and_gathering_is_not(devices, tmp_path):
    with intended_for("cuda"):
        config = changed(deepseek_v3.deepseek_v3_debugmodel_sdpa(), tmp_path)
    shared = {"context_parallel_degree": 2, "context_parallel_load_balancer": None}
    ring = changed(config, tmp_path, parallelism=shared, compile={"context_parallel": "ring"})
    assert refusal(ring, 2, num_local_ranks=1) == PROBLEM.format(
        "--compile.context_parallel is 'ring'",
        "'gather' on cuda for deepseek_v3 debugmodel, which attends with DocumentCausalSDPA: its "
        "ring calls kernels of CPUs",
        "use gather, or a --config that attends with FlexAttention",
    )
    check_configuration(config, 1, num_local_ranks=1)
    check_configuration(changed(config, tmp_path, parallelism=shared), 2, num_local_ranks=1)


def test_a_build_without_nccl_is_refused(devices, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    assert refusal(for_cuda(tmp_path), 1, num_local_ranks=1) == PROBLEM.format(
        "GT_DEVICE is 'cuda'",
        "cpu: this PyTorch is built without NCCL, by which CUDA devices communicate",
        "install a build of PyTorch for CUDA, or use GT_DEVICE=cpu",
    )


def test_saving_beside_the_training_without_gloo_is_refused(devices, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.distributed.is_gloo_available", lambda: False)
    check_configuration(for_cuda(tmp_path), 1, num_local_ranks=1)
    config = for_cuda(tmp_path, checkpoint={"async_mode": "async"})
    assert refusal(config, 1, num_local_ranks=1) == PROBLEM.format(
        "--checkpoint.async_mode is 'async'",
        "'disabled': ranks save beside the training by gloo, which this PyTorch lacks",
        "leave the flag out, or install a build of PyTorch with gloo",
    )


def test_bfloat16_is_refused_where_no_device_has_it(devices, tmp_path):
    devices.capabilities = "7.0\n7.5\n"
    check_configuration(for_cuda(tmp_path), 1, num_local_ranks=1)
    config = for_cuda(tmp_path, training={"mixed_precision_param": "bfloat16"})
    assert refusal(config, 1, num_local_ranks=1) == PROBLEM.format(
        "--training.mixed_precision_param is 'bfloat16'",
        "'float32' on this machine: its devices have compute capability 7.5 at most, and bfloat16 "
        "needs 8.0",
        "give float32, or use a newer GPU",
    )


@pytest.mark.parametrize("capabilities", [None, "", "[N/A]\n", "7.5\n9.0\n"])
def test_bfloat16_is_left_alone_where_a_device_may_have_it(devices, tmp_path, capabilities):
    devices.capabilities = capabilities
    config = for_cuda(tmp_path, training={"mixed_precision_param": "bfloat16"})
    check_configuration(config, 1, num_local_ranks=1)


FLEX = "a model without FlexAttention, which is compiled also when all else runs eagerly: "


def test_flex_attention_without_triton_is_refused(devices, tmp_path, monkeypatch):
    monkeypatch.setattr(cuda_violations.importlib.util, "find_spec", lambda name: None)
    assert refusal(for_cuda(tmp_path), 1, num_local_ranks=1) == PROBLEM.format(
        "--config is 'llama3 debugmodel'",
        f"{FLEX}Inductor's kernels for CUDA need Triton",
        "install the package triton, and retry",
    )


def test_flex_attention_without_a_c_compiler_is_refused(devices, tmp_path, monkeypatch):
    devices.programs.clear()
    assert refusal(for_cuda(tmp_path), 1, num_local_ranks=1) == PROBLEM.format(
        "--config is 'llama3 debugmodel'",
        f"{FLEX}Triton needs a C compiler",
        "install gcc, or name another compiler in CC, and retry",
    )
    monkeypatch.setenv("CC", "/opt/bin/cc")
    check_configuration(for_cuda(tmp_path), 1, num_local_ranks=1)


def test_flex_attention_without_pythons_headers_is_refused(devices, tmp_path, monkeypatch):
    exists = cuda_violations.Path.exists
    monkeypatch.setattr(
        cuda_violations.Path, "exists", lambda path: path.name != "Python.h" and exists(path)
    )
    headers = sysconfig.get_paths(sysconfig.get_default_scheme().replace("_local", "_prefix"))
    assert refusal(for_cuda(tmp_path), 1, num_local_ranks=1) == PROBLEM.format(
        "--config is 'llama3 debugmodel'",
        f"{FLEX}Triton needs Python.h in {headers['include']}",
        "install Python's headers (python3-dev), and retry",
    )


def test_inductor_without_a_c_compiler_is_refused_for_any_model(devices, tmp_path):
    devices.programs.clear()
    config = changed(llama3.llama3_debugmodel(), tmp_path)
    options = dataclasses.replace(config.compile, inductor_compilation="full")
    found = cuda_violations.cuda_violations(dataclasses.replace(config, compile=options))
    assert [(each.flag, each.value) for each in found] == [
        ("--compile.inductor_compilation", "full")
    ]
    eager = dataclasses.replace(options, mode="none")
    assert not [*cuda_violations.cuda_violations(dataclasses.replace(config, compile=eager))]


def test_a_dry_run_asks_none_of_it(devices, tmp_path):
    devices.programs.clear()
    check_configuration(for_cuda(tmp_path), 1, will_train=False)
