"""Steps of several microbatches, run on a few ranks. Workers import this module by name."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from stage_models import Block
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from gt_pipeline.graph import (
    MICROBATCHES_FORM,
    AccumulatedStep,
    AccumulationGraphs,
    cut_accumulation,
)
from gt_trace import TracedStep, collective_counts, trace_step
from gt_trace.artifacts.mesh_axes import MeshAxes
from gt_trace.fsdp import shard

BATCH = (4, 8)


def step_of(module: nn.Module) -> Callable[..., Any]:
    """Forward, loss and backward as a function of a batch."""

    def step(x: Tensor, y: Tensor) -> Any:
        loss = (module(x) * y).sum()
        parameters = list(module.parameters())
        return loss, torch.autograd.grad(loss, parameters, allow_unused=True)

    return step


def captured(module: nn.Module) -> TracedStep:
    """The step of a module, captured on a batch of zeros."""
    return trace_step(step_of(module), module=module)(torch.zeros(BATCH), torch.zeros(BATCH))


def cut(module: nn.Module, num_microbatches: int) -> AccumulationGraphs:
    """The step of a module, cut."""
    return cut_accumulation(captured(module), num_results=1, num_microbatches=num_microbatches)


def through_json(graphs: AccumulationGraphs, axes: MeshAxes) -> AccumulationGraphs:
    """The graphs of a step as they are loaded."""
    encoded = MICROBATCHES_FORM.encode(graphs, axes)
    document = json.loads(json.dumps(encoded.document))
    return MICROBATCHES_FORM.decode(document, axes, blob=encoded.blobs.__getitem__)


def train_like_eager(
    num_microbatches: int, is_stored: bool = False
) -> tuple[list[str], dict[str, dict[str, int]]]:
    """Some microbatches, against gradients that are summed over them and then once over ranks.

    Args:
        num_microbatches: of a step.
        is_stored: whether its graphs run as they are loaded.

    Returns:
        What differs in any bit, and the collectives of each graph.
    """
    torch.manual_seed(0)
    # Of 15 rows, that two ranks share unevenly.
    module = Block(hidden=15)
    whole = copy.deepcopy(module)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    shard(module, mesh, mode="shard", reduction="sum")
    graphs = cut(module, num_microbatches)
    if is_stored:
        graphs = through_json(graphs, MeshAxes.of([mesh]))
    torch.manual_seed(dist.get_rank())
    batches = [(torch.randn(BATCH), torch.randn(BATCH)) for _ in range(num_microbatches)]
    found = AccumulatedStep(graphs, module)(iter(batches))
    losses = [(whole(x) * y).sum() for x, y in batches]
    for loss in losses:
        loss.backward()
    differing = [
        f"loss {number}"
        for number, ((loss,), other) in enumerate(zip(found.results, losses, strict=True))
        if not torch.equal(loss, other)
    ]
    for (name, parameter), gradient, placed in zip(
        whole.named_parameters(), found.gradients, module.parameters(), strict=True
    ):
        assert isinstance(gradient, DTensor)
        assert isinstance(placed, DTensor)
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)  # two terms have one sum, in whatever order
        if gradient.placements != placed.placements:
            differing.append(f"placements of {name}")
        if not torch.equal(gradient.full_tensor(), parameter.grad):
            differing.append(name)
    return differing, {
        each.role: dict(collective_counts(each.graph_module)) for each in graphs.graphs
    }
