"""What may be asked of the planner: every argument looked at, all that is wrong in one error."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping
from types import NoneType

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gt_autoparallel.argument_checks import check_arguments, kind_problem, path_problem
from gt_autoparallel.errors import PlacementInputError
from gt_autoparallel.graph.experts import expert_problems
from gt_autoparallel.graph.layouts import MeshShape
from gt_autoparallel.graph.placement_graph import PlacementGraph
from gt_autoparallel.problem.constraints import Constraints, LayoutConstraint
from gt_passes.simulation import CostModel


def mesh_shape(mesh: object) -> MeshShape:
    """Names and sizes of a mesh.

    Raises:
        PlacementInputError: it is no mesh, or its axes have no names.
    """
    if isinstance(mesh, MeshShape):
        return mesh
    if not isinstance(mesh, DeviceMesh):
        raise PlacementInputError(
            f"mesh is {mesh!r}; allowed: a DeviceMesh with named axes, or a MeshShape"
        )
    return MeshShape.of(mesh)


def check_model_arguments(
    model: object,
    mesh: object,
    example_inputs: object,
    example_kwargs: object,
    *,
    function: str,
    cost_model: object,
    compute_dtype: object,
    reduce_dtype: object,
    experts: object,
    device: object,
    optimizer_state_copies: object = 2.0,
    loss_bytes: object = 0,
    replicate_unknown: object = (),
    progress: object = None,
    path: object = "",
) -> None:
    """See that what is given about a model is of the right kind; shapes are for the capture.

    Args: those of ``planner_of_model`` and ``load_plan``, and the name of the called function.

    Raises:
        PlacementInputError: naming every argument that is not what it must be.
    """
    problems: list[str | None] = [kind_problem(model, "model", nn.Module, "a torch.nn.Module")]
    try:
        mesh_shape(mesh)
    except PlacementInputError as error:
        problems.append(str(error))
    problems += [
        kind_problem(
            example_inputs,
            "example_inputs",
            (tuple, list),
            "a tuple of the forward's positional arguments, as in (tokens,)",
        ),
        kind_problem(
            example_kwargs,
            "example_kwargs",
            (Mapping, NoneType),
            "a mapping of the forward's keyword arguments, or None",
        ),
        kind_problem(
            cost_model,
            "cost_model",
            (CostModel, NoneType),
            "a gt_passes.simulation.CostModel, or None for H100s",
        ),
    ]
    if not _is_amount(optimizer_state_copies):
        problems.append(
            f"optimizer_state_copies is {optimizer_state_copies!r}; allowed: a number of at least 0"
        )
    if type(loss_bytes) is not int or loss_bytes < 0:
        problems.append(f"loss_bytes is {loss_bytes!r}; allowed: an integer of at least 0")
    problems += [
        f"{name} is {dtype!r}; allowed: a floating-point torch.dtype, or None"
        for name, dtype in (("compute_dtype", compute_dtype), ("reduce_dtype", reduce_dtype))
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
    ]
    problems += expert_problems(experts)
    if isinstance(replicate_unknown, str) or not (
        isinstance(replicate_unknown, Collection)
        and all(isinstance(name, str) for name in replicate_unknown)
    ):
        problems.append(
            f"replicate_unknown is {replicate_unknown!r}; allowed: a collection of names, as in "
            '{"mylib.gate.default"}'
        )
    problems += _device_problems(device)
    if progress is not None and not callable(progress):
        problems.append(
            f"progress is {progress!r}; allowed: a function that takes a line of text, or None"
        )
    problems.append(path_problem(path))
    check_arguments(function, *problems)


def check_mesh_of_graph(graph: PlacementGraph, mesh: MeshShape) -> None:
    """Each axis has several ranks, and divides some dim of some parameter or input.

    Raises:
        PlacementInputError: an axis does not.
    """
    shapes = {
        spec.shape
        for node in graph.nodes
        if node.kind in ("parameter", "input")
        for spec in node.outputs
        if spec is not None
    }
    problems = [
        f"axis {name!r} has 1 rank: there is nothing to shard along it, leave it out"
        for name, size in zip(mesh.names, mesh.sizes, strict=True)
        if size == 1
    ]
    problems += [
        f"axis {name!r} has {size} ranks, and no dim of any parameter or input is a multiple of "
        f"{size}: nothing could be sharded along it"
        for name, size in zip(mesh.names, mesh.sizes, strict=True)
        if not any(extent and extent % size == 0 for shape in shapes for extent in shape)
    ]
    if problems:
        raise PlacementInputError("mesh: " + "; ".join(problems))


def check_request(
    *,
    constraints: object,
    memory_budget_bytes: object,
    recomputes: object,
    relative_gap: object,
    time_limit_seconds: object,
    below_us: object,
) -> None:
    """See that the arguments of ``Planner.find`` are what they must be.

    Raises:
        PlacementInputError: naming every argument that is not what it must be.
    """
    problems: list[str | None] = []
    if not (
        isinstance(constraints, (tuple, list))
        and all(isinstance(each, LayoutConstraint) for each in constraints)
    ):
        names = ", ".join(f"{each.name}=..." for each in dataclasses.fields(Constraints))
        allowed = f"Constraints({names})"
        problems.append(kind_problem(constraints, "constraints", Constraints, allowed))
    if memory_budget_bytes is not None and not (
        type(memory_budget_bytes) is int and memory_budget_bytes >= 0
    ):
        problems.append(
            f"memory_budget_bytes is {memory_budget_bytes!r}; allowed: an integer of at least 0, "
            "or None for no limit"
        )
    problems.append(kind_problem(recomputes, "recomputes", bool, "True or False"))
    if not _is_amount(relative_gap):
        problems.append(f"relative_gap is {relative_gap!r}; allowed: a number of at least 0")
    if not _is_amount(time_limit_seconds, may_be_endless=True) or time_limit_seconds == 0:
        problems.append(f"time_limit_seconds is {time_limit_seconds!r}; allowed: a positive number")
    if not _is_amount(below_us, may_be_endless=True):
        problems.append(f"below_us is {below_us!r}; allowed: a number of at least 0")
    check_arguments("Planner.find", *problems)


def _is_amount(value: object, *, may_be_endless: bool = False) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return value >= 0 and (may_be_endless or math.isfinite(value))


def _device_problems(device: object) -> Iterator[str]:
    try:
        is_device = isinstance(device, (str, torch.device)) and bool(torch.device(device).type)
    except RuntimeError:
        is_device = False
    if not is_device:
        yield f"device is {device!r}; allowed: a torch.device or its name, as 'cuda'"
