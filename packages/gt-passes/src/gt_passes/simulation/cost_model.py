"""The price of one node: microseconds on the device, on the host, and what they are spent on.

One object answers for a machine: operators by the roofline (``compute_model``), collectives by the
model of NCCL (``collective_model``), and the host's time for launching either. Answers are kept by
what they depend on, so that a model's repeated layers cost one look-up a node.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch.fx import Node

from gt_passes._torch_internals import OpOverload, torch_group_ranks, value_of
from gt_passes.analysis.node_calls import arguments_of
from gt_passes.analysis.process_groups import group_name_of
from gt_passes.analysis.symbol_sizes import SymbolSizes
from gt_passes.errors import GtPassesError
from gt_passes.simulation.beside import DeviceParts
from gt_passes.simulation.collective_model import CollectiveKind, CollectiveModel
from gt_passes.simulation.compute_model import device_time, matmul_us
from gt_passes.simulation.hardware import Hardware, h100_sxm
from gt_passes.simulation.operands import (
    OperandReader,
    PricedOperand,
    input_operands,
    operands_of,
    output_operands,
)
from gt_passes.simulation.work import MatmulShape, OpKind, OpWork, WorkRule, is_masked, work_of

# What a node that launches a collective does: its kind, its bytes, its process group.
RanksOfGroup = Callable[[str], Sequence[int]]
"""From the name of a process group to its global ranks."""

_KINDS: tuple[tuple[str, CollectiveKind], ...] = (
    ("all_gather", "all_gather"),
    ("reduce_scatter", "reduce_scatter"),
    ("all_reduce", "all_reduce"),
    ("all_to_all", "all_to_all"),
    ("alltoall", "all_to_all"),
    ("broadcast", "broadcast"),
    ("isend", "send_receive"),
    ("irecv", "send_receive"),
    ("batch_p2p", "send_receive"),
)


class UnknownProcessGroupError(GtPassesError, ValueError):
    """A graph names a process group whose ranks nobody told."""


class UnknownCollectiveError(GtPassesError, ValueError):
    """A collective of which neither kind nor process group can be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveLaunch:
    """One collective of a graph."""

    kind: CollectiveKind
    num_bytes: int
    """On this rank: the larger of what goes in and what comes out."""

    group_name: str


def collective_launch(node: Node, sizes: SymbolSizes) -> CollectiveLaunch:
    """What a node launches.

    Args:
        node: one for which ``gt_passes.analysis.collectives.is_collective`` holds.
        sizes: numbers for symbolic sizes.

    Raises:
        UnknownCollectiveError: neither kind nor group can be told.
    """
    assert isinstance(node.target, OpOverload)  # is_collective has looked
    name = node.target._schema.name.partition("::")[2]
    kinds = [kind for part, kind in _KINDS if part in name]
    group_name = group_name_of(node)
    if not kinds or group_name is None:
        raise UnknownCollectiveError(
            f"node {node.name} ({node.target}) is a collective of an unknown kind; known: "
            + ", ".join(part for part, _ in _KINDS)
        )
    given = sum(operand.num_bytes for operand in input_operands(node, sizes))
    taken = sum(operand.num_bytes for operand in output_operands(node, sizes))
    if "_out" in name:  # the result is an argument as well
        given -= taken
    kind = "send_receive" if _is_permutation(node) else kinds[0]
    return CollectiveLaunch(kind=kind, num_bytes=max(given, taken), group_name=group_name)


def _is_permutation(node: Node) -> bool:
    """Whether an all-to-all has one part: each rank sends to one other, as around a ring."""
    if node.target is not torch.ops._c10d_functional.all_to_all_single.default:
        return False
    return all(_num_parts(splits) == 1 for splits in node.args[1:3])


def _num_parts(splits: object) -> int | None:
    """How many of the sizes are not 0; None if one is known at run time only."""
    if not isinstance(splits, list | tuple) or not all(isinstance(n, int) for n in splits):
        return None
    return len([size for size in splits if size != 0])


def ranks_of_torch_group(group_name: str) -> tuple[int, ...]:
    """The global ranks of a process group of this process, by torch's own registry.

    Raises:
        UnknownProcessGroupError: there is no such group here.
    """
    ranks = torch_group_ranks(group_name)
    if ranks is None:
        raise UnknownProcessGroupError(
            f"the graph uses the process group {group_name!r}, which this process does not have: "
            "simulate where the graph was captured, or say CostModel(ranks_of_group=...)"
        )
    return ranks


Bound = Literal["compute", "memory", "network", "host", "nothing"]

HostModel = Literal["eager", "cuda_graph"]
"""eager: Python calls operator after operator. cuda_graph: the device replays without the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCost:
    """The price of one node on one machine."""

    kind: OpKind
    duration_us: float
    """On its stream; 0 for what runs on no stream."""

    host_us: float
    """How long the host takes to issue it."""

    bound: Bound
    """What decides the duration."""

    flops: int = 0
    moved_bytes: int = 0
    is_guess: bool = False
    """Whether only bytes were known of the operator."""

    blocks_host: bool = False
    """Whether the host waits for it."""

    collective: CollectiveLaunch | None = None
    """For the kind ``collective``."""

    needs: DeviceParts | None = None
    """As for ``Task``: what collectives beside it slow down."""

    takes: DeviceParts | None = None
    """As for ``Task``: what a collective takes of the device."""


class CostModel:
    """Prices the nodes of captured graphs.

    Args:
        hardware: the machine.
        sizes: numbers for symbolic sizes; see ``balanced_exchange_sizes``.
        ranks_of_group: from the name of a process group to its global ranks; torch's registry by
            default. Nodes of the machine hold ``hardware.gpus_per_node`` ranks in order.
        rules: what further operators do, by the node's target, before the formulas of ``work_of``.
        host: how operators are issued.
    """

    def __init__(
        self,
        hardware: Hardware | None = None,
        *,
        sizes: SymbolSizes | None = None,
        ranks_of_group: RanksOfGroup = ranks_of_torch_group,
        rules: Mapping[object, WorkRule] | None = None,
        host: HostModel = "eager",
    ) -> None:
        self.hardware = h100_sxm() if hardware is None else hardware
        self.sizes = SymbolSizes() if sizes is None else sizes
        self.host = host
        self._ranks_of_group = ranks_of_group
        self._rules = dict(rules or {})
        self._collectives = CollectiveModel(hardware=self.hardware)
        self._ranks: dict[str, Sequence[int]] = {}
        self._costs: dict[Hashable, OpCost] = {}

    def with_hardware(self, hardware: Hardware) -> CostModel:
        """The same assumptions on another machine."""
        return CostModel(
            hardware,
            sizes=self.sizes,
            ranks_of_group=self._ranks_of_group,
            rules=self._rules,
            host=self.host,
        )

    def cost(self, node: Node) -> OpCost:
        """The price of one node of a captured graph.

        Raises:
            UnknownProcessGroupError: a collective over a group whose ranks are unknown.
            UnknownCollectiveError: a collective of an unknown kind.
        """
        return self.cost_of_key(self.key(node), node)

    def key(self, node: Node, reader: OperandReader | None = None) -> Hashable:
        """All that the price of a node depends on, the same for every machine.

        Reading shapes is most of the work of pricing: who prices a whole graph, or on several
        machines, brings a reader and keeps the keys.
        """
        if reader is None:
            reader = OperandReader(self.sizes)
        if node.op != "call_function":
            return node.op
        constants = tuple(argument for argument in node.args if isinstance(argument, (bool, str)))
        return (
            node.target,
            reader.inputs(node),
            reader.outputs(node),
            constants,
            is_masked(node),
            node.kwargs.get("non_blocking"),
        )

    def cost_of_key(self, key: Hashable, node: Node) -> OpCost:
        """The price of a node whose key is known already."""
        known = self._costs.get(key)
        if known is None:
            known = self._costs[key] = self._price(node)
        return known

    def memory_bound_cost(self, moved_bytes: int) -> OpCost:
        """The price of a kernel that only reads and writes, such as several operators in one."""
        return self._price_work(OpWork(kind="streaming", moved_bytes=moved_bytes), masked=False)

    def replayed(self, cost: OpCost) -> OpCost:
        """The price of the same node inside a CUDA graph: the host has no part in it."""
        gap_us = self.hardware.graph_replay_kernel_us if cost.duration_us > 0 else 0.0
        return replace(cost, duration_us=cost.duration_us + gap_us, host_us=0.0)

    @property
    def replay_launch(self) -> OpCost:
        """The price of starting a CUDA graph: one launch by the host."""
        return OpCost(
            kind="view",
            duration_us=0.0,
            host_us=self.hardware.host_kernel_us,
            bound="nothing",
        )

    def collective_us(self, kind: CollectiveKind, num_bytes: int, ranks: Sequence[int]) -> float:
        """The time of a collective without a graph; as ``CollectiveModel.time_us``."""
        return self._collectives.time_us(kind, num_bytes, ranks)

    def group_ranks(self, group_name: str) -> Sequence[int]:
        """The global ranks of a process group, asked for once."""
        if group_name not in self._ranks:
            self._ranks[group_name] = tuple(self._ranks_of_group(group_name))
        return self._ranks[group_name]

    def _price(self, node: Node) -> OpCost:
        if is_pipelined_product(node) and node.target not in self._rules:
            return self._price_pipelined(node)
        work = work_of(node, self.sizes, self._rules)
        if work.kind == "collective":
            return self._price_collective(node)
        return self._price_work(work, masked=is_masked(node))

    def _price_work(self, work: OpWork, *, masked: bool) -> OpCost:
        device = device_time(work, self.hardware, masked=masked)
        cost = OpCost(
            kind=work.kind,
            duration_us=device.total_us,
            host_us=self._host_us(work),
            bound=_bound(work, device.compute_us, device.memory_us, self.hardware),
            flops=work.flops,
            moved_bytes=work.moved_bytes,
            is_guess=work.is_guess,
            blocks_host=work.blocks_host,
            needs=None if work.kind == "host_copy" else device.parts,
        )
        return self.replayed(cost) if self.host == "cuda_graph" else cost

    def _price_pipelined(self, node: Node) -> OpCost:
        """On the compute stream: what of the copies no product hides, it waits for inside."""
        num_ranks = len(self.group_ranks(str(group_name_of(node))))
        product = pipelined_product(node, num_ranks, self.sizes)
        time = pipelined_time(product, num_ranks, self.hardware)
        cost = OpCost(
            kind="matmul",
            duration_us=time.total_us,
            host_us=self.hardware.host_kernel_us,
            bound="compute" if time.is_product else "network",
            flops=product.flops,
            moved_bytes=sum(product.product_bytes),
            needs=time.needs if time.is_product else None,
        )
        return self.replayed(cost) if self.host == "cuda_graph" else cost

    def _price_collective(self, node: Node) -> OpCost:
        launch = collective_launch(node, self.sizes)
        ranks = self.group_ranks(launch.group_name)
        cost = OpCost(
            kind="collective",
            duration_us=self._collectives.time_us(launch.kind, launch.num_bytes, ranks),
            host_us=self.hardware.host_collective_us,
            bound="network",
            moved_bytes=launch.num_bytes,
            collective=launch,
            takes=self._collectives.taken(launch.kind, launch.num_bytes, ranks),
        )
        return self.replayed(cost) if self.host == "cuda_graph" else cost

    def _host_us(self, work: OpWork) -> float:
        hardware = self.hardware
        by_kind: Mapping[OpKind, float] = {
            "none": 0.0,
            "view": hardware.host_view_us,
            "wait": hardware.host_wait_us,
            "host_scalar": hardware.host_scalar_us,
        }
        return by_kind.get(work.kind, hardware.host_kernel_us)


def _bound(work: OpWork, compute_us: float, memory_us: float, hardware: Hardware) -> Bound:
    if work.kind in ("none", "view", "wait", "host_scalar"):
        return "nothing"
    if max(compute_us, memory_us) < hardware.kernel_fixed_us:
        return "host"
    return "compute" if compute_us >= memory_us else "memory"


# How long async tensor parallelism takes: a product that is pipelined with its collective.
#
# PyTorch cuts the product along the ranks and puts the parts on two streams in turn
# (``torch/distributed/_symmetric_memory/__init__.py``): while a part is multiplied, the GPU's
# copy engine reads the next one from another GPU's memory, or writes there what has been
# multiplied. Copies do not overlap with one another; the last tiles of a part do with the first
# of the next:
#
#     gather = copy to where others read + barrier + part + (n - 1) * max(part, copy)
#     scatter = part + (n - 1) * max(part, barrier + copy) + barrier + sum of n parts
#     part = products / n + launch
_GATHERS = frozenset({"symm_mem::fused_all_gather_matmul"})
_SCATTERS = frozenset(
    {"symm_mem::fused_matmul_reduce_scatter", "symm_mem::fused_scaled_matmul_reduce_scatter"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinedProduct:
    """What one fused call does on a rank."""

    collective: Literal["all_gather", "reduce_scatter"]
    group_name: str
    shapes: tuple[MatmulShape, ...]
    """Of the whole products."""

    dtype: torch.dtype
    product_bytes: tuple[int, ...]
    """That each product reads and writes, its right operand once for each rank."""

    part_bytes: int
    """What goes from one rank to another."""

    @property
    def flops(self) -> int:
        """Of all products."""
        return sum(shape.flops for shape in self.shapes)


def is_pipelined_product(node: Node) -> bool:
    """Whether a node is such a call."""
    target = node.target
    return isinstance(target, OpOverload) and target._schema.name in _GATHERS | _SCATTERS


def pipelined_product(node: Node, num_ranks: int, sizes: SymbolSizes) -> PipelinedProduct:
    """What a node does for which ``is_pipelined_product`` holds.

    Args:
        node: of a captured graph, with recorded values.
        num_ranks: of its group.
        sizes: numbers for symbolic sizes.
    """
    assert isinstance(node.target, OpOverload)  # is_pipelined_product has looked
    gathers = node.target._schema.name in _GATHERS
    arguments = arguments_of(node)
    left = _operand(arguments["A"], sizes)
    rights = [_operand(each, sizes) for each in arguments["Bs"]] if gathers else []
    rights = rights or [_operand(arguments["B"], sizes)]
    inner = left.shape[-1]
    rows = left.numel // inner * (num_ranks if gathers else 1)
    shapes = tuple(MatmulShape(rows, right.shape[-1], inner) for right in rights)
    (result, *_) = output_operands(node, sizes)
    itemsize = result.dtype.itemsize
    return PipelinedProduct(
        collective="all_gather" if gathers else "reduce_scatter",
        group_name=str(arguments["group_name"]),
        shapes=shapes,
        dtype=left.dtype,
        product_bytes=tuple(
            rows * inner * left.dtype.itemsize
            + num_ranks * right.num_bytes
            + rows * right.shape[-1] * itemsize
            for right in rights
        ),
        part_bytes=left.num_bytes if gathers else result.num_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinedTime:
    """Microseconds."""

    total_us: float
    part_us: float
    """One part of all products."""

    copy_us: float
    """What one part takes from GPU to GPU."""

    needs: DeviceParts
    """For how long all products keep the device busy, without their launches."""

    @property
    def is_product(self) -> bool:
        """Whether parts take longer than the copies beside them."""
        return self.part_us >= self.copy_us


def pipelined_time(product: PipelinedProduct, num_ranks: int, hardware: Hardware) -> PipelinedTime:
    """How long the call takes, from the moment when all ranks are there.

    Args:
        product: what is done.
        num_ranks: of the group, all on one node.
        hardware: the machine.
    """
    memory_rate = hardware.hbm_bytes_per_s * hardware.hbm_streaming_efficiency
    launch_us = hardware.kernel_fixed_us
    products_us = [
        (matmul_us(shape, product.dtype, hardware), 1e6 * moved / memory_rate)
        for shape, moved in zip(product.shapes, product.product_bytes, strict=True)
    ]
    whole_us = sum(map(max, products_us))
    needs = DeviceParts(*map(sum, zip(*products_us, strict=True)))
    part_us = whole_us / num_ranks + launch_us * len(product.shapes)
    copy_us = launch_us + 1e6 * product.part_bytes / hardware.nvlink_bus_bytes_per_s
    barrier_us = launch_us + hardware.nccl_ring_nvlink_ll_us
    if product.collective == "all_gather":
        first_us = launch_us + 2e6 * product.part_bytes / memory_rate + barrier_us
        total_us = first_us + part_us + (num_ranks - 1) * max(part_us, copy_us)
    else:
        copy_us += barrier_us
        sum_us = launch_us + 1e6 * (num_ranks + 1) * product.part_bytes / memory_rate
        total_us = part_us + (num_ranks - 1) * max(part_us, copy_us) + barrier_us + sum_us
    return PipelinedTime(total_us=total_us, part_us=part_us, copy_us=copy_us, needs=needs)


def _operand(argument: object, sizes: SymbolSizes) -> PricedOperand:
    assert isinstance(argument, Node)  # tensors of a captured graph are nodes
    (operand,) = operands_of(value_of(argument), sizes)
    return operand
