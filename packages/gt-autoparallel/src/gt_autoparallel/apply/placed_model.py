"""By what plan, and on which meshes, a model is placed: for whoever stores what is captured of it.

A captured step of a placed model names the process groups of its mesh, and those over which experts
exchange tokens; which graph it is follows from the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gt_autoparallel.apply.placed_forward import PlacedForward
from gt_autoparallel.plan.placement_plan import PlacementPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedModel:
    """What ``apply_plan`` has placed a model by."""

    plan: PlacementPlan
    mesh: DeviceMesh
    expert_meshes: Mapping[tuple[str, ...], DeviceMesh]
    """Over which experts exchange tokens, of one dimension, by the names of the axes of ``mesh``
    that are together in it; empty where they exchange none. Of a pipeline's stage those of all
    stages, in one order: who makes groups of them makes as many on every rank."""


def placed_model(model: nn.Module) -> PlacedModel | None:
    """What a model is placed by; None if no plan places it."""
    forward = vars(model).get("forward")
    if not isinstance(forward, PlacedForward):
        return None
    return PlacedModel(
        plan=forward.plan, mesh=forward.mesh, expert_meshes=dict(forward.expert_meshes)
    )
