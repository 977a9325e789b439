"""What a user may demand of a placement, and its translation to constraints on single nodes.

A demand names inputs, outputs, parameters, nodes, modules or routed experts by name or pattern, and
gives a placement for each mesh axis, ``None`` where the planner may choose; or a mapping from names
of axes to placements. What does not exist or does not fit is refused, all of it in one error.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Literal, get_args

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from gt_autoparallel.errors import ConstraintError
from gt_autoparallel.graph.experts import FIRST_WEIGHT_OPERAND
from gt_autoparallel.graph.layouts import MeshShape, fits
from gt_autoparallel.graph.placement_graph import (
    NodePhase,
    PlacementGraph,
    PlacementNode,
    TensorSpec,
)
from gt_autoparallel.prices.microbatches import Microbatches

WantedLayout = Sequence[Placement | None] | Mapping[str, Placement]
"""A placement or None for each mesh axis in order, or placements by the names of axes."""

_Side = Literal["operand", "output"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutConstraint:
    """One operand or output of one node, and the placements that it must have.

    ``Constraints`` are resolved to these before solving.
    """

    node: str
    """``PlacementNode.name``."""

    side: Literal["operand", "output"]
    position: int
    """Index into the node's operands, or into its outputs."""

    placements: tuple[Placement | None, ...]
    """One for each mesh axis; None leaves the axis to the planner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleOutput:
    """A layout of what modules give to others, in one phase of the step.

    In the forward phase that is their result; in the backward phase the gradients of what they
    read.
    """

    layout: WantedLayout
    phase: NodePhase = "forward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """Demands on a placement. Names may be patterns with ``*``, ``?`` and ``[...]``.

    Of inputs, outputs and parameters, a name goes before patterns that match it.
    """

    inputs: Mapping[str, WantedLayout] = field(default_factory=dict)
    """Layouts in which inputs are given, by the names of the arguments."""

    outputs: Mapping[str, WantedLayout] = field(default_factory=dict)
    """Layouts in which outputs are returned and their gradients given, by name: ``output`` or
    ``output['logits']``."""

    parameters: Mapping[str, WantedLayout] = field(default_factory=dict)
    """Layouts in which parameters are stored and gradients given, by fully qualified name."""

    nodes: Mapping[str, WantedLayout | ModuleOutput] = field(default_factory=dict)
    """Layouts of the (first) outputs of nodes, by their names; or, by the fully qualified name of a
    module, of what it gives to others, in the forward phase if nothing is said."""

    experts: Mapping[str, WantedLayout] = field(default_factory=dict)
    """Layouts in which the weights of routed experts are computed with, in both phases, by the
    fully qualified name of the experts' module. ``Shard(0)`` along an axis is expert parallelism
    over it, tokens travel to their experts; ``Replicate()`` lets each rank compute with what is
    gathered."""

    expert_tokens: Mapping[str, WantedLayout] = field(default_factory=dict)
    """Layouts in which tokens, (batch, sequence, width), come to routed experts, by the name of the
    experts' module: whose tokens each rank routes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRequest:
    """What a plan was made for, besides model and mesh: enough to ask again with a change."""

    constraints: tuple[LayoutConstraint, ...] = ()
    memory_budget_bytes: int | None = None
    """Per rank; None for no limit."""

    recomputes: bool = True
    """Whether nodes of the forward may run again in the backward to keep the budget."""

    optimizer_state_copies: float = 2.0
    """Optimizer state in units of the parameters' bytes: 2 for Adam."""

    replicate_unknown: tuple[str, ...] = ()
    """Operators without a rule that may run replicated, by the name of their ``OpOverload``."""

    microbatches: Microbatches | None = None
    """How a step runs the graph for several microbatches; None: it is the whole step."""

    loss_bytes: int = 0
    """What a rank holds for the loss when most is alive, of all that is no result of the model."""

    accumulates_gradients: bool = False
    """Whether a step runs all of the graph several times and adds up gradients, which then are
    there from the first time on."""


def resolve_constraints(
    constraints: Constraints, graph: PlacementGraph, mesh: MeshShape
) -> tuple[LayoutConstraint, ...]:
    """The constraints on single nodes that ``constraints`` means.

    Raises:
        ConstraintError: unknown names, wrong numbers of placements, unknown axes, or layouts that
            do not cut a tensor evenly; all of them are listed.
    """
    _check_mappings(constraints)
    resolver = _Resolver(graph, mesh)
    resolver.named("inputs", constraints.inputs, graph.of_kind("input"), "output")
    resolver.named("outputs", constraints.outputs, graph.of_kind("output"), "operand")
    resolver.named("parameters", constraints.parameters, graph.of_kind("parameter"), "output")
    for name, wanted in constraints.nodes.items():
        resolver.node_or_module(name, wanted)
    resolver.routed_experts("experts", constraints.experts, FIRST_WEIGHT_OPERAND)
    resolver.routed_experts("expert_tokens", constraints.expert_tokens, 0)
    if resolver.problems:
        raise ConstraintError("constraints:\n  " + "\n  ".join(resolver.problems))
    return tuple(dict.fromkeys(resolver.found))


def _check_mappings(constraints: Constraints) -> None:
    problems = []
    for part in fields(constraints):
        wanted = getattr(constraints, part.name)
        if not isinstance(wanted, Mapping):
            problems.append(
                f"{part.name} is a {type(wanted).__name__}; allowed: a mapping from names "
                "to layouts"
            )
            continue
        problems += [
            f"{part.name} has the key {key!r}; allowed: names, as strings"
            for key in wanted
            if not isinstance(key, str)
        ]
    if problems:
        raise ConstraintError("constraints:\n  " + "\n  ".join(problems))


class _Resolver:
    """Collects constraints and what is wrong with them."""

    def __init__(self, graph: PlacementGraph, mesh: MeshShape) -> None:
        self._graph = graph
        self._mesh = mesh
        self.found: list[LayoutConstraint] = []
        self.problems: list[str] = []

    def named(
        self,
        what: str,
        wanted: Mapping[str, WantedLayout],
        nodes: Sequence[PlacementNode],
        side: _Side,
    ) -> None:
        """Constraints on sources and sinks by their names."""
        by_name = {str(node.target): node for node in nodes}
        aliases = self._graph.parameter_aliases if what == "parameters" else {}
        names = {**by_name, **{alias: by_name[name] for alias, name in aliases.items()}}
        for pattern, layout in wanted.items():
            where = f"{what}[{pattern!r}]"
            matched = [name for name in names if fnmatchcase(name, pattern)]
            if pattern in names:
                matched = [pattern]
            if not matched:
                self.problems.append(f"{where}: there is none; {_known(pattern, list(names))}")
            found = [names[name] for name in matched if name == pattern or name not in wanted]
            self._constrain(where, layout, [(node, side, 0) for node in found])

    def routed_experts(self, what: str, wanted: Mapping[str, WantedLayout], position: int) -> None:
        """Constraints on the weights of experts, or on their tokens.

        Options say where the experts of a block are by the layout of its first weight.
        """
        blocks = [node for node in self._graph.of_kind("experts") if node.phase == "forward"]
        for pattern, layout in wanted.items():
            where = f"{what}[{pattern!r}]"
            matched = [node for node in blocks if fnmatchcase(str(node.target), pattern)]
            if not matched:
                names = [str(node.target) for node in blocks]
                self.problems.append(f"{where}: there is none; {_known(pattern, names)}")
            self._constrain(where, layout, [(node, "operand", position) for node in matched])

    def node_or_module(self, pattern: str, wanted: WantedLayout | ModuleOutput) -> None:
        """A constraint on one node, or on what modules give to others."""
        where = f"nodes[{pattern!r}]"
        exact = [node for node in self._graph.nodes if node.name == pattern]
        if exact and not isinstance(wanted, ModuleOutput):
            self._constrain(where, wanted, [(exact[0], "output", 0)])
            return
        demand = wanted if isinstance(wanted, ModuleOutput) else ModuleOutput(layout=wanted)
        if demand.phase not in get_args(NodePhase):
            self.problems.append(
                f"{where}: phase is {demand.phase!r}; allowed: {get_args(NodePhase)!r}"
            )
            return
        modules = {node.module for node in self._graph.nodes if node.kind == "operator"}
        modules |= {name for module in modules for name in _parents(module)}
        matched = sorted(name for name in modules if name and fnmatchcase(name, pattern))
        if not matched:
            names = [node.name for node in self._graph.nodes]
            self.problems.append(
                f"{where}: there is no such node or module; "
                + _known(pattern, [*sorted(modules - {""}), *names])
            )
        places = [place for name in matched for place in self._results(name, demand.phase)]
        if matched and not places:
            self.problems.append(f"{where}: it gives nothing to others in the {demand.phase}")
        self._constrain(where, demand.layout, places)

    def _results(self, module: str, phase: NodePhase) -> Iterator[tuple[PlacementNode, _Side, int]]:
        """Values made in a module and read outside of it, in one phase."""
        nodes = self._graph.nodes

        def inside(node: PlacementNode) -> bool:
            return node.module == module or node.module.startswith(module + ".")

        # A share node only passes on what somebody made, inside or outside.
        seen: set[tuple[int, int]] = set()
        for use in self._graph.uses:
            maker, reader = nodes[use.value.node], nodes[use.consumer]
            if reader.kind in ("share", "gradient", "input_gradient") or reader.phase != phase:
                continue
            if inside(reader):
                continue
            if maker.kind not in ("operator", "experts", "share") or maker.phase != phase:
                continue
            if not inside(maker) or (maker.index, use.value.output) in seen:
                continue
            seen.add((maker.index, use.value.output))
            yield maker, "output", use.value.output

    def _constrain(
        self,
        where: str,
        wanted: WantedLayout,
        places: Sequence[tuple[PlacementNode, _Side, int]],
    ) -> None:
        # What a user gives may be anything.
        placements = self._placements(where, wanted)
        if placements is None:
            return
        for node, side, position in places:
            spec = (
                self._graph.spec(node.operands[position])
                if side == "operand"
                else node.outputs[position]
            )
            problem = self._misfit(spec, placements)
            if problem is not None:
                self.problems.append(f"{where}: {problem} of {node.name!r}")
                continue
            self.found.append(
                LayoutConstraint(
                    node=node.name, side=side, position=position, placements=placements
                )
            )

    def _placements(self, where: str, wanted: object) -> tuple[Placement | None, ...] | None:
        """One placement or None for each axis; None if what is wanted is no such thing."""
        names = self._mesh.names
        if isinstance(wanted, Mapping):
            unknown = [name for name in wanted if name not in names]
            if unknown:
                self.problems.append(f"{where}: axes {unknown!r} do not exist; {list(names)!r} do")
                return None
            wanted = [wanted.get(name) for name in names]
        if isinstance(wanted, str) or not isinstance(wanted, Sequence):
            self.problems.append(
                f"{where}: {wanted!r}; allowed: a list with a placement or None for each of the "
                f"mesh axes {list(names)!r}, or a mapping from them to placements"
                + ("; phases are for nodes" if isinstance(wanted, ModuleOutput) else "")
            )
            return None
        placements = tuple(wanted)
        if len(placements) != len(names):
            self.problems.append(
                f"{where}: {len(placements)} placements for {len(names)} mesh axes {list(names)!r}"
            )
            return None
        wrong = [
            p for p in placements if not isinstance(p, (Shard, Replicate, Partial, type(None)))
        ]
        if wrong:
            self.problems.append(
                f"{where}: {wrong!r}; allowed: Shard, Replicate, Partial, or None for any"
            )
            return None
        negative = [p for p in placements if isinstance(p, Shard) and p.dim < 0]
        if negative:
            self.problems.append(
                f"{where}: {negative!r}; allowed: dims that are counted from the first one, 0"
            )
            return None
        return placements

    def _misfit(
        self, spec: TensorSpec | None, placements: Sequence[Placement | None]
    ) -> str | None:
        if spec is None:
            return "no tensor is the result"
        layout = tuple(Replicate() if p is None else p for p in placements)
        if fits(spec.shape, layout, self._mesh):
            return None
        sizes = dict(zip(self._mesh.names, self._mesh.sizes, strict=True))
        text = placements_text(placements)
        return f"{text} does not cut shape {spec.shape!r} evenly on mesh {sizes!r}, the shape"


def placements_text(placements: Sequence[Placement | None]) -> str:
    """What was demanded, as errors show it."""
    return "(" + ", ".join("any" if p is None else str(p) for p in placements) + ")"


def _parents(module: str) -> Iterator[str]:
    parts = module.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts)))


def _known(name: str, names: Sequence[str]) -> str:
    """The names that come closest, or the first ones."""
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5) or list(names[:5])
    return f"there are {close!r}" if close else "there are none at all"
