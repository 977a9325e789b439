"""At which moment of the backward most is there, found by letting layers take their turns.

The backward runs from the last layer to the first. A layer that has had its turn has let go of what
it saved, and has gradients; one that has not has what it saved and no gradients. What is outside of
layers is taken to be there all the time. Since nothing else of activations counts, each layer is
also looked at as if none had had its turn yet: all is saved, and it alone has gradients.

Where a step runs the graph for several microbatches, everything is there at any moment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gt_autoparallel.audit.in_flight import gathered_ahead, unreduced_gradients
from gt_autoparallel.audit.recomputation_checks import recomputed_bytes_of_layers, scope
from gt_autoparallel.audit.shards import shard_bytes
from gt_autoparallel.plan.placement_plan import PlacementPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class FullestMoment:
    """Bytes of a rank."""

    made: int = 0
    ahead: int = 0
    let_go: int = 0
    to_come: int = 0
    """Of gradients."""


def fullest_moments(
    plan: PlacementPlan, saved: Mapping[str, int], *, graphs_in_turn: int
) -> tuple[FullestMoment, FullestMoment]:
    """Where a layer computes again, and where one's gradients are reduced; ``saved`` by layers."""
    again, ahead, whole = (
        recomputed_bytes_of_layers(plan),
        gathered_ahead(plan),
        unreduced_gradients(plan),
    )
    computing, reducing = [], []
    for layer, let_go, to_come in _turns(plan, saved) or [(each, 0, 0) for each in again]:
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


def _turns(plan: PlacementPlan, saved: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """Layers with what has been let go of in their turn, and what gradients are to come."""
    if plan.request.microbatches is not None:
        return []
    gradients: dict[str, int] = dict.fromkeys(_layers(plan), 0)
    for node in plan.graph.of_kind("gradient"):
        if scope(node) in gradients:
            layout = plan.options[node.index].operands[0]
            spec = plan.graph.spec(node.operands[0])
            gradients[scope(node)] += shard_bytes(spec, layout, plan.mesh.sizes)
    found: list[tuple[str, int, int]] = []
    to_come, let_go = sum(gradients.values()), 0
    for layer in reversed(gradients):
        found.append((layer, 0, sum(gradients.values()) - gradients[layer]))
        to_come -= gradients[layer]
        found.append((layer, let_go, to_come))
        let_go += saved.get(layer, 0)
    return found


def _layers(plan: PlacementPlan) -> Iterator[str]:
    """In the order in which they first compute; last those that never do."""
    sources = ("parameter", "buffer", "input")
    for node in sorted(plan.graph.nodes, key=lambda node: node.kind in sources):
        if any(part.isdigit() for part in node.module.split(".")):
            yield scope(node)


def _most(moments: Sequence[FullestMoment]) -> FullestMoment | None:
    def key(each: FullestMoment) -> tuple[int, ...]:
        excess = each.made + each.ahead - each.let_go - each.to_come
        return (excess, each.made, each.ahead, each.let_go)

    return max(moments, key=key, default=None)
