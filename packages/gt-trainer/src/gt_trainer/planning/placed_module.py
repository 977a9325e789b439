"""A module with its loss, placed by a solver on ranks of two axes: tensor parallelism of a plan.

Which weights are cut along which axis, and which activations, nobody says by hand: a solver finds
it for each mesh (``gt_autoparallel``), and the step of what it found is captured and simulated like
any other. What the solver thinks that it takes ranks nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from gt_autoparallel import (
    Constraints,
    MeshShape,
    PlacementPlan,
    PlacementRequest,
    find_placement,
)
from gt_passes.simulation import CostModel, Hardware
from gt_trace.fsdp import MixedPrecision
from gt_trainer.planning.run_recipe import RunRecipe

MESH_AXES = ("data", "model")
"""Of a placed module: its batches are cut over the first, and whole along the second."""

MODULE = "module"
"""Under which name ``ModuleWithLoss`` has its module."""


class ModuleWithLoss(nn.Module):
    """A module as a function from a batch to its loss, so that a solver places all of a step."""

    def __init__(self, module: nn.Module, loss: Callable[..., Tensor]) -> None:
        """Keep both.

        Args:
            module: whose parameters are those of this one, with ``module.`` before their names.
            loss: called as ``loss(module, *inputs)``; gives a scalar.
        """
        super().__init__()
        self.module = module
        self.loss = loss

    def forward(self, *inputs: Tensor) -> Tensor:
        """The loss of a batch, samples first."""
        value: Tensor = self.loss(self.module, *inputs)
        return value


def placement_of(
    recipe: RunRecipe,
    module: ModuleWithLoss,
    inputs: Sequence[Tensor],
    machine: Hardware,
    *,
    mixed_precision: MixedPrecision | None,
) -> PlacementPlan:
    """The cheapest placement of a module on ``dp_shard`` x ``tp`` ranks, in the machine's memory.

    Args:
        recipe: with tensor parallelism.
        module: on meta, not placed.
        inputs: of one microbatch on one data-parallel rank, on meta, samples first.
        machine: that prices and memory are of.
        mixed_precision: dtypes in which parameters are used, and their gradients summed.

    Raises:
        PlacementError: the module cannot be placed, or does not fit.
    """
    precision = mixed_precision or MixedPrecision()
    return find_placement(
        module,
        MeshShape(names=MESH_AXES, sizes=(recipe.dp_shard, recipe.tp)),
        meta_inputs(inputs, times=recipe.dp_shard),
        PlacementRequest(
            constraints=Constraints(inputs={"*": (Shard(0), Replicate())}),
            cost_model=CostModel(machine),
            compute_dtype=precision.param_dtype,
            reduce_dtype=precision.reduce_dtype,
            accumulates_gradients=recipe.num_microbatches > 1,
        ),
    )


def labels_of_placed(mesh: DeviceMesh) -> dict[str, str]:
    """What communication along an axis is for, by the name of its process group."""
    labels = zip(MESH_AXES, ("data parallel", "tensor parallel"), strict=True)
    return {mesh.get_group(axis).group_name: label for axis, label in labels}


def meta_inputs(tensors: Sequence[Tensor], *, times: int = 1) -> list[Tensor]:
    """As many tensors without values, with ``times`` as many samples."""
    return [
        torch.empty((each.shape[0] * times, *each.shape[1:]), dtype=each.dtype, device="meta")
        for each in tensors
    ]
