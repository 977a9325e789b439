"""Two and four ranks on one device: is a captured step the eager one to the bit?"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from gpu.models import Decoder, Sizes, batches, eager_step, recipe
from gpu.sites import Site, cpu_site, cuda_site
from gpu.staged_group import STAGED, register_staged_backend
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from gt_passes import PassContext, PassManager
from gt_trace.capture.trace import trace_step
from gt_trace.fsdp import shard

_NUM_STEPS = 3
_TP_PLAN = {"w1": ColwiseParallel(), "w3": ColwiseParallel(), "w2": RowwiseParallel()}


def differences(device_type: str, degrees: tuple[int, int], folder: Path) -> list[str]:
    """Train on (FSDP, TP) ranks of one device; return what differs on any of them."""
    world_size = degrees[0] * degrees[1]
    multiprocessing.spawn(
        _rank, args=(device_type, degrees, str(folder)), nprocs=world_size, join=True
    )
    return [
        f"rank {rank}: {line}"
        for rank in range(world_size)
        for line in (folder / f"rank-{rank}").read_text().splitlines()
    ]


def _rank(rank: int, device_type: str, degrees: tuple[int, int], folder: str) -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    site = cuda_site() if device_type == "cuda" else cpu_site()
    torch.use_deterministic_algorithms(device_type == "cuda")
    register_staged_backend()
    dist.init_process_group(
        STAGED,
        store=dist.FileStore(f"{folder}/store", degrees[0] * degrees[1]),
        rank=rank,
        world_size=degrees[0] * degrees[1],
        timeout=timedelta(seconds=120),
    )
    try:
        eager_model, model = (_placed(site, degrees) for _ in range(2))
        expected = _trained(site, rank, eager_step(eager_model), eager_model)
        captured = _captured(site, model)
        found = _trained(site, rank, captured, model)
        different = [
            name
            for name, value in expected.items()
            if not torch.equal(value, found[name]) or not value.isfinite().all()
        ]
        Path(folder, f"rank-{rank}").write_text("\n".join(different))
    finally:
        dist.destroy_process_group()


def _placed(site: Site, degrees: tuple[int, int]) -> nn.Module:
    fsdp, tp = degrees
    torch.manual_seed(7)
    sizes = dataclasses.replace(Sizes.of(site), num_layers=2)
    model = Decoder(sizes).to(site.device)
    mesh = init_device_mesh(site.device.type, degrees, mesh_dim_names=("fsdp", "tp"))
    if tp > 1:
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], _TP_PLAN)
        head = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(model, mesh["tp"], {"output": head})
    if fsdp > 1:
        shard(model, mesh["fsdp"], mode="shard")
    return model


def _captured(site: Site, model: nn.Module) -> Callable[..., Any]:
    ((tokens, labels),) = batches(site, 1)
    step = trace_step(eager_step(model), module=model)(tokens, labels)
    PassManager(recipe(site), context=PassContext.of_step(step)).run(step.graph_module)
    return step.bind(model)


def _trained(
    site: Site, rank: int, step: Callable[..., Any], model: nn.Module
) -> dict[str, torch.Tensor]:
    """Losses and parameters of this rank by name."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    result = {}
    for index, (tokens, labels) in enumerate(batches(site, _NUM_STEPS)):
        loss, gradients = step(tokens, labels)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        result[f"loss {index}"] = _local(loss)
    parameters = {name: _local(each) for name, each in model.named_parameters()}
    return result | parameters


def _local(value: torch.Tensor) -> torch.Tensor:
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.detach().clone()
