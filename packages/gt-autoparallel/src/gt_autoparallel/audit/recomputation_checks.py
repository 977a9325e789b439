"""May what a plan computes again run again, and what does it take? By the graph's uses alone.

A node of a layer may run again if its operator gives the same bits, if nothing but its own layer
reads it, nor what views it in place, and if what it reads can be had in the backward: kept, or made
again, too. What is kept for it is counted with everything that is kept (``memory_checks``). Routed
experts run again inside of their backward, which reads what they read: all of them, or what lies
between their products; then it is the backward's node that is said to run again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from gt_autoparallel.audit.scopes import is_in_layer, scope
from gt_autoparallel.audit.shards import shard_bytes
from gt_autoparallel.audit.viewed_storage import viewed_operand
from gt_autoparallel.graph.placement_graph import PlacementNode, Value
from gt_autoparallel.plan.placement_plan import PlacementPlan
from gt_autoparallel.prices.experts import experts_inner_bytes, experts_product_bytes
from gt_autoparallel.prices.recomputability import may_run_twice


def recomputation_problems(plan: PlacementPlan) -> Iterator[str]:
    """Nodes that run again and must not."""
    nodes = plan.graph.nodes
    if list(plan.recomputed) != sorted({*plan.recomputed} & set(range(len(nodes)))):
        yield f"what runs again is not a list of nodes in order: {list(plan.recomputed)[:5]}..."
        return
    readers: dict[int, list[PlacementNode]] = defaultdict(list)
    for node in nodes:
        for value in node.operands:
            readers[value.node].append(node)
    for index in plan.recomputed:
        reason = _reason_against(plan, nodes[index], readers)
        if reason is not None:
            yield f"node {nodes[index].name!r} runs again, though {reason}"


def recomputed_bytes_of_layers(plan: PlacementPlan) -> Mapping[str, int]:
    """What each layer makes again."""
    of_scope: dict[str, int] = defaultdict(int)
    for index in plan.recomputed:
        node, option = plan.graph.nodes[index], plan.options[index]
        position = viewed_operand(node)
        if node.kind == "experts":
            operands = plan.graph.operand_specs(node)
            inner = experts_inner_bytes(node, operands, option, plan.mesh)
            if node.phase == "backward":
                inner -= min(inner, experts_product_bytes(node, operands, option, plan.mesh))
            of_scope[scope(node)] += inner
            continue
        if position is None:
            outputs = [Value(index, at) for at, spec in enumerate(node.outputs) if spec is not None]
            made = [(plan.graph.spec(value), plan.layout(value)) for value in outputs]
        else:
            made = [(plan.graph.spec(node.operands[position]), option.operands[position])]
        of_scope[scope(node)] += sum(
            shard_bytes(spec, layout, plan.mesh.sizes) for spec, layout in made
        )
    return of_scope


def _reason_against(
    plan: PlacementPlan, node: PlacementNode, readers: dict[int, list[PlacementNode]]
) -> str | None:
    is_of_backward = node.phase == "backward" and node.kind != "experts"
    if is_of_backward or node.kind not in ("operator", "share", "experts"):
        return "it is no computation of the forward"
    if node.kind != "experts" and not may_run_twice(node):
        return "its operator may give something else the second time"
    if not is_in_layer(node):
        return "it is in no layer"
    if node.kind == "experts":
        others = [n for n in plan.graph.of_kind("experts") if n.target == node.target]
        if not any(each.phase == "backward" for each in others):
            return "nothing in the backward reads it"
        is_twice = sum(each.index in plan.recomputed for each in others) > 1
        return "its backward does, too" if is_twice else None
    position = viewed_operand(node)
    if position is not None:
        stays = plan.layout(node.operands[position]) == plan.options[node.index].operands[position]
        if stays:
            return "it only views what is there"
    if not any(reader.phase == "forward" for reader in readers[node.index]):
        return "only the backward reads it"
    stack, is_read = [node], False
    while stack:
        for reader in readers[stack.pop().index]:
            if reader.kind == "output" or scope(reader) != scope(node):
                return f"{reader.name!r} outside of its layer reads it"
            is_read |= reader.phase == "backward" or reader.index in plan.recomputed
            if reader.phase == "forward" and viewed_operand(reader) is not None:
                stack.append(reader)
    return None if is_read else "nothing in the backward reads it"
