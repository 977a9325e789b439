"""The audit of a plan: everything it says is worked out again, by code that planned nothing.

A solver sees tables and clusters of a graph. A wrong table, a cluster whose members differ or an
edge left out gives a plan that costs something else than its objective, with nothing in the result
to show it. So the plan is walked on the whole graph, node by node and use by use: is every option
one that the node has, do the steps of every redistribution lead where they should, does every
price, window, sum and byte come out the same?

Independent of the planner: layouts of shards, the walk of steps, windows, sums and memory are
programmed a second time here. Shared with it: the options of a single operator, and the price of a
single node and step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch.distributed.tensor import Partial

from gt_autoparallel.argument_checks import check_arguments
from gt_autoparallel.audit.cost_checks import CostWalk
from gt_autoparallel.audit.memory_checks import memory_problems
from gt_autoparallel.audit.recomputation_checks import recomputation_problems
from gt_autoparallel.audit.shards import layout_problem
from gt_autoparallel.errors import AuditError
from gt_autoparallel.graph.graph_encoding import graph_digest
from gt_autoparallel.graph.layouts import Layout, MeshShape, short_text
from gt_autoparallel.graph.options import NodeOption
from gt_autoparallel.graph.placement_graph import PlacementNode, TensorSpec
from gt_autoparallel.plan.placement_plan import PlacementPlan, plan_problem
from gt_autoparallel.prices.memory import MemoryBreakdown
from gt_autoparallel.rules import node_options, replicated_operators
from gt_autoparallel.rules.experts import expert_options

_MAX_LISTED = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """What an audit that found nothing wrong has seen."""

    total_us: float
    """The plan's cost by the audit's own walk."""

    objective_us: float
    """The plan's cost as the solver had it."""

    memory: MemoryBreakdown
    num_nodes: int
    num_redistributions: int
    num_steps: int

    @property
    def relative_error(self) -> float:
        """How far the solver's objective is off, relative to the audited cost."""
        return abs(self.objective_us - self.total_us) / self.total_us if self.total_us else 0.0

    def __str__(self) -> str:
        return (
            f"audited {self.num_nodes} nodes, {self.num_redistributions} redistributions, "
            f"{self.num_steps} steps: {self.total_us:.3f} us, off by {self.relative_error:.1e}"
        )


def audit_plan(plan: PlacementPlan, *, offered: OfferedOptions | None = None) -> AuditReport:
    """Work a plan out again on its whole graph.

    Args:
        plan: the plan.
        offered: the options of operators; those of this package's rules by default.

    Returns:
        What was seen, if everything agrees.

    Raises:
        AuditError: something does not; the message lists every disagreement.
        PlacementInputError: what is given is no plan.
    """
    check_arguments("audit_plan", plan_problem(plan))
    problems, walk = examined(plan, offered)
    if walk is None or problems:
        lines = "".join(f"\n  - {problem}" for problem in problems[:_MAX_LISTED])
        more = len(problems) - _MAX_LISTED
        if more > 0:
            lines += f"\n  - and {more} more"
        raise AuditError(f"the plan is not what it says:{lines}")
    return AuditReport(
        total_us=walk.total_us,
        objective_us=plan.solver.objective_us,
        memory=plan.memory,  # all parts of which were counted again
        num_nodes=len(plan.graph.nodes),
        num_redistributions=walk.num_redistributions,
        num_steps=walk.num_steps,
    )


def examined(
    plan: PlacementPlan, offered: OfferedOptions | None
) -> tuple[list[str], CostWalk | None]:
    """A line for everything that is wrong, and the walk, if what is walked means anything."""
    problems = []
    if graph_digest(plan.graph) != plan.signature.graph_digest:
        problems.append("the graph is not the one that the plan was made for")
    if len(plan.options) != len(plan.graph.nodes):
        return [*problems, f"{len(plan.options)} options for {len(plan.graph.nodes)} nodes"], None
    problems += node_problems(plan, offered or node_options)
    problems += recomputation_problems(plan)
    if problems:
        # Costs of what a node cannot do mean nothing.
        return problems, None
    problems += link_problems(plan)
    problems += constraint_problems(plan)
    problems += replicated_problems(plan)
    walk = CostWalk(plan)
    problems += walk.problems
    problems += memory_problems(plan)
    return problems, walk


# May every node run as planned, and do layouts that must agree agree?
class OfferedOptions(Protocol):
    """The options of an operator; ``rules.node_options`` is the one in use."""

    def __call__(
        self,
        node: PlacementNode,
        operands: tuple[TensorSpec, ...],
        mesh: MeshShape,
        *,
        replicate_unknown: tuple[str, ...] = (),
    ) -> tuple[NodeOption, ...]:
        """Every option of ``node`` on a mesh, in a fixed order."""
        ...


def node_problems(plan: PlacementPlan, offered: OfferedOptions) -> Iterator[str]:
    """Nodes whose option is not one of theirs, or whose layouts do not fit their tensors."""
    unknown = plan.request.replicate_unknown
    for node, option in zip(plan.graph.nodes, plan.options, strict=True):
        operands = plan.graph.operand_specs(node)
        problem = _shape_problem(node, operands, option, plan.mesh)
        if problem is None and node.kind in ("operator", "experts"):
            options = (
                expert_options(node, operands, plan.mesh)
                if node.kind == "experts"
                else offered(node, operands, plan.mesh, replicate_unknown=unknown)
            )
            # The planner takes options from the very tuple; comparing them one by one is slow.
            is_offered = any(option is each for each in options) or option in options
            if not is_offered:
                problem = "no rule offers its option"
        elif problem is None:
            problem = _kind_problem(node, option)
        if problem is not None:
            yield f"node {node.name!r}: {problem}: {_option_text(option)}"


def link_problems(plan: PlacementPlan) -> Iterator[str]:
    """Pairs of nodes that must have one layout: gradients as what they are of, tangents as outputs.

    The backward of routed experts runs on what its forward kept, so it runs in the same way.
    """
    named: dict[tuple[str, str], Layout] = {}
    experts: dict[str, Layout] = {}
    for node, option in zip(plan.graph.nodes, plan.options, strict=True):
        match node.kind:
            case "parameter" | "input" | "output":
                layout = option.operands[0] if node.kind == "output" else option.outputs[0]
                assert layout is not None, "what has a name is a tensor"
                named[node.kind, str(node.target)] = layout
            case "gradient" | "input_gradient":
                source = "parameter" if node.kind == "gradient" else "input"
                wanted = named.get((source, str(node.target)))
                if wanted is None or wanted != option.operands[0]:
                    yield _link_text(node, option.operands[0], f"its {source}", wanted)
            case "experts":
                is_backward = node.phase == "backward"
                weights = option.operands[4 + is_backward]
                wanted = experts.setdefault(str(node.target), weights)
                if wanted != weights:
                    yield _link_text(node, weights, "the weights of its forward", wanted)
    for node, option in zip(plan.graph.nodes, plan.options, strict=True):
        if node.kind == "tangent":
            output = str(node.target).removesuffix("/tangent")
            wanted = named.get(("output", output))
            if wanted is None or wanted != option.outputs[0]:
                yield _link_text(node, option.outputs[0], "its output", wanted)


def constraint_problems(plan: PlacementPlan) -> Iterator[str]:
    """Constraints of the request that the plan does not keep."""
    index = {node.name: node.index for node in plan.graph.nodes}
    for constraint in plan.request.constraints:
        if constraint.node not in index:
            yield f"constraint on node {constraint.node!r}: there is no such node"
            continue
        option = plan.options[index[constraint.node]]
        side = option.operands if constraint.side == "operand" else option.outputs
        layout = side[constraint.position]
        if layout is None or any(
            wanted is not None and wanted != placement
            for wanted, placement in zip(constraint.placements, layout, strict=True)
        ):
            yield (
                f"constraint on node {constraint.node!r}, {constraint.side} {constraint.position}: "
                f"planned as {_layout_text(layout)}"
            )


def replicated_problems(plan: PlacementPlan) -> Iterator[str]:
    """Nodes that run replicated without a rule and are not listed, and the other way round."""
    unknown = replicated_operators(plan.graph, plan.request.replicate_unknown)
    found, listed = {node.name for node in unknown}, set(plan.replicated_nodes)
    for name in sorted(found - listed):
        yield f"node {name!r} runs replicated without a rule and is not listed"
    for name in sorted(listed - found):
        yield f"node {name!r} is listed as replicated without a rule, which it is not"


def _shape_problem(
    node: PlacementNode, operands: tuple[TensorSpec, ...], option: NodeOption, mesh: MeshShape
) -> str | None:
    """Whether each tensor has one layout, which fits it."""
    if len(option.operands) != len(operands) or len(option.outputs) != len(node.outputs):
        return "one layout for each operand and output"
    pairs = zip((*operands, *node.outputs), (*option.operands, *option.outputs), strict=True)
    for spec, layout in pairs:
        if (spec is None) != (layout is None):
            return "a layout without a tensor, or a tensor without a layout"
        if spec is not None and layout is not None:
            problem = layout_problem(spec.shape, layout, mesh.sizes)
            if problem is not None:
                return problem
    return None


def _kind_problem(node: PlacementNode, option: NodeOption) -> str | None:
    """What kinds without a rule may not do."""
    if node.kind == "share":
        return None if option.operands == option.outputs else "a share node changes nothing"
    layouts = (*option.operands, *option.outputs)
    if any(isinstance(p, Partial) for layout in layouts if layout is not None for p in layout):
        return f"a node of kind {node.kind} holds no partial sums"
    return None


def _link_text(node: PlacementNode, layout: Layout | None, what: str, wanted: Layout | None) -> str:
    return f"node {node.name!r}: {_layout_text(layout)}, but {what} has {_layout_text(wanted)}"


def _option_text(option: NodeOption) -> str:
    operands = ", ".join(_layout_text(layout) for layout in option.operands)
    outputs = ", ".join(_layout_text(layout) for layout in option.outputs)
    return f"({operands}) -> ({outputs})"


def _layout_text(layout: Layout | None) -> str:
    return "no tensor" if layout is None else short_text(layout)
