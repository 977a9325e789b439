"""Whole training steps: memory policies, memory in use, compilation, launches."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from gpu.models import (
    CapturedStep,
    Trained,
    batches,
    captured_step,
    decoder,
    eager_step,
    recipe,
    train,
)
from gpu.sites import Site

from gt_config import MemoryPolicy
from gt_passes import estimate_memory, release_cuda_graphs
from gt_passes.testing import measure_peak_bytes

_CUDA_BLOCK_BYTES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedThreeWays:
    eager: Trained
    captured: Trained
    replayed: Trained
    num_pieces: int
    num_offloaded: int
    refused_copies: list[str]
    """Copies to the host that were left out of recordings, each with the reason."""


def trained_three_ways(site: Site, policy: MemoryPolicy) -> TrainedThreeWays:
    """Five optimizer steps of equal models: eagerly, as a captured graph, and replayed."""
    model = decoder(site)
    eager = train(site, eager_step(model), model)
    captured = captured_step(site, decoder(site), passes=recipe(site, memory_policy=policy))
    replayed = captured_step(
        site, decoder(site), passes=recipe(site, memory_policy=policy, recorded=True)
    )
    offloaded = captured.counts("offload-tagged") if policy == "offload" else {}
    result = TrainedThreeWays(
        eager=eager,
        captured=train(site, captured.bound(), captured.model),
        replayed=train(site, replayed.bound(), replayed.model),
        num_pieces=replayed.counts("cuda-graphs").get("pieces", 0),
        num_offloaded=offloaded.get("tensors_offloaded", 0),
        refused_copies=[
            refusal
            for refusal in replayed.refusals("cuda-graphs")
            if any(name in refusal for name in ("offload", "reload", "wait_copy"))
        ],
    )
    release_cuda_graphs(replayed.step.graph_module)
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """Bytes beyond parameters, buffers and the batch."""

    measured_bytes: int
    estimated_bytes: int

    @property
    def error(self) -> float:
        """Measured over estimated, less 1."""
        return self.measured_bytes / self.estimated_bytes - 1


def peak_memory(site: Site, policy: MemoryPolicy) -> PeakMemory:
    """What a step of the captured graph holds at most, measured and estimated."""
    captured = captured_step(site, decoder(site), passes=recipe(site, memory_policy=policy))
    profile = estimate_memory(
        captured.step.graph_module,
        num_static_inputs=captured.step.num_static_inputs,
        block_bytes=_CUDA_BLOCK_BYTES if site.large else 1,
    )
    held = profile.bytes_by_kind["static inputs"] + profile.bytes_by_kind["arguments"]
    return PeakMemory(
        measured_bytes=_measured_bytes(site, captured),
        estimated_bytes=profile.peak_bytes - held,
    )


def _measured_bytes(site: Site, captured: CapturedStep) -> int:
    (batch,) = batches(site, 1)
    if site.device.type != "cuda":
        inputs = captured.plain_inputs(*batch)
        return measure_peak_bytes(captured.step.graph_module, inputs) - sum(map(_bytes, inputs))
    step = captured.bound()
    for _ in range(2):  # the first step makes what stays: workspaces of cuBLAS, and streams
        step(*batch)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(*batch)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _bytes(value: object) -> int:
    return value.untyped_storage().nbytes() if isinstance(value, torch.Tensor) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledAndRecorded:
    """A step that is compiled as a whole and recorded."""

    num_pieces: int
    outputs_copied: int
    largest_difference: float
    """From eager, of the loss and of every gradient, relative to the largest element."""

    launches: Counter[str]
    """Calls of CUDA's runtime and driver that launch something, in one replayed step."""


def compiled_and_recorded(site: Site) -> CompiledAndRecorded:
    """``full`` Inductor under CUDA graphs, beside eager."""
    model = decoder(site)
    captured = captured_step(
        site, model, passes=recipe(site, inductor_compilation="full", recorded=True)
    )
    step, reference = captured.bound(), eager_step(model)
    difference = 0.0
    for batch in batches(site, 4):
        loss, gradients = step(*batch)
        expected, theirs = reference(*batch)
        pairs = zip((loss, *gradients), (expected, *theirs), strict=True)
        difference = max(difference, *(_difference(a, b) for a, b in pairs))
    (batch,) = batches(site, 1)
    counts = captured.counts("cuda-graphs")
    launches = launches_of(lambda: step(*batch))
    release_cuda_graphs(captured.step.graph_module)
    return CompiledAndRecorded(
        num_pieces=counts.get("pieces", 0),
        outputs_copied=counts.get("outputs_copied", 0),
        largest_difference=difference,
        launches=launches,
    )


def launches_of(function: Callable[[], object]) -> Counter[str]:
    """Launches of kernels and of graphs by the host, by the name of the call. None without CUDA."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    names = (event.name for event in profile.events())
    return Counter(name for name in names if _is_launch(name))


def _is_launch(name: str) -> bool:
    """``cudaLaunchKernel``, ``cudaLaunchKernelExC``, ``cuLaunchKernel``, ``cudaGraphLaunch``."""
    return name.startswith(("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch"))


def _difference(first: torch.Tensor, second: torch.Tensor) -> float:
    return ((first - second).abs().max() / second.abs().max().clamp_min(1e-30)).item()
