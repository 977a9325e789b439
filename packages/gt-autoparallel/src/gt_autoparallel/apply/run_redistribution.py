"""One rank's part of a redistribution: functional collectives on plain local tensors.

Collectives concatenate and cut along dim 0. A value whose memory is not in the order of its dims (a
transposed one) is moved in the order of its memory, so that nothing is copied for that alone, and
what arrives is laid out in memory as the global value is: views after it stay possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace

import torch
from torch.fx.traceback import has_preserved_node_meta

from gt_autoparallel.apply.rank_mesh import RankMesh
from gt_autoparallel.graph.placement_graph import TensorSpec
from gt_autoparallel.graph.redistribution import RedistributionStep
from gt_config.node_keys import FsdpCollectiveAnnotation, NodeAnnotation
from gt_trace import annotate, traced_call

_functional = torch.ops._c10d_functional


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalMove:
    """The steps of one redistribution, ready to run on this rank."""

    steps: tuple[RedistributionStep, ...]
    dim_order: tuple[int, ...]
    """Dims of the tensor from the outermost in memory to the innermost."""

    mesh: RankMesh
    annotations: tuple[NodeAnnotation | None, ...] = ()
    """What the nodes of each step are annotated with; empty for nothing at all."""

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's shard after the redistribution, of its shard before it."""
        if tensor.dtype is torch.bool and any(step.kind != "slice" for step in self.steps):
            # As bytes: Inductor's C++ takes a bool that comes from a collective for an integer.
            return self(tensor.view(torch.uint8)).view(torch.bool)
        is_natural = self.dim_order == tuple(range(len(self.dim_order)))
        moved = tensor if is_natural else tensor.permute(self.dim_order)
        annotations = self.annotations or (None,) * len(self.steps)
        for step, annotation in zip(self.steps, annotations, strict=True):
            with annotated(annotation):
                moved = self._moved(step, moved)
        if is_natural:
            return moved
        return moved.permute([self.dim_order.index(dim) for dim in range(len(self.dim_order))])

    def _moved(self, step: RedistributionStep, tensor: torch.Tensor) -> torch.Tensor:
        (moved,) = traced_call(
            (step, self.dim_order, self.mesh), lambda given: (self._run(step, given[0]),), (tensor,)
        )
        result: torch.Tensor = moved
        return result

    def _run(self, step: RedistributionStep, tensor: torch.Tensor) -> torch.Tensor:
        size = self.mesh.shape.sizes[step.axis]
        group = self.mesh.group_names[step.axis]
        source = None if step.source_dim is None else self.dim_order.index(step.source_dim)
        target = None if step.target_dim is None else self.dim_order.index(step.target_dim)
        match step.kind:
            case "all_reduce":
                return _wait(_functional.all_reduce(tensor.contiguous(), "sum", group))
            case "all_gather":
                assert source is not None
                gathered = _wait(
                    _functional.all_gather_into_tensor(tensor.contiguous(), size, group)
                )
                return _from_first_dim(gathered, source, size)
            case "reduce_scatter":
                assert target is not None
                pieces = _to_first_dim(tensor, target, size)
                return _wait(_functional.reduce_scatter_tensor(pieces, "sum", size, group))
            case "all_to_all":
                assert source is not None
                assert target is not None
                pieces = _to_first_dim(tensor, target, size)
                splits = [pieces.shape[0] // size] * size
                exchanged = _wait(_functional.all_to_all_single(pieces, splits, splits, group))
                return _from_first_dim(exchanged, source, size)
            case "slice":
                assert target is not None
                length = tensor.shape[target] // size
                start = self.mesh.coordinate[step.axis] * length
                return tensor.narrow(target, start, length).contiguous()


def local_move(
    spec: TensorSpec,
    steps: Sequence[RedistributionStep],
    mesh: RankMesh,
    *,
    fsdp: FsdpCollectiveAnnotation | None = None,
) -> LocalMove:
    """The redistribution of a value by ``steps``, on this rank.

    ``fsdp`` is what the steps do for a parameter, whatever the axis. Where several axes shard the
    parameter, there is a collective for each, and all are FSDP's.
    """
    is_fsdp = fsdp is not None and any(step.kind != "slice" for step in steps)
    return LocalMove(
        steps=tuple(steps),
        dim_order=_dim_order(spec),
        mesh=mesh,
        annotations=tuple(
            replace(fsdp, mesh_axis=mesh.shape.names[step.axis])
            if is_fsdp and fsdp is not None
            else None
            for step in steps
        ),
    )


def _dim_order(spec: TensorSpec) -> tuple[int, ...]:
    dims = range(len(spec.shape))
    if any(stride == 0 and size > 1 for size, stride in zip(spec.shape, spec.stride, strict=True)):
        return tuple(dims)  # an expanded value has no memory of its own, and gets it when moved
    return tuple(sorted(dims, key=lambda dim: (-spec.stride[dim], dim)))


def _wait(launched: torch.Tensor) -> torch.Tensor:
    waited: torch.Tensor = _functional.wait_tensor(launched)
    return waited


def _to_first_dim(tensor: torch.Tensor, dim: int, num_pieces: int) -> torch.Tensor:
    """The pieces of ``dim``, one after the other along dim 0."""
    if dim == 0:
        return tensor.contiguous()
    return torch.cat(tensor.chunk(num_pieces, dim=dim), dim=0)


def _from_first_dim(tensor: torch.Tensor, dim: int, num_pieces: int) -> torch.Tensor:
    """The pieces that lie along dim 0, put together along ``dim``."""
    if dim == 0:
        return tensor
    return torch.cat(tensor.chunk(num_pieces, dim=0), dim=dim)


def annotated(*annotations: NodeAnnotation | None) -> AbstractContextManager[object]:
    """Nodes traced inside carry ``annotations``; None stands for none."""
    if not has_preserved_node_meta():
        return nullcontext()
    with ExitStack() as stack:
        for annotation in annotations:
            if annotation is not None:
                stack.enter_context(annotate(annotation))
        return stack.pop_all()
