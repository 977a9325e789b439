"""Where a case runs: a GPU, or a CPU that imitates what a GPU records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gt_passes import CudaGraphs, DescribeOnly, InductorCompiler, SubgraphCompiler
from gt_passes.cuda_graphs.cuda_graph_safety import CaptureTarget
from gt_passes.testing import FakeRecorder

SAFE_OPERATORS = frozenset({"gpu_cases::delayed"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A device, and what differs between devices."""

    device: torch.device
    backend: str
    """Of process groups."""

    target: CaptureTarget
    new_recorder: Callable[[], Any]
    compiler: SubgraphCompiler
    """Inductor where there is a GPU; on the CPU, what makes its regions and compiles nothing."""

    large: bool
    """Whether models are large enough to measure."""

    def cuda_graphs(self, **options: Any) -> CudaGraphs:
        return CudaGraphs(target=self.target, new_recorder=self.new_recorder, **options)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @contextmanager
    def one_rank_groups(self, number: int = 1) -> Iterator[list[str]]:
        """The names of process groups of this rank alone, each with a communicator of its own."""
        dist.init_process_group(
            self.backend,
            store=dist.HashStore(),
            rank=0,
            world_size=1,
            timeout=timedelta(seconds=120),  # a hang is a failure
        )
        try:
            groups = [dist.group.WORLD, *(dist.new_group([0]) for _ in range(number - 1))]
            yield [group.group_name for group in groups]
        finally:
            dist.destroy_process_group()


def cuda_site() -> Site:
    from gt_passes.cuda_graphs.cuda_graphs import CudaRecorder

    return Site(
        device=torch.device("cuda", torch.cuda.current_device()),
        backend="nccl",
        target=CaptureTarget(safe_operators=SAFE_OPERATORS),
        new_recorder=CudaRecorder,
        compiler=InductorCompiler(),
        large=True,
    )


def cpu_site() -> Site:
    return Site(
        device=torch.device("cpu"),
        backend="gloo",
        target=CaptureTarget(
            device_type="cpu",
            compute_capability=(9, 0),
            backend_of_group=lambda group_name: "gloo",
            capturable_backends=frozenset({"gloo"}),
            safe_operators=SAFE_OPERATORS,
        ),
        new_recorder=_imitated_recorder,
        compiler=DescribeOnly(),
        large=False,
    )


def _imitated_recorder() -> Any:
    """A fake recorder whose recording draws no random numbers, as recording on a GPU does not."""
    fake = FakeRecorder()
    record = fake.record

    def record_without_drawing(*args: Any) -> Any:
        with torch.random.fork_rng(devices=[]):
            return record(*args)

    fake.record = record_without_drawing
    return fake
