"""A case's step as a model: built, sharded, and captured on this rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

from fuzz.case import PartSpec, Sharding, StepSpec
from fuzz.exchanges import all_reduce
from fuzz.parts import Part, build_part
from gt_passes import second_group_of
from gt_trace.annotate import phase
from gt_trace.capture.trace import trace_step
from gt_trace.capture.traced_step import TracedStep
from gt_trace.fsdp import MixedPrecision, gathered, shard

__all__ = ["CapturedStep", "capture_step"]

_BATCH, _LENGTH = 2, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedStep:
    """A step of one rank."""

    traced: TracedStep
    inputs: tuple[Any, ...]
    """One for each placeholder of the graph: state, then data."""


class Block(nn.Module):
    """Layers in a row; the unit that bucketing and memory policies work on."""

    def __init__(self, parts: tuple[PartSpec, ...], *, dim: int, group: str) -> None:
        super().__init__()
        self.parts = nn.ModuleList(build_part(part, dim=dim, group=group) for part in parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x


class Model(nn.Module):
    """Embedding, blocks, norm, projection; its names are those of language models."""

    def __init__(self, spec: StepSpec, group: str) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(spec.vocabulary, spec.dim)
        self.layers = nn.ModuleDict(
            {
                str(number): Block(parts, dim=spec.dim, group=group)
                for number, parts in enumerate(spec.blocks)
            }
        )
        self.norm = nn.RMSNorm(spec.dim)
        self.lm_head = nn.Linear(spec.dim, spec.vocabulary, bias=False)
        if spec.tied:
            self.lm_head.weight = self.tok_embeddings.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        result: torch.Tensor = self.lm_head(self.norm(x))
        return result

    def take_returned(self) -> list[torch.Tensor]:
        """What parts return besides; forgotten afterwards."""
        parts = [module for module in self.modules() if isinstance(module, Part)]
        taken = [tensor for part in parts for tensor in part.returned]
        for part in parts:
            part.returned.clear()
        return taken


def capture_step(spec: StepSpec) -> CapturedStep:
    """Build, shard and capture a step. Every rank of the world calls it.

    Raises:
        CaptureError: the step cannot be captured; the case is then no case.
    """
    torch.manual_seed(spec.seed)
    data_mesh, group = _mesh(spec.sharding)
    model = Model(spec, group)
    if spec.sharding != "none":
        dtype = torch.bfloat16 if spec.param_dtype == "bfloat16" else None
        shard(
            model,
            data_mesh,
            mode="shard" if spec.sharding == "shard_beside_tensor" else spec.sharding,
            mixed_precision=None if dtype is None else MixedPrecision(param_dtype=dtype),
            reduction=spec.reduction,
        )
    optimizer = _optimizer(model) if spec.optimizer else None
    step = _step(model, optimizer, spec, group)
    tokens = _tokens(spec, salt=dist.get_rank())
    traced = trace_step(step, module=model, optimizer=optimizer)(tokens)
    inputs: list[Any] = []

    def note_inputs(*plain: Any) -> list[Any]:
        inputs.extend(plain)
        raise _InputsNotedError

    with suppress(_InputsNotedError):
        traced.bind(model, optimizer, executable=note_inputs)(tokens)
    return CapturedStep(traced=traced, inputs=tuple(tensor.detach() for tensor in inputs))


class _InputsNotedError(Exception):
    """Ends a call of which only the inputs were of interest."""


@lru_cache  # each mesh has groups of its own, and gloo's are never freed
def _mesh(sharding: Sharding) -> tuple[DeviceMesh, str]:
    """The mesh that parameters are sharded over, and the group of the layers' own collectives."""
    axes = {"hybrid_shard": ("dp_replicate", "fsdp"), "shard_beside_tensor": ("fsdp", "tp")}
    names = axes.get(sharding, ("fsdp",))
    mesh = init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=names)
    # Before passes run, so that none waits for a rank on which an earlier one was refused.
    second_group_of(mesh.get_group("fsdp").group_name, purpose="reductions")
    if "tp" in names:
        return mesh["fsdp"], mesh.get_group("tp").group_name
    return mesh, mesh.get_group("fsdp").group_name


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """SGD whose state exists already, as capture asks."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)
    for parameter in parameters:
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def _tokens(spec: StepSpec, *, salt: int) -> torch.Tensor:
    """(B, L + 1): inputs, and each one's successor as label."""
    generator = torch.Generator().manual_seed(1000 * spec.seed + salt)
    rows = _BATCH * spec.num_microbatches
    return torch.randint(spec.vocabulary, (rows, _LENGTH + 1), generator=generator)


def _step(
    model: Model, optimizer: torch.optim.Optimizer | None, spec: StepSpec, group: str
) -> Callable[[torch.Tensor], dict[str, Any]]:
    def step(tokens: torch.Tensor) -> dict[str, Any]:
        losses = []
        share = spec.share_gathered and spec.sharding != "none"
        with gathered(model) if share else nullcontext():
            for microbatch in tokens.chunk(spec.num_microbatches):
                logits = model(microbatch[:, :-1])
                with phase("loss"):
                    labels = microbatch[:, 1:].flatten()
                    losses.append(F.cross_entropy(logits.flatten(0, 1).float(), labels))
        loss = torch.stack(losses).sum()
        results: dict[str, Any] = {"loss": loss, "returned": model.take_returned()}
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        if spec.log_metric:
            results["metric"] = all_reduce(loss.detach(), group)
        if optimizer is None:
            return results | {"gradients": dict(zip(named, gradients, strict=True))}
        for parameter, gradient in zip(named.values(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        return results

    return step
