"""What may be asked of the planner: every argument looked at, all that is wrong in one error."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gt_autoparallel.constraints import Constraints
from gt_autoparallel.errors import PlacementInputError
from gt_autoparallel.layouts import MeshShape
from gt_autoparallel.plan import LayoutConstraint
from gt_passes.simulation import CostModel

__all__ = ["check_model_arguments", "check_request", "mesh_shape"]


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
    try:
        return MeshShape.of(mesh)
    except ValueError as error:
        raise PlacementInputError(str(error)) from error


def check_model_arguments(
    model: object,
    example_inputs: object,
    example_kwargs: object,
    *,
    cost_model: object,
    optimizer_state_copies: object,
    compute_dtype: object,
    reduce_dtype: object,
    experts: object,
    replicate_unknown: object,
    device: object,
) -> None:
    """See that what is given about a model is of the right kind; shapes are for the capture.

    Args: those of ``planner_of_model``.

    Raises:
        PlacementInputError: naming every argument that is not what it must be.
    """
    problems = []
    if not isinstance(model, nn.Module):
        problems.append(f"model is a {type(model).__name__}; allowed: a torch.nn.Module")
    if not isinstance(example_inputs, (tuple, list)):
        problems.append(
            f"example_inputs is a {type(example_inputs).__name__}; allowed: a tuple of the "
            "forward's positional arguments, as in (tokens,)"
        )
    if example_kwargs is not None and not isinstance(example_kwargs, Mapping):
        problems.append(
            f"example_kwargs is a {type(example_kwargs).__name__}; allowed: a mapping of the "
            "forward's keyword arguments, or None"
        )
    if cost_model is not None and not isinstance(cost_model, CostModel):
        problems.append(
            f"cost_model is a {type(cost_model).__name__}; allowed: a "
            "gt_passes.simulation.CostModel, or None for H100s"
        )
    if not _is_amount(optimizer_state_copies):
        problems.append(
            f"optimizer_state_copies is {optimizer_state_copies!r}; allowed: a number of at least 0"
        )
    problems += [
        f"{name} is {dtype!r}; allowed: a floating-point torch.dtype, or None"
        for name, dtype in (("compute_dtype", compute_dtype), ("reduce_dtype", reduce_dtype))
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
    ]
    problems += _expert_problems(experts)
    if isinstance(replicate_unknown, str) or not (
        isinstance(replicate_unknown, Collection)
        and all(isinstance(name, str) for name in replicate_unknown)
    ):
        problems.append(
            f"replicate_unknown is {replicate_unknown!r}; allowed: a collection of names, as in "
            '{"mylib.gate.default"}'
        )
    problems += _device_problems(device)
    _raise("arguments", problems)


def check_request(
    *,
    constraints: object,
    memory_budget_bytes: object,
    relative_gap: object,
    time_limit_seconds: object,
) -> None:
    """See that a request is one.

    Args: those of ``Planner.find``.

    Raises:
        PlacementInputError: naming every argument that is not what it must be.
    """
    problems = []
    if not isinstance(constraints, Constraints) and not (
        isinstance(constraints, (tuple, list))
        and all(isinstance(each, LayoutConstraint) for each in constraints)
    ):
        problems.append(
            f"constraints is a {type(constraints).__name__}; allowed: Constraints(inputs=..., "
            "outputs=..., parameters=..., nodes=...)"
        )
    if memory_budget_bytes is not None and not (
        type(memory_budget_bytes) is int and memory_budget_bytes >= 0
    ):
        problems.append(
            f"memory_budget_bytes is {memory_budget_bytes!r}; allowed: an integer of at least 0, "
            "or None for no limit"
        )
    if not _is_amount(relative_gap):
        problems.append(f"relative_gap is {relative_gap!r}; allowed: a number of at least 0")
    if not _is_amount(time_limit_seconds, may_be_endless=True) or time_limit_seconds == 0:
        problems.append(f"time_limit_seconds is {time_limit_seconds!r}; allowed: a positive number")
    _raise("request", problems)


def _is_amount(value: object, *, may_be_endless: bool = False) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return value >= 0 and (may_be_endless or math.isfinite(value))


def _expert_problems(experts: object) -> Iterator[str]:
    if experts is None:
        return
    if not isinstance(experts, Mapping):
        yield (
            f"experts is a {type(experts).__name__}; allowed: a mapping from names of modules to "
            "expert blocks, or None"
        )
        return
    for name, block in experts.items():
        missing = [part for part in ("module", "weight_names", "run") if not hasattr(block, part)]
        if missing:
            yield (
                f"experts[{name!r}] is a {type(block).__name__} without {', '.join(missing)}; "
                "allowed: an ExpertBlock"
            )


def _device_problems(device: object) -> Iterator[str]:
    try:
        is_device = isinstance(device, (str, torch.device)) and bool(torch.device(device).type)
    except RuntimeError:
        is_device = False
    if not is_device:
        yield f"device is {device!r}; allowed: a torch.device or its name, as 'cuda'"


def _raise(what: str, problems: Sequence[str]) -> None:
    if problems:
        raise PlacementInputError(f"{what} of the planner:\n  " + "\n  ".join(problems))
