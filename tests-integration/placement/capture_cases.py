"""What ``test_placed_captures.py`` runs in a worker: the captured step of a placed model."""

from __future__ import annotations

import torch
import torch.distributed as dist
from training_cases import Case

from gt_config import AutoParallelConfig
from gt_config.graph_kinds import GraphKind
from gt_passes import DescribeOnly, PassContext, PassManager, PassManagerReport
from gt_trace import graph_text
from gt_trainer.dry_run.fake_step import fake_step
from gt_trainer.startup import StartupClock
from gt_trainer.steps.captured_step import whole_step
from gt_trainer.steps.program import TracingOptions, capture_program
from gt_trainer.steps.recipe import Recipe
from gt_trainer.trainer import GraphTrainer

WORLD_SIZE = 4


def captured_before_passes(
    case: Case, solver: AutoParallelConfig, inductor: str, folder: str
) -> str:
    """The step of a planned model as its recipe gets it, on rank 0 of a fake world."""
    options = {
        "autoparallel": True,
        "autoparallel_solver": solver,
        "inductor_compilation": inductor,
    }
    config = case.build("aot_fx_trace", folder, options=options)
    # A fake world needs a process without a group; the worker gets one of one rank back.
    dist.destroy_process_group()
    try:
        return _captured(config)
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def _captured(config: GraphTrainer.Config) -> str:
    texts: list[str] = []
    recipe = Recipe(options=config.compile, compiler=DescribeOnly())

    def recorded(context: PassContext, graph: GraphKind) -> PassManager:
        manager = recipe(context, graph)
        run = manager.run

        def record_and_run(graph_module: torch.fx.GraphModule) -> PassManagerReport:
            texts.append(graph_text(graph_module))
            return run(graph_module)

        manager.run = record_and_run  # type: ignore[method-assign]  # what it gets is recorded
        return manager

    with fake_step(config, WORLD_SIZE) as step:
        capture_program(
            whole_step(
                step.model,
                step.loss_fn,
                *step.inputs,
                options=TracingOptions(meta_device=step.meta_device),
            ),
            recipe=recorded,
            clock=StartupClock(),
        )
    (text,) = texts
    return text
