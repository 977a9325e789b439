"""Plan a model and place it, on all ranks of a job at once: what a plain training loop needs.

One rank plans and the others get its plan, so that all have the same one and only one pays for it.
A failure there is raised on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from gt_autoparallel.apply import apply_plan
from gt_autoparallel.argument_checks import check_arguments, kind_problem
from gt_autoparallel.errors import PlacementError
from gt_autoparallel.find import PlacementRequest, find_placement
from gt_autoparallel.graph.placement_graph import ModelInterface
from gt_autoparallel.plan import PlacementPlan, decode_plan, encode_plan
from gt_autoparallel.prices.costs import PlacementPrices
from gt_autoparallel.prices.microbatches import Microbatches
from gt_autoparallel.problem.constraints import Constraints
from gt_passes.simulation import CostModel

Key = TypeVar("Key")
"""Names a plan."""


_FAKE_BACKEND = "fake"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPlan:
    """The one plan of all ranks, and how the planned model is called."""

    plan: PlacementPlan
    interface: ModelInterface


def place(
    model: nn.Module,
    mesh: DeviceMesh,
    example_inputs: Sequence[Any],
    request: PlacementRequest | None = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    ignore_hooks: bool = False,
) -> PlacementPlan:
    """Find the cheapest placement of a model's training step, and place the model by it.

    ::

        mesh = init_device_mesh("cuda", (4, 2), mesh_dim_names=("data", "model"))
        place(model, mesh, (tokens_of_all_ranks,))
        optimizer = torch.optim.AdamW(model.parameters())
        for tokens, labels in batches_of_this_rank:
            (loss_of(model(tokens), labels) / mesh.size(0)).backward()
            optimizer.step()
            optimizer.zero_grad()

    All ranks call it, with equal arguments. Loss, optimizer and loop stay the caller's; see
    ``apply_plan`` for what the model is afterwards.

    Args:
        model: not placed yet. If it has values, every rank must have equal ones.
        mesh: with named axes, of all ranks of the job.
        example_inputs: positional arguments of the forward, global tensors of the whole batch.
        request: what the plan must keep, and what it is made for. By default what the model takes
            and returns is cut along dim 0 over the first axis of the mesh, and whole along the
            others; a request without constraints leaves even that to the planner.
        example_kwargs: keyword arguments of the forward, global tensors likewise.
        ignore_hooks: as for ``apply_plan``.

    Returns:
        The plan.

    Raises:
        PlacementError: the model cannot be planned or placed as requested; on every rank.
    """
    check_arguments(
        "place",
        kind_problem(model, "model", nn.Module, "a torch.nn.Module"),
        _mesh_problem(mesh),
        kind_problem(
            request,
            "request",
            (PlacementRequest, type(None)),
            "a PlacementRequest(memory_budget_bytes=..., ...), or None",
        ),
    )
    asked = _cut_over_first_axis(mesh) if request is None else request
    shared = plan_on_first_rank(
        lambda: find_placement(model, mesh, example_inputs, asked, example_kwargs=example_kwargs),
        device=mesh.device_type,
        cost_model=asked.cost_model,
    )
    apply_plan(
        model,
        shared.plan,
        mesh,
        experts=asked.experts,
        interface=shared.interface,
        ignore_hooks=ignore_hooks,
    )
    return shared.plan


def plan_on_first_rank(
    find: Callable[[], PlacementPlan],
    *,
    device: torch.device | str,
    cost_model: CostModel | None = None,
    microbatches: Microbatches | None = None,
) -> SharedPlan:
    """Let rank 0 of the default process group plan, and give its plan to all.

    Args:
        find: makes the plan; called on rank 0 only, where the model was captured in this process.
        device: on which the process group sends.
        cost_model: the one that ``find`` plans with.
        microbatches: those that ``find`` plans for.

    Raises:
        PlacementError: as on rank 0; any other failure there, too, in words.
    """
    (shared,) = plans_on_first_rank(
        lambda: {None: find()}, device=device, cost_model=cost_model, microbatches=microbatches
    ).values()
    return shared


def plans_on_first_rank(
    find: Callable[[], Mapping[Key, PlacementPlan]],
    *,
    device: torch.device | str,
    cost_model: CostModel | None = None,
    microbatches: Microbatches | None = None,
) -> dict[Key, SharedPlan]:
    """Let rank 0 make several plans, as of the stages of a pipeline, and give all of them to all.

    Arguments and errors are those of ``plan_on_first_rank``; keys can be pickled.
    """
    sent: list[Any] = [None]
    plans: Mapping[Key, PlacementPlan] = {}
    if makes_plans():
        try:
            plans = find()
            encoded = {key: (encode_plan(p), p.graph.interface) for key, p in plans.items()}
            sent = [encoded]
        except Exception as error:  # noqa: BLE001  # whatever it is, the others wait for it
            sent = [_failure(error)]
    if dist.get_rank() == 0 or not makes_plans():
        dist.broadcast_object_list(sent, src=0, device=torch.device(device))
    (received,) = sent
    if isinstance(received, PlacementError):
        raise received
    prices = PlacementPrices(cost_model, microbatches=microbatches)
    return {
        key: SharedPlan(
            plan=plans[key] if key in plans else decode_plan(content, prices), interface=interface
        )
        for key, (content, interface) in received.items()
    }


def makes_plans() -> bool:
    """Whether this rank plans for all: the first does, and any of a world of fake ranks.

    Nobody sends anything to a fake rank (PyTorch's backend ``fake``).
    """
    return dist.get_rank() == 0 or dist.get_backend() == _FAKE_BACKEND


def _failure(error: Exception) -> PlacementError:
    """What can be sent to other ranks: errors of the planner as they are, others in words."""
    if isinstance(error, PlacementError):
        return error
    failure = PlacementError(f"planning failed on rank 0: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _mesh_problem(mesh: object) -> str | None:
    problem = kind_problem(mesh, "mesh", DeviceMesh, "a DeviceMesh with named axes")
    if isinstance(mesh, DeviceMesh) and mesh.size() != dist.get_world_size():
        return (
            f"mesh has {mesh.size()} of the {dist.get_world_size()} ranks; allowed: a mesh of all "
            "ranks, which get one plan; for a part of them use find_placement and apply_plan"
        )
    return problem


def _cut_over_first_axis(mesh: DeviceMesh) -> PlacementRequest:
    layout = (Shard(0), *(Replicate(),) * (mesh.ndim - 1))
    return PlacementRequest(
        constraints=Constraints(inputs={"*": layout}, outputs={"*": layout}),
        device=mesh.device_type,
    )
