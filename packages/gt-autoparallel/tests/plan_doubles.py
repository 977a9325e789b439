"""A plan made by hand: two linear layers on a small mesh, with prices that a reader can add up.

Nothing of the planner is used, so that what reads plans is tested against numbers of its own. The
accounting here is the shortest that is right for this graph; it is no model of the package's.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import nn
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from gt_autoparallel.graph.graph_encoding import graph_digest
from gt_autoparallel.graph.layouts import Layout, MeshShape, fits, local_shape
from gt_autoparallel.graph.options import AxisOption, NodeOption
from gt_autoparallel.graph.parameter_chains import ParameterMove
from gt_autoparallel.graph.placement_graph import (
    NodeKind,
    NodePhase,
    PlacementGraph,
    PlacementNode,
    TensorSpec,
    Value,
)
from gt_autoparallel.graph.redistribution import RedistributionStep
from gt_autoparallel.plan.placement_plan import (
    ModelSignature,
    PlacementPlan,
    PlannedRedistribution,
    PlannedWindow,
    SolverReport,
)
from gt_autoparallel.prices.costs import StepTime
from gt_autoparallel.prices.memory import MemoryBreakdown
from gt_autoparallel.problem.constraints import ResolvedRequest

aten = torch.ops.aten
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial("sum")
TOKENS, WIDTH = 8, 16


@dataclass(frozen=True)
class Prices:
    """One us a kilobyte on the network, one us a node."""

    us_per_byte: float = 1e-3
    us_per_node: float = 1.0

    @property
    def digest(self) -> str:
        return f"double {self.us_per_byte} {self.us_per_node}"

    def compute_us(
        self,
        node: PlacementNode,
        operands: tuple[TensorSpec, ...],
        option: NodeOption,
        mesh: MeshShape,
    ) -> float:
        if node.kind not in ("operator", "parameter"):
            return 0.0
        shape = local_shape(node.outputs[0].shape, option.outputs[0], mesh)
        return self.us_per_node + prod(shape) * self.us_per_byte

    def step_time(
        self,
        step: RedistributionStep,
        dtype: torch.dtype,
        mesh: MeshShape,
        move: ParameterMove | None,
    ) -> StepTime:
        if step.kind == "slice":
            return StepTime(0.0)
        num_elements = max(prod(step.input_shape), prod(step.output_shape))
        time_us = num_elements * dtype.itemsize * self.us_per_byte * (1 + step.axis)
        return StepTime(time_us) if move is None else StepTime(0.25 * time_us, 0.75 * time_us)


class TwoLayers(nn.Module):
    """The model of ``two_layer_graph``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x @ layer.weight
        return x


class _Builder:
    def __init__(self) -> None:
        self.nodes: list[PlacementNode] = []

    def add(
        self,
        name: str,
        kind: NodeKind,
        target: object,
        *args: object,
        shape: tuple[int, ...] | None,
        module: str = "",
        phase: NodePhase = "forward",
    ) -> Value:
        outputs = () if shape is None else (spec(shape),)
        index = len(self.nodes)
        self.nodes.append(
            PlacementNode(
                index=index,
                name=name,
                kind=kind,
                target=target,
                args=args,
                outputs=outputs,
                module=module,
                phase=phase,
            )
        )
        return Value(index)


def spec(shape: tuple[int, ...]) -> TensorSpec:
    stride = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return TensorSpec(shape=shape, stride=stride, dtype=torch.float32)


def two_layer_graph() -> PlacementGraph:
    """x @ w0 @ w1 and its backward; each weight and the hidden activation has a share node."""
    add = (builder := _Builder()).add
    tall, wide, square = (TOKENS, WIDTH), (WIDTH, TOKENS), (WIDTH, WIDTH)
    mm, t = aten.mm.default, aten.t.default
    l0, l1 = "layers.0", "layers.1"
    w0 = add("p0", "parameter", "layers.0.weight", shape=square, module=l0)
    w1 = add("p1", "parameter", "layers.1.weight", shape=square, module=l1)
    x = add("x", "input", "x", shape=tall)
    xs = add("x_share", "share", None, x, shape=tall)
    h = add("mm0", "operator", mm, xs, w0, shape=tall, module=l0)
    hs = add("h_share", "share", None, h, shape=tall, module=l0)
    w1s = add("p1_share", "share", None, w1, shape=square, module=l1)
    y = add("mm1", "operator", mm, hs, w1s, shape=tall, module=l1)
    add("out", "output", "output", y, shape=None)
    back: dict[str, object] = {"phase": "backward"}
    g = add("tangent", "tangent", "output", shape=tall, **back)
    gs = add("g_share", "share", None, g, shape=tall, **back)
    ht = add("t0", "operator", t, hs, shape=wide, module=l1, **back)
    gw1 = add("mm2", "operator", mm, ht, gs, shape=square, module=l1, **back)
    w1t = add("t1", "operator", t, w1s, shape=square, module=l1, **back)
    gh = add("mm3", "operator", mm, gs, w1t, shape=tall, module=l1, **back)
    xt = add("t2", "operator", t, xs, shape=wide, module=l0, **back)
    gw0 = add("mm4", "operator", mm, xt, gh, shape=square, module=l0, **back)
    add("g0", "gradient", "layers.0.weight", gw0, shape=None, module=l0, **back)
    add("g1", "gradient", "layers.1.weight", gw1, shape=None, module=l1, **back)
    return PlacementGraph(nodes=tuple(builder.nodes), parameter_aliases={})


_MM = (((R, R), R), ((S0, R), S0), ((R, S1), S1), ((S1, S0), P))
_T = (((R,), R), ((S0,), S1), ((S1,), S0))
_RULES = {aten.mm.default: _MM, aten.t.default: _T}


def node_options(
    node: PlacementNode, operands: tuple[TensorSpec, ...], mesh: MeshShape
) -> tuple[NodeOption, ...]:
    """Options of ``mm`` and ``t``: textbook matrix multiplication."""
    options = []
    for combination in itertools.product(_RULES[node.target], repeat=mesh.num_axes):
        axis_options = tuple(AxisOption(operands=ins, outputs=(out,)) for ins, out in combination)
        option = NodeOption(
            operands=tuple(
                tuple(axis.operands[i] for axis in axis_options) for i in range(len(operands))
            ),
            outputs=(tuple(axis.outputs[0] for axis in axis_options),),
            axis_options=axis_options,
        )
        pairs = zip((*operands, *node.outputs), (*option.operands, *option.outputs), strict=True)
        if all(fits(each.shape, layout, mesh) for each, layout in pairs):
            options.append(option)
    return tuple(options)


# The outputs of each node, one placement an axis; what an operand must be follows from the rules.
_DATA_PARALLEL: Mapping[str, Placement] = {
    **dict.fromkeys(("x", "x_share", "mm0", "h_share", "mm1", "tangent", "g_share", "mm3"), S0),
    **dict.fromkeys(("t0", "t2"), S1),
    **dict.fromkeys(("mm2", "mm4"), P),
}
DDP = {**_DATA_PARALLEL, "p0": R, "p1": R, "p1_share": R, "t1": R}
# Along dims that tensor parallelism leaves alone: else one gather could not undo it.
FSDP = {**DDP, "p0": S0, "p1": S1}
TENSOR_PARALLEL = {
    **dict.fromkeys(("x", "x_share", "mm1", "tangent", "g_share", "t2"), R),
    "p0": S1,
    "mm0": S1,
    "h_share": S1,
    "p1": S0,
    "p1_share": S0,
    "t0": S0,
    "mm2": S0,
    "t1": S1,
    "mm3": S1,
    "mm4": S1,
}
TENSOR_PARALLEL["mm1"] = P


def plan_by_hand(
    *axes: tuple[str, int, Mapping[str, Placement]],
    prices: Prices | None = None,
    request: ResolvedRequest | None = None,
) -> PlacementPlan:
    """A plan on a mesh of the given axes: name, size, and the placement of each node's output."""
    mesh = MeshShape(names=tuple(a[0] for a in axes), sizes=tuple(a[1] for a in axes))
    graph = two_layer_graph()
    options = tuple(_option(node, graph, mesh, axes) for node in graph.nodes)
    return assemble(graph, mesh, options, prices=prices or Prices(), request=request)


def _option(
    node: PlacementNode,
    graph: PlacementGraph,
    mesh: MeshShape,
    axes: tuple[tuple[str, int, Mapping[str, Placement]], ...],
) -> NodeOption:
    def layout_of(name: str) -> Layout:
        return tuple(placements[name] for _, _, placements in axes)

    if node.kind == "operator":
        operands = tuple(graph.spec(value) for value in node.operands)
        before = [layout_of(graph.nodes[value.node].name) for value in node.operands]
        found = [
            option
            for option in node_options(node, operands, mesh)
            if option.outputs[0] == layout_of(node.name)
        ]
        # Of several, the one that wants what is there.
        return max(found, key=lambda option: sum(map(_equal, option.operands, before)))
    if node.kind == "share":
        return NodeOption(operands=(layout_of(node.name),), outputs=(layout_of(node.name),))
    if node.kind == "gradient":
        parameter = next(n.name for n in graph.of_kind("parameter") if n.target == node.target)
        return NodeOption(operands=(layout_of(parameter),), outputs=())
    if node.kind == "output":
        return NodeOption(operands=(layout_of("tangent"),), outputs=())
    return NodeOption(operands=(), outputs=(layout_of(node.name),))


def _equal(left: Layout, right: Layout) -> bool:
    return left == right


def steps_by_hand(
    shape: tuple[int, ...], source: Layout, target: Layout, mesh: MeshShape
) -> tuple[RedistributionStep, ...]:
    """Last axis first: reduce or gather what differs; then first axis first: slice.

    A sum is scattered at once where no other axis shards the same dim.
    """
    source, target = (
        tuple(R if size == 1 else p for p, size in zip(layout, mesh.sizes, strict=True))
        for layout in (source, target)
    )
    layout, steps = list(source), []

    def step(kind: str, axis: int, placement: Placement) -> None:
        before, given = local_shape(shape, tuple(layout), mesh), layout[axis]
        layout[axis] = placement
        steps.append(
            RedistributionStep(
                kind=kind,
                axis=axis,
                source_dim=given.dim if isinstance(given, Shard) else None,
                target_dim=placement.dim if isinstance(placement, Shard) else None,
                input_shape=before,
                output_shape=local_shape(shape, tuple(layout), mesh),
            )
        )

    for axis in reversed(range(mesh.num_axes)):
        others = {*layout, *target[:axis], *target[axis + 1 :]}
        if layout[axis] == P and isinstance(target[axis], Shard) and target[axis] not in others:
            step("reduce_scatter", axis, target[axis])
        elif layout[axis] == P != target[axis]:
            step("all_reduce", axis, R)
        elif isinstance(layout[axis], Shard) and layout[axis] != target[axis]:
            step("all_gather", axis, R)
    for axis in range(mesh.num_axes):
        if layout[axis] != target[axis]:
            step("slice", axis, target[axis])
    return tuple(steps)


def assemble(
    graph: PlacementGraph,
    mesh: MeshShape,
    options: tuple[NodeOption, ...],
    *,
    prices: Prices,
    request: ResolvedRequest | None = None,
) -> PlacementPlan:
    """Everything of a plan that follows from its options."""
    compute = tuple(
        prices.compute_us(node, tuple(map(graph.spec, node.operands)), option, mesh)
        for node, option in zip(graph.nodes, options, strict=True)
    )
    redistributions = []
    busy: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for node in graph.nodes:
        busy[_window(node)][0] += compute[node.index]
    for use in graph.uses:
        source = options[use.value.node].outputs[use.value.output]
        target = options[use.consumer].operands[use.position]
        if source == target:
            continue
        value = graph.spec(use.value)
        steps = steps_by_hand(value.shape, source, target, mesh)
        if not steps:
            continue
        consumer = graph.nodes[use.consumer]
        move: ParameterMove | None = None
        if graph.nodes[use.value.node].kind == "parameter":
            move = "unshard"
        elif consumer.kind == "gradient" or _is_transposed_gradient(graph, consumer):
            move = "reduce_grad"
        times = [prices.step_time(step, value.dtype, mesh, move) for step in steps]
        hidden_us = sum(time.hidden_us for time in times)
        window = None if move is None else _window(consumer)
        if window is not None:
            busy[window][1] += hidden_us
        redistributions.append(
            PlannedRedistribution(
                use=use,
                steps=steps,
                in_full_us=sum(time.in_full_us for time in times),
                hidden_us=hidden_us,
                window=window,
            )
        )
    windows = tuple(
        PlannedWindow(name=name, compute_us=times[0], communication_us=times[1])
        for name, times in busy.items()
    )
    in_full = sum(each.in_full_us for each in redistributions)
    objective = sum(window.time_us for window in windows) + in_full
    return PlacementPlan(
        mesh=mesh,
        graph=graph,
        options=options,
        redistributions=tuple(redistributions),
        compute_us=compute,
        windows=windows,
        memory=_memory(graph, mesh, options),
        request=request or ResolvedRequest(),
        prices=prices,
        solver=SolverReport(
            objective_us=objective,
            lower_bound_us=objective,
            method="by hand",
            seconds=0.25,
            num_variables=len(graph.nodes),
            num_options=4 * len(graph.nodes),
            num_nodes=len(graph.nodes),
            proven=True,
        ),
        signature=ModelSignature(
            parameters={f"layers.{i}.weight": f"float32[{WIDTH}, {WIDTH}]" for i in range(2)},
            modules={
                "": "TwoLayers",
                "layers": "ModuleList",
                "layers.0": "Linear",
                "layers.1": "Linear",
            },
            graph_digest=graph_digest(graph),
        ),
    )


def _is_transposed_gradient(graph: PlacementGraph, node: PlacementNode) -> bool:
    readers = [graph.nodes[use.consumer] for use in graph.uses if use.value.node == node.index]
    return node.target is aten.t.default and [reader.kind for reader in readers] == ["gradient"]


def _window(node: PlacementNode) -> str:
    phase = "optimizer" if node.kind == "parameter" else node.phase
    return f"{node.module or 'model'} {phase}"


def _memory(
    graph: PlacementGraph, mesh: MeshShape, options: tuple[NodeOption, ...]
) -> MemoryBreakdown:
    """Saved for the backward: the shared input, hidden activation and second weight."""
    by_name = {node.name: node for node in graph.nodes}

    def num_bytes(name: str) -> int:
        node = by_name[name]
        return prod(local_shape(node.outputs[0].shape, options[node.index].outputs[0], mesh)) * 4

    parameters = num_bytes("p0") + num_bytes("p1")
    saved = {
        share: num_bytes(share)
        for share, of in (("x_share", "x"), ("h_share", "mm0"), ("p1_share", "p1"))
        # An input or a parameter that is shared as it is takes no memory of its own.
        if of == "mm0"
        or options[by_name[share].index].outputs != options[by_name[of].index].outputs
    }
    # Gradients that are to come and what is gone, for each layer: as if the others had not had their
    # turn yet, and in its turn.
    modules = sorted({node.module for node in graph.of_kind("gradient")})
    gradient = {module: num_bytes(f"p{place}") for place, module in enumerate(modules)}
    gone = {
        module: sum(saved[name] for name in saved if by_name[name].module == module)
        for module in modules
    }
    first, second = modules
    turns = [
        (first, gradient[second], 0),
        (first, 0, gone[second]),
        (second, gradient[first], 0),
        (second, gradient[first], 0),
    ]
    to_come, let_go = min(((come, away) for _, come, away in turns), key=lambda e: (sum(e), -e[1]))
    at_reduction = []
    for node in graph.of_kind("gradient"):
        maker = graph.nodes[node.operands[0].node]
        if maker.target is aten.t.default:
            maker = graph.nodes[maker.operands[0].node]
        (layout,) = options[maker.index].outputs
        if layout is not None and any(map(Placement.is_partial, layout)):
            at_reduction += [
                (2 * num_bytes(maker.name), away + gone[module], come)
                for module, come, away in turns
                if module == maker.module
            ]
    in_flight, gone_then, to_come_then = max(
        at_reduction, key=lambda e: (e[0] - e[1] - e[2], e), default=(0, let_go, to_come)
    )
    return MemoryBreakdown(
        parameters=parameters,
        gradients=parameters,
        optimizer_state=2 * parameters,
        saved_activations=sum(saved.values()),
        let_go_in_backward=let_go,
        to_come_in_backward=to_come,
        in_flight=in_flight,
        let_go_at_reduction=gone_then,
        to_come_at_reduction=to_come_then,
    )
