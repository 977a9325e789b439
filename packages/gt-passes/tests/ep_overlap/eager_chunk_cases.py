"""What the workers of ``test_eager_chunks.py`` run: a captured step, in chunks and without."""

from __future__ import annotations

import torch
import torch.distributed as dist
from chunked_models import SmallModel, batch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from gt_config import EpChunkDim
from gt_passes.ep_overlap import InputLayout, TokenDims, chunk_forwards
from gt_trace import TracedStep, trace_step
from gt_trace.fsdp import shard

BLOCK = InputLayout(
    activation="x_BLD",
    arguments={
        "x_BLD": TokenDims(batch=0, seq=1),
        "mask_B1LL": TokenDims(batch=0),
        "positions_BL": TokenDims(batch=0, seq=1),
    },
)
MOE = InputLayout(activation="x_BLD", arguments={"x_BLD": TokenDims(batch=0, seq=1)})


def layout_of(modules: str) -> InputLayout:
    return MOE if modules.endswith("moe") else BLOCK


def new_model(*, fsdp: bool) -> SmallModel:
    torch.manual_seed(0)
    model = SmallModel(dist.get_world_size())
    if fsdp:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        shard(model, mesh, mode="shard")
    return model


def step_of(model: SmallModel):
    def step(
        tokens: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        prediction = model(tokens, mask, positions)
        loss = F.cross_entropy(prediction.flatten(0, 1), labels.flatten())
        return loss, torch.autograd.grad(loss, tuple(model.parameters()))

    return step


def capture(model: SmallModel, modules: str | None, chunk_dim: EpChunkDim = "batch") -> TracedStep:
    """The training step as captured, with some modules in two chunks."""
    example = batch()
    if modules is None:
        return trace_step(step_of(model), module=model)(*example)
    with chunk_forwards(model, modules=modules, chunk_dim=chunk_dim, layout=layout_of(modules)):
        return trace_step(step_of(model), module=model)(*example)


Results = dict[str, torch.Tensor]


def flat(model: SmallModel, outputs: tuple[torch.Tensor, tuple[torch.Tensor, ...]]) -> Results:
    loss, gradients = outputs
    names = [name for name, _ in model.named_parameters()]
    results = {"loss": loss.detach()}
    for name, gradient in zip(names, gradients, strict=True):
        local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        results[name] = local.detach()
    return results | {name: buffer.clone() for name, buffer in model.named_buffers()}


def chunked_and_whole(modules: str, chunk_dim: EpChunkDim, fsdp: bool) -> tuple[Results, Results]:
    """Loss, gradients and buffers of one captured step, in chunks and without."""
    found = []
    for patterns in (modules, None):
        model = new_model(fsdp=fsdp)
        bound = capture(model, patterns, chunk_dim).bind(model)
        found.append(flat(model, bound(*batch(seed=dist.get_rank()))))
    return found[0], found[1]


def eager_before_and_after_undo(modules: str) -> tuple[Results, Results, Results]:
    """Run eagerly: before wrapping, wrapped, and after the wrapper was taken off."""
    found = []
    model = new_model(fsdp=False)
    inputs = batch(seed=dist.get_rank())
    step = step_of(model)
    for wrapped in (False, True, False):
        for buffer in model.buffers():
            buffer.zero_()
        if wrapped:
            with chunk_forwards(
                model, modules=modules, chunk_dim="batch", layout=layout_of(modules)
            ):
                found.append(flat(model, step(*inputs)))
        else:
            found.append(flat(model, step(*inputs)))
    return found[0], found[1], found[2]
