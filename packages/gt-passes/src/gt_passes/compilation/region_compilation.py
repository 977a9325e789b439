"""Regions that were chosen, compiled: each is outlined, and equal ones share one program."""

from __future__ import annotations

from collections.abc import Hashable

from torch.fx import GraphModule

from gt_passes.analysis.outlined_region import OutlinedRegion, RegionOutliner
from gt_passes.compilation.inductor_compiler import SubgraphCompiler
from gt_passes.compilation.inductor_regions import RegionChoice
from gt_passes.compilation.region_identity import region_identity
from gt_passes.contract import PassReport


def compile_regions(
    graph_module: GraphModule, choice: RegionChoice, compiler: SubgraphCompiler
) -> PassReport:
    """Put a call of a compiled program in place of each region, in place.

    Equal regions, such as those of equal layers, are compiled once.

    Raises:
        InductorOptionError: a region's options name one that this PyTorch's Inductor does not have.
    """
    outliner = RegionOutliner(graph_module)
    compiled: dict[Hashable, OutlinedRegion] = {}
    for plan in choice.regions:
        outline = outliner.outline(plan.nodes, anchor=plan.anchor)
        identity = region_identity(graph_module, outline, plan.options)
        if identity not in compiled:
            body = outliner.body(outline)
            compiled[identity] = OutlinedRegion(body, compiler.compile(body, plan.options))
        outliner.replace(outline, compiled[identity], stem="inductor_region")
    outliner.finish()
    counts = {
        "regions": len(choice.regions),
        "compiled": len(compiled),
        "nodes": sum(len(plan.nodes) for plan in choice.regions),
    }
    return PassReport(
        changed=bool(choice.regions),
        counts={name: count for name, count in counts.items() if count},
        refusals=choice.refusals,
    )
