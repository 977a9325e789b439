"""Compile the whole graph with Inductor, communication included."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch.fx import GraphModule

from gt_config.graph_kinds import COMPUTING_ACTIONS, JOINT_GRAPHS, STEP_GRAPHS, GraphKind
from gt_config.numerics import Numerics
from gt_passes.analysis.outlined_region import OutlinedRegion, RegionOutliner, region_of
from gt_passes.compilation.inductor_compiler import InductorCompiler, SubgraphCompiler
from gt_passes.contract import ChangeBounds, GraphPass, PassContext, PassReport, Refusal
from gt_passes.registry import register_pass


@register_pass
@dataclass(frozen=True, slots=True, kw_only=True)
class CompileWholeGraph(GraphPass):
    """Make the whole graph one region, compiled by Inductor for CPU (C++) or GPU (Triton).

    The graph keeps its inputs and outputs, and writes to parameters and buffers stay. Collectives
    are compiled in their order: by default Inductor may fuse, and not reorder
    (``InductorCompiler.keep_order``). A fused kernel stands where the first of its operators stood,
    so that what another of them waits for is waited for earlier than in the graph.

    *Before*::

        g = all_gather_into_tensor(w, 8, "fsdp");  h = wait_tensor(g);  y = mm(x, h)
        return y

    *After*::

        r = run_region(inductor_graph_0, w, x)
        return r[0]

    *Refuses*: a graph of which a part has been compiled already.

    *Preserves numerics*: no, as ``CompileRegions``. Tolerance: 1e-5 relative for the loss and 1e-4
    for a gradient, in float32 on CPU (docs/decisions/0006-compilation.md).
    """

    name: ClassVar[str] = "compile-whole-graph"
    numerics: ClassVar[Numerics] = "approximate"
    runs_on: ClassVar[frozenset[GraphKind]] = frozenset(
        {*STEP_GRAPHS, *JOINT_GRAPHS, *COMPUTING_ACTIONS}
    )
    generates_code: ClassVar[bool] = True

    compiler: SubgraphCompiler = field(default_factory=InductorCompiler)
    """``DescribeOnly()`` makes the region and compiles nothing."""

    @property
    def bounds(self) -> ChangeBounds:
        """What runs inside the one region is not on the graph."""
        return ChangeBounds(collective_bytes_may_shrink=True, peak_memory_growth=None)

    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        """Compile the graph; see the class."""
        calls = [node for node in graph_module.graph.nodes if node.op == "call_function"]
        regions = [node for node in calls if region_of(node) is not None]
        if regions:
            reason = "a part of the graph is compiled already, and a compiler cannot look inside"
            return PassReport(
                changed=False,
                refusals=tuple(Refusal(node_name=node.name, reason=reason) for node in regions),
            )
        outliner = RegionOutliner(graph_module)
        if not calls or not (outline := outliner.outline(calls)).outputs:
            return PassReport(changed=False)
        body = outliner.body(outline)
        region = OutlinedRegion(body, self.compiler.compile(body, {}))
        outliner.replace(outline, region, stem="inductor_graph")
        outliner.finish()
        return PassReport(changed=True, counts={"nodes": len(calls)})
