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
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, replace

from gt_autoparallel.audit.layer_turns import fullest_moments, work_of_layers
from gt_autoparallel.audit.parameter_ways import gathering_nodes, made_gradients
from gt_autoparallel.audit.scopes import scope
from gt_autoparallel.audit.shards import shard_bytes
from gt_autoparallel.audit.viewed_storage import viewed_operand
from gt_autoparallel.graph.placement_graph import Value
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
