"""One weight on two stages: the embedding of the first is the output projection of the last.

Both stages hold a copy. What keeps the copies one weight, each at its place in a run:

- they begin with the same values: those of the projection, under whose name torchtitan draws them
  (``settle_tied_weight``);
- both get the sum of their gradients, by ``GraphPPRunner`` for captured stages, and here, around
  PyTorch's schedule, for eager ones (``TiedSchedule``);
- the norm of all gradients counts it once (``local_update.clip_gradients``);
- optimizers call both by the name that a whole model's has, so that checkpoints are those of a run
  without a pipeline (``settle_tied_weight``). Model states need nothing: torchtitan saves a tied
  weight under both of its names, of which each stage has one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.distributed import ParallelDims

from gt_pipeline.runner.shared_parameters import (
    SharedMember,
    SharedParameter,
    find_members,
    shared_parameters,
)
from gt_pipeline.split import SharedGroup
from gt_trainer.decoder.tied_stages import EMBEDDING, PROJECTION
from gt_trainer.pipelines.pipeline_plan import PipelinePlan, ranks_of_pipelines

_GROUP = SharedGroup((PROJECTION, EMBEDDING))
"""In the order in which gradients are summed; the first has the values to begin with."""


def tied_groups(model: Any) -> tuple[SharedGroup, ...]:
    """What stages of a model share, given the model or its configuration; nothing if not tied."""
    return (_GROUP,) if model.enable_weight_tying else ()


def untie_alone(part: Any) -> None:
    """Tell a stage with one end of a tied weight that it has no other to tie it to."""
    if part.tok_embeddings is None or part.lm_head is None:
        part.enable_weight_tying = False


def tied_copies(
    parts: Mapping[int, nn.Module], plan: PipelinePlan, parallel_dims: ParallelDims
) -> tuple[SharedParameter, ...]:
    """The tied weight as this rank holds it; nothing on a rank without a copy.

    Every rank of the world calls it, of a model that is tied.

    Args:
        parts: this rank's stages by index.
        plan: of the whole pipeline.
        parallel_dims: torchtitan's meshes.
    """
    members = [
        copies
        for ranks in ranks_of_pipelines(parallel_dims.pp, parallel_dims.world_size)
        for copies in _members(plan, ranks)
        if len({each.stage for each in copies}) > 1
    ]
    stages = {index: _Part(part) for index, part in parts.items()}
    return shared_parameters(members, stages, rank=dist.get_rank())


def settle_tied_weight(
    parts: Mapping[int, nn.Module],
    optimizers: Iterable[torch.optim.Optimizer],
    plan: PipelinePlan,
    parallel_dims: ParallelDims,
) -> tuple[nn.Parameter, ...]:
    """Make both copies equal, and let optimizers call them by one name. Collective.

    To be called when weights are drawn and before anything is loaded.

    Args:
        parts: as for ``tied_copies``.
        optimizers: of the parts, with names of their parameters.
        plan: see ``tied_copies``.
        parallel_dims: see ``tied_copies``.

    Returns:
        Those of this rank's parameters that are second copies: what is summed over all parameters
        of the pipeline leaves them out.
    """
    for copies in tied_copies(parts, plan, parallel_dims):
        copies.synchronize()
        copies.release()
    for optimizer in optimizers:
        _call_by_embedding(optimizer)
    named = [dict(part.named_parameters()) for part in parts.values()]
    return tuple(each[PROJECTION] for each in named if PROJECTION in each and EMBEDDING not in each)


class TiedSchedule:
    """PyTorch's schedule of eager stages, after whose steps both copies have the summed gradient.

    Gradients of a step are summed apart from those of steps before it, as captured stages do.

    Args:
        schedule: PyTorch's.
        parts: this rank's stages by index.
        copies: of ``tied_copies``.
    """

    def __init__(
        self, schedule: Any, parts: Mapping[int, nn.Module], copies: Sequence[SharedParameter]
    ) -> None:
        self._schedule = schedule
        self._parts = parts
        self._copies = tuple(copies)

    def step(self, **batch: Any) -> None:
        """Train on one batch; arguments are those of PyTorch's schedule."""
        before = self._take_gradients()
        self._schedule.step(**batch)
        gradients = self._take_gradients()
        for copies in self._copies:
            copies.sum_gradients(gradients)
        for index, of_part in gradients.items():
            parameters = dict(self._parts[index].named_parameters())
            for name, gradient in of_part.items():
                earlier = before[index].get(name)
                parameters[name].grad = gradient if earlier is None else earlier.add_(gradient)

    def eval(self, **batch: Any) -> None:
        """Compute losses of one batch; arguments are those of PyTorch's schedule."""
        self._schedule.eval(**batch)

    def close(self) -> None:
        """Give back process groups."""
        for copies in self._copies:
            copies.release()

    def _take_gradients(self) -> dict[int, dict[str, torch.Tensor]]:
        """Those of the copies, by stage and name; parameters lose them."""
        names = {name for copies in self._copies for name in (m.name for m in copies.members)}
        taken: dict[int, dict[str, torch.Tensor]] = {index: {} for index in self._parts}
        for index, part in self._parts.items():
            for name, parameter in part.named_parameters():
                if name in names and parameter.grad is not None:
                    taken[index][name] = _placed_as(parameter, parameter.grad)
                    parameter.grad = None
        return taken


class _Part:
    """A stage's module, as something that holds parameters."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """By their names in the model."""
        return dict(self._module.named_parameters())


def _members(plan: PipelinePlan, ranks: Sequence[int]) -> list[tuple[SharedMember, ...]]:
    """Where the copies are in one pipeline, given the global ranks of its places."""
    stage_to_rank = plan.schedule.stage_to_rank
    return find_members(
        (_GROUP,),
        {
            stage: [name for name in _GROUP.names if name.rpartition(".")[0] in modules]
            for stage, modules in enumerate(plan.names_per_stage)
        },
        {stage: ranks[stage_to_rank[stage]] for stage in range(plan.schedule.num_stages)},
    )


def _call_by_embedding(optimizer: torch.optim.Optimizer) -> None:
    """Call the projection as the whole model's optimizer calls the weight."""
    for group in optimizer.param_groups:
        names = group["param_names"]
        if PROJECTION not in names:
            continue
        parameter = group["params"][names.index(PROJECTION)]
        group["param_names"] = [EMBEDDING if name == PROJECTION else name for name in names]

        def keep_apart(loaded: torch.optim.Optimizer, parameter: nn.Parameter = parameter) -> None:
            # Where one rank has both stages, two optimizers are given the same tensors.
            state = loaded.state[parameter]
            for key, value in state.items():
                state[key] = value.clone() if isinstance(value, torch.Tensor) else value

        optimizer.register_load_state_dict_post_hook(keep_apart)


def _placed_as(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """What eager stages leave may still be a part of a sum over ranks."""
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        return gradient.redistribute(placements=parameter.placements)
    return gradient
