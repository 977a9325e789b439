"""What passes on FSDP's collectives share: whose collectives they find, and what they may cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Graph

from gt_config.graph_kinds import DATA_PARALLEL_AXES, MeshAxis
from gt_config.numerics import Numerics
from gt_passes._torch_internals import OpOverload
from gt_passes.analysis.layer_names import LayerNames
from gt_passes.contract import ChangeBounds, GraphPass
from gt_passes.fsdp.fsdp_launches import FsdpLaunches, find_fsdp_launches


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpPass(GraphPass):
    """A pass that moves or joins FSDP's collectives, block by block."""

    numerics: ClassVar[Numerics] = "bitwise"

    mesh_axes: ClassVar[frozenset[MeshAxis]] = DATA_PARALLEL_AXES
    layers: str = "layers.*"
    """Pattern of the names of the modules that are blocks."""

    @property
    def bounds(self) -> ChangeBounds:
        """The same bytes; more memory, as what is gathered or reduced is held for longer."""
        return ChangeBounds(peak_memory_growth=None)

    def find_launches(self, graph: Graph, *targets: OpOverload) -> FsdpLaunches:
        """The FSDP collectives of a graph that call one of ``targets``, with their blocks."""
        return find_fsdp_launches(graph, targets=targets, layers=LayerNames(self.layers))
