"""Give token exchanges a communicator of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule, Node

from gt_config.graph_kinds import STEP_GRAPHS, GraphKind
from gt_config.node_keys import ChunkAnnotation
from gt_config.numerics import Numerics
from gt_passes._torch_internals import OpOverload
from gt_passes.analysis.process_groups import group_name_of
from gt_passes.contract import GraphPass, PassContext, PassReport, Refusal
from gt_passes.ep_overlap.exchange_operators import is_exchange_launch, is_token_exchange
from gt_passes.registry import register_pass
from gt_passes.second_groups import second_exchange_group
from gt_trace.node_metadata import read_annotation


@register_pass
@dataclass(frozen=True, slots=True, kw_only=True)
class SeparateExchangeGroup(GraphPass):
    """Exchange the tokens of chunks over a second process group of the same ranks.

    A communicator runs one collective at a time. On one group the counts of the next chunk, which
    the host waits for, queue behind the tokens of this one, and nothing overlaps.

    *Before*::

        d = all_to_all_single(x, ..., "ep")            # tokens of chunk 0
        n = all_to_all_single(counts, ..., "ep")       # counts of chunk 1

    *After*::

        d = all_to_all_single(x, ..., "ep, second")
        n = all_to_all_single(counts, ..., "ep")

    *Refuses*: exchanges over a group that nothing else in this graph uses, and operators that are
    given no group by name.

    *Preserves numerics*: yes. The ranks and their order are the same.
    """

    name: ClassVar[str] = "separate-exchange-group"
    numerics: ClassVar[Numerics] = "bitwise"
    runs_on: ClassVar[frozenset[GraphKind]] = frozenset({*STEP_GRAPHS, "STAGE"})
    keeps_dataflow: ClassVar[bool] = False  # another group's name, and nothing else

    second_group: Callable[[str], str] = second_exchange_group
    """The name of the second group, given that of the first. Called in the order of the graph,
    which is that of every rank: it may create the group, which all its ranks must do together.
    Where a rank may fail before it gets here, create them earlier (``second_group_of``)."""

    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        """Move the token exchanges of chunks to the second group; see the class."""
        exchanges: list[Node] = []
        shared: set[str] = set()
        for node in graph_module.graph.nodes:
            if (
                is_exchange_launch(node)
                and is_token_exchange(node)
                and read_annotation(node, ChunkAnnotation) is not None
            ):
                exchanges.append(node)
            else:
                shared.add(group_name_of(node) or "")
        second: dict[str, str] = {}
        refusals: list[Refusal] = []
        num_moved = 0
        for node in exchanges:
            group = group_name_of(node)
            if group in second.values():
                continue
            if group is None or group not in shared:
                known = "it is given no group by name"
                alone = f"nothing else uses group {group!r}"
                reason = known if group is None else alone
                refusals.append(Refusal(node_name=node.name, reason=reason))
                continue
            if group not in second:
                second[group] = self.second_group(group)
            _replace_group(node, second[group])
            num_moved += 1
        return PassReport.of({"exchanges_moved": num_moved}, refusals)


def _replace_group(node: Node, group: str) -> None:
    assert isinstance(node.target, OpOverload)  # group_name_of has looked
    for position, declared in enumerate(node.target._schema.arguments):
        if declared.name != "group_name":
            continue
        if position < len(node.args) and not declared.kwarg_only:
            node.update_arg(position, group)
        else:
            node.update_kwarg("group_name", group)
