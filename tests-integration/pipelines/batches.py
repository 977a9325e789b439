"""Models, batches and gradients of pipelines that are compared: the same on every rank."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from training_cases import local

from gt_trainer.context_parallel.attend_to_all_ranks import attend_to_all_ranks
from gt_trainer.decoder.initialization import _part
from gt_trainer.trainer import GraphTrainer

Gradients = dict[str, torch.Tensor]
Microbatch = tuple[torch.Tensor, torch.Tensor, dict[str, Any]]


def new_model(trainer: GraphTrainer, part_of: Callable[[Any], nn.Module]) -> Any:
    """The model, or a stage of it, with tensor and expert parallelism and no data parallelism.

    Ranks that share sequences still do.
    """
    with torch.device("meta"):
        model: Any = part_of(trainer.model_config.build())
    if trainer.parallel_dims.cp_enabled:
        strategy = trainer.config.compile.context_parallel
        attend_to_all_ranks(model, trainer.parallel_dims.get_mesh("cp"), strategy=strategy)
    if trainer.parallel_dims.ep_enabled or trainer.parallel_dims.tp_enabled:
        model.parallelize(trainer.parallel_dims)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    set_weights(model)
    return model.train()


def new_loss(trainer: GraphTrainer, model: Any) -> Any:
    loss_fn = trainer.config.loss.build(compile_config=trainer.config.compile)
    if hasattr(loss_fn, "set_lm_head") and model.lm_head is not None:
        loss_fn.set_lm_head(model.lm_head)
        model._skip_lm_head = True
    return loss_fn


def set_weights(model: nn.Module) -> None:
    """Values that depend on nothing but a parameter's name and shape."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            whole = 0.02 * torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                whole += 1
            part = _part(whole, parameter) if isinstance(parameter, DTensor) else whole
            local_part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local_part.copy_(part)


def microbatches(trainer: GraphTrainer, batch: int) -> list[Microbatch]:
    """Of this data rank; every pipeline rank of it gets the same."""
    config = trainer.config
    data = trainer.parallel_dims.get_optional_mesh("batch")
    data_rank = 0 if data is None else data.get_local_rank()
    size, length = config.parallelism.pipeline_parallel_microbatch_size, config.training.seq_len
    generator = torch.Generator().manual_seed(100 * batch + data_rank)
    found = []
    for _ in range(config.training.local_batch_size // size):
        tokens = torch.randint(2048, (size, length), generator=generator)
        positions = torch.arange(length).repeat(size, 1)
        positions[:, length // 3 :] -= length // 3
        labels = tokens.roll(-1, dims=1)
        labels[:, ::5] = -100
        found.append(
            trainer.post_dataloading_process({"input": tokens, "positions": positions}, labels)
        )
    return found


def num_tokens() -> torch.Tensor:
    return torch.tensor(777)


def schedule_inputs(trainer: GraphTrainer, found: list[Microbatch]) -> dict[str, Any]:
    return {
        "arg_mbs": [(inputs,) for inputs, _, _ in found] if trainer.pp_has_first_stage else None,
        "kwarg_mbs": [kwargs for _, _, kwargs in found],
        "target_mbs": [labels for _, labels, _ in found] if trainer.pp_has_last_stage else None,
    }


def taken_gradients(parts: list[nn.Module], *, whole: bool = False) -> Gradients:
    """Gradients by name, placed as the parameters, which lose them.

    Local ones, or, where ``whole``, over all tensor-parallel ranks; experts stay local.
    """
    found = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            gradient = parameter.grad
            if gradient is None:
                continue
            if isinstance(gradient, DTensor):
                assert isinstance(parameter, DTensor)
                # Parts of tensor-parallel ranks are summed here, after all microbatches.
                gradient = gradient.redistribute(placements=parameter.placements)
                if whole and "ep" not in (gradient.device_mesh.mesh_dim_names or ()):
                    gradient = gradient.full_tensor()
            found[name] = local(gradient)
            parameter.grad = None
    return found


def reduced_as(
    like: Mapping[str, nn.Parameter], gradients: Gradients, trainer: GraphTrainer
) -> Gradients:
    """Sums over data ranks, cut as ``like`` is. Two terms have one sum, in whatever order."""
    meshes = (trainer.parallel_dims.get_optional_mesh(axis) for axis in ("fsdp", "dp_replicate"))
    groups = [mesh.get_group() for mesh in meshes if mesh is not None]
    found = {}
    for name, gradient in gradients.items():
        parameter = like[name]
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        if mesh is not None and "ep" in (mesh.mesh_dim_names or ()):
            found[name] = gradient  # an expert's, which lives on this rank alone
            continue
        total = gradient.clone()
        for group in groups:
            dist.all_reduce(total, group=group)
        found[name] = _part(total, parameter) if isinstance(parameter, DTensor) else total
    return found


def local_parameters(parts: list[nn.Module]) -> dict[str, torch.Tensor]:
    return {name: local(parameter) for part in parts for name, parameter in part.named_parameters()}


class LocalAdamW:
    """Updates this rank's parts of parameters, element by element, however they are placed."""

    def __init__(self, parts: list[nn.Module]) -> None:
        self._parameters = {
            name: nn.Parameter(
                parameter.to_local().detach() if isinstance(parameter, DTensor) else parameter.data
            )
            for part in parts
            for name, parameter in part.named_parameters()
        }
        self._optimizer = torch.optim.AdamW(self._parameters.values(), lr=1e-3, foreach=False)

    def step(self, gradients: Gradients) -> None:
        for name, gradient in gradients.items():
            self._parameters[name].grad = gradient
        self._optimizer.step()
        self._optimizer.zero_grad()


def unequal(what: str, a: list[torch.Tensor], b: list[torch.Tensor]) -> Iterator[str]:
    if len(a) != len(b):
        yield f"{what}: {len(a)} losses and {len(b)}"
    for number, (one, other) in enumerate(zip(a, b, strict=False)):
        if not torch.equal(one.reshape(()), other.reshape(())):
            yield f"{what}: loss {number} is {one.item()!r} and {other.item()!r}"


class counts_kept:  # noqa: N801  # used as a function
    """Evaluation leaves the experts' counts of tokens as they were, for the comparison."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = dict(model.named_buffers())
        self._before = MappingProxyType({n: b.clone() for n, b in self._buffers.items()})

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exception: object) -> None:
        for name, buffer in self._buffers.items():
            buffer.copy_(self._before[name])
