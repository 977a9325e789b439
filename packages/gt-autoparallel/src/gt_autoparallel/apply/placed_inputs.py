"""The arguments of a placed model's forward: this rank's shards, checked against the plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from gt_autoparallel.errors import PlacementInputError
from gt_autoparallel.graph.layouts import Layout, local_shape, short_text
from gt_autoparallel.graph.placement_graph import InputLeaf, ModelInterface, Value
from gt_autoparallel.plan.placement_plan import PlacementPlan
from gt_trace import ArgumentSignature, register_block_masks, structure_differences
from gt_trace.capture.graph_inputs import same_constant


class InputReader:
    """Turns the arguments of a call into this rank's tensors, by slot."""

    def __init__(
        self, plan: PlacementPlan, interface: ModelInterface, slots: Mapping[int, int]
    ) -> None:
        self.plan = plan
        self._interface = interface
        self._slots = slots
        _, planned_kwargs = interface.input_spec.children()
        self._keywords: list[str] = planned_kwargs.context
        self._with_gradients = {str(n.target) for n in plan.graph.of_kind("input_gradient")}

    def local_tensors(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[int, torch.Tensor]:
        """This rank's tensor for each slot of an input.

        Raises:
            PlacementInputError: the arguments are not those that were planned, or a tensor is not
                this rank's shard; all of them are named.
        """
        register_block_masks()
        kwargs = {name: kwargs[name] for name in self._keywords if name in kwargs} | kwargs
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != self._interface.input_spec:
            lines = structure_differences(
                self._interface.input_spec, self._signatures(), spec, leaves
            )
            raise PlacementInputError(
                "arguments have another structure than the planned ones; call the model as in the "
                "example inputs:\n  " + "\n  ".join(lines)
            )
        tensors: dict[int, torch.Tensor] = {}
        problems: list[str] = []
        for leaf, found in zip(self._interface.inputs, leaves, strict=True):
            if leaf.node is not None:
                problem = self._problem(leaf, found)
                if problem is None:
                    local = found.to_local() if isinstance(found, DTensor) else found
                    tensors[self._slots[leaf.node]] = local
                else:
                    problems.append(problem)
            elif leaf.is_tensor != isinstance(found, torch.Tensor):
                planned = "a tensor" if leaf.is_tensor else f"the constant {leaf.constant!r}"
                problems.append(f"{leaf.name} is {_shown(found)}; it was planned as {planned}")
            elif not leaf.is_tensor and not same_constant(found, leaf.constant):
                problems.append(
                    f"{leaf.name} is {found!r}; it was planned as the constant {leaf.constant!r}"
                )
        if problems:
            raise PlacementInputError("inputs of the placed model:\n  " + "\n  ".join(problems))
        return tensors

    def _signatures(self) -> list[ArgumentSignature]:
        """What was planned for each leaf, to be told where the structure differs."""
        found = []
        for leaf in self._interface.inputs:
            spec = None if leaf.node is None else self.plan.graph.spec(Value(leaf.node))
            found.append(
                ArgumentSignature(
                    name=leaf.name,
                    is_tensor=leaf.is_tensor,
                    constant=leaf.constant,
                    shape=() if spec is None else spec.shape,
                    dtype=None if spec is None else spec.dtype,
                )
            )
        return found

    def _problem(self, leaf: InputLeaf, found: object) -> str | None:
        assert leaf.node is not None
        value = Value(leaf.node)
        spec, layout = self.plan.graph.spec(value), self.plan.layout(value)
        if not isinstance(found, torch.Tensor):
            return f"{leaf.name} is a {type(found).__name__}; allowed: a tensor"
        needs_gradient = found.requires_grad and torch.is_grad_enabled()
        if needs_gradient and leaf.name not in self._with_gradients:
            return (
                f"{leaf.name} requires grad, and was planned without a gradient: detach it, or "
                "plan with an example input that requires grad"
            )
        if isinstance(found, DTensor) and not _is_placed(found, layout, self.plan):
            return (
                f"{leaf.name} is a DTensor placed as {found.placements}; allowed: placed as "
                f"{short_text(layout)} on the planned mesh"
            )
        shape = tuple(found.to_local().shape if isinstance(found, DTensor) else found.shape)
        wanted = local_shape(spec.shape, layout, self.plan.mesh)
        if shape != wanted or found.dtype != spec.dtype:
            return (
                f"{leaf.name} has shape {shape} and dtype {found.dtype}; allowed: {wanted}, this "
                f"rank's shard of {spec.shape} placed as {short_text(layout)}, and {spec.dtype}"
            )
        return None


def _shown(found: object) -> str:
    return "a tensor" if isinstance(found, torch.Tensor) else repr(found)


def _is_placed(tensor: DTensor, layout: Layout, plan: PlacementPlan) -> bool:
    mesh = tensor.device_mesh
    return (
        tuple(tensor.placements) == tuple(layout)
        and tuple(mesh.shape) == plan.mesh.sizes
        and tuple(mesh.mesh_dim_names or ()) == plan.mesh.names
    )
