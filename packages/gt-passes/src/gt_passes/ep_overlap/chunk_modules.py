"""Run modules of a captured step in chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule

from gt_config import EpChunkDim
from gt_config.graph_kinds import STEP_GRAPHS, GraphKind
from gt_config.node_keys import ChunkAnnotation
from gt_config.numerics import Numerics
from gt_passes.contract import ChangeBounds, GraphPass, PassContext, PassReport, Refusal
from gt_passes.ep_overlap.chunked_nodes import has_nodes_of
from gt_passes.ep_overlap.graph_chunks import chunk_graph
from gt_passes.registry import register_pass
from gt_trace.node_metadata import read_annotation


@register_pass
@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkModules(GraphPass):
    """Run modules once for each chunk of the batch or the sequence, forward and backward.

    So one chunk's token exchange can be hidden behind another's compute: see
    ``schedule-ep-overlap``, which reads the metadata that this pass writes.

    *Before* (``e`` exchanges tokens)::

        y = g(e(f(x)))
        loss, dy = head(y)
        dx, dw = backward(dy)

    *After*, with two chunks::

        x0, x1 = split(x)                    # split_boundary
        y0 = g(e(f(x0)));  y1 = g(e(f(x1)))  # body 0, body 1
        y = cat(y0, y1)                      # materialization
        loss, dy = head(y)
        dy0, dy1 = split(dy)
        dx1, dw1 = backward(dy1)             # the last chunk first
        dx0, dw0 = backward(dy0);  dw = dw1 + dw0
        dx = cat(dx0, dx1)

    *Refuses*: a graph that has chunks already. Raises ``GraphChunkingError`` where an operator has
    no rule, or a rule does not hold; the error names the nodes.

    *Preserves numerics*: no, gradients of parameters are summed chunk by chunk.
    """

    name: ClassVar[str] = "chunk-modules"
    numerics: ClassVar[Numerics] = "reordered"
    runs_on: ClassVar[frozenset[GraphKind]] = frozenset({*STEP_GRAPHS, "STAGE"})
    keeps_dataflow: ClassVar[bool] = False

    module_patterns: tuple[str, ...] = ("layers.*.moe",)
    """Names of the modules to chunk; an asterisk stands for any characters in one component."""

    chunk_dim: EpChunkDim = "batch"
    """Dimension 0 or 1 of the (batch, sequence, model) inputs of the modules."""

    num_chunks: int = 2
    """Their sizes differ by at most one."""

    preserve_eager_order: bool = False
    """Cast and sum gradients of parameters where the eager producer does."""

    may_match_none: bool = False
    """Whether the graph may be of a part of a model that holds none of the modules."""

    @property
    def bounds(self) -> ChangeBounds:
        """Each chunk exchanges its own token counts. No bound on memory.

        Where chunks are joined or summed, whole values stand beside their parts, and whether the
        step's peak is there the pass does not know.
        """
        return ChangeBounds(collective_bytes_growth=float(self.num_chunks), peak_memory_growth=None)

    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        """Chunk modules; see the class."""
        for node in graph_module.graph.nodes:
            if read_annotation(node, ChunkAnnotation) is not None:
                reason = "the graph has chunks already"
                return PassReport.of({}, [Refusal(node_name=node.name, reason=reason)])
        if self.may_match_none and not has_nodes_of(graph_module, self.module_patterns):
            return PassReport.of({})
        chunks = chunk_graph(
            graph_module,
            patterns=self.module_patterns,
            fake_mode=context.fake_mode,
            num_static_inputs=context.num_static_inputs,
            chunk_dim=self.chunk_dim,
            num_chunks=self.num_chunks,
            preserve_eager_order=self.preserve_eager_order,
        )
        num_cats = sum(join.kind == "cat" for join in chunks.joins)
        return PassReport.of(
            {
                "regions": len(chunks.regions),
                "splits": chunks.num_splits,
                "concatenations": num_cats,
                "sums": len(chunks.joins) - num_cats,
            }
        )
