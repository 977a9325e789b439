"""Give gradient reductions a communicator of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from gt_config.graph_kinds import DATA_PARALLEL_AXES, GraphKind, MeshAxis
from gt_config.node_keys import PipelineAnnotation
from gt_config.numerics import Numerics
from gt_passes.analysis.layer_names import LayerNames
from gt_passes.contract import GraphPass, PassContext, PassReport, Refusal
from gt_passes.fsdp.fsdp_launches import find_fsdp_launches
from gt_passes.registry import register_pass
from gt_passes.second_groups import second_reduction_group
from gt_trace.node_metadata import read_annotation

_functional = torch.ops._c10d_functional
_ALL_GATHER = _functional.all_gather_into_tensor.default
_REDUCE_SCATTER = _functional.reduce_scatter_tensor.default


@register_pass
@dataclass(frozen=True, slots=True, kw_only=True)
class SeparateReductionGroup(GraphPass):
    """Reduce gradients over a second process group of the same ranks.

    A communicator runs one collective at a time: on one group, the gathering of the next block's
    parameters queues behind the reduction of the last block's gradients.

    *Before*::

        r = reduce_scatter_tensor(a, "sum", 8, "fsdp")
        g = all_gather_into_tensor(b, 8, "fsdp")

    *After*::

        r = reduce_scatter_tensor(a, "sum", 8, "fsdp, second")
        g = all_gather_into_tensor(b, 8, "fsdp")

    *Refuses*: reductions over a group that gathers no parameters in this graph: nothing would
    overlap. Those of a pipeline's REDUCE_GRAD all move: other graphs gather, and the schedule says
    when (``gt_trainer.preflight`` refuses one in which nothing could overlap).

    *Preserves numerics*: yes. The ranks and their order are the same.
    """

    name: ClassVar[str] = "separate-reduction-group"
    numerics: ClassVar[Numerics] = "bitwise"
    mesh_axes: ClassVar[frozenset[MeshAxis]] = DATA_PARALLEL_AXES
    runs_on: ClassVar[frozenset[GraphKind]] = frozenset({"STEP", "REDUCE_GRAD", "JOINT_BACKWARD"})
    keeps_dataflow: ClassVar[bool] = False  # another group's name, and nothing else

    second_group: Callable[[str], str] = second_reduction_group
    """The name of the second group, given that of the first. Called in the order of the graph,
    which is that of every rank: it may create the group, which all its ranks must do together.
    Where a rank may fail before it gets here, create them earlier (``second_group_of``)."""

    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        """Move reductions to the second group; see the class."""
        found = find_fsdp_launches(
            graph_module.graph,
            targets=(_ALL_GATHER, _REDUCE_SCATTER),
            layers=LayerNames(),
        )
        gathering = {each.options[-1] for each in found.launches if each.kind == "unshard"}
        second: dict[str, str] = {}
        refusals = list(found.refusals)
        num_moved = 0
        for each in found.launches:
            group = each.options[-1]
            if each.launch.target is not _REDUCE_SCATTER or group in second.values():
                continue
            assert isinstance(group, str)
            if group not in gathering and not _is_in_pipeline(each.launch):
                reason = f"group {group!r} gathers no parameters that a reduction could delay"
                refusals.append(Refusal(node_name=each.launch.name, reason=reason))
                continue
            if group not in second:
                second[group] = self.second_group(group)
            each.launch.args = (*each.launch.args[:-1], second[group])
            num_moved += 1
        return PassReport.of({"reductions_moved": num_moved}, refusals)


def _is_in_pipeline(launch: Node) -> bool:
    annotation = read_annotation(launch, PipelineAnnotation)
    return annotation is not None and annotation.action == "REDUCE_GRAD"
