"""What only GPUs have, imitated on CPUs: recordings, symmetric memory."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch.distributed import _symmetric_memory

from gt_passes import CudaGraphs, recipes
from gt_passes.cuda_graphs.cuda_graph_safety import CaptureTarget
from gt_passes.tensor_parallel.symmetric_memory import SymmetricMemoryHere
from gt_passes.testing import FakeRecorder


@contextlib.contextmanager
def imitated_recordings() -> Iterator[list[FakeRecorder]]:
    """Let ``--compile.cuda_graphs`` imitate recordings; yields the recorders as they are made."""
    recorders: list[FakeRecorder] = []

    def new_recorder() -> FakeRecorder:
        recorders.append(FakeRecorder())
        return recorders[-1]

    target = CaptureTarget(
        device_type="cpu",
        backend_of_group=lambda group_name: "gloo",
        capturable_backends=frozenset({"gloo"}),
    )
    imitated = functools.partial(
        CudaGraphs, target=target, new_recorder=new_recorder, min_kernels=1
    )
    with mock.patch.object(recipes, "CudaGraphs", imitated):
        yield recorders


@contextlib.contextmanager
def symmetric_memory_of_cpus() -> Iterator[None]:
    """The operators exist on GPUs only; torch defines their meaning beside them."""
    library = torch.library.Library("symm_mem", "IMPL")  # of this worker alone
    meanings: dict[str, Callable[..., object]] = {
        "fused_all_gather_matmul": _symmetric_memory._fused_all_gather_matmul_fallback,
        "fused_matmul_reduce_scatter": _symmetric_memory._fused_matmul_reduce_scatter_fallback,
    }
    for name, meaning in meanings.items():
        library.impl(name, meaning, "CPU")
    try:
        with mock.patch.object(SymmetricMemoryHere, "reason_against", return_value=None):
            yield
    finally:
        library._destroy()
