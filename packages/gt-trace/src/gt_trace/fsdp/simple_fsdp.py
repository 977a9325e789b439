"""Data parallelism as traceable collectives on parameters.

After ``shard``, each rank stores its shard of every parameter, as a ``DTensor``. A parameter that
is read *inside a forward* of the model is gathered first (and its gradient reduced in backward);
read anywhere else it is the stored shard. So the model's own code, optimizers, initializers,
weight tying and checkpoints work unchanged, eagerly and in a trace. A parameter is gathered once in
the forward of its module, a tied one once in the whole forward; several forwards share what they
gather inside ``gathered``.

Before (one parameter ``w`` of a linear layer, as captured)::

    out = mm(x, t(w))                                  # w whole on every rank

After, with mode "shard" over 4 ranks::

    w_whole = wait_tensor(all_gather_into_tensor(w_shard, 4, dp))
    out = mm(x, t(w_whole))
    ...
    g_shard = wait_tensor(reduce_scatter_tensor(g_whole, "sum", 4, dp))

Idea: SimpleFSDP (arXiv 2411.00284). The placements are those of torch's FSDP2
(torch/distributed/fsdp/_fully_shard/_fsdp_param.py), so that its checkpoints fit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from gt_trace._torch_internals import concatenate_meshes, strided_shard
from gt_trace.fsdp.collectives import GradientReduction, ShardAxis, UnshardPlan
from gt_trace.fsdp.sharded_parameter import (
    Activity,
    ShardedParameter,
    ShardingError,
    activity_of,
    give_properties,
    sharded_parameters,
)

__all__ = ["MixedPrecision", "ShardedModel", "ShardingError", "ShardingMode", "gathered", "shard"]

ShardingMode = Literal["replicate", "shard", "hybrid_shard"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPrecision:
    """Dtypes of computation and of gradient reduction."""

    param_dtype: torch.dtype | None = None
    """Parameters are gathered and computed with in this; None: as stored."""

    reduce_dtype: torch.dtype | None = None
    """Gradients are reduced in this; None: as stored, whatever ``param_dtype`` is.

    FSDP2 has the same default from torch 2.15 on; before, it followed ``param_dtype``.
    """


class ShardedModel:
    """What ``shard`` did to a model, and how to take it back."""

    def __init__(self, model: nn.Module, undo: list[Callable[[], None]]) -> None:
        self.model = model
        self._undo = undo

    def undo(self) -> None:
        """Store whole parameters again and remove every trace of the sharding.

        A collective: all ranks must call it. Calling it twice is harmless.
        """
        while self._undo:
            self._undo.pop()()


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    mode: ShardingMode,
    mixed_precision: MixedPrecision | None = None,
    shard_dim: int = 0,
    reduction: GradientReduction = "avg",
    prefix: str = "",
) -> ShardedModel:
    """Shard the parameters of ``model`` over data-parallel ranks, in place.

    Args:
        model: on any device, meta included. Parameters may be DTensors on a tensor- or
            expert-parallel mesh of the same root mesh. Submodules that were sharded before keep
            their sharding. On a real device every rank must hold equal values.
        mesh: with axis names. One axis for "replicate" and "shard"; (replicate, shard) for
            "hybrid_shard".
        mode: "shard" splits each parameter (FSDP), "replicate" keeps it whole and all-reduces
            gradients (DDP), "hybrid_shard" splits within the second axis and replicates over the
            first (HSDP).
        mixed_precision: dtypes of computation and reduction.
        shard_dim: tensor dimension to split. Extents that do not divide are padded in transit.
        reduction: "avg" over all data-parallel ranks, as FSDP2 and DDP do; "sum" where the loss
            is already divided by what all ranks saw.
        prefix: name of ``model`` in a larger model, for annotations.

    Raises:
        ShardingError: every reason why not, with the names of the parameters concerned.
    """
    problems = _mesh_problems(mesh, mode)
    slots = _slots(model, prefix)
    if not problems:
        problems = _nesting_problems(slots, model)
    if not problems:
        problems = _parameter_problems(slots, mesh, mode, shard_dim)
    if problems:
        raise ShardingError("the model cannot be sharded:\n  " + "\n  ".join(problems))
    axes = _axes(mesh)
    shard_axis = None if mode == "replicate" else axes[-1]
    replicate_axis = None if mode == "shard" else axes[0]
    precision = mixed_precision or MixedPrecision()
    undo: list[Callable[[], None]] = []
    by_module: dict[nn.Module, dict[str, ShardedParameter]] = {}
    for slot in slots:
        parameter = slot.parameter
        local = _local(parameter)
        plan = UnshardPlan(
            parameter_names=slot.names,
            shard_axis=shard_axis,
            replicate_axis=replicate_axis,
            shard_dim=shard_dim,
            size=local.shape[shard_dim] if mode != "replicate" else 0,
            param_dtype=precision.param_dtype,
            reduce_dtype=precision.reduce_dtype,
            reduction=reduction,
        )
        stored = _store(parameter, mesh, mode, plan)
        assert isinstance(stored, DTensor)
        inner = parameter if isinstance(parameter, DTensor) else None
        sharded = ShardedParameter(
            name=slot.names[0],
            plan=plan,
            placements=tuple(stored.placements),
            inner_mesh=None if inner is None else inner.device_mesh,
            inner_placements=() if inner is None else tuple(inner.placements),
        )
        for (module, key), name in zip(slot.owners, slot.names, strict=True):
            module._parameters[key] = stored
            by_module.setdefault(module, {})[key] = replace(sharded, name=name)
        undo.append(_restore_parameter(slot, sharded))
    activity = Activity(originals=[(slot.names[0], weakref.ref(slot.parameter)) for slot in slots])
    for module in model.modules():
        earlier = activity_of(module)
        if earlier is not None and earlier.outer is None:
            earlier.outer = activity
            undo.append(_restore_outer(earlier))
    for module, parameters in by_module.items():
        undo.append(give_properties(module, parameters, activity))
    for module in model.modules():
        before = module.register_forward_pre_hook(activity.enter)
        after = module.register_forward_hook(activity.leave, always_call=True)
        undo.extend([before.remove, after.remove])
    return ShardedModel(model, undo)


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Inside, parameters of ``module`` and its submodules read as gathered, as in a forward.

    Each is gathered once, also if several forwards run inside. As in a forward, that goes for
    everything that was sharded in the same call of ``shard``.
    """
    activities: dict[int, Activity] = {}
    for submodule in module.modules():
        activity = activity_of(submodule)
        # A model that was sharded around this one decides what is read while its hooks run.
        while activity is not None:
            activities[id(activity)] = activity
            activity = activity.outer
    with ExitStack() as stack:
        for activity in activities.values():
            stack.enter_context(activity.hold(module))
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    parameter: nn.Parameter
    owners: tuple[tuple[nn.Module, str], ...]
    names: tuple[str, ...]


def _slots(model: nn.Module, prefix: str) -> list[_Slot]:
    """Each distinct parameter that is not sharded yet, with all its owners."""
    found: dict[int, tuple[nn.Parameter, list[tuple[nn.Module, str]], list[str]]] = {}
    for fqn, module in model.named_modules(prefix=prefix):
        for name, parameter in module._parameters.items():
            if parameter is None or name in sharded_parameters(module):
                continue
            _, owners, names = found.setdefault(id(parameter), (parameter, [], []))
            owners.append((module, name))
            names.append(f"{fqn}.{name}" if fqn else name)
    return [
        _Slot(parameter=parameter, owners=tuple(owners), names=tuple(names))
        for parameter, owners, names in found.values()
    ]


def _mesh_problems(mesh: DeviceMesh, mode: ShardingMode) -> list[str]:
    problems: list[str] = []
    if mode not in ("replicate", "shard", "hybrid_shard"):
        return [f"mode is {mode!r}; allowed: 'replicate', 'shard', 'hybrid_shard'"]
    wanted = 2 if mode == "hybrid_shard" else 1
    if mesh.ndim != wanted:
        problems.append(
            f"mode {mode!r} needs a mesh of {wanted} axes, and this one has {mesh.ndim}"
        )
    if mesh.mesh_dim_names is None:
        problems.append("the mesh has no axis names; give mesh_dim_names=")
    return problems


def _parameter_problems(
    slots: list[_Slot], mesh: DeviceMesh, mode: ShardingMode, shard_dim: int
) -> list[str]:
    if not slots:
        return ["no parameter is left to shard: the model has none, or all are sharded already"]
    problems: list[str] = []
    num_shards = 1 if mode == "replicate" else mesh.size(mesh.ndim - 1)
    for slot in slots:
        name, parameter = slot.names[0], slot.parameter
        if parameter.numel() == 0:
            problems.append(f"{name} has no elements")
        if mode != "replicate" and not 0 <= shard_dim < parameter.dim():
            problems.append(
                f"{name} has {parameter.dim()} dimensions, and shard_dim is {shard_dim}"
            )
            continue
        if not isinstance(parameter, DTensor):
            continue
        problems.extend(_mesh_overlap(name, parameter, mesh))
        strange = [p for p in parameter.placements if not isinstance(p, Shard | Replicate)]
        if strange:
            problems.append(f"{name} is placed as {strange} already; allowed: Shard, Replicate")
        if mode == "replicate" or not _inner_shards(parameter, shard_dim):
            continue
        inner = _inner_shards(parameter, shard_dim)
        if inner > 1 and parameter.shape[shard_dim] % (inner * num_shards):
            problems.append(
                f"{name} has extent {parameter.shape[shard_dim]} in dim {shard_dim}, which its own "
                f"mesh splits by {inner}; it does not divide by {inner} x {num_shards}"
            )
    return problems


def _mesh_overlap(name: str, parameter: DTensor, mesh: DeviceMesh) -> list[str]:
    try:
        concatenate_meshes([mesh, parameter.device_mesh])
    except RuntimeError:
        own = parameter.device_mesh.mesh_dim_names
        problem = (
            f"{name} is placed on the mesh axes {own}, which overlap the data-parallel axes "
            f"{mesh.mesh_dim_names} or have another root mesh"
        )
        return [problem]
    return []


def _nesting_problems(slots: list[_Slot], model: nn.Module) -> list[str]:
    """Where this call cannot go around an earlier one."""
    earlier: dict[int, str] = {}
    for module in model.modules():
        activity = activity_of(module)
        if activity is not None:
            # What was whole before may still be held where that call did not see it.
            earlier |= {id(o): n for n, ref in activity.originals if (o := ref()) is not None}
        for key, sharded in sharded_parameters(module).items():
            earlier[id(module._parameters[key])] = sharded.name
    added = [
        f"{name} was added to a module that is sharded already; undo that sharding first"
        for slot in slots
        for (module, _), name in zip(slot.owners, slot.names, strict=True)
        if sharded_parameters(module) and id(slot.parameter) not in earlier
    ]
    return added + [
        f"{slot.names[0]} is tied to {earlier[id(slot.parameter)]}, which is sharded already; "
        "shard them in one call"
        for slot in slots
        if id(slot.parameter) in earlier
    ]


def _inner_shards(parameter: DTensor, dim: int) -> int:
    """Into how many parts the parameter's own mesh already splits that dimension."""
    count = 1
    for axis, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard) and placement.dim == dim:
            count *= parameter.device_mesh.size(axis)
    return count


def _axes(mesh: DeviceMesh) -> list[ShardAxis]:
    assert mesh.mesh_dim_names is not None
    return [
        ShardAxis(
            name=name,
            group_name=mesh.get_group(axis).group_name,
            num_ranks=mesh.size(axis),
            rank=mesh.get_local_rank(axis),
        )
        for axis, name in enumerate(mesh.mesh_dim_names)
    ]


def _local(parameter: torch.Tensor) -> torch.Tensor:
    detached = parameter.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def _store(
    parameter: nn.Parameter, mesh: DeviceMesh, mode: ShardingMode, plan: UnshardPlan
) -> nn.Parameter:
    """This rank's shard as a DTensor over the data-parallel mesh and the parameter's own."""
    local = _local(parameter)
    outer: tuple[Placement, ...] = (Replicate(),)
    if mode != "replicate":
        assert plan.shard_axis is not None
        dim = plan.shard_dim
        start = min(plan.shard_axis.rank * plan.chunk, plan.size)
        # A copy, so that the whole parameter can be freed.
        local = local.narrow(dim, start, plan.local_size).clone(
            memory_format=torch.contiguous_format
        )
        inner = _inner_shards(parameter, dim) if isinstance(parameter, DTensor) else 1
        placement = Shard(dim) if inner == 1 else strided_shard(dim, split_factor=inner)
        outer = (placement,) if mode == "shard" else (Replicate(), placement)
    spanned = mesh
    placements = outer
    if isinstance(parameter, DTensor):
        spanned = concatenate_meshes([mesh, parameter.device_mesh])
        placements = (*outer, *parameter.placements)
    with torch.no_grad():
        stored = DTensor.from_local(
            local,
            spanned,
            placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    return nn.Parameter(stored, requires_grad=parameter.requires_grad)


def _restore_parameter(slot: _Slot, sharded: ShardedParameter) -> Callable[[], None]:
    # In the stored dtype: what is computed in is no matter here.
    as_stored = replace(sharded, plan=replace(sharded.plan, param_dtype=None, reduce_dtype=None))

    def undo() -> None:
        module, name = slot.owners[0]
        stored = module._parameters[name]
        assert stored is not None
        with torch.no_grad():
            whole = nn.Parameter(
                as_stored.gather(stored).clone(), requires_grad=stored.requires_grad
            )
        for owner, key in slot.owners:
            owner._parameters[key] = whole

    return undo


def _restore_outer(activity: Activity) -> Callable[[], None]:
    def undo() -> None:
        activity.outer = None

    return undo
