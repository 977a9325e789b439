"""The ways to run one step: eager, torch.compile, ours, and the peer where torchtitan is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gpu_step.model import StepFn, eager_step
from gt_config import CompileConfig, MemoryPolicy
from gt_config.compile_config import InductorCompilation
from gt_passes import (
    CudaGraphs,
    PassContext,
    PassManager,
    SubgraphCompiler,
    default_passes,
    release_cuda_graphs,
)
from gt_passes.cuda_graphs.cuda_graph_safety import CaptureTarget
from gt_passes.simulation import CostModel, Hardware, StepSimulation, simulate_step
from gt_trace.capture.trace import trace_step

EAGER = "eager"
TORCH_COMPILE = "torch.compile"
GRAPH_TRAINER = "graph_trainer, its tracer and clean-up"
COMPILATIONS: tuple[InductorCompilation, ...] = ("none", "regional", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """A step that is ready to be called."""

    name: str
    step: StepFn
    note: str = ""
    """What its passes counted."""

    simulated_ms: float | None = None
    """How long the simulation says that the GPU computes in a step, where there is a graph."""

    simulated_host_ms: float | None = None
    """How long it says that the host takes to issue the step; None where graphs are replayed, whose
    launches it counts as nothing."""

    is_recorded: bool = False
    """Whether CUDA graphs are replayed, whose memory the allocator does not count then."""

    release: Callable[[], None] = lambda: None
    """Lets go of recordings."""


def eager(model: nn.Module) -> Contestant:
    return Contestant(name=EAGER, step=eager_step(model))


def torch_compile(model: nn.Module, *, backend: str) -> Contestant:
    """The model compiled by ``torch.compile``, in an eager autograd loop."""
    torch.compiler.reset()
    compiled: Any = torch.compile(model, backend=backend)
    return Contestant(name=TORCH_COMPILE, step=eager_step(compiled))


def ours(
    model: nn.Module,
    inputs: tuple[torch.Tensor, ...],
    *,
    compilation: InductorCompilation,
    recorded: bool,
    memory_policy: MemoryPolicy,
    compiler: SubgraphCompiler | None = None,
    graphs: CudaGraphs | None = None,
    hardware: Hardware | None = None,
) -> Contestant:
    """A captured step after the default recipe.

    Args:
        model: placed.
        inputs: an example batch.
        compilation: as ``--compile.inductor_compilation``.
        recorded: whether CUDA graphs are recorded.
        memory_policy: as ``--compile.memory_policy``.
        compiler: None for Inductor.
        graphs: records in place of the default, which takes collectives that do nothing for
            kernels, as those of NCCL are.
        hardware: to simulate; None for H100 SXM.
    """
    traced = trace_step(eager_step(model), module=model)(*inputs)
    context = PassContext.of_step(traced)
    options = CompileConfig(inductor_compilation=compilation, memory_policy=memory_policy)
    passes = [*default_passes(options, graph="STEP", compiler=compiler)]
    if recorded:
        backends = frozenset({"nccl", "fake"})
        passes.append(graphs or CudaGraphs(target=CaptureTarget(capturable_backends=backends)))
    report = PassManager(passes, context=context).run(traced.graph_module)
    cost_model = CostModel(hardware, host="cuda_graph" if recorded else "eager")
    simulated = simulate_step(traced.graph_module, cost_model)
    counts = {name: count for each in report.records for name, count in each.report.counts.items()}
    return Contestant(
        name=name_of_ours(compilation, recorded=recorded),
        step=traced.bind(model),
        note=f"{counts.get('pieces', 0)} pieces" if recorded else "",
        is_recorded=recorded,
        simulated_ms=simulated.compute_us / 1e3,
        simulated_host_ms=None if recorded else _host_ms(simulated),
        release=lambda: release_cuda_graphs(traced.graph_module),
    )


def _host_ms(simulated: StepSimulation) -> float:
    return sum(task.host_us for task in simulated.run.timeline.tasks) / 1e3


def name_of_ours(compilation: InductorCompilation, *, recorded: bool) -> str:
    return f"ours, {compilation}" + (", graphs" if recorded else "")


def num_operators(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> int:
    """Operators of the step as captured, views included: what eager calls one after another."""
    traced = trace_step(eager_step(model), module=model)(*inputs)
    return sum(node.op == "call_function" for node in traced.graph_module.graph.nodes)


def graph_trainer(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Contestant:
    """Torchtitan's tracer, dead code and views cleaned up, as ``run_traced`` runs it.

    Its further passes take torchtitan's own model and configuration, and are left out.

    Raises:
        ImportError: torchtitan is not here.
    """
    from torchtitan.experiments.graph_trainer.make_fx_tracer import minimal_fx_tracer, run_traced
    from torchtitan.experiments.graph_trainer.remove_noop_passes import (
        canonicalize_graph_pass,
        eliminate_dead_code_pass,
    )

    theirs = eager_step(model)

    def flat_step(tokens: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
        loss, gradients = theirs(tokens, labels)
        return [loss, *gradients]

    traced = minimal_fx_tracer(flat_step, module=model)(*inputs)
    for graph_pass in (eliminate_dead_code_pass, canonicalize_graph_pass):
        traced.gm = graph_pass(traced.gm, traced.example_inputs)
    run = run_traced(traced, module=model)

    def step(tokens: torch.Tensor, labels: torch.Tensor) -> Any:
        loss, *gradients = run(tokens, labels)
        return loss, tuple(gradients)

    return Contestant(name=GRAPH_TRAINER, step=step)
