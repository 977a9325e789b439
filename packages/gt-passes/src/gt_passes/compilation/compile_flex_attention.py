"""Compile FlexAttention and nothing else: models that have it compile it eagerly too.

FlexAttention is nothing but a request to Inductor: run operator by operator, it makes the full
matrix of scores, (B, H, L, L), in the forward and again in the backward. A model that attends with
it calls ``torch.compile(flex_attention, options=...)``, and so what an eager run computes is what
Inductor makes of it with these options; a capture takes that compilation apart, and this pass puts
it together again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar

from torch.fx import GraphModule

from gt_config.graph_kinds import COMPUTING_ACTIONS, JOINT_GRAPHS, STEP_GRAPHS, GraphKind
from gt_config.numerics import Numerics
from gt_passes.compilation.inductor_compiler import InductorCompiler, SubgraphCompiler
from gt_passes.compilation.inductor_regions import plan_flex_attention
from gt_passes.compilation.region_compilation import compile_regions
from gt_passes.contract import ChangeBounds, GraphPass, PassContext, PassReport
from gt_passes.registry import register_pass


def _as_eager_compiles() -> SubgraphCompiler:
    return InductorCompiler(eager_rounding=False)


@register_pass
@dataclass(frozen=True, slots=True, kw_only=True)
class CompileFlexAttention(GraphPass):
    """Compile every FlexAttention operator with Inductor, each in a region of its own.

    Equal ones, such as those of equal layers, are compiled once, forward and backward apart.

    *Before*::

        a = flex_attention(q, k, v, score_function, block_mask, ...)
        out = a[0];  logsumexp = a[1]

    *After*::

        r = run_region(inductor_region_0, q, k, v, kv_num_blocks, kv_indices, ...)
        out = r[0];  logsumexp = r[1]

    *Refuses*: sizes that depend on data.

    *Preserves numerics*: no. The operator's own implementation computes all scores and takes their
    softmax; the kernel goes over blocks of keys and rescales. An eager model that compiles
    FlexAttention with the same ``options`` runs the same kernels, but Inductor chooses block sizes
    by measuring, if the options say so, and another choice sums in another order.
    """

    name: ClassVar[str] = "compile-flex-attention"
    numerics: ClassVar[Numerics] = "approximate"
    runs_on: ClassVar[frozenset[GraphKind]] = frozenset(
        {*STEP_GRAPHS, *JOINT_GRAPHS, *COMPUTING_ACTIONS}
    )
    generates_code: ClassVar[bool] = True

    options: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    """Inductor's, as ``{"max_autotune": True}``: those with which the model compiles it."""

    compiler: SubgraphCompiler = field(default_factory=_as_eager_compiles)
    """``DescribeOnly()`` makes the regions and compiles nothing."""

    @property
    def bounds(self) -> ChangeBounds:
        """Memory inside a compiled region is not on the graph."""
        return ChangeBounds(peak_memory_growth=None)

    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        """Compile FlexAttention; see the class.

        Raises:
            InductorOptionError: an option that this PyTorch's Inductor does not have.
        """
        choice = plan_flex_attention(graph_module.graph, options=self.options)
        return compile_regions(graph_module, choice, self.compiler)
