"""Prices of what a plan consists of: a node on one rank's shards, a step of a redistribution.

Compute is the roofline of ``gt_passes.simulation`` at local shapes, collectives are its model of
NCCL. Groups of ranks lie on nodes as they fill them, so that an inner mesh axis of 8 runs on NVLink
and an outer one over the network. A collective that gathers or scatters a dim whose pieces are not
contiguous pays for the copy that reorders them. Routed experts pay for their matrix products and,
if expert-parallel, for their token exchanges, at balanced routing. What a rank stores of a
parameter pays for clipping and Adam, frozen or not.

What may hide is what the passes can hide: gatherings of parameters, which they prefetch, and
reductions of gradients, which they wait for late. They put those of a layer in one bucket for each
axis, whose latency is not each parameter's, and whose packing and unpacking keep the compute stream
busy, as every copy does: only the collective itself hides. A parameter that changes its layout in
any other way on its way (by an all-to-all, say) is not prefetched, and counts in full.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from gt_autoparallel.graph.experts import FIRST_WEIGHT_OPERAND, expert_parallel_axes
from gt_autoparallel.graph.layouts import Layout, MeshShape, local_shape
from gt_autoparallel.graph.options import NodeOption
from gt_autoparallel.graph.parameter_chains import ParameterMove
from gt_autoparallel.graph.placement_graph import PlacementNode, TensorSpec, Value
from gt_autoparallel.graph.redistribution import RedistributionStep
from gt_autoparallel.graph.redistribution_ways import StepKind
from gt_autoparallel.prices.experts import (
    experts_exchanged_bytes,
    experts_inner_bytes,
    experts_local_rows,
    experts_saved_bytes,
)
from gt_autoparallel.prices.microbatches import Microbatches
from gt_passes.simulation import CostModel, MatmulShape, OpWork, device_time, optimizer_step_us

_VERSION = 3
"""Version of the formulas in this file: a stored plan remembers by which it was priced."""


_HIDDEN_KINDS: Mapping[ParameterMove, tuple[StepKind, ...]] = {
    "unshard": ("all_gather",),
    "reduce_grad": ("reduce_scatter", "all_reduce"),
}
"""What the passes put in buckets, and launch early or wait for late."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Time of a step of a redistribution, in us."""

    in_full_us: float
    """Communication that nothing hides, and copies."""

    hidden_us: float = 0.0
    """Communication that the computation of a window may hide."""


class StepPrices(Protocol):
    """Prices of what a plan consists of: a node, a step. ``PlacementPrices`` is the one in use."""

    @property
    def digest(self) -> str:
        """SHA-256 of all that the prices depend on: equal digests, equal prices."""
        ...

    def compute_us(
        self,
        node: PlacementNode,
        operands: tuple[TensorSpec, ...],
        option: NodeOption,
        mesh: MeshShape,
    ) -> float:
        """Time of one node on one rank's shards in us; 0 for kinds that compute nothing.

        That of a parameter is the optimizer's, which takes as long as there is to update.

        ``operands`` are the global tensors of its operands, in their order.
        """
        ...

    def between_products_us(
        self,
        node: PlacementNode,
        operands: tuple[TensorSpec, ...],
        option: NodeOption,
        mesh: MeshShape,
    ) -> float:
        """Time in which a backward of routed experts makes again what its forward did not keep.

        That is all that it reads but its operands and results of matrix products and exchanges.
        """
        ...

    def step_time(
        self,
        step: RedistributionStep,
        dtype: torch.dtype,
        mesh: MeshShape,
        move: ParameterMove | None,
    ) -> StepTime:
        """Time of one step of a redistribution of a tensor of ``dtype``.

        ``move`` is what the redistribution does for a parameter, if anything.
        """
        ...


class PlacementPrices:
    """Prices of nodes and steps on one kind of machine; answers are kept.

    Args:
        cost_model: of the machine; H100 SXM by default.
        microbatches: of a step, which gathers parameters, reduces gradients and updates once: each
            has its share of the time of that. None: prices of a whole step.
    """

    def __init__(
        self, cost_model: CostModel | None = None, *, microbatches: Microbatches | None = None
    ) -> None:
        self.cost_model = CostModel() if cost_model is None else cost_model
        self._num_microbatches = 1 if microbatches is None else microbatches.num_in_step
        self._compute: dict[Hashable, float] = {}
        self._steps: dict[Hashable, StepTime] = {}

    @property
    def digest(self) -> str:
        """SHA-256 of the machine's constants and of the version of the formulas."""
        hardware = self.cost_model.hardware
        constants = {
            field.name: getattr(hardware, field.name)
            for field in dataclasses.fields(hardware)
            if field.name != "constants"
        }
        known = {"version": _VERSION, "host": self.cost_model.host, "hardware": constants}
        if self._num_microbatches > 1:  # of one microbatch, prices are those of a step
            known["num_microbatches"] = self._num_microbatches
        content = json.dumps(known, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def compute_us(
        self,
        node: PlacementNode,
        operands: tuple[TensorSpec, ...],
        option: NodeOption,
        mesh: MeshShape,
    ) -> float:
        """Time of one node on one rank's shards, as in ``StepPrices``."""
        if node.kind == "experts":
            return self._experts_us(node, operands, option, mesh)
        if node.kind == "parameter":
            stored = math.prod(local_shape(node.output().shape, option.output(), mesh))
            update_us = optimizer_step_us(
                stored,
                self.cost_model.hardware,
                bytes_per_parameter=node.output().dtype.itemsize,
            )
            return update_us / self._num_microbatches
        if node.kind != "operator":
            return 0.0
        shards = tuple(
            _shard(spec, layout, mesh)
            for spec, layout in zip(operands, option.operands, strict=True)
        )
        results = tuple(
            None if spec is None or layout is None else _shard(spec, layout, mesh)
            for spec, layout in zip(node.outputs, option.outputs, strict=True)
        )
        key = (node.target, shards, results, node.constants)
        known = self._compute.get(key)
        if known is None:
            stand_in = _stand_in(node, shards, results)
            known = self._compute[key] = self.cost_model.cost(stand_in).duration_us
        return known

    def between_products_us(
        self,
        node: PlacementNode,
        operands: tuple[TensorSpec, ...],
        option: NodeOption,
        mesh: MeshShape,
    ) -> float:
        """Time of what routed experts make again, as in ``StepPrices``: all is read and written."""
        return self._copy_us(experts_inner_bytes(node, operands, option, mesh))

    def step_time(
        self,
        step: RedistributionStep,
        dtype: torch.dtype,
        mesh: MeshShape,
        move: ParameterMove | None,
    ) -> StepTime:
        """Time of one step of a redistribution, as in ``StepPrices``."""
        key = (step, dtype.itemsize, mesh, move)
        known = self._steps.get(key)
        if known is None:
            known = self._step_time(step, dtype.itemsize, mesh, move)
            if move is not None:
                known = StepTime(
                    known.in_full_us / self._num_microbatches,
                    known.hidden_us / self._num_microbatches,
                )
            self._steps[key] = known
        return known

    def _step_time(
        self,
        step: RedistributionStep,
        itemsize: int,
        mesh: MeshShape,
        move: ParameterMove | None,
    ) -> StepTime:
        copy_us = self._copy_us(itemsize * _copied_elements(step))
        if step.kind == "slice":
            return StepTime(copy_us)
        num_bytes = step.num_elements * itemsize
        ranks = mesh.ranks_of_axis(step.axis)
        time_us = self.cost_model.collective_us(step.kind, num_bytes, ranks)
        if move is None or step.kind not in _HIDDEN_KINDS[move]:
            return StepTime(copy_us + time_us)
        latency_us = self.cost_model.collective_us(step.kind, 0, ranks)
        packed = math.prod(step.input_shape) + math.prod(step.output_shape)
        # Latencies and kernels are the bucket's, whatever is in it, be it nothing.
        kernel_us = self.cost_model.hardware.kernel_fixed_us
        bucket_us = max(0.0, self._copy_us(itemsize * packed) - kernel_us)
        return StepTime(copy_us + bucket_us, time_us - latency_us)

    def _copy_us(self, num_bytes: int) -> float:
        """Time in which the device reads and writes so many bytes; no kernel for none."""
        return self.cost_model.memory_bound_cost(2 * num_bytes).duration_us if num_bytes else 0.0

    def _experts_us(
        self,
        node: PlacementNode,
        operands: tuple[TensorSpec, ...],
        option: NodeOption,
        mesh: MeshShape,
    ) -> float:
        """Grouped products, the memory of the rows between them, and the exchanges."""
        key = (node.target, node.phase, operands, option, mesh)
        known = self._compute.get(key)
        if known is not None:
            return known
        backward = node.phase == "backward"
        first = FIRST_WEIGHT_OPERAND + backward
        weights, layouts = operands[first:], option.operands[first:]
        local = [local_shape(w.shape, at, mesh) for w, at in zip(weights, layouts, strict=True)]
        rows = experts_local_rows(node, operands, option, mesh)
        dtype = operands[0].dtype
        total = 0.0
        for experts, wide, narrow in local:
            each = max(1, rows // max(experts, 1))
            moved = experts * (wide * narrow + each * (wide + narrow)) * dtype.itemsize
            shape = MatmulShape(each, wide, narrow, experts)
            work = OpWork(
                kind="grouped_matmul",
                flops=shape.flops,
                matmul=shape,
                dtype=dtype,
                moved_bytes=moved,
            )
            total += (2 if backward else 1) * device_time(work, self.cost_model.hardware).total_us
        # What lies between the products is read and written once, twice in the backward.
        kept = experts_saved_bytes(node, operands, option, mesh)
        if kept:
            total += self.cost_model.memory_bound_cost(2 * kept).duration_us
        ranks = mesh.ranks_of_axes(expert_parallel_axes(node, option))
        for num_bytes in experts_exchanged_bytes(node, operands, option, mesh):
            total += self.cost_model.collective_us("all_to_all", num_bytes, ranks)
        self._compute[key] = total
        return total


_Shard = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, for each dim whether it is broadcast (stride 0), dtype."""


def _shard(spec: TensorSpec, layout: Layout, mesh: MeshShape) -> _Shard:
    broadcast = tuple(min(stride, 1) for stride in spec.stride)
    return local_shape(spec.shape, layout, mesh), broadcast, spec.dtype


def _stand_in(
    node: PlacementNode, operands: Sequence[_Shard], results: Sequence[_Shard | None]
) -> Node:
    """The node as the cost model reads nodes: with recorded values of local shapes."""
    graph = Graph()
    placeholders = []
    seen: dict[Value, Node] = {}
    for position, (value, shard) in enumerate(zip(node.operands, operands, strict=True)):
        if value not in seen:
            seen[value] = graph.placeholder(f"operand_{position}")
            seen[value].meta["val"] = _meta_tensor(shard)
        placeholders.append(seen[value])
    given = iter(placeholders)
    args, kwargs = pytree.tree_map(
        lambda leaf: next(given) if isinstance(leaf, Value) else leaf, (node.args, node.kwargs)
    )
    stand_in = graph.call_function(node.target, args, kwargs)
    tensors = [None if shard is None else _meta_tensor(shard) for shard in results]
    stand_in.meta["val"] = tensors[0] if len(tensors) == 1 else tuple(tensors)
    return stand_in


def _meta_tensor(shard: _Shard) -> torch.Tensor:
    shape, broadcast, dtype = shard
    strides = []
    stride = 1
    for size, keeps in zip(reversed(shape), reversed(broadcast), strict=True):
        strides.append(stride * keeps)
        stride *= size if keeps else 1
    return torch.empty_strided(shape, strides[::-1], dtype=dtype, device="meta")


def _copied_elements(step: RedistributionStep) -> int:
    """Elements that are reordered in memory before or after a step.

    Pieces of a dim are contiguous if the dims before it have one element in all.
    """
    copied = 0
    if step.target_dim is not None and math.prod(step.input_shape[: step.target_dim]) > 1:
        copied += math.prod(step.output_shape if step.kind == "slice" else step.input_shape)
    if step.source_dim is not None and math.prod(step.output_shape[: step.source_dim]) > 1:
        copied += math.prod(step.output_shape)
    return copied
