"""Does a plan take the memory it says? Bytes counted anew from layouts and uses.

Saved for the backward is each storage that a forward node made and a backward node reads. A value
is in the storage of its operand if it is a view of it, or shares it in the layout that it has; and
it keeps all of that storage alive, however small a part of it it is. Storages of parameters,
buffers and inputs are there anyway. Routed experts keep more than their operands, which they know
themselves.
"""

from __future__ import annotations

from collections.abc import Iterator

from gt_autoparallel._torch_internals import OpOverload
from gt_autoparallel.audit.shards import shard_bytes
from gt_autoparallel.graph.placement_graph import PlacementNode, Value
from gt_autoparallel.plan.placement_plan import PlacementPlan
from gt_autoparallel.prices.experts import experts_saved_bytes
from gt_autoparallel.prices.memory import MemoryBreakdown

_SOURCES = ("parameter", "buffer", "input")


def memory_problems(plan: PlacementPlan) -> Iterator[str]:
    """Parts of the plan's memory that its layouts do not take, and a budget that is broken."""
    found = recounted_memory(plan)
    for part in ("parameters", "gradients", "optimizer_state", "saved_activations"):
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
    gradients = sum(
        shard_bytes(graph.spec(node.operands[0]), plan.options[node.index].operands[0], sizes)
        for node in graph.of_kind("gradient")
    )
    return MemoryBreakdown(
        parameters=parameters,
        gradients=gradients,
        optimizer_state=round(parameters * plan.request.optimizer_state_copies),
        saved_activations=_saved_bytes(plan),
    )


def _saved_bytes(plan: PlacementPlan) -> int:
    nodes = plan.graph.nodes
    bytes_of_storage: dict[object, int] = {}
    for node in nodes:
        if node.phase == "forward":
            continue
        for value in node.operands:
            if nodes[value.node].phase == "forward":
                bytes_of_storage.update(_storage(plan, value))
    kept_by_experts = sum(
        experts_saved_bytes(
            node, plan.graph.operand_specs(node), plan.options[node.index], plan.mesh
        )
        for node in plan.graph.of_kind("experts")
    )
    return sum(bytes_of_storage.values()) + kept_by_experts


def _storage(plan: PlacementPlan, value: Value) -> dict[object, int]:
    """The storage that holds a value, and its bytes; nothing for what is there anyway."""
    node = plan.graph.nodes[value.node]
    if node.kind in _SOURCES:
        return {}
    position = _viewed_operand(node)
    if position is None:
        return {value: _output_bytes(plan, value)}
    source = node.operands[position]
    there, wanted = plan.layout(source), plan.options[node.index].operands[position]
    if there == wanted:
        return _storage(plan, source)
    # Moved before it is viewed: what arrives is a storage of its own.
    spec = plan.graph.spec(source)
    return {(node.index, position): shard_bytes(spec, wanted, plan.mesh.sizes)}


def _viewed_operand(node: PlacementNode) -> int | None:
    """The operand whose storage the node's outputs are in; None if they have their own."""
    if node.kind == "share":
        return 0
    if not isinstance(node.target, OpOverload):
        return None
    returned = node.target._schema.returns
    aliases = [argument.alias_info for argument in node.target._schema.arguments[:1]]
    if len(returned) != 1 or returned[0].alias_info is None or aliases[0] is None:
        return None
    return 0


def _output_bytes(plan: PlacementPlan, value: Value) -> int:
    return shard_bytes(plan.graph.spec(value), plan.layout(value), plan.mesh.sizes)
