"""Random plans of captured graphs: any choice of options that fit together is a plan to run."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import replace

from plan_doubles import Prices
from torch import nn

from gt_autoparallel.graph.layouts import Layout, MeshShape
from gt_autoparallel.graph.options import NodeOption
from gt_autoparallel.graph.parameter_chains import is_view_like
from gt_autoparallel.graph.placement_graph import PlacementGraph, PlacementNode, Value
from gt_autoparallel.graph.redistribution import can_redistribute, redistribution_steps
from gt_autoparallel.plan.model_signature import model_signature
from gt_autoparallel.plan.placement_plan import PlacementPlan, PlannedRedistribution, SolverReport
from gt_autoparallel.prices.memory import MemoryBreakdown
from gt_autoparallel.prices.needed_storages import needed_storages
from gt_autoparallel.prices.recomputability import recomputable_nodes
from gt_autoparallel.problem.constraints import ResolvedRequest
from gt_autoparallel.rules import node_options
from gt_autoparallel.rules.experts import expert_options


def random_plan(
    model: nn.Module,
    graph: PlacementGraph,
    mesh: MeshShape,
    *,
    seed: int,
    fixed: Mapping[str, Layout] | None = None,
    recomputes: bool = False,
) -> PlacementPlan:
    """A plan with random options; ``fixed`` gives some nodes their first output's layout by name.

    Half of what may run again in the backward does, if any of it ``recomputes``.
    """
    draw = random.Random(seed)
    chosen = _random_options(graph, mesh, draw, fixed or {})
    again = [
        index
        for index in sorted(recomputable_nodes(graph) if recomputes else ())
        if draw.random() < 0.5 and not _is_view_in_place(graph.nodes[index], chosen)
    ]
    return plan_of(model, graph, mesh, chosen, again)


def _is_view_in_place(node: PlacementNode, options: tuple[NodeOption, ...]) -> bool:
    if not is_view_like(node):
        return False
    source = node.operands[0]
    return options[source.node].outputs[source.output] == options[node.index].operands[0]


def plan_of(
    model: nn.Module,
    graph: PlacementGraph,
    mesh: MeshShape,
    options: tuple[NodeOption, ...],
    again: Collection[int] = (),
) -> PlacementPlan:
    """The plan with these options; its prices and memory mean nothing."""
    recomputed = needed_storages(graph, options, again).recomputed
    redistributions = []
    for use in graph.uses:
        source = options[use.value.node].outputs[use.value.output]
        target = options[use.consumer].operands[use.position]
        assert source is not None
        steps = redistribution_steps(graph.spec(use.value).shape, source, target, mesh)
        if steps:
            first = PlannedRedistribution(
                use=use, steps=steps, in_full_us=0.0, hidden_us=0.0, window=None
            )
            redistributions.append(first)
            if use.consumer in recomputed:
                redistributions.append(replace(first, again=True))
    return PlacementPlan(
        mesh=mesh,
        graph=graph,
        options=options,
        recomputed=recomputed,
        redistributions=tuple(redistributions),
        compute_us=(0.0,) * len(graph.nodes),
        windows=(),
        memory=MemoryBreakdown(parameters=0, gradients=0, optimizer_state=0, saved_activations=0),
        request=ResolvedRequest(),
        prices=Prices(),
        solver=SolverReport(
            objective_us=0.0,
            lower_bound_us=0.0,
            method="random",
            seconds=0.0,
            num_variables=0,
            num_options=0,
            num_nodes=len(graph.nodes),
            proven=False,
        ),
        signature=model_signature(model, graph),
    )


def _random_options(
    graph: PlacementGraph, mesh: MeshShape, draw: random.Random, fixed: Mapping[str, Layout]
) -> tuple[NodeOption, ...]:
    assert graph.interface is not None
    output_of_tangent = {leaf.tangent: leaf.node for leaf in graph.interface.outputs}
    parameters = {str(n.target): n.index for n in graph.of_kind("parameter")}
    experts: dict[str, NodeOption] = {}
    # Outputs come after what the backward reads of their gradients.
    later = {
        leaf.node: fixed.get(graph.nodes[leaf.node].name)
        or draw.choice(_options(graph, graph.nodes[leaf.node], mesh)).operands[0]
        for leaf in graph.interface.outputs
        if leaf.node is not None
    }
    chosen: dict[int, NodeOption] = {}
    for node in graph.nodes:
        if node.kind == "output":
            chosen[node.index] = NodeOption(operands=(later[node.index],), outputs=())
        elif node.kind == "tangent" and node.index in output_of_tangent:
            layout = later[output_of_tangent[node.index]]
            chosen[node.index] = NodeOption(operands=(), outputs=(layout,))
        elif node.kind == "gradient":
            layout = chosen[parameters[str(node.target)]].outputs[0]
            assert layout is not None
            chosen[node.index] = NodeOption(operands=(layout,), outputs=())
        elif node.name in fixed and node.kind in ("parameter", "input", "buffer"):
            chosen[node.index] = NodeOption(operands=(), outputs=(fixed[node.name],))
        else:
            options = [
                option
                for option in _options(graph, node, mesh)
                if _reachable(option, node, chosen)
                and (node.kind != "experts" or _like_forward(option, node, experts))
            ]
            chosen[node.index] = draw.choice(options)
            if node.kind == "experts":
                experts.setdefault(str(node.target), chosen[node.index])
    return tuple(chosen[index] for index in range(len(graph.nodes)))


def _like_forward(
    option: NodeOption, node: PlacementNode, experts: Mapping[str, NodeOption]
) -> bool:
    forward = experts.get(str(node.target))
    return forward is None or option.operands[1:] == forward.operands


def _options(graph: PlacementGraph, node: PlacementNode, mesh: MeshShape) -> tuple[NodeOption, ...]:
    operands = tuple(graph.spec(value) for value in node.operands)
    if node.kind == "experts":
        return expert_options(node, operands, mesh)
    return node_options(node, operands, mesh)


def _reachable(option: NodeOption, node: PlacementNode, chosen: Mapping[int, NodeOption]) -> bool:
    return all(
        can_redistribute(_layout(chosen, value), wanted)
        for value, wanted in zip(node.operands, option.operands, strict=True)
    )


def _layout(chosen: Mapping[int, NodeOption], value: Value) -> Layout:
    layout = chosen[value.node].outputs[value.output]
    assert layout is not None
    return layout
