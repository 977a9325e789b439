"""Llama 3 on ranks that do not exist, captured without passes, any number of layers."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from gt_trainer import device
from gt_trainer.steps.program import TracingOptions, capture_program

device.install("cpu")  # before the imports below, whose modules copy their device

from torch.fx import GraphModule  # noqa: E402

from gt_passes import PassContext, PassManager  # noqa: E402
from gt_trace import TracedStep  # noqa: E402
from gt_trainer.dry_run.fake_step import fake_step  # noqa: E402
from gt_trainer.models.llama3 import llama3_8b, llama3_405b  # noqa: E402
from gt_trainer.startup import StartupClock  # noqa: E402
from gt_trainer.steps.captured_step import whole_step  # noqa: E402

__all__ = ["WORKLOADS", "CapturedModel", "CapturedWorkload", "captured_model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedWorkload:
    """A published configuration on a world."""

    make_config: Callable[[], Any]
    world_size: int
    tensor_parallel_degree: int


WORKLOADS = {
    "8B": CapturedWorkload(make_config=llama3_8b, world_size=64, tensor_parallel_degree=1),
    "405B": CapturedWorkload(make_config=llama3_405b, world_size=1024, tensor_parallel_degree=8),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedModel:
    """A step as captured."""

    num_layers: int
    traced: TracedStep
    capture_cpu_seconds: float

    def graph(self) -> GraphModule:
        """A copy of the graph, to run passes on."""
        return copy.deepcopy(self.traced.graph_module)

    def context(self) -> PassContext:
        """What our passes need to know of it."""
        return PassContext.of_step(self.traced)


@contextmanager
def captured_model(num_layers: int, workload: CapturedWorkload) -> Iterator[CapturedModel]:
    """Capture a step, deep ones stamped; its ranks exist while the context lasts."""
    config = workload.make_config()
    config.parallelism = dataclasses.replace(
        config.parallelism, tensor_parallel_degree=workload.tensor_parallel_degree
    )
    spec = config.model_spec
    assert spec is not None
    published = spec.model.layers
    spec.model.layers = [
        copy.deepcopy(published[number % len(published)]) for number in range(num_layers)
    ]
    with fake_step(config, workload.world_size) as step:
        begin = time.process_time()
        report = capture_program(
            whole_step(
                step.model,
                step.loss_fn,
                *step.inputs,
                options=TracingOptions(meta_device=step.meta_device),
            ),
            recipe=lambda context, graph: PassManager([], context=context, verify=False),
            clock=StartupClock(),
        )
        seconds = time.process_time() - begin
        yield CapturedModel(
            num_layers=num_layers, traced=report.program.captured, capture_cpu_seconds=seconds
        )
