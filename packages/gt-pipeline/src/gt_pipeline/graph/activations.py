"""Tensors between stages: their signatures, and how DTensors travel as their local tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.torch_version import TorchVersion

from gt_pipeline.runner.stage_protocol import ActivationSignature

_MAKES_PARTS_OF_SHARDS = TorchVersion(torch.__version__) >= "2.15"
"""Whether ``redistribute`` makes parts of a sum of shards, without communication; 2.11 refuses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationPlacement:
    """How an activation that is a DTensor lies on its mesh; the local tensor is what travels.

    The same on every rank, and can be pickled: the stage after builds its own mesh's DTensor by it.
    """

    mesh_axes: tuple[str, ...]
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    """Shape of the whole tensor, over all ranks."""

    def example(self, signature: ActivationSignature, mesh: DeviceMesh) -> DTensor:
        """An activation on meta, with a local tensor of that signature on a mesh with these axes.

        It is for ``capture_stage`` of the stage after.
        """
        whole = DTensor.from_local(
            torch.empty(signature.shape, dtype=signature.dtype, device="meta"),
            mesh[self.mesh_axes],
            self.placements,
            run_check=False,
            shape=torch.Size(self.shape),
            stride=torch.empty(self.shape, device="meta").stride(),
        ).detach()
        assert isinstance(whole, DTensor)
        whole.requires_grad_(signature.requires_grad)
        return whole


def example_of(activation: Tensor | ActivationSignature) -> Tensor:
    """What stands for an activation in a capture: on meta if only its signature is known."""
    if isinstance(activation, Tensor):
        example = activation.detach()
        return example.requires_grad_(activation.requires_grad)
    example = torch.empty(activation.shape, dtype=activation.dtype, device="meta")
    return example.requires_grad_(activation.requires_grad)


def signature_of(tensor: Tensor, repeats: int | None = None) -> ActivationSignature:
    """Return the signature of what travels.

    Args:
        tensor: the activation.
        repeats: position of the activation that is the same tensor, if there is one before it.
    """
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return ActivationSignature(
        shape=tuple(local.shape),
        dtype=local.dtype,
        requires_grad=tensor.requires_grad and repeats is None,
        repeats=repeats,
    )


def repetitions(activations: Sequence[Tensor | ActivationSignature]) -> list[int | None]:
    """Return, for each activation, the position of the same tensor before it; None if it is new."""
    first: dict[int, int] = {}
    found: list[int | None] = []
    for position, each in enumerate(activations):
        if isinstance(each, ActivationSignature):
            found.append(each.repeats)
        else:
            before = first.setdefault(id(each), position)
            found.append(None if before == position else before)
    return found


def placement_of(output: Tensor) -> ActivationPlacement | None:
    """How an output lies on its mesh; None for a plain one."""
    if not isinstance(output, DTensor):
        return None
    return ActivationPlacement(
        mesh_axes=tuple(output.device_mesh.mesh_dim_names or ()),
        placements=tuple(output.placements),
        shape=tuple(output.shape),
    )


def travelling(tensor: Tensor) -> Tensor:
    """Return the plain tensor that travels: this rank's part of a DTensor.

    A lazy conjugation or negation is computed: transfers read memory.
    """
    if not isinstance(tensor, DTensor):
        return tensor.resolve_conj().resolve_neg()
    return tensor.to_local(grad_placements=_gradient_placements(tensor))


def _gradient_placements(tensor: DTensor) -> list[Any]:
    """How the gradient that travels is placed.

    Of a tensor that every rank has whole, in parts that are still to be summed, and the other way
    round, as autograd has them inside of a model: a sum at the cut would be one more, and rounds
    elsewhere.
    """
    return [
        Replicate() if each.is_partial() else Partial() if each.is_replicate() else each
        for each in tensor.placements
    ]


def travelling_gradient(activation: Tensor, gradient: Tensor) -> Tensor:
    """Return what travels back for an activation, as the stage before expects it."""
    if not isinstance(gradient, DTensor):
        return gradient.resolve_conj().resolve_neg()
    assert isinstance(activation, DTensor)  # autograd gives a DTensor for a DTensor
    mesh, wanted = gradient.device_mesh, _gradient_placements(activation)
    # What every rank has whole is made of equal parts: exact on an axis of a power of two.
    whole = [
        each.is_partial()
        and (has.is_replicate() or (has.is_shard() and not _MAKES_PARTS_OF_SHARDS))
        for has, each in zip(gradient.placements, wanted, strict=True)
    ]
    kept = [Replicate() if each else place for each, place in zip(whole, wanted, strict=True)]
    num_parts = math.prod(mesh.size(dim) for dim, each in enumerate(whole) if each)
    local = gradient.redistribute(placements=kept).to_local()
    return local if num_parts == 1 else local / num_parts
