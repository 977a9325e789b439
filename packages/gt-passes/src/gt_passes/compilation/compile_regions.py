"""Compile the regions of a graph that are made for a compiler, and run the rest as captured.

FlexAttention is nothing but a request to Inductor: run operator by operator, it makes the full
matrix of scores. The rest of a step keeps its bits when it is left alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch.fx import GraphModule

from gt_config.graph_kinds import COMPUTING_ACTIONS, JOINT_GRAPHS, STEP_GRAPHS, GraphKind
from gt_config.numerics import Numerics
from gt_passes.compilation.inductor_compiler import InductorCompiler, SubgraphCompiler
from gt_passes.compilation.inductor_regions import plan_regions
from gt_passes.compilation.region_compilation import compile_regions
from gt_passes.contract import ChangeBounds, GraphPass, PassContext, PassReport
from gt_passes.registry import register_pass


@register_pass
@dataclass(frozen=True, slots=True, kw_only=True)
class CompileRegions(GraphPass):
    """Compile FlexAttention, tagged nodes, chosen modules, or all that memory bounds with Inductor.

    Equal regions, such as those of equal layers, are compiled once. ``inductor_regions`` says how a
    caller tags nodes, and where a region ends.

    *Before*::

        g = mm(x, w1);  s = silu(g);  u = mm(x, w3);  h = mul(s, u);  y = mm(h, w2)
        z = add(x, y)

    *After*, with ``module_patterns=("layers.*.feed_forward",)``::

        r = run_region(inductor_region_0, x, w1, w3, w2)
        y = r[0]
        z = add(x, y)

    *Refuses*, of what was chosen: random operators, operators with effects or of unknown effects,
    writes to memory that is used outside the region, sizes that depend on data. Collectives and
    waits are never in a region, nor is what is compiled already.

    *Preserves numerics*: no. Inductor sums in another order than eager, and on GPU uses other
    approximations of some functions. With ``InductorCompiler.eager_rounding`` a fused elementwise
    operator rounds as eager does. Tolerance: 1e-5 relative in float32 for a norm or feed-forward
    region on CPU (docs/decisions/0006-compilation.md).
    """

    name: ClassVar[str] = "compile-regions"
    numerics: ClassVar[Numerics] = "approximate"
    runs_on: ClassVar[frozenset[GraphKind]] = frozenset(
        {*STEP_GRAPHS, *JOINT_GRAPHS, *COMPUTING_ACTIONS}
    )
    generates_code: ClassVar[bool] = True

    module_patterns: tuple[str, ...] = ()
    """Modules to compile besides FlexAttention and tagged nodes, as ``layers.*.feed_forward``."""

    memory_bound: bool = False
    """Compile also every elementwise operator, reduction and copy, those of one layer together:
    norms, activation functions, sums, casts. Complex arithmetic stays as it is."""

    compiler: SubgraphCompiler = field(default_factory=InductorCompiler)
    """``DescribeOnly()`` makes the regions and compiles nothing."""

    @property
    def bounds(self) -> ChangeBounds:
        """Memory inside a compiled region is not on the graph."""
        return ChangeBounds(peak_memory_growth=None)

    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        """Compile regions; see the class.

        Raises:
            InductorOptionError: a tag names an option that this PyTorch's Inductor does not have.
        """
        choice = plan_regions(
            graph_module.graph,
            module_patterns=self.module_patterns,
            memory_bound=self.memory_bound,
        )
        return compile_regions(graph_module, choice, self.compiler)
