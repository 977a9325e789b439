"""Place a model by a plan: its parameters become DTensors, its forward the planned graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from gt_autoparallel._torch_internals import has_gradient_hooks
from gt_autoparallel.apply.local_program import RunNode, local_program
from gt_autoparallel.apply.placed_experts import PlacedExperts, expert_axes
from gt_autoparallel.apply.placed_forward import (
    PlacedForward,
    hooks_of_inner_modules,
    hooks_of_model,
)
from gt_autoparallel.apply.placed_inputs import InputReader
from gt_autoparallel.apply.rank_mesh import RankMesh
from gt_autoparallel.argument_checks import check_arguments, kind_problem
from gt_autoparallel.errors import PlanMismatchError
from gt_autoparallel.graph.experts import ExpertBlock, expert_problems
from gt_autoparallel.graph.layouts import Layout, replicated
from gt_autoparallel.graph.placement_graph import ModelInterface
from gt_autoparallel.plan.model_signature import model_differences
from gt_autoparallel.plan.placement_plan import PlacementPlan, plan_problem


def apply_plan(
    model: nn.Module,
    plan: PlacementPlan,
    mesh: DeviceMesh,
    *,
    experts: Mapping[str, ExpertBlock] | None = None,
    interface: ModelInterface | None = None,
    ignore_hooks: bool = False,
    expert_meshes: Mapping[tuple[int, ...], DeviceMesh] | None = None,
) -> nn.Module:
    """Place ``model`` by ``plan``, in place.

    Each parameter becomes a ``DTensor`` in its planned layout, under its name, so that optimizers
    and checkpoints (``torch.distributed.checkpoint``) work on it. Parameters with values keep them:
    every rank must hold equal ones, and cuts its own shard. A model on the meta device stays there:
    call ``to_empty`` and its own initializer. Buffers stay whole on every rank.

    Afterwards the model takes and returns plain tensors: this rank's shards in the planned layouts
    of inputs and outputs (``DTensor`` inputs with these layouts are taken too). Its loss must be
    such that the sum over the ranks that hold different shards is the loss of the whole batch. It
    runs eagerly, and in any capture as the same operators. Make optimizers, and register hooks on
    parameters and on the model itself, afterwards. The modules inside are not called: hooks on them
    are refused, here and at every call.

    Args:
        model: the planned one, or one of the same structure; not placed yet.
        plan: from ``find_placement`` or a file; the same on all ranks. Where time ends a search,
            ranks that plan each for itself may come to different plans: plan on one, and give the
            others the file or what ``encode_plan`` makes of it.
        mesh: with the planned axes and sizes.
        experts: the model's expert blocks by name, if it was planned with them.
        interface: how the model is called, for a plan whose graph was captured in another process;
            None takes the one of the plan's graph.
        ignore_hooks: modules inside may have forward and backward hooks, which do not run: for
            hooks that only compute on tensors, which is in the plan, or that wait to be turned on.
        expert_meshes: of ``make_expert_meshes``, where ranks have different plans. None: what the
            plan needs is made here, so all ranks of the world need the same.

    Returns:
        ``model``.

    Raises:
        PlanMismatchError: model, mesh or expert blocks are not those of the plan; every
            difference is listed, and nothing is changed.
        PlacementInputError: an argument is not what it must be; each is named.
    """
    check_arguments(
        "apply_plan",
        kind_problem(model, "model", nn.Module, "a torch.nn.Module"),
        plan_problem(plan),
        kind_problem(mesh, "mesh", DeviceMesh, "a DeviceMesh with the axes of the plan"),
        *expert_problems(experts),
        kind_problem(
            interface, "interface", (ModelInterface, type(None)), "a ModelInterface, or None"
        ),
    )
    problems = [*_problems(model, plan, experts or {}, ignore_hooks=ignore_hooks)]
    interface = interface or plan.graph.interface
    if interface is None:
        problems.append(
            "the plan comes from a file and does not say how the model is called: load it for the "
            "model, or give interface="
        )
    rank: RankMesh | None = None
    try:
        rank = RankMesh.of(mesh, plan.mesh)
    except PlanMismatchError as error:
        problems.append(str(error))
    if problems or rank is None or interface is None:
        raise PlanMismatchError("the plan does not fit:\n  " + "\n  ".join(problems))
    meshes = make_expert_meshes([plan], mesh) if expert_meshes is None else expert_meshes
    program = local_program(
        plan,
        rank,
        interface=interface,
        experts=_expert_nodes(plan, meshes, experts or {}),
    )
    place_parameters(model, plan.parameter_layouts(), mesh, rank)
    forward = PlacedForward(
        model,
        program,
        interface=interface,
        inputs=InputReader(plan, interface, program.inputs),
        mesh=mesh,
        expert_meshes={
            tuple(plan.mesh.names[axis] for axis in axes): meshes[axes] for axes in sorted(meshes)
        },
        called_modules=None if ignore_hooks else frozenset(experts or {}),
    )
    object.__setattr__(model, "forward", forward)
    return model


def _problems(
    model: nn.Module,
    plan: PlacementPlan,
    experts: Mapping[str, ExpertBlock],
    *,
    ignore_hooks: bool,
) -> Iterator[str]:
    if isinstance(vars(model).get("forward"), PlacedForward):
        yield "the model is placed already"
        return
    yield from model_differences(plan, model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, each in model.named_parameters():
        if has_gradient_hooks(each):
            yield (
                f"{name} has gradient hooks, which the DTensor in its place would not have; "
                "register them after the model is placed"
            )
    yield from hooks_of_model(model)
    lost = [] if ignore_hooks else [*hooks_of_inner_modules(model, called=frozenset(experts))]
    if lost:
        yield from lost
        yield (
            "hooks inside do not run in a placed model: remove them, or say ignore_hooks=True if "
            "all that they do is in the plan"
        )
    tied = {alias: parameters.get(alias) for alias in plan.graph.parameter_aliases}
    names = {node.name: str(node.target) for node in plan.graph.of_kind("parameter")}
    for alias, parameter in tied.items():
        original = names[plan.graph.parameter_aliases[alias]]
        if parameter is not None and parameter is not parameters.get(original):
            yield f"{alias} was tied to {original} when the model was planned, and is not; tie it"
    planned_blocks = {str(node.target) for node in plan.graph.of_kind("experts")}
    if planned_blocks != set(experts):
        yield (
            f"experts are blocks for {sorted(experts)!r}, and the plan has "
            f"{sorted(planned_blocks)!r}; give the blocks with which the model was planned"
        )


def make_expert_meshes(
    plans: Iterable[PlacementPlan], mesh: DeviceMesh
) -> dict[tuple[int, ...], DeviceMesh]:
    """The ranks that exchange tokens for experts, for every plan that some rank has.

    PyTorch names groups by how many a process has made, so that ranks with plans of their own have
    to make the same: every rank of the world calls it with all plans, in any order.

    Args:
        plans: for meshes like ``mesh``, such as those of a pipeline's stages.
        mesh: this rank's.

    Returns:
        By axes of the mesh: their ranks together, the last axis fastest, in one dimension.
    """
    axes = sorted(set().union(*map(expert_axes, plans)))
    return {each: _mesh_of_axes(mesh, each) for each in axes}


def _expert_nodes(
    plan: PlacementPlan,
    expert_meshes: Mapping[tuple[int, ...], DeviceMesh],
    experts: Mapping[str, ExpertBlock],
) -> dict[str, RunNode]:
    """How each node of kind experts runs: forward and backward of a block share what is kept."""
    placed = {
        name: PlacedExperts.of(plan, expert_meshes.__getitem__, name=name, block=block)
        for name, block in experts.items()
    }
    return {
        node.name: placed[node.target].backward
        if node.phase == "backward"
        else placed[node.target].forward
        for node in plan.graph.of_kind("experts")
    }


def _mesh_of_axes(mesh: DeviceMesh, axes: tuple[int, ...]) -> DeviceMesh:
    """The ranks along some axes together, the last one fastest, in one dimension.

    Makes a process group if there are several axes, so every rank of the mesh has to call it.
    """
    names = mesh.mesh_dim_names
    assert names is not None
    if len(axes) == 1:
        return mesh[names[axes[0]]]
    at: tuple[int | slice, ...] = tuple(
        slice(None) if axis in axes else coordinate
        for axis, coordinate in enumerate(mesh.get_coordinate() or ())
    )
    ranks = mesh.mesh[at].flatten().tolist()
    group = dist.new_group(ranks, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)  # this rank is in it
    return DeviceMesh.from_group(group, mesh.device_type, mesh_dim_names=("experts",))


# Parameters of a model as DTensors with planned placements, under their names and ties.
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
