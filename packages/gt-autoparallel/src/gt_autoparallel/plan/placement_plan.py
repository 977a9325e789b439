"""What the planner decided, with everything that is needed to check, explain, store and apply it.

A plan is data. It holds the graph that was planned, the option chosen for each node, and the steps
of every redistribution between them; every number in it can be recomputed from these three and the
prices of single nodes and steps (``StepPrices``), which is what the audit does.

Who reads it: ``apply`` (options and steps), ``audit`` (everything), ``report``, ``explain``,
``comparison``, ``plan_file``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gt_autoparallel.argument_checks import kind_problem
from gt_autoparallel.graph.layouts import Layout, MeshShape
from gt_autoparallel.graph.options import NodeOption
from gt_autoparallel.graph.placement_graph import NodePhase, PlacementGraph, Use, Value
from gt_autoparallel.graph.redistribution import RedistributionStep
from gt_autoparallel.plan.judgement import PlanJudgement
from gt_autoparallel.prices.costs import StepPrices
from gt_autoparallel.prices.memory import MemoryBreakdown
from gt_autoparallel.problem.constraints import ResolvedRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRedistribution:
    """How one use gets its value: the steps from the layout that is there to the one wanted."""

    use: Use
    steps: tuple[RedistributionStep, ...]
    """The steps in order, at least one."""

    in_full_us: float
    """What nothing hides of its steps' times, once (not times any multiplicity)."""

    hidden_us: float
    """What the compute of ``window`` may hide; 0 without one."""

    window: str | None
    """The window of a parameter's first and a gradient's last redistribution. None: no window hides
    anything of it."""

    again: bool = False
    """Whether it is the second time, in the backward, for a consumer that runs again."""

    @property
    def time_us(self) -> float:
        """All of its steps' times."""
        return self.in_full_us + self.hidden_us


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWindow:
    """One layer (or module outside of layers) in one phase: costs max(compute, communication)."""

    name: str
    """``"layers.3 forward"``: the layer or the top-level module, and the phase."""

    compute_us: float
    communication_us: float
    """Only what may hide under its compute."""

    @property
    def time_us(self) -> float:
        """What the window costs."""
        return max(self.compute_us, self.communication_us)


def step_us(
    windows: Sequence[PlannedWindow], redistributions: Sequence[PlannedRedistribution]
) -> float:
    """What a step costs: the sum of its windows and of all that no window hides."""
    in_full = sum(each.in_full_us for each in redistributions)
    return sum(window.time_us for window in windows) + in_full


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverReport:
    """How the solver got there."""

    objective_us: float
    """Cost of the plan by the solver's own tables."""

    lower_bound_us: float
    """No plan costs less than this under the same prices and constraints. Of layers that may differ
    it is the bound of what the search counts, in which a node that is read across layers runs again
    in all alike layers if it does in one; a plan that is cheaper than that is its own bound."""

    method: str
    """What found the plan: ``"lp"`` (the relaxation was integral), ``"milp"`` or another."""

    seconds: float
    num_variables: int
    """Choices, after repeated layers share theirs."""

    num_options: int
    num_nodes: int
    """Nodes of the graph that the variables stand for."""

    memory_price_us_per_gib: float = 0.0
    """Dual of the memory budget in the relaxation: what one GiB more would save, at the margin."""

    proven: bool
    """Whether the gap is no larger than what was asked for: a time limit did not end the search."""

    @property
    def gap(self) -> float:
        """How much cheaper another plan could be at most, relative to this one."""
        if self.objective_us <= 0:
            return 0.0
        return max(0.0, (self.objective_us - self.lower_bound_us) / self.objective_us)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSignature:
    """What a plan was made for: enough to refuse another model."""

    parameters: Mapping[str, str]
    """From name to shape and dtype in words, of parameters and buffers, aliases too; of parameters
    that are not trained, that they are frozen."""

    modules: Mapping[str, str]
    """From name to class and mode (training or evaluation) in words; the model itself is ""."""

    graph_digest: str
    """SHA-256 of the graph: operators, their arguments, shapes and dtypes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacementPlan:
    """A placement of every tensor and operator of a training step on a mesh.

    Two plans are equal if they place the same graph on the same mesh in the same way, by the same
    prices and for the same request; how long the solver took does not matter, nor what rivals the
    plan had.
    """

    mesh: MeshShape
    graph: PlacementGraph
    options: tuple[NodeOption, ...]
    """The chosen one of each node, in the order of ``graph.nodes``. Sources (parameters, inputs)
    have no operands, and sinks (outputs, gradients) no outputs."""

    redistributions: tuple[PlannedRedistribution, ...]
    """One for each use whose layout differs from what is there, in the order of consumers and
    positions."""

    compute_us: tuple[float, ...]
    """Price of each node, in the order of ``graph.nodes``."""

    windows: tuple[PlannedWindow, ...]
    """The windows, in the order of their first node."""

    recomputed: tuple[int, ...] = ()
    """Indices of the forward's nodes that run once more in the backward, in order: what they make
    is not kept, and what they read is. A backward of routed experts among them makes again what
    lies between the matrix products of its forward, whose results are kept."""

    memory: MemoryBreakdown
    request: ResolvedRequest
    prices: StepPrices
    solver: SolverReport
    signature: ModelSignature
    replicated_nodes: tuple[str, ...] = ()
    """Nodes without a rule that run replicated because the request allowed it."""

    judgement: PlanJudgement | None = None
    """The simulated steps of this plan and its rivals; None if it was not set beside any."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PlacementPlan):
            return NotImplemented
        return self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash((self.mesh, self.signature.graph_digest, self.prices.digest, self.options))

    @property
    def objective_us(self) -> float:
        """What the plan costs: the sum of its windows and of all that no window hides."""
        return step_us(self.windows, self.redistributions)

    def layout(self, value: Value) -> Layout:
        """The layout in which ``value`` leaves its node."""
        return self.options[value.node].output(value.output)

    def phase_of(self, redistribution: PlannedRedistribution) -> NodePhase:
        """When a redistribution runs: with its consumer, in the backward for the second time."""
        consumer = self.graph.nodes[redistribution.use.consumer]
        return "backward" if redistribution.again else consumer.phase

    def steps_of_uses(self) -> dict[tuple[int, int], tuple[RedistributionStep, ...]]:
        """From consumer and position of a use to its steps; uses without steps are absent."""
        return {(r.use.consumer, r.use.position): r.steps for r in self.redistributions}

    def parameter_layouts(self) -> dict[str, Layout]:
        """The layout of each parameter by name, under each of its names if it is tied."""
        nodes = {node.name: node for node in self.graph.of_kind("parameter")}
        layouts = {str(n.target): self.layout(Value(n.index)) for n in nodes.values()}
        for alias, name in self.graph.parameter_aliases.items():
            layouts[alias] = self.layout(Value(nodes[name].index))
        return layouts

    def gradient_layouts(self) -> dict[str, Layout]:
        """The layout in which each parameter's gradient arrives; the audit sees them equal."""
        return {
            str(node.target): self.options[node.index].operands[0]
            for node in self.graph.of_kind("gradient")
        }

    def _identity(self) -> tuple[object, ...]:
        return (
            self.mesh,
            self.signature.graph_digest,
            dict(self.signature.parameters),
            dict(self.signature.modules),
            self.prices.digest,
            self.request,
            self.options,
            self.recomputed,
            self.redistributions,
            self.compute_us,
            self.windows,
            self.memory,
            self.replicated_nodes,
        )


def plan_problem(value: object, name: str = "plan") -> str | None:
    """What is wrong with an argument that must be a plan."""
    allowed = "a PlacementPlan, from find_placement or a plan file"
    return kind_problem(value, name, PlacementPlan, allowed)
