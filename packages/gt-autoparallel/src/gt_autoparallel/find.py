"""The front door: a model, a mesh and example inputs in, an audited plan out."""

from __future__ import annotations

import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gt_autoparallel.argument_checks import check_arguments, kind_problem
from gt_autoparallel.errors import OpenSearchWarning
from gt_autoparallel.graph.capture import capture_placement_graph
from gt_autoparallel.graph.experts import ExpertBlock, opaque_experts
from gt_autoparallel.graph.layouts import MeshShape
from gt_autoparallel.plan.model_signature import model_signature
from gt_autoparallel.plan.placement_plan import PlacementPlan
from gt_autoparallel.planner import Planner, ReportProgress
from gt_autoparallel.prices.costs import PlacementPrices
from gt_autoparallel.prices.memory import device_budget_bytes
from gt_autoparallel.prices.microbatches import Microbatches
from gt_autoparallel.problem.constraints import Constraints, LayoutConstraint
from gt_autoparallel.request_checks import check_model_arguments, mesh_shape
from gt_autoparallel.simulated_rivals import Judge, with_rivals
from gt_passes.simulation import CostModel
from gt_trace.garbage_collection import held_garbage_collection


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """What is asked of a placement, besides the model, the mesh and the inputs."""

    constraints: Constraints | Sequence[LayoutConstraint] = ()
    """Demands on inputs, outputs, parameters, nodes and routed experts."""

    memory_budget_bytes: int | Literal["device"] | None = "device"
    """Bytes that the placed model may take on each rank; None for no limit. ``"device"``: the
    memory of the machine that prices are for, less the margin of ``device_budget_bytes``."""

    recomputes: bool = True
    """Whether the backward may run parts of the forward again to keep the budget, and gather
    parameters again."""

    cost_model: CostModel | None = None
    """The machine that prices are for; None for H100s."""

    optimizer_state_copies: float = 2.0
    """Optimizer state in units of the parameters' bytes: 2 for Adam, 0 for plain SGD."""

    compute_dtype: torch.dtype | None = None
    """Dtype to which parameters are cast for use; None leaves them."""

    reduce_dtype: torch.dtype | None = None
    """Dtype in which gradients of cast parameters are summed over ranks; None for the parameters'
    own."""

    microbatches: Microbatches | None = None
    """How a step runs the model for several microbatches, of which the example inputs are one, as a
    pipeline does with its stages: parameters are gathered and gradients reduced once. None: the
    example inputs are the whole step."""

    loss_bytes: int = 0
    """What a rank holds for the loss when most is alive, of all that is no result of the model: it
    is there with all that is saved, and gone before a layer computes anything again."""

    accumulates_gradients: bool = False
    """Whether a step runs the model several times, as a whole, and adds up gradients: they are then
    there from the first time on. ``microbatches`` says that of what a pipeline does."""

    experts: Mapping[str, ExpertBlock] | None = None
    """Routed experts, by the names of their modules: each is placed as a whole."""

    replicate_unknown: Collection[str] = ()
    """Names of operators that may run whole on every rank though no rule knows them, or though
    they draw random numbers; then the plan is right only if every rank draws the same: seed all
    ranks alike."""

    device: torch.device | str = "cpu"
    """The device for whose kernels the graph is captured."""

    relative_gap: float = 1e-3
    """How much more than the best plan the plan may cost; 0 asks for an optimum."""

    time_limit_seconds: float = 120.0
    """Seconds for the solver; then the best plan yet is given with its gap."""

    judge: Judge | None = None
    """Simulates the step of a plan. With one, what experts would do is simulated beside the
    cheapest plan, and the fastest step is taken (``simulated_rivals``); None: the cheapest plan."""

    progress: ReportProgress | None = None
    """Takes a line about each stage."""


def find_placement(
    model: nn.Module,
    mesh: DeviceMesh | MeshShape,
    example_inputs: Sequence[Any],
    request: PlacementRequest | None = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
) -> PlacementPlan:
    """Find the cheapest placement of a model's training step on a mesh.

    ::

        mesh = init_device_mesh("cuda", (8, 8), mesh_dim_names=("data", "model"))
        request = PlacementRequest(memory_budget_bytes=60 * 2**30)
        plan = find_placement(model, mesh, (tokens,), request)

    Args:
        model: as if for one device, on the meta device or any other; only shapes are read.
        mesh: its named axes.
        example_inputs: positional arguments of the forward, global tensors of the whole batch.
        request: what the plan must keep, and what it is made for; None for the defaults.
        example_kwargs: keyword arguments of the forward, global tensors likewise.

    Warns:
        OpenSearchWarning: the search for the plan ended with a larger gap than was asked for.

    Raises:
        UnsupportedModelError: the model or its inputs cannot be planned.
        PlacementInputError: an argument is not what it must be, or the mesh does not suit the
            model; lists every violation.
        ConstraintError: a constraint names what does not exist, or asks for the impossible.
        InfeasiblePlacementError: nothing keeps constraints and budget; says which and by how much.
        SolverError: no plan was found in time.
    """
    request = PlacementRequest() if request is None else request
    allowed = "a PlacementRequest(memory_budget_bytes=..., ...), or None"
    check_arguments("find_placement", kind_problem(request, "request", PlacementRequest, allowed))
    plan = find_with(planner_for(model, mesh, example_inputs, request, example_kwargs), request)
    warn_if_open(plan, request.relative_gap)
    return plan


def planner_for(
    model: nn.Module,
    mesh: DeviceMesh | MeshShape,
    example_inputs: Sequence[Any],
    request: PlacementRequest,
    example_kwargs: Mapping[str, Any] | None = None,
) -> Planner:
    """Capture a model for what ``find_with`` shall find; errors are those of ``find_placement``."""
    return planner_of_model(
        model,
        mesh,
        example_inputs,
        example_kwargs=example_kwargs,
        cost_model=request.cost_model,
        optimizer_state_copies=request.optimizer_state_copies,
        microbatches=request.microbatches,
        loss_bytes=request.loss_bytes,
        accumulates_gradients=request.accumulates_gradients,
        compute_dtype=request.compute_dtype,
        reduce_dtype=request.reduce_dtype,
        experts=request.experts,
        replicate_unknown=request.replicate_unknown,
        device=request.device,
        progress=request.progress,
    )


def find_with(planner: Planner, request: PlacementRequest) -> PlacementPlan:
    """The plan of a request by the planner that ``planner_for`` made for it."""
    plan = planner.find(
        constraints=request.constraints,
        memory_budget_bytes=_budget_bytes(request),
        recomputes=request.recomputes,
        relative_gap=request.relative_gap,
        time_limit_seconds=request.time_limit_seconds,
    )
    if request.judge is None:
        return plan
    return with_rivals(
        planner,
        plan,
        request.judge,
        relative_gap=request.relative_gap,
        time_limit_seconds=request.time_limit_seconds,
    )


def warn_if_open(plan: PlacementPlan, relative_gap: float, *, of: str = "a placement") -> None:
    """Warn the caller's caller if the search for a plan ended with a larger gap than was asked for.

    Args:
        plan: which is fit for use.
        relative_gap: that was asked for.
        of: what the plan is of.
    """
    found = plan.solver
    if found.proven:
        return
    warnings.warn(
        f"the search for {of} ended with a gap of {found.gap:.2%}, {relative_gap:.2%} was asked "
        f"for: the plan costs {found.objective_us:.0f} us, and it is only proven that none costs "
        f"less than {found.lower_bound_us:.0f} us; a larger memory budget or more time "
        "(time_limit_seconds) may help",
        OpenSearchWarning,
        stacklevel=3,
    )


def _budget_bytes(request: PlacementRequest) -> int | None:
    if request.memory_budget_bytes != "device":
        return request.memory_budget_bytes
    cost_model = request.cost_model or CostModel()
    return device_budget_bytes(cost_model.hardware.hbm_capacity_bytes)


@held_garbage_collection()
def planner_of_model(
    model: nn.Module,
    mesh: DeviceMesh | MeshShape,
    example_inputs: Sequence[Any],
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    cost_model: CostModel | None = None,
    optimizer_state_copies: float = 2.0,
    microbatches: Microbatches | None = None,
    loss_bytes: int = 0,
    accumulates_gradients: bool = False,
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    experts: Mapping[str, ExpertBlock] | None = None,
    replicate_unknown: Collection[str] = (),
    device: torch.device | str = "cpu",
    progress: ReportProgress | None = None,
) -> Planner:
    """Capture a model once, to plan it several times with other budgets and constraints.

    Arguments are those of ``find_placement`` and the fields of ``PlacementRequest`` that do not
    change from one plan to the next; errors are those of ``find_placement``.
    """
    check_model_arguments(
        model,
        mesh,
        example_inputs,
        example_kwargs,
        function="find_placement",
        cost_model=cost_model,
        optimizer_state_copies=optimizer_state_copies,
        loss_bytes=loss_bytes,
        compute_dtype=compute_dtype,
        reduce_dtype=reduce_dtype,
        experts=experts,
        replicate_unknown=replicate_unknown,
        device=device,
        progress=progress,
    )
    shape = mesh_shape(mesh)
    started = time.perf_counter()
    with opaque_experts(model, experts or {}):
        graph = capture_placement_graph(
            model,
            example_inputs,
            example_kwargs,
            device=device,
            compute_dtype=compute_dtype,
            reduce_dtype=reduce_dtype,
            allowed_random_operators=replicate_unknown,
        )
    if progress is not None:
        progress(f"captured {len(graph.nodes)} nodes ({time.perf_counter() - started:.1f} s)")
    return Planner(
        graph,
        shape,
        signature=model_signature(model, graph),
        prices=PlacementPrices(cost_model, microbatches=microbatches),
        replicate_unknown=replicate_unknown,
        optimizer_state_copies=optimizer_state_copies,
        microbatches=microbatches,
        loss_bytes=loss_bytes,
        accumulates_gradients=accumulates_gradients,
        progress=progress,
    )
