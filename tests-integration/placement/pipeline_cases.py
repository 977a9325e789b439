"""What the workers of ``test_placed_pipelines.py`` run: placed stages against one whole model."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from pipelines.batches import num_tokens, schedule_inputs
from pipelines.cases import PipelineCase, evaluate
from placement.cases import NUM_STEPS, full, gradients, relative_error, traced_collectives
from torch import nn
from torch.distributed.tensor import DTensor

from gt_trainer.decoder.tied_stages import EMBEDDING
from gt_trainer.placement.planned_mesh import planned_mesh
from gt_trainer.trainer import GraphTrainer

AUTOPARALLEL = {"autoparallel": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a rank saw."""

    losses: tuple[tuple[float, float], ...]
    """Of each step, where the last stage is: the placed stages' over data ranks, the whole's."""

    evaluated: tuple[tuple[float, float], ...]
    """Likewise of one evaluation after the last step, of this data rank."""

    worst_gradient: tuple[float, str]
    """Largest relative error in norm over all steps, and the parameter that has it."""

    worst_parameter: tuple[float, str]
    """Likewise after the last step."""

    num_sharded: int
    """Parameters of this rank's stages of which a dim is sharded."""

    per_microbatch: Mapping[str, int]
    """Collectives of the graphs that run for each microbatch, by axis."""

    per_step: Mapping[str, int]
    """Likewise of those that gather parameters and reduce gradients, once in a step."""


def new_trainer(case: PipelineCase, folder: str, gib: float | None, **further: Any) -> GraphTrainer:
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size)
    config = case.build("aot_fx_trace", folder, **further)
    solver = dataclasses.replace(config.compile.autoparallel_solver, memory_budget_gib=gib)
    config.compile = dataclasses.replace(config.compile, autoparallel_solver=solver)
    return GraphTrainer(config)


def compare_placed_pipeline(case: PipelineCase, folder: str, gib: float | None = None) -> Found:
    """Five steps of placed stages on four ranks, and of the whole model on each of them."""
    trainer = new_trainer(case, folder, gib)
    whole = _whole_model(trainer)
    models = [*trainer.model_parts, whole]
    # As for whole models: see ``compare_with_whole_model``.
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, eps=1e-6) for m in models]
    losses: list[tuple[float, float]] = []
    errors: list[tuple[float, str]] = []
    for step in range(NUM_STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = _placed_loss(trainer, step)
        expected = _whole_loss(trainer, whole, step)
        if trainer.pp_has_last_stage:
            losses.append((loss, expected))
        errors += _errors(trainer, gradients(whole), gradients)
        for optimizer in optimizers:
            optimizer.step()
    sharded = [
        name
        for part in trainer.model_parts
        for name, parameter in part.named_parameters()
        if isinstance(parameter, DTensor) and any(p.is_shard() for p in parameter.placements)
    ]
    evaluated = _evaluated(trainer, whole)
    axes = _collectives_by_axis(trainer)
    found = Found(
        losses=tuple(losses),
        evaluated=evaluated,
        worst_gradient=max(errors),
        worst_parameter=max(
            _errors(trainer, dict(whole.named_parameters()), lambda m: dict(m.named_parameters()))
        ),
        num_sharded=len(sharded),
        per_microbatch=axes["microbatch"],
        per_step=axes["step"],
    )
    trainer.close()
    return found


def assert_agrees(found: Sequence[Found], *, tolerance: float = 1e-5) -> None:
    """Losses, gradients and parameters are equal on every rank."""
    assert sum(bool(each.losses) for each in found) == len(found) // 2
    for each in found:
        assert bool(each.losses) == bool(each.evaluated)
        for loss, expected in (*each.losses, *each.evaluated):
            assert abs(loss - expected) <= tolerance * abs(expected), each.losses
        assert each.worst_gradient[0] < tolerance, each.worst_gradient
        assert each.worst_parameter[0] < tolerance, each.worst_parameter


def _whole_model(trainer: GraphTrainer) -> Any:
    """The same model on one device, with the weights of all stages."""
    mine = {
        name: full(parameter)
        for part in trainer.model_parts
        for name, parameter in part.named_parameters()
    }
    gathered: list[dict[str, torch.Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, mine)
    weights = {name: weight for each in gathered for name, weight in each.items()}
    whole: Any = trainer.model_config.build()
    whole.init_weights(buffer_device=None)
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            parameter.copy_(weights[name])
    return whole.train()


def _evaluated(trainer: GraphTrainer, whole: nn.Module) -> tuple[tuple[float, float], ...]:
    trainer._allow_validation()
    for model in (*trainer.model_parts, whole):
        model.eval()
    found = _microbatches(trainer, NUM_STEPS, _data_rank(trainer))
    losses = evaluate(trainer, found)
    with torch.no_grad():
        expected = [_loss_of(trainer)(whole(x, **kw), y, None)[0] for x, y, kw in found]
    return tuple((one.item(), other.item()) for one, other in zip(losses, expected, strict=False))


def _placed_loss(trainer: GraphTrainer, step: int) -> float:
    """The mean loss of the step, over data ranks; 0 where the last stage is not."""
    losses: list[torch.Tensor] | None = [] if trainer.pp_has_last_stage else None
    mesh = trainer.parallel_dims.get_optional_mesh("batch")
    trainer.pp_schedule.step(
        **schedule_inputs(trainer, _microbatches(trainer, step, _data_rank(trainer))),
        losses=losses,
        loss_kwargs={"global_valid_tokens": num_tokens()},
        return_outputs=False,
    )
    total = torch.stack([loss.detach() for loss in losses or [torch.zeros(())]]).sum()
    if mesh is not None:
        dist.all_reduce(total, group=mesh.get_group())
    return total.item()


def _whole_loss(trainer: GraphTrainer, whole: Any, step: int) -> float:
    mesh = trainer.parallel_dims.get_optional_mesh("batch")
    total = 0.0
    for data_rank in range(1 if mesh is None else mesh.size()):
        for inputs, labels, kwargs in _microbatches(trainer, step, data_rank):
            loss, _ = _loss_of(trainer)(whole(inputs, **kwargs), labels, num_tokens())
            loss.backward()
            total += loss.item()
    return total


def _loss_of(trainer: GraphTrainer) -> Any:
    return trainer.config.loss.build(compile_config=trainer.config.compile)


def _data_rank(trainer: GraphTrainer) -> int:
    mesh = trainer.parallel_dims.get_optional_mesh("batch")
    return 0 if mesh is None else mesh.get_local_rank()


def _microbatches(trainer: GraphTrainer, step: int, data_rank: int) -> list[Any]:
    """Tokens, labels and keyword arguments of one data rank: documents that differ by step."""
    config = trainer.config
    size, length = config.parallelism.pipeline_parallel_microbatch_size, config.training.seq_len
    generator = torch.Generator().manual_seed(1000 * step + data_rank)
    found = []
    for _ in range(config.training.local_batch_size // size):
        tokens = torch.randint(trainer.model_config.vocab_size, (size, length), generator=generator)
        positions = (torch.arange(length) % (length // 2 + 1 - step)).expand(size, -1).contiguous()
        found.append(
            trainer.post_dataloading_process(
                {"input": tokens, "positions": positions}, tokens.roll(-1, dims=1)
            )
        )
    return found


def _errors(trainer: GraphTrainer, wanted: Mapping[str, torch.Tensor], of: Any) -> list[Any]:
    """Relative errors in norm of this rank's stages, with the names of what has them."""
    found = {name: full(each) for part in trainer.model_parts for name, each in of(part).items()}
    names = {name for part in trainer.model_parts for name, _ in part.named_parameters()}
    assert found.keys() == names
    # The whole model calls a tied weight by its first name.
    return [
        (relative_error(found[name], wanted[name if name in wanted else EMBEDDING]), name)
        for name in found
    ]


def _collectives_by_axis(trainer: GraphTrainer) -> dict[str, dict[str, int]]:
    mesh = planned_mesh(trainer.parallel_dims)
    counts: dict[str, dict[str, int]] = {"microbatch": {}, "step": {}}
    for stage in trainer.pp_schedule.stages.values():
        for kind, action in stage.actions.items():
            when = "step" if kind in ("UNSHARD", "REDUCE_GRAD") else "microbatch"
            if kind in ("BACKWARD_INPUT", "BACKWARD_WEIGHT"):
                continue  # together they are FULL_BACKWARD
            for (_, axis, _), count in traced_collectives(action.graph_module.graph, mesh).items():
                counts[when][axis] = counts[when].get(axis, 0) + count
    return counts
