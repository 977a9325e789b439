"""At which moment of the backward most is there, found by letting layers take their turns.

A layer works from the first to the last of its operators in the backward, but for those that bring
gradients home. Layers take turns if no two of them work at the same time, there as in the forward,
and who worked last in the forward has the first turn. Then a layer that has had its turn has let go
of what it saved and has its gradients; one that has not has what it saved, and no gradients but
those of parameters that others read, too. What is outside of layers is taken to be there all the
time. Since nothing else of activations counts, each layer is also looked at as if none had had its
turn yet: all is saved, and it alone has gradients.

Where layers take no turns, or a step runs the graph for several microbatches, everything is there
at any moment, but for what a layer saved where its backward ends. What is read even later is not
let go of.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from gt_autoparallel.audit.parameter_ways import (
    after_parameters,
    before_gradients,
    gathering_nodes,
    made_gradients,
)
from gt_autoparallel.audit.recomputation_checks import recomputed_bytes_of_layers
from gt_autoparallel.audit.scopes import is_in_layer, scope
from gt_autoparallel.audit.shards import shard_bytes
from gt_autoparallel.audit.viewed_storage import viewed_operand
from gt_autoparallel.graph.placement_graph import NodePhase, PlacementNode, Value
from gt_autoparallel.plan.placement_plan import PlacementPlan

Work = dict[NodePhase, dict[str, tuple[int, int]]]
"""In each phase: layers -> the first and the last node that computes for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FullestMoment:
    """Bytes of a rank."""

    made: int = 0
    ahead: int = 0
    let_go: int = 0
    to_come: int = 0
    """Of gradients."""


def fullest_moments(
    plan: PlacementPlan, saved: Mapping[str, int], work: Work, *, graphs_in_turn: int
) -> tuple[FullestMoment, FullestMoment]:
    """Where a layer computes again, and where one's gradients are reduced; ``saved`` by layers."""
    again, ahead, whole = (
        recomputed_bytes_of_layers(plan),
        gathered_ahead(plan),
        unreduced_gradients(plan),
    )
    computing, reducing = [], []
    turns = [*_turns(plan, saved, work)]
    others = {*again, *whole} - {layer for layer, _, _ in turns}
    for layer, let_go, to_come in (*turns, *((other, 0, 0) for other in sorted(others))):
        computing.append(
            FullestMoment(
                made=again.get(layer, 0) // graphs_in_turn,
                ahead=ahead.get(layer, 0),
                let_go=let_go,
                to_come=to_come,
            )
        )
        if whole.get(layer):
            own = saved.get(layer, 0)
            made = whole[layer] + ahead.get(layer, 0)
            reducing.append(FullestMoment(made=made, let_go=let_go + own, to_come=to_come))
    most = _most(computing) or FullestMoment()
    return most, _most(reducing) or FullestMoment(let_go=most.let_go, to_come=most.to_come)


def work_of_layers(nodes: Sequence[PlacementNode]) -> Work:
    """When layers compute."""
    aside = after_parameters(nodes) | before_gradients(nodes)
    found: Work = {"forward": {}, "backward": {}}
    for node in nodes:
        if node.kind not in ("operator", "experts") or not is_in_layer(node):
            continue
        if node.index not in aside:
            layer, of_phase = scope(node), found[node.phase]
            first, _ = of_phase.get(layer, (node.index, node.index))
            of_phase[layer] = (first, node.index)
    return found


def backward_turns(work: Work) -> list[str]:
    """Layers in the order in which the backward takes them; none if they take no turns."""
    before, after = work["forward"], work["backward"]
    layers = sorted(before.keys() & after.keys(), key=lambda layer: after[layer])
    for early, late in pairwise(layers):
        if after[early][1] > after[late][0] or before[late][1] > before[early][0]:
            return []
    return layers


def _turns(
    plan: PlacementPlan, saved: Mapping[str, int], work: Work
) -> Iterator[tuple[str, int, int]]:
    """Layers with what has been let go of in their turn, and what gradients are to come."""
    layers = backward_turns(work) if plan.request.microbatches is None else []
    gradients = dict.fromkeys(layers, 0)
    read_elsewhere = parameters_read_elsewhere(plan.graph.nodes)
    for node in plan.graph.of_kind("gradient"):
        if scope(node) in gradients and node.target not in read_elsewhere:
            layout = plan.options[node.index].operands[0]
            spec = plan.graph.spec(node.operands[0])
            gradients[scope(node)] += shard_bytes(spec, layout, plan.mesh.sizes)
    to_come, let_go = sum(gradients.values()), 0
    for layer in gradients:
        yield layer, 0, sum(gradients.values()) - gradients[layer]
        to_come -= gradients[layer]
        yield layer, let_go, to_come
        let_go += saved.get(layer, 0)


def parameters_read_elsewhere(nodes: Sequence[PlacementNode]) -> set[object]:
    """Names of parameters that any but their own layer computes with."""
    carriers = after_parameters(nodes) | gathering_nodes(nodes)
    found: set[object] = set()
    readers: dict[int, list[PlacementNode]] = defaultdict(list)
    for node in nodes:
        for value in node.operands:
            readers[value.node].append(node)
    for parameter in (node for node in nodes if node.kind == "parameter"):
        stack = [parameter.index]
        while stack:
            for reader in readers[stack.pop()]:
                if reader.index in carriers:
                    stack.append(reader.index)
                elif scope(reader) != scope(parameter):
                    found.add(parameter.target)
    return found


def _most(moments: Sequence[FullestMoment]) -> FullestMoment | None:
    def key(each: FullestMoment) -> tuple[int, ...]:
        excess = each.made + each.ahead - each.let_go - each.to_come
        return (excess, each.made, each.ahead, each.let_go)

    return max(moments, key=key, default=None)


# What of parameters and gradients is on its way while a layer's backward runs, counted anew.
#
# Whose weights are gathered again for the backward computes beside the gathering of the next
# layer, which is taken to be as large. A gradient that is summed over ranks is there whole, as
# it was made and once more in the bucket in which it is reduced. Microbatches are reduced when
# nothing runs.
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
