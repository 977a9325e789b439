"""What the workers of ``test_cuda_graphs.py`` run: a sharded step, replayed and not."""

from __future__ import annotations

import copy

import torch
from inductor_cases import run_on
from sharded_step_cases import capture_two_microbatches, flat

from gt_passes import CudaGraphs
from gt_passes.cuda_graphs.cuda_graph_safety import CaptureTarget
from gt_passes.testing import FakeRecorder

ON_CPU = CaptureTarget(
    device_type="cpu",
    backend_of_group=lambda group_name: "gloo",
    capturable_backends=frozenset({"gloo"}),
)
"""As if the CPU were a device whose work is recorded."""


def outputs_captured_and_replayed() -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    """Loss and gradient shards over four steps, and the number of pieces."""
    step, model, tokens = capture_two_microbatches()
    unpassed = copy.deepcopy(step.graph_module)
    captured = step.bind(model, executable=unpassed)
    report, _ = run_on(CudaGraphs(target=ON_CPU, new_recorder=FakeRecorder), step)
    replayed = step.bind(model)
    batches = [(tokens + number) % 13 for number in range(4)]
    expected = [result for batch in batches for result in flat(captured(batch))]
    got = [result for batch in batches for result in flat(replayed(batch))]
    return expected, got, report.counts["pieces"]
