"""Which groups have symmetric memory, asked of a machine that need not have it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _SymmetricMemory

from gt_passes._torch_compilation_internals import (
    load_symmetric_memory_operators,
    symmetric_memory_workspaces,
)
from gt_passes.tensor_parallel.symmetric_memory import SymmetricMemoryHere, SymmetricMemoryOnPaper
from gt_trace.testing import fake_world


@pytest.fixture
def two_gpus(monkeypatch):
    """As if this process were the first of two on a host of two GPUs that reach each other."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda here, other: True)
    with fake_world(rank=0, world_size=2):
        yield dist.group.WORLD.group_name


def with_allocator(monkeypatch, name):
    monkeypatch.setattr(_SymmetricMemory, "get_backend", staticmethod(lambda device: name))


def test_a_group_that_nobody_has_enabled_has_symmetric_memory(two_gpus, monkeypatch):
    """Operators find a group by its name, and torch has deprecated to enable one."""
    with_allocator(monkeypatch, "CUDA")
    assert SymmetricMemoryHere().reason_against(two_gpus) is None


def test_a_torch_without_an_allocator_has_none(two_gpus, monkeypatch):
    with_allocator(monkeypatch, None)
    reason = SymmetricMemoryHere().reason_against(two_gpus)
    assert reason == "this PyTorch has no allocator of symmetric memory for CUDA"


def test_gpus_that_cannot_reach_each_other_have_none(two_gpus, monkeypatch):
    with_allocator(monkeypatch, "CUDA")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda here, other: False)
    reason = SymmetricMemoryHere().reason_against(two_gpus)
    assert reason == "GPU 0 cannot access the memory of GPU 1"


def test_a_group_over_two_hosts_has_none(two_gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    reason = SymmetricMemoryHere().reason_against(two_gpus)
    assert reason == (
        f"the group {two_gpus!r} spans 2 hosts of 1 GPUs, and symmetric memory is that of one"
    )


def test_a_group_that_does_not_exist_has_none(two_gpus):
    reason = SymmetricMemoryHere().reason_against("elsewhere")
    assert reason == "this process knows no group 'elsewhere'"


def test_the_fused_operators_are_there_once_they_were_loaded():
    """In a process of its own: others may have imported them."""
    program = (
        "import torch\n"
        "from gt_passes._torch_compilation_internals import load_symmetric_memory_operators\n"
        "load_symmetric_memory_operators()\n"
        "print(torch.ops.symm_mem.fused_all_gather_matmul.default)\n"
        "print(torch.ops.symm_mem.fused_matmul_reduce_scatter.default)\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert answer.stdout.split() == [
        "symm_mem.fused_all_gather_matmul.default",
        "symm_mem.fused_matmul_reduce_scatter.default",
    ]


def test_workspaces_are_those_of_all_groups(monkeypatch):
    load_symmetric_memory_operators()
    module = sys.modules["torch.distributed._symmetric_memory"]
    workspace = torch.empty(8)
    monkeypatch.setattr(module, "_group_name_to_workspace_tensor", {"tp": workspace, "other": None})
    (found,) = symmetric_memory_workspaces()
    assert found is workspace


def test_there_are_no_workspaces_before_the_operators_are_loaded(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.distributed._symmetric_memory", raising=False)
    assert symmetric_memory_workspaces() == ()


def test_on_paper_the_gpus_of_one_host_have_symmetric_memory():
    with fake_world(rank=0, world_size=16):
        whole = dist.group.WORLD.group_name
        half = dist.new_group(list(range(8))).group_name
        memory = SymmetricMemoryOnPaper(gpus_per_node=8)
        assert memory.reason_against(half) is None
        assert memory.reason_against(whole) == (
            f"the group {whole!r} spans 2 hosts of 8 GPUs, and symmetric memory is that of one"
        )
        assert memory.reason_against("moon") == "this process knows no group 'moon'"
