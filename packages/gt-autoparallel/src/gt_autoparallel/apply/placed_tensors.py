"""Parameters of a model as DTensors with planned placements, under their names and ties."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from gt_autoparallel.apply.rank_mesh import RankMesh
from gt_autoparallel.graph.layouts import Layout, replicated


def place_parameters(
    model: nn.Module, layouts: Mapping[str, Layout], mesh: DeviceMesh, rank: RankMesh
) -> None:
    """Let ``model`` hold its parameters as DTensors.

    A parameter with values keeps them: each rank cuts its own shard, so that ranks must hold equal
    values. One on the meta device stays there, for ``to_empty`` and the model's own initializer.
    A parameter that is reached by several names stays one; attributes that were set on it stay.
    Parameters that ``layouts`` does not name are replicated.
    """
    placed: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    """Old and new parameter, by the identity of either: it may be reached by another name."""

    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in placed:
                name = f"{prefix}.{key}" if prefix else key
                stored = _placed(parameter, layouts.get(name), mesh, rank)
                # Both are held, so that no other object gets their identity meanwhile.
                placed[id(parameter)] = placed[id(stored)] = (parameter, stored)
            module._parameters[key] = placed[id(parameter)][1]


def _placed(
    parameter: nn.Parameter, layout: Layout | None, mesh: DeviceMesh, rank: RankMesh
) -> nn.Parameter:
    layout = layout or replicated(rank.shape)
    local = parameter.detach()
    for axis, placement in enumerate(layout):
        if isinstance(placement, Shard):
            length = local.shape[placement.dim] // rank.shape.sizes[axis]
            local = local.narrow(placement.dim, rank.coordinate[axis] * length, length)
    # A copy, so that the whole parameter can be freed.
    local = local.clone(memory_format=torch.contiguous_format)
    with torch.no_grad():
        stored = DTensor.from_local(
            local,
            mesh,
            layout,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    result = nn.Parameter(stored, requires_grad=parameter.requires_grad)
    vars(result).update(vars(parameter))  # what a user wrote on it, such as ``no_weight_decay``
    return result
