"""How many operators a graph has in each layer, for whoever looks at a run."""

from __future__ import annotations

from collections import Counter

from torch.fx import GraphModule

from gt_passes.analysis.collectives import is_collective
from gt_trace import module_fqn, phase_of

LayerCounts = dict[str, dict[str, int]]
"""By layer, in the order of the graph: operators by what they are a part of."""


def layer_counts(graph_module: GraphModule) -> LayerCounts:
    """Count what computes in the forward, what does elsewhere, and collectives.

    A layer is a module up to the first number in its name, or its whole name: ``layers.3``,
    ``norm``. What belongs to no module is counted under its phase, in brackets.
    """
    counts: dict[str, Counter[str]] = {}
    for node in graph_module.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        phase = phase_of(node) or "no phase"
        kind = "collectives" if is_collective(node) else phase
        counts.setdefault(_layer(module_fqn(node)) or f"({phase})", Counter())[kind] += 1
    return {layer: dict(found) for layer, found in counts.items()}


def _layer(fqn: str) -> str:
    parts = fqn.split(".")
    numbered = (place for place, part in enumerate(parts) if part.isdigit())
    return ".".join(parts[: next(numbered, len(parts)) + 1])
