"""What does a pipeline runtime cost per action, apart from what stages compute?

Stages that compute nothing, under our runner, PyTorch's eager runtime, and the runtime of
torchtitan's graph_trainer where it runs. Once with stages that are nothing else, and with captured
stages whose graphs do not run, also of tensor parallelism (its axis has one rank here: DTensors as
ever, and nothing to communicate)::

    python benchmarks/bench_pipeline_runtime.py [--json FILE] [--rounds 15] [--steps 4]

Time is CPU time of the thread that runs the step: waiting for another rank does not count, nor what
else the machine does. Runtimes take turns in every round. The time of a step is divided by the
number of computations, sends and receives, which is the same for all.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from pipeline_runtime.captured_stages import captured_runner
from pipeline_runtime.our_stages import our_runner
from pipeline_runtime.torch_stages import PEER_NAME as TORCH_NAME
from pipeline_runtime.torch_stages import step_torch, torch_runtime
from report import Report, Row, Sample
from torch.distributed.device_mesh import init_device_mesh

from gt_pipeline.schedules import Schedule, lower, schedule_of

_GOAL = 0.3
_SHAPE = (2, 4)
"""Of a microbatch's activation: what is sent is not what is measured."""

_GRAPH_PEER_NAME = "torchtitan graph_trainer"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Workload:
    schedule: str
    num_ranks: int
    num_stages: int
    num_microbatches: int = 16
    captured: bool = False
    """Whether our stages are captured ones, without what their graphs compute."""

    tensor_parallel: bool = False
    """Whether activations are DTensors. Our stages are captured then."""

    def plan(self) -> Schedule:
        return schedule_of(
            self.schedule,
            num_ranks=self.num_ranks,
            num_stages=self.num_stages,
            num_microbatches=self.num_microbatches,
        )

    def __str__(self) -> str:
        return (
            f"{self.schedule}, {self.num_ranks} rank{'s' if self.num_ranks > 1 else ''}, "
            f"{self.num_stages} stages, {self.num_microbatches} microbatches"
            + (", captured" if self.captured else "")
            + (", TP" if self.tensor_parallel else "")
        )


_WORKLOADS = (
    _Workload(schedule="Interleaved1F1B", num_ranks=1, num_stages=4),
    _Workload(schedule="Interleaved1F1B", num_ranks=2, num_stages=4),
    _Workload(schedule="ZBVZeroBubble", num_ranks=2, num_stages=4),
    _Workload(schedule="DualPipeV", num_ranks=2, num_stages=4),
    _Workload(schedule="Interleaved1F1B", num_ranks=2, num_stages=4, captured=True),
    _Workload(schedule="DualPipeV", num_ranks=2, num_stages=4, captured=True),
    # Not of a V: PyTorch's runtime detaches in place what it hands to a stage of the same rank, and
    # a DTensor that a stage returns again for the next microbatch does not bear it.
    _Workload(
        schedule="Interleaved1F1B", num_ranks=2, num_stages=4, captured=True, tensor_parallel=True
    ),
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=4, help="of each runtime in a round")
    options = parser.parse_args(arguments)
    report = Report(benchmark="pipeline_runtime")
    for workload in _WORKLOADS:
        measured = _measure(workload, options.rounds, options.steps)
        row = Row(
            workload=str(workload), metric="action_overhead", unit="us", ours=measured["ours"]
        )
        for peer, goal in ((TORCH_NAME, _GOAL), (_GRAPH_PEER_NAME, None)):
            if peer in measured:
                report.rows.append(
                    Row(
                        workload=row.workload,
                        metric=row.metric,
                        unit=row.unit,
                        ours=row.ours,
                        peer=measured[peer],
                        peer_name=peer,
                        goal=None if workload.captured else goal,
                    )
                )
    report.notes.append(
        "captured: our stages read microbatches, keep values and add gradients; the peer's stages "
        "are as in the other rows, so that their ratio is no bound of the runtime's"
    )
    report.notes.append("us of CPU time of the thread that runs the step; mean over ranks")
    report.notes.append(
        f"{_GRAPH_PEER_NAME}: not installed"
        if importlib.util.find_spec("torchtitan") is None
        else f"{_GRAPH_PEER_NAME}: on one rank, with an attribute of stages given back that "
        "PyTorch 2.15 removed; on more, its steps fail there (pipeline_runtime/peer_stages.py)"
    )
    print(report.table())
    if options.json is not None:
        report.write(options.json)
    return 0


def _measure(workload: _Workload, rounds: int, steps: int) -> dict[str, Sample]:
    """Microseconds per action of each runtime, one value a round, the mean over ranks."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(workload.num_ranks)]
        processes = [
            context.Process(
                target=_run_rank, args=(workload, rank, rounds, steps, f"{folder}/store", pipe[1])
            )
            for rank, pipe in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()
        by_rank: list[dict[str, list[float]]] = [mine.recv() for mine, _ in pipes]
        for process in processes:
            process.join()
    return {
        name: Sample.of([sum(each) / len(each) for each in zip(*columns, strict=True)])
        for name in by_rank[0]
        if (columns := [values[name] for values in by_rank])
    }


def _run_rank(
    workload: _Workload, rank: int, rounds: int, steps: int, store: str, answer: Connection
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, workload.num_ranks),  # type: ignore[attr-defined] # is exported
        rank=rank,
        world_size=workload.num_ranks,
    )
    schedule = workload.plan()
    num_actions = len(lower(schedule, unshards=False, reduces=False).actions[rank])
    contestants = _contestants(workload, schedule, rank)
    measured: dict[str, list[float]] = {name: [] for name in contestants}
    for step in contestants.values():
        step()  # first calls pay for what is lazy
    gc.disable()  # a training loop collects between steps
    for _ in range(rounds):
        for name, step in contestants.items():
            gc.collect()
            dist.barrier()
            start = time.thread_time_ns()
            for _ in range(steps):
                step()
            spent = time.thread_time_ns() - start
            measured[name].append(spent / 1000 / steps / num_actions)
    answer.send(measured)
    dist.barrier()
    dist.destroy_process_group()


def _contestants(
    workload: _Workload, schedule: Schedule, rank: int
) -> dict[str, Callable[[], object]]:
    """One step of each runtime, by its name."""
    batch = torch.zeros(_SHAPE[0] * schedule.num_microbatches, *_SHAPE[1:])
    mesh = None
    if workload.tensor_parallel:
        axes = ("pp", "tp")
        mesh = init_device_mesh("cpu", (schedule.num_ranks, 1), mesh_dim_names=axes)["tp"]
    if workload.captured:
        runner = captured_runner(schedule, rank, _SHAPE, mesh)
    else:
        runner = our_runner(schedule, rank, _SHAPE)
    runtime, stages = torch_runtime(schedule, rank, _SHAPE, mesh)
    contestants: dict[str, Callable[[], object]] = {
        "ours": lambda: runner.step(batch, target=batch),
        TORCH_NAME: lambda: step_torch(runtime, stages, schedule, _SHAPE),
    }
    if (
        schedule.num_ranks == 1
        and not workload.captured
        and importlib.util.find_spec("torchtitan") is not None
    ):
        from pipeline_runtime.peer_stages import peer_runtime

        peer, peer_stages = peer_runtime(schedule, rank, _SHAPE)
        contestants[_GRAPH_PEER_NAME] = lambda: step_torch(peer, peer_stages, schedule, _SHAPE)
    return contestants


if __name__ == "__main__":
    sys.exit(main())
