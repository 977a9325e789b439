"""The sites on which every case runs: this machine's GPU, and its CPU.

On the CPU, recordings are imitated (``gt_passes.testing.FakeRecorder``), so that the
Python of each case is proven on machines that cannot run what it is for.

Needs torch, pytest and the sources of four packages::

    PYTHONPATH=packages/gt-config/src:packages/gt-trace/src:packages/gt-passes/src:packages/gt-pipeline/src \\
        python -m pytest tests-integration/gpu
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# cuBLAS reads it when it is first used: only then its products are the same bits in every run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from gpu.sites import Site, cpu_site, cuda_site

NO_CUDA = "needs a CUDA device: make test-gpu, on a machine that has one"


def _cuda_or_skip() -> Site:
    if not torch.cuda.is_available():
        pytest.skip(NO_CUDA)
    return cuda_site()


@pytest.fixture(params=["cuda", "cpu"])
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    """Where a case runs. Algorithms are deterministic meanwhile, so that bits can be compared."""
    chosen = cpu_site() if request.param == "cpu" else _cuda_or_skip()
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(chosen.device.type == "cuda")
    # Memory that is filled when it is allocated hides who reads it too early.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.manual_seed(0)
    yield chosen
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def gpu() -> Site:
    """The GPU, for what only a GPU can answer."""
    return _cuda_or_skip()
