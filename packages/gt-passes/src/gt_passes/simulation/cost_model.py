"""The price of one node: microseconds on the device, on the host, and what they are spent on.

One object answers for a machine: operators by the roofline (``compute_model``), collectives by the
model of NCCL (``collective_model``), and the host's time for launching either. Answers are kept by
what they depend on, so that a model's repeated layers cost one look-up a node.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch.fx import Node

from gt_passes.analysis.process_groups import group_name_of
from gt_passes.analysis.symbol_sizes import SymbolSizes
from gt_passes.simulation.beside import DeviceParts
from gt_passes.simulation.collective_launch import (
    CollectiveLaunch,
    RanksOfGroup,
    collective_launch,
    ranks_of_torch_group,
)
from gt_passes.simulation.collective_model import CollectiveKind, CollectiveModel
from gt_passes.simulation.compute_model import device_time
from gt_passes.simulation.hardware import Hardware, h100_sxm
from gt_passes.simulation.operands import OperandReader
from gt_passes.simulation.pipelined_product import (
    is_pipelined_product,
    pipelined_product,
    pipelined_time,
)
from gt_passes.simulation.work import OpKind, OpWork, WorkRule, is_masked, work_of

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
