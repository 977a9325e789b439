"""How long a collective takes on NCCL: latency plus bytes over bandwidth, on NVLink and NICs.

The formulas are those of NCCL's own tuning model (``src/graph/tuning.cc``), which picks algorithm
and protocol by them:

    time = latency + bytes / algorithm bandwidth
    ring:  n - 1 steps (all-reduce twice as many); each step between nodes costs the network's
           latency, each other one NVLink's; bytes * (n - 1) / n go over the bus (twice)
    tree:  all-reduce only; up and down a chain in each node and a binary tree over the nodes
    NVLS:  all-reduce in one node, summed in the NVLink switch

Each with the protocols LL (low latency, a fraction of the bandwidth), LL128 and Simple; the fastest
counts. An all-to-all is sends and receives side by side: what goes to other nodes passes through
this GPU's NIC, the rest over NVLink, and the slower of the two decides.

While it runs, a collective takes a multiprocessor for each of its channels, and of memory bandwidth
what passes over the bus, read and written.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from gt_passes.simulation.beside import DeviceParts
from gt_passes.simulation.hardware import Hardware

CollectiveKind = Literal[
    "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send_receive"
]

_PROTOCOLS = ("ll", "ll128", "simple")
_FAIR_SHARE = 0.5
"""Of memory bandwidth: neither a collective nor what runs beside it is left with less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLayout:
    """How the ranks of a process group lie on nodes."""

    num_ranks: int
    num_nodes: int
    ranks_per_node: int
    """On the node that has the fewest of the group: it has the fewest NICs."""

    @classmethod
    def of(cls, ranks: Sequence[int], gpus_per_node: int) -> GroupLayout:
        """The layout of global ranks that fill nodes in order.

        Raises:
            ValueError: there are no ranks, or one is there twice.
        """
        if not ranks or len(set(ranks)) != len(ranks):
            raise ValueError(f"ranks are {tuple(ranks)!r}; allowed: one or more, each once")
        nodes = Counter(rank // gpus_per_node for rank in ranks)
        return cls(num_ranks=len(ranks), num_nodes=len(nodes), ranks_per_node=min(nodes.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveModel:
    """Times of collectives on one kind of machine."""

    hardware: Hardware

    def time_us(self, kind: CollectiveKind, num_bytes: int, ranks: Sequence[int]) -> float:
        """How long one collective takes, from the moment when all ranks are there.

        Args:
            kind: what is done.
            num_bytes: on one rank, the larger of what goes in and what comes out: the gathered
                tensor, the tensor before it is scattered, what a rank sends in an all-to-all.
            ranks: global ranks of the group.

        Raises:
            ValueError: an unknown kind, negative bytes, or ranks that are none.
        """
        if kind not in get_args(CollectiveKind):
            allowed = ", ".join(get_args(CollectiveKind))
            raise ValueError(f"kind is {kind!r}; allowed: {allowed}")
        if num_bytes < 0:
            raise ValueError(f"num_bytes is {num_bytes!r}; allowed: 0 or more")
        group = GroupLayout.of(ranks, self.hardware.gpus_per_node)
        if group.num_ranks == 1:
            return self._copy_us(num_bytes)
        if kind == "all_to_all":
            return self._all_to_all_us(num_bytes, group)
        if kind == "send_receive":
            return self._send_us(num_bytes, group)
        return min(self._candidates(kind, num_bytes, group))

    def taken(self, kind: CollectiveKind, num_bytes: int, ranks: Sequence[int]) -> DeviceParts:
        """Fractions of multiprocessors and of memory bandwidth that a collective takes.

        Two multiprocessors serve a NIC, all of them NVLink. Arguments are those of ``time_us``.
        """
        group, hardware = GroupLayout.of(ranks, self.hardware.gpus_per_node), self.hardware
        if group.num_ranks == 1:
            return DeviceParts(0.0, 0.0)
        num_sms = hardware.collective_sms
        if group.num_nodes > 1:
            num_sms = min(num_sms, group.ranks_per_node * hardware.collective_sms_per_nic)
        on_bus = 1e6 * num_bytes * _bus_factor(kind, group.num_ranks)
        on_bus_per_s = on_bus / self.time_us(kind, num_bytes, ranks)
        memory_rate = hardware.hbm_bytes_per_s * hardware.hbm_streaming_efficiency
        of_memory = hardware.collective_memory_passes * on_bus_per_s / memory_rate
        return DeviceParts(num_sms / hardware.num_sms, min(_FAIR_SHARE, of_memory))

    def bus_bytes_per_s(self, group: GroupLayout) -> float:
        """What a ring can carry: NVLink, or the NICs of the group's GPUs on one node."""
        if group.num_nodes == 1:
            return self.hardware.nvlink_bus_bytes_per_s
        network = group.ranks_per_node * self.hardware.nic_effective_bytes_per_s
        if group.ranks_per_node == 1:
            return network
        return min(network, self.hardware.nvlink_bus_bytes_per_s)

    def _candidates(
        self, kind: CollectiveKind, num_bytes: int, group: GroupLayout
    ) -> Iterator[float]:
        for protocol in _PROTOCOLS:
            yield self._ring_us(kind, num_bytes, group, protocol)
            if kind == "all_reduce":
                yield self._tree_us(num_bytes, group, protocol)
        one_node = group.num_nodes == 1 and group.num_ranks >= self.hardware.nvls_min_ranks
        if kind == "all_reduce" and one_node:
            yield self._nvls_us(num_bytes, group)

    def _ring_us(
        self, kind: CollectiveKind, num_bytes: int, group: GroupLayout, protocol: str
    ) -> float:
        """Time = base + inner steps * nvlink + outer steps * network + bytes * factor / bus."""
        n, nodes = group.num_ranks, group.num_nodes
        rounds = 2 if kind == "all_reduce" else 1
        steps, network_steps = rounds * (n - 1), rounds * (nodes - 1)
        if nodes > 1 and group.ranks_per_node == 1:
            network_steps = steps
        nvlink = self._latency("ring_nvlink", protocol)
        network = self._latency("ring_network", protocol)
        if nodes > 1 and protocol == "ll":
            nvlink *= 1.8  # as in NCCL's model: flags travel through the proxy
        latency = self._latency("ring_base", protocol)
        latency += (steps - network_steps) * nvlink + network_steps * network
        factor = _bus_factor(kind, n)
        return latency + 1e6 * num_bytes * factor / self._protocol_bytes_per_s(group, protocol)

    def _tree_us(self, num_bytes: int, group: GroupLayout, protocol: str) -> float:
        """Time = base + 2 * (chain in the node + log2(nodes)) steps, at half the bandwidth."""
        nvlink = (group.ranks_per_node - 1) * self._latency("tree_nvlink", protocol)
        network = math.log2(group.num_nodes) * self._latency("tree_network", protocol)
        latency = self._latency("tree_base", protocol) + 2 * (nvlink + network)
        return latency + 2e6 * num_bytes / (0.92 * self._protocol_bytes_per_s(group, protocol))

    def _nvls_us(self, num_bytes: int, group: GroupLayout) -> float:
        """Bus bandwidth as nccl-tests define it, measured with the switch summing."""
        factor = _bus_factor("all_reduce", group.num_ranks)
        rate = self.hardware.nvls_all_reduce_bus_bytes_per_s
        return self.hardware.nccl_nvls_simple_us + 1e6 * num_bytes * factor / rate

    def _all_to_all_us(self, num_bytes: int, group: GroupLayout) -> float:
        """The slower of what stays in the node and what leaves it, each rank giving n parts."""
        n, hardware = group.num_ranks, self.hardware
        inside = num_bytes * (group.ranks_per_node - 1) / n / hardware.nvlink_bus_bytes_per_s
        outside = num_bytes * (n - group.ranks_per_node) / n / hardware.nic_effective_bytes_per_s
        hop = "ring_network" if group.num_nodes > 1 else "ring_nvlink"
        latency = self._latency("ring_base", "simple") + self._latency(hop, "simple")
        latency += (n - 2) * hardware.all_to_all_peer_us
        return latency + 1e6 * max(inside, outside)

    def _send_us(self, num_bytes: int, group: GroupLayout) -> float:
        across = group.num_nodes > 1
        rate = self.hardware.nvlink_bus_bytes_per_s
        rate = self.hardware.nic_effective_bytes_per_s if across else rate
        hop = self._latency("ring_network" if across else "ring_nvlink", "simple")
        return self._latency("ring_base", "simple") + hop + 1e6 * num_bytes / rate

    def _copy_us(self, num_bytes: int) -> float:
        """A group of one copies in device memory: read and written."""
        hardware = self.hardware
        rate = hardware.hbm_bytes_per_s * hardware.hbm_streaming_efficiency
        return hardware.kernel_fixed_us + 2e6 * num_bytes / rate

    def _latency(self, what: str, protocol: str) -> float:
        value: float = getattr(self.hardware, f"nccl_{what}_{protocol}_us")
        return value

    def _protocol_bytes_per_s(self, group: GroupLayout, protocol: str) -> float:
        bus = self.bus_bytes_per_s(group)
        if protocol == "simple":
            return bus
        if protocol == "ll128":
            channels = self.hardware.nccl_channels * self.hardware.nccl_ll128_channel_bytes_per_s
            return min(0.92 * bus, channels)  # 120 of each 128 bytes are data
        limits = {
            1: self.hardware.nccl_ll_1_node_bytes_per_s,
            2: self.hardware.nccl_ll_2_nodes_bytes_per_s,
        }
        limit = limits.get(group.num_nodes, self.hardware.nccl_ll_4_nodes_bytes_per_s)
        return min(limit, bus / (4 if group.num_nodes > 1 else 3))


def _bus_factor(kind: CollectiveKind, num_ranks: int) -> float:
    """What a rank sends, and receives, of its bytes."""
    if kind in ("broadcast", "send_receive"):
        return 1.0
    rounds = 2 if kind == "all_reduce" else 1
    return rounds * (num_ranks - 1) / num_ranks
