"""What of parameters and gradients is on its way while a layer's backward runs, counted anew.

Whose weights are gathered again for the backward computes beside the gathering of the next layer,
which is taken to be as large. A gradient that is summed over ranks is there whole, as it was made
and once more in the bucket in which it is reduced. Microbatches are reduced when nothing runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from gt_autoparallel.audit.parameter_ways import gathering_nodes, made_gradients
from gt_autoparallel.audit.scopes import is_in_layer, scope
from gt_autoparallel.audit.shards import shard_bytes
from gt_autoparallel.audit.viewed_storage import viewed_operand
from gt_autoparallel.graph.placement_graph import Value
from gt_autoparallel.plan.placement_plan import PlacementPlan


def gathered_ahead(plan: PlacementPlan) -> Mapping[str, int]:
    """Bytes that are gathered ahead of each layer: as many as it gathers again itself."""
    nodes, sizes = plan.graph.nodes, plan.mesh.sizes
    found: dict[str, int] = defaultdict(int)
    for index in sorted(gathering_nodes(nodes) & {*plan.recomputed}):
        node, value = nodes[index], Value(index)
        spec, layout = plan.graph.spec(value), plan.layout(value)
        position = viewed_operand(node)
        if position is not None:
            spec = plan.graph.spec(node.operands[position])
            layout = plan.options[index].operands[position]
        found[scope(node)] += shard_bytes(spec, layout, sizes)
    return found


def unreduced_gradients(plan: PlacementPlan) -> Mapping[str, int]:
    """Bytes of each layer's gradients that are summed over ranks, as made and in their bucket."""
    if plan.request.microbatches is not None:
        return {}
    nodes = plan.graph.nodes
    widest: dict[Value, int] = {}
    for value, reduced_as in made_gradients(plan.graph):
        made = plan.graph.spec(value)
        both = [replace(made, dtype=dtype) for dtype in (made.dtype, reduced_as)]
        layout = plan.layout(value)
        num_bytes = sum(shard_bytes(spec, layout, plan.mesh.sizes) for spec in both)
        is_summed = any(placement.is_partial() for placement in layout)
        if is_summed and is_in_layer(nodes[value.node]):
            widest[value] = max(num_bytes, widest.get(value, 0))
    found: dict[str, int] = defaultdict(int)
    for value, num_bytes in widest.items():
        found[scope(nodes[value.node])] += num_bytes
    return found
