"""How long the scheduler takes nodes to run, to know how much must stand behind an exchange.

These numbers decide how much of what is independent goes between a launch and its wait, never in
which order collectives run. So ranks that would estimate differently (they do not: only shapes
count, and data-dependent ones as balanced) would still agree on that.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import GraphModule, Node

from gt_passes.analysis.collectives import is_collective
from gt_passes.analysis.symbol_sizes import SymbolSizes, balanced_exchange_sizes
from gt_passes.ep_overlap.exchange_operators import is_exchange_launch
from gt_passes.simulation.collective_model import CollectiveModel
from gt_passes.simulation.compute_model import device_time
from gt_passes.simulation.hardware import Hardware, h100_sxm
from gt_passes.simulation.operands import input_operands
from gt_passes.simulation.work import is_masked, work_of

NodeDurations = Callable[[GraphModule], Callable[[Node], float]]
"""From a graph to the microseconds that each node is taken to run, on its own stream."""


def estimated_durations(
    graph_module: GraphModule, *, hardware: Hardware | None = None
) -> Callable[[Node], float]:
    """Durations by the cost model of ``gt_passes.simulation``.

    An exchange is taken to go over as many ranks as it has split sizes, which fill machines in
    order; one without split sizes over two machines.

    Args:
        graph_module: a captured graph with recorded values.
        hardware: the machine; H100 SXM by default.
    """
    machine = hardware or h100_sxm()
    network = CollectiveModel(hardware=machine)
    sizes = SymbolSizes(balanced_exchange_sizes(graph_module))

    def duration_us(node: Node) -> float:
        if is_exchange_launch(node):
            sent = sum(operand.num_bytes for operand in input_operands(node, sizes))
            return network.time_us("all_to_all", sent, range(_num_ranks(node, machine)))
        if node.op != "call_function" or is_collective(node):
            return 0.0
        return device_time(work_of(node, sizes, {}), machine, masked=is_masked(node)).total_us

    return duration_us


def _num_ranks(launch: Node, machine: Hardware) -> int:
    splits = [len(each) for each in launch.args if isinstance(each, (list, tuple)) and each]
    return splits[0] if splits else 2 * machine.gpus_per_node
