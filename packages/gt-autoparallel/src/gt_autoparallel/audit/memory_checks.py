"""Does a plan take the memory it says? Bytes counted anew from layouts and uses.

Saved for the backward is each storage that a forward node made and a backward node reads. A value
is in the storage of its operand if it is a view of it, or shares it in the layout that it has; and
it keeps all of that storage alive, however small a part of it it is. Storages of parameters,
buffers and inputs are there anyway. Routed experts keep more than their operands, which they know
themselves. What runs again in the backward reads what is saved as any node of the backward does,
and what it makes is not saved (``recomputation_checks``).

When a layer's gradients are reduced, they are there whole, as they were made and in their bucket,
beside what is gathered ahead of the next layer, and what the layer saved is gone (``in_flight``).
Which of it all is there when is in ``layer_turns``.

Where a step runs the graph for several microbatches, each live one has what it saved, but of
gathered parameters there is one for all, and gradients are the sums that are not reduced yet. Where
one step after the other adds to the gradients, the sum is there beside what is added.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
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
from gt_autoparallel.prices.experts import experts_product_bytes, experts_saved_bytes
from gt_autoparallel.prices.memory import MemoryBreakdown

_SOURCES = ("parameter", "buffer", "input")


def memory_problems(plan: PlacementPlan) -> Iterator[str]:
    """Parts of the plan's memory that its layouts do not take, and a budget that is broken."""
    found = recounted_memory(plan)
    for part in (field.name for field in fields(MemoryBreakdown)):
        ours, planned = getattr(found, part), getattr(plan.memory, part)
        if ours != planned:
            yield f"{part.replace('_', ' ')} take {ours:,} bytes, planned as {planned:,}"
    budget = plan.request.memory_budget_bytes
    if budget is not None and found.total > budget:
        yield f"{found.total:,} bytes are {found.total - budget:,} over the budget of {budget:,}"


def recounted_memory(plan: PlacementPlan) -> MemoryBreakdown:
    """The memory of a plan, from its options alone."""
    sizes, graph = plan.mesh.sizes, plan.graph
    parameters = sum(_output_bytes(plan, Value(n.index)) for n in graph.of_kind("parameter"))
    gradients = (
        sum(
            shard_bytes(graph.spec(node.operands[0]), plan.options[node.index].operands[0], sizes)
            for node in graph.of_kind("gradient")
        )
        if plan.request.microbatches is None
        else sum(_sums(plan).values())
    )
    request = plan.request
    work = work_of_layers(graph.nodes)
    saved = saved_bytes(plan, work["backward"])
    backward, reduction = fullest_moments(plan, saved, work, graphs_in_turn=_graphs_in_turn(plan))
    return MemoryBreakdown(
        parameters=parameters,
        gradients=_with_new_ones(plan, gradients),
        optimizer_state=round(parameters * plan.request.optimizer_state_copies),
        saved_activations=sum(saved.values()),
        recomputed=backward.made,
        loss=request.loss_bytes,
        gradients_before=(
            gradients if request.accumulates_gradients or request.microbatches is not None else 0
        ),
        gathered_ahead=backward.ahead,
        let_go_in_backward=backward.let_go,
        to_come_in_backward=backward.to_come,
        in_flight=reduction.made,
        let_go_at_reduction=reduction.let_go,
        to_come_at_reduction=reduction.to_come,
    )


def _with_new_ones(plan: PlacementPlan, gradients: int) -> int:
    """Sums, if there are any, and the gradients of the microbatch that runs."""
    if plan.request.microbatches is None:
        return 2 * gradients if plan.request.accumulates_gradients else gradients
    return gradients + gradients // _graphs_in_turn(plan)


def _graphs_in_turn(plan: PlacementPlan) -> int:
    microbatches = plan.request.microbatches
    return 1 if microbatches is None else microbatches.num_graphs


def saved_bytes(plan: PlacementPlan, turn_of: Mapping[str, tuple[int, int]]) -> Mapping[str, int]:
    """What each layer has saved until its turn; under no name what is read even later."""
    nodes, runs_again = plan.graph.nodes, frozenset(plan.recomputed)
    read_until = _read_until(plan, runs_again)
    read_last: dict[object, int] = {}
    thinned = {nodes[index].target for index in runs_again if nodes[index].phase == "backward"}
    bytes_of_storage: dict[object, int] = {}
    for node in nodes:
        if node.phase == "forward" and node.index not in runs_again:
            continue
        at = node.index if node.phase == "backward" else read_until[node.index]
        for value in node.operands:
            if nodes[value.node].phase == "forward":
                for storage, num_bytes in _storage(plan, value, runs_again).items():
                    bytes_of_storage[storage] = num_bytes
                    read_last[storage] = max(read_last.get(storage, 0), at)
    microbatches = plan.request.microbatches
    once = set() if microbatches is None else gathering_nodes(nodes)
    live = 1 if microbatches is None else microbatches.num_live
    found: dict[str, int] = defaultdict(int)
    for node in plan.graph.of_kind("experts"):
        if node.phase == "forward" and node.index not in runs_again:
            kept = experts_product_bytes if node.target in thinned else experts_saved_bytes
            operands, option = plan.graph.operand_specs(node), plan.options[node.index]
            found[scope(node)] += live * kept(node, operands, option, plan.mesh)
    for storage, num_bytes in bytes_of_storage.items():
        maker = _node_of(storage)
        _, end = turn_of.get(scope(nodes[maker]), (0, len(nodes)))
        until = scope(nodes[maker]) if read_last.get(storage, 0) <= end else ""
        found[until] += num_bytes * (1 if maker in once else live)
    return found


def _read_until(plan: PlacementPlan, runs_again: Collection[int]) -> list[int]:
    """For each node the last one of the backward that reads its result, or what is made of it."""
    nodes, found = plan.graph.nodes, [0] * len(plan.graph.nodes)
    for node in reversed(nodes):
        position, until = viewed_operand(node), found[node.index]
        if node.phase == "backward":
            until = node.index
        elif node.index not in runs_again:
            stays = position is not None and (
                plan.layout(node.operands[position]) == plan.options[node.index].operands[position]
            )
            until = until if stays else 0
        for value in node.operands:
            found[value.node] = max(found[value.node], until)
    return found


def _storage(plan: PlacementPlan, value: Value, runs_again: Collection[int]) -> dict[object, int]:
    """The storage that holds a value, and its bytes; nothing for what need not be saved."""
    node = plan.graph.nodes[value.node]
    if node.kind in _SOURCES or (node.index in runs_again and node.kind != "experts"):
        return {}
    position = viewed_operand(node)
    if position is None:
        return {value: _output_bytes(plan, value)}
    source = node.operands[position]
    there, wanted = plan.layout(source), plan.options[node.index].operands[position]
    if there == wanted:
        return _storage(plan, source, runs_again)
    # Moved before it is viewed: what arrives is a storage of its own.
    spec = plan.graph.spec(source)
    return {(node.index, position): shard_bytes(spec, wanted, plan.mesh.sizes)}


def _node_of(storage: object) -> int:
    """The node that made a storage, of the keys of ``_storage``."""
    if isinstance(storage, Value):
        return storage.node
    assert isinstance(storage, tuple)
    node: int = storage[0]
    return node


def _sums(plan: PlacementPlan) -> dict[Value, int]:
    """Bytes of what microbatches add up for each gradient, in the dtype of its reduction."""
    found: dict[Value, int] = {}
    for value, reduced_as in made_gradients(plan.graph):
        spec = replace(plan.graph.spec(value), dtype=reduced_as)
        num_bytes = shard_bytes(spec, plan.layout(value), plan.mesh.sizes)
        found[value] = max(num_bytes, found.get(value, 0))
    return found


def _output_bytes(plan: PlacementPlan, value: Value) -> int:
    return shard_bytes(plan.graph.spec(value), plan.layout(value), plan.mesh.sizes)


# At which moment of the backward most is there, found by letting layers take their turns.
#
# A layer works from the first to the last of its operators in the backward, but for those that
# bring gradients home. Layers take turns if no two of them work at the same time, there as in
# the forward, and who worked last in the forward has the first turn. Then a layer that has had
# its turn has let go of what it saved and has its gradients; one that has not has what it saved,
# and no gradients but those of parameters that others read, too. What is outside of layers is
# taken to be there all the time. Since nothing else of activations counts, each layer is also
# looked at as if none had had its turn yet: all is saved, and it alone has gradients.
#
# Where layers take no turns, or a step runs the graph for several microbatches, everything is
# there at any moment, but for what a layer saved where its backward ends. What is read even
# later is not let go of.
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
