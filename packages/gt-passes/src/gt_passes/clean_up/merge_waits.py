"""Wait for each collective once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule, Node

from gt_config.graph_kinds import EVERY_GRAPH, GraphKind
from gt_config.numerics import Numerics
from gt_passes.analysis.collectives import is_wait
from gt_passes.analysis.forward_sweep import ForwardSweep
from gt_passes.contract import ChangeBounds, GraphPass, PassContext, PassReport
from gt_passes.registry import register_pass


@register_pass
@dataclass(frozen=True, slots=True, kw_only=True)
class MergeWaits(GraphPass):
    """Replace every further wait for a collective by the first.

    Differentiable collectives wait for what their own forward has waited for, so captures of token
    exchanges hold waits of waits. A wait returns the tensor that it is given, so all are one value.

    *Before*::

        a = all_to_all_single(x, ...)
        b = wait_tensor(a)
        c = wait_tensor(b)
        d = wait_tensor(a)

    *After*::

        a = all_to_all_single(x, ...)
        b = wait_tensor(a)        # and b stands for c and d

    *Refuses*: nothing.

    *Preserves numerics*: yes.
    """

    name: ClassVar[str] = "merge-waits"
    numerics: ClassVar[Numerics] = "bitwise"
    runs_on: ClassVar[frozenset[GraphKind]] = EVERY_GRAPH
    only_cleans_up: ClassVar[bool] = True

    @property
    def bounds(self) -> ChangeBounds:
        """A result may be held from an earlier wait on."""
        return ChangeBounds(peak_memory_growth=None)

    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        """Merge waits; see the class."""
        sweep = ForwardSweep(graph_module.graph)
        wait_of: dict[Node, Node] = {}  # of a launch, and of the wait itself
        for node in sweep:
            if not is_wait(node) or len(node.all_input_nodes) != 1:
                continue
            (launched,) = node.all_input_nodes
            first = wait_of.setdefault(launched, node)
            if first is node:
                wait_of[node] = node
            else:
                sweep.replace(node, by=first)
        return PassReport.of({"waits_merged": sweep.num_replaced})
