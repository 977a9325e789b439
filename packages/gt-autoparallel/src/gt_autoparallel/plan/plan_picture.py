"""What a drawing of a plan shows, as data: layers once, their tensors, and what moves.

Layers that place and move the same are one entry with a count, so that a model of a hundred layers
is a page. The page that draws it is ``report_page``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

from gt_autoparallel.graph.layer_names import layer_of_module
from gt_autoparallel.graph.layouts import Layout, num_local_elements
from gt_autoparallel.graph.parameter_chains import gradient_chains, parameter_chains
from gt_autoparallel.graph.placement_graph import NodePhase, Value
from gt_autoparallel.plan.layer_ranges import ranged_rows
from gt_autoparallel.plan.placement_plan import PlacementPlan, PlannedRedistribution
from gt_autoparallel.plan.prediction import CollectivePurpose

OUTSIDE = "the model"
"""The name of what lies in no module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnTensor:
    """A global tensor and how the mesh cuts it."""

    shape: tuple[int, ...]
    dtype: str
    """In words, as ``bfloat16``."""

    layout: Layout
    local_bytes: int
    """On each rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnStep:
    """One collective, or a cut that sends nothing."""

    kind: str
    axis: str
    num_bytes: int
    """On each rank: the larger of what goes in and what comes out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnMove:
    """A redistribution."""

    name: str
    """What it is made for: of an activation the operator, within its layer; else the parameter."""

    purpose: CollectivePurpose
    phase: NodePhase
    source: DrawnTensor
    target: DrawnTensor
    steps: tuple[DrawnStep, ...]
    time_us: float
    may_hide: bool
    """Whether the compute of its layer may hide it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnParameter:
    """A parameter, and what brings it to its layer and its gradient back."""

    name: str
    """Within its layer."""

    tensor: DrawnTensor
    moves: tuple[DrawnMove, ...]
    full_name: str = field(compare=False)
    """Fully qualified; of layers that are alike, of the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnLayer:
    """Layers that are alike, drawn once; or a top-level module outside of layers."""

    name: str
    """``layers.0-31``, or ``output``."""

    count: int
    parameters: tuple[DrawnParameter, ...]
    activations: tuple[DrawnMove, ...]
    """What moves between operators, in the order in which it does."""


def drawn_layers(plan: PlacementPlan) -> tuple[DrawnLayer, ...]:
    """The layers of a plan, each kind once, in the order of their first parameters."""
    of_parameters, activations = _moves(plan)
    parameters: dict[str, list[DrawnParameter]] = {}
    for node in plan.graph.of_kind("parameter"):
        full_name = str(node.target)
        part = part_of(full_name)
        parameters.setdefault(part, []).append(
            DrawnParameter(
                name=_within(full_name, part),
                tensor=_tensor(plan, Value(node.index), plan.options[node.index].output()),
                moves=tuple(of_parameters.get(full_name, ())),
                full_name=full_name,
            )
        )
    names = dict.fromkeys([*parameters, *activations])
    rows = [
        (name, (tuple(parameters.get(name, ())), tuple(activations.get(name, ()))))
        for name in names
    ]
    return tuple(
        DrawnLayer(
            name=row.name, count=row.count, parameters=row.content[0], activations=row.content[1]
        )
        for row in ranged_rows(rows)
    )


def part_of(name: str) -> str:
    """The layer in which a module or parameter lies, or its top-level module outside of layers."""
    return layer_of_module(name) or name.rpartition(".")[0].partition(".")[0] or OUTSIDE


def _within(name: str, part: str) -> str:
    """A name without that of the part that it is in, of which ``layers.0/add`` is also one."""
    return name[len(part) + 1 :] if name.startswith((f"{part}.", f"{part}/")) else name


def _moves(plan: PlacementPlan) -> tuple[dict[str, list[DrawnMove]], dict[str, list[DrawnMove]]]:
    """Moves of parameters and their gradients by parameter, and of activations by their part."""
    unsharded, reduced = parameter_chains(plan.graph), gradient_chains(plan.graph)
    of_parameters: dict[str, list[DrawnMove]] = defaultdict(list)
    activations: dict[str, list[DrawnMove]] = defaultdict(list)
    for each in plan.redistributions:
        consumer = plan.graph.nodes[each.use.consumer]
        purpose: CollectivePurpose = "activation"
        parameter = unsharded.get(each.use.value.node)
        if parameter is not None:
            purpose = "unshard"
        elif consumer.index in reduced:
            parameter, purpose = reduced[consumer.index], "reduce gradient"
        if parameter is None:
            part = part_of(f"{consumer.module}.")
            activations[part].append(_move(plan, each, _within(consumer.name, part), purpose))
        else:
            name = _within(parameter, part_of(parameter))
            of_parameters[parameter].append(_move(plan, each, name, purpose))
    return of_parameters, activations


def _move(
    plan: PlacementPlan, moved: PlannedRedistribution, name: str, purpose: CollectivePurpose
) -> DrawnMove:
    value, consumer = moved.use.value, plan.graph.nodes[moved.use.consumer]
    wanted = plan.options[consumer.index].operands[moved.use.position]
    item_bytes = plan.graph.spec(value).dtype.itemsize
    return DrawnMove(
        name=name,
        purpose=purpose,
        phase=plan.phase_of(moved),
        source=_tensor(plan, value, plan.layout(value)),
        target=_tensor(plan, value, wanted),
        steps=tuple(
            DrawnStep(
                kind=step.kind,
                axis=plan.mesh.names[step.axis],
                num_bytes=max(prod(step.input_shape), prod(step.output_shape)) * item_bytes,
            )
            for step in moved.steps
        ),
        time_us=moved.time_us,
        may_hide=moved.window is not None,
    )


def _tensor(plan: PlacementPlan, value: Value, layout: Layout) -> DrawnTensor:
    spec = plan.graph.spec(value)
    num_elements = num_local_elements(spec.shape, layout, plan.mesh)
    return DrawnTensor(
        shape=spec.shape,
        dtype=str(spec.dtype).removeprefix("torch."),
        layout=layout,
        local_bytes=num_elements * spec.dtype.itemsize,
    )


def windows_of_layers(plan: PlacementPlan) -> Iterator[tuple[str, int, float, float]]:
    """Name, number of layers, and compute and communication of all of them together, in us."""
    rows = [(each.name, (each.compute_us, each.communication_us)) for each in plan.windows]
    for row in ranged_rows(rows):
        compute_us, communication_us = row.content
        if compute_us or communication_us:
            yield row.name, row.count, compute_us * row.count, communication_us * row.count


def times_in_full(plan: PlacementPlan) -> dict[str, float]:
    """What no window hides, in us, by what moves and in which phase; nothing that takes no time."""
    found: dict[str, float] = defaultdict(float)
    for each in plan.redistributions:
        what = "activations" if each.window is None else "parameters, in full"
        if each.in_full_us:
            found[f"{what}, {plan.phase_of(each)}"] += each.in_full_us
    return found
