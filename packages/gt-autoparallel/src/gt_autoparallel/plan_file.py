"""Plans on disk, which are refused unless every bit and everything around them agrees.

A file may hold the plans of several parts of a model: ``"content": {"parts": {...}}``, by their
names. Loading for a model checks, besides the file (``plan.plan_document``), its parameters, its
captured graph and the mesh: a plan for another model is never applied. There is no switch to skip
this.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gt_autoparallel.argument_checks import (
    check_arguments,
    kind_problem,
    path_problem,
    prices_problem,
)
from gt_autoparallel.audit import audit_plan
from gt_autoparallel.errors import ConstraintError, PlanMismatchError, UnsupportedModelError
from gt_autoparallel.graph.capture import capture_placement_graph
from gt_autoparallel.graph.experts import ExpertBlock, opaque_experts
from gt_autoparallel.graph.graph_encoding import canonical_json, graph_digest, spec_text
from gt_autoparallel.graph.layouts import MeshShape, short_text
from gt_autoparallel.graph.placement_graph import PlacementGraph
from gt_autoparallel.plan.model_signature import graph_differences, model_differences
from gt_autoparallel.plan.placement_plan import PlacementPlan, plan_problem
from gt_autoparallel.plan.plan_encoding import decode_plan, encode_plan
from gt_autoparallel.prices.costs import PlacementPrices, StepPrices
from gt_autoparallel.prices.microbatches import Microbatches
from gt_autoparallel.problem.constraints import Constraints, resolve_constraints
from gt_autoparallel.request_checks import check_model_arguments, mesh_shape
from gt_passes.simulation import CostModel
from gt_trace.artifacts.regular_file import read_regular
from gt_trace.artifacts.strict_json import parse_json


def write_plan(plan: PlacementPlan, path: str | os.PathLike[str]) -> Path:
    """Write a plan; whoever reads ``path`` sees the old file or all of the new one.

    Args:
        plan: the plan.
        path: where; its folder is made if missing.

    Returns:
        The path.

    Raises:
        PlacementInputError: an argument is not what it must be.
        OSError: the file cannot be written.
    """
    check_arguments("write_plan", plan_problem(plan), path_problem(path))
    return write_document(encode_plan(plan), Path(path))


def write_plans(plans: Mapping[str, PlacementPlan], path: str | os.PathLike[str]) -> Path:
    """Write the plans of several parts of a model, by their names, to one file.

    Arguments, result and errors are otherwise those of ``write_plan``.
    """
    check_arguments("write_plans", *map(plan_problem, plans.values()), path_problem(path))
    parts = {name: encode_plan(plan) for name, plan in plans.items()}
    return write_document({"parts": parts}, Path(path))


def read_plan(
    path: str | os.PathLike[str], *, prices: StepPrices, part: str | None = None
) -> PlacementPlan:
    """Read a plan for a report, an audit or a comparison; ``check_plan_fits`` before applying it.

    Args:
        path: of a file that ``write_plan`` wrote, or ``write_plans``.
        prices: those that the plan was made with.
        part: the name of the part, of a file of several; None: the file holds one plan.

    Raises:
        PlanMismatchError: the file is no plan, of another version, damaged or edited, has fields
            that no plan has, or was made with other prices.
        PlacementInputError: an argument is not what it must be.
        OSError: it cannot be read.
    """
    check_arguments("read_plan", path_problem(path), prices_problem(prices))
    content = _of_part(read_document(Path(path))["content"], part, path)
    try:
        plan = decode_plan(content, prices)
        written = encode_plan(plan)
    except (PlanMismatchError, UnsupportedModelError) as error:
        raise PlanMismatchError(f"{os.fspath(path)}: {error}") from error
    unknown = list(_unknown_fields(content, written, "content"))
    if unknown:
        raise PlanMismatchError(
            f"{os.fspath(path)} has fields that no plan has: {', '.join(unknown)}"
        )
    return plan


def tensors_of_parts(path: str | os.PathLike[str]) -> dict[str, frozenset[str]]:
    """Names of parameters and buffers in each part of a model whose plans are in one file.

    No plan is read for it, only the names.

    Args:
        path: of a file that ``write_plans`` wrote.

    Raises:
        PlanMismatchError: the file is no plan, of another version, damaged or edited, or holds one
            plan of a whole model.
        PlacementInputError: an argument is not what it must be.
        OSError: it cannot be read.
    """
    check_arguments("tensors_of_parts", path_problem(path))
    content = read_document(Path(path))["content"]
    if not isinstance(content, dict) or "parts" not in content:
        raise PlanMismatchError(f"{os.fspath(path)} has the plan of a whole model, and no parts")
    try:
        return {
            name: frozenset(part["signature"]["parameters"])
            for name, part in content["parts"].items()
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise PlanMismatchError(
            f"{os.fspath(path)}: the plans' content cannot be read: {type(error).__name__}: {error}"
        ) from error


def check_plan_file(
    path: str | os.PathLike[str],
    model: nn.Module,
    mesh: DeviceMesh | MeshShape,
    example_inputs: Sequence[Any],
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    cost_model: CostModel | None = None,
    microbatches: Microbatches | None = None,
    part: str | None = None,
    constraints: Constraints | None = None,
    memory_budget_bytes: int | None = None,
    made_for_budget_bytes: int | None = None,
    optimizer_state_copies: float = 2.0,
    loss_bytes: int = 0,
    accumulates_gradients: bool = False,
) -> PlacementPlan:
    """Read a plan, and see that it is for a model, as far as can be told without capturing it.

    For whoever starts the processes that ``load_plan`` it: seconds, and no process group.

    Args:
        path: of a file that ``write_plan`` wrote.
        model: as for ``find_placement``, like all that follows.
        mesh: its named axes.
        example_inputs: positional arguments of the forward, global tensors of the whole batch.
        example_kwargs: keyword arguments, likewise.
        cost_model: of the machine for which the plan was made.
        microbatches: how a step runs the model for several; None: it is the whole step.
        part: which of a file's plans it is, as for ``read_plan``.
        constraints: what the plan must keep, whatever it was asked for.
        memory_budget_bytes: what it may take on each rank, likewise; None for no limit.
        made_for_budget_bytes: the budget that it must have been made for; None for any.
        optimizer_state_copies: optimizer state in units of the parameters' bytes: 2 for Adam.
        loss_bytes: as in ``PlacementRequest``.
        accumulates_gradients: likewise.

    Raises:
        PlanMismatchError: the file is damaged, or model, inputs, mesh or cost model are not those
            of the plan, or it does not keep what is demanded; names what differs.
        PlacementInputError: an argument is not what it must be; lists every violation.
        OSError: the file cannot be read.
    """
    check_model_arguments(
        model,
        mesh,
        example_inputs,
        example_kwargs,
        function="check_plan_file",
        cost_model=cost_model,
        compute_dtype=None,
        reduce_dtype=None,
        experts=None,
        device="cpu",
        path=path,
    )
    plan = read_plan(path, prices=PlacementPrices(cost_model, microbatches=microbatches), part=part)
    problems = [
        *_request_problems(
            plan,
            made_for_budget_bytes,
            microbatches=microbatches,
            optimizer_state_copies=optimizer_state_copies,
            accumulates_gradients=accumulates_gradients,
        ),
        *_model_problems(plan, model, mesh_shape(mesh)),
        *_input_problems(plan, model, example_inputs, example_kwargs or {}),
    ]
    # Demands name inputs and axes, of which only the same ones can be asked for anything; and what
    # the loss takes follows from them.
    if not problems:
        problems += _demand_problems(plan, constraints, memory_budget_bytes)
        if loss_bytes != plan.request.loss_bytes:
            planned = f"{plan.request.loss_bytes:,}"
            problems.append(f"the loss takes {loss_bytes:,} bytes, planned for {planned}")
    _raise_mismatch(problems)
    return plan


def load_plan(
    path: str | os.PathLike[str],
    model: nn.Module,
    mesh: DeviceMesh | MeshShape,
    example_inputs: Sequence[Any],
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    cost_model: CostModel | None = None,
    microbatches: Microbatches | None = None,
    part: str | None = None,
    constraints: Constraints | None = None,
    memory_budget_bytes: int | None = None,
    made_for_budget_bytes: int | None = None,
    optimizer_state_copies: float = 2.0,
    loss_bytes: int = 0,
    accumulates_gradients: bool = False,
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    experts: Mapping[str, ExpertBlock] | None = None,
    device: torch.device | str = "cpu",
) -> PlacementPlan:
    """Read a plan for a model: everything that the plan depends on is seen to be the same.

    The model is captured, which is most of what planning costs but the solve.

    Args:
        path: of a file that ``write_plan`` wrote.
        model: as for ``find_placement``, like all that follows.
        mesh: its named axes.
        example_inputs: positional arguments of the forward, global tensors of the whole batch.
        example_kwargs: keyword arguments, likewise.
        cost_model: of the machine for which the plan was made.
        microbatches: how a step runs the model for several; None: it is the whole step.
        part: which of a file's plans it is, as for ``read_plan``.
        constraints: what the plan must keep, whatever it was asked for.
        memory_budget_bytes: what it may take on each rank, likewise; None for no limit.
        made_for_budget_bytes: the budget that it must have been made for; None for any.
        optimizer_state_copies: optimizer state in units of the parameters' bytes: 2 for Adam.
        loss_bytes: as in ``PlacementRequest``.
        accumulates_gradients: likewise.
        compute_dtype: dtype to which parameters are cast for use.
        reduce_dtype: dtype in which gradients of cast parameters are summed over ranks.
        experts: routed experts, by the names of their modules.
        device: for whose kernels the graph is captured.

    Raises:
        PlanMismatchError: the file is damaged, or model, inputs, mesh or cost model are not those
            of the plan, or it does not keep what is demanded; names what differs.
        PlacementInputError: an argument is not what it must be; lists every violation.
        AuditError: the plan is not what it says.
        OSError: the file cannot be read.
    """
    check_model_arguments(
        model,
        mesh,
        example_inputs,
        example_kwargs,
        function="load_plan",
        cost_model=cost_model,
        compute_dtype=compute_dtype,
        reduce_dtype=reduce_dtype,
        experts=experts,
        device=device,
        path=path,
    )
    # What costs nothing to compare is compared before the model is captured.
    plan = check_plan_file(
        path,
        model,
        mesh,
        example_inputs,
        example_kwargs=example_kwargs,
        cost_model=cost_model,
        microbatches=microbatches,
        part=part,
        constraints=constraints,
        memory_budget_bytes=memory_budget_bytes,
        made_for_budget_bytes=made_for_budget_bytes,
        optimizer_state_copies=optimizer_state_copies,
        loss_bytes=loss_bytes,
        accumulates_gradients=accumulates_gradients,
    )
    with opaque_experts(model, experts or {}):
        graph = capture_placement_graph(
            model,
            example_inputs,
            example_kwargs,
            device=device,
            compute_dtype=compute_dtype,
            reduce_dtype=reduce_dtype,
            allowed_random_operators=plan.request.replicate_unknown,
        )
    check_plan_fits(plan, model=model, mesh=mesh_shape(mesh), graph=graph)
    # The captured graph knows, besides, how the model is called.
    fitted = replace(plan, graph=graph)
    audit_plan(fitted)
    return fitted


def check_plan_fits(
    plan: PlacementPlan, *, model: nn.Module, mesh: MeshShape, graph: PlacementGraph
) -> None:
    """See that a plan was made for this model on this mesh.

    Args:
        plan: the plan.
        model: the model that it shall place; shapes and dtypes of its tensors are looked at, what
            is frozen, and classes and modes of its modules.
        mesh: the mesh on which it shall run.
        graph: captured from ``model`` with the example inputs of the run.

    Raises:
        PlanMismatchError: naming everything that differs.
        PlacementInputError: an argument is not what it must be.
    """
    check_arguments(
        "check_plan_fits",
        plan_problem(plan),
        kind_problem(model, "model", nn.Module, "a torch.nn.Module"),
        kind_problem(mesh, "mesh", MeshShape, "a MeshShape, as MeshShape.of(device_mesh)"),
        kind_problem(graph, "graph", PlacementGraph, "a PlacementGraph, captured from the model"),
    )
    problems = _model_problems(plan, model, mesh)
    if graph_digest(graph) != plan.signature.graph_digest:
        problems += graph_differences(plan.graph, graph)
    _raise_mismatch(problems)


def _request_problems(
    plan: PlacementPlan,
    made_for_budget_bytes: int | None,
    *,
    microbatches: Microbatches | None,
    optimizer_state_copies: float,
    accumulates_gradients: bool,
) -> Iterator[str]:
    """What decides the memory of a step, and is neither in the model nor in its inputs."""
    planned = plan.request
    if microbatches != planned.microbatches:
        of_found, of_planned = (
            "none" if m is None else str(m) for m in (microbatches, planned.microbatches)
        )
        yield f"microbatches are {of_found}, planned for {of_planned}"
    if accumulates_gradients != planned.accumulates_gradients:
        of_found, of_planned = (
            "several microbatches add up gradients" if each else "each step makes new gradients"
            for each in (accumulates_gradients, planned.accumulates_gradients)
        )
        yield f"{of_found}, planned for a run in which {of_planned}"
    if optimizer_state_copies != planned.optimizer_state_copies:
        yield (
            f"the optimizer's state is {optimizer_state_copies:g} times the parameters' bytes, "
            f"planned for {planned.optimizer_state_copies:g} times"
        )
    budget = planned.memory_budget_bytes
    if made_for_budget_bytes not in (None, budget):
        planned_for = "none" if budget is None else f"{budget:,} bytes"
        yield (
            f"the memory budget is {made_for_budget_bytes:,} bytes on each rank, planned for "
            f"{planned_for}"
        )


def _model_problems(plan: PlacementPlan, model: nn.Module, mesh: MeshShape) -> list[str]:
    problems = model_differences(plan, model)
    if str(mesh) != str(plan.mesh):
        problems.insert(0, f"mesh is {mesh}, planned for {plan.mesh}")
    elif mesh != plan.mesh:
        problems.insert(
            0,
            f"mesh is {mesh} with strides {list(mesh.strides)} of ranks, planned for "
            f"{list(plan.mesh.strides)}",
        )
    return problems


def _input_problems(
    plan: PlacementPlan, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[str]:
    """Tensors among the arguments by name; what is inside of others, the captured graph tells."""
    try:
        given = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    except TypeError as error:
        yield f"the model is not called as in the example inputs: {error}"
        return
    for node in plan.graph.of_kind("input"):
        found, planned = given.get(str(node.target)), node.output()
        if not isinstance(found, torch.Tensor):
            continue
        found_text = f"{str(found.dtype).removeprefix('torch.')}{list(found.shape)}"
        if found_text != spec_text(planned):
            yield f"input {node.target} is {found_text}, planned for {spec_text(planned)}"


def _demand_problems(
    plan: PlacementPlan, constraints: Constraints | None, memory_budget_bytes: int | None
) -> Iterator[str]:
    """What a plan does not keep, whatever it was asked for when it was made."""
    nodes = {node.name: node for node in plan.graph.nodes}
    try:
        demands = resolve_constraints(constraints or Constraints(), plan.graph, plan.mesh)
    except ConstraintError as error:
        yield str(error)
        return
    for demand in demands:
        node = nodes[demand.node]
        option = plan.options[node.index]
        layouts = option.outputs if demand.side == "output" else option.operands
        layout = layouts[demand.position]
        if layout is None:
            continue
        for axis, wanted, found in zip(plan.mesh.names, demand.placements, layout, strict=True):
            if wanted not in (None, found):
                yield (
                    f"{node.kind} {node.target} is {short_text((found,))} along {axis}, and "
                    f"{short_text((wanted,))} is demanded"
                )
    if memory_budget_bytes is not None and plan.memory.total > memory_budget_bytes:
        yield (
            f"it takes {plan.memory.total:,} bytes of memory on each rank, and "
            f"{memory_budget_bytes:,} are allowed"
        )


def _raise_mismatch(problems: Sequence[str]) -> None:
    if problems:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise PlanMismatchError(f"the plan was made for something else; plan again:{lines}")


def _of_part(content: Any, part: str | None, path: str | os.PathLike[str]) -> Any:
    """The plan of one part in what a file holds, or of the whole."""
    parts: Any = content.get("parts") if isinstance(content, dict) else None
    if part is None and parts is None:
        return content
    if part is None:
        raise PlanMismatchError(
            f"{os.fspath(path)} has plans of the parts {', '.join(sorted(parts))}, and none of a "
            "whole model"
        )
    if not isinstance(parts, dict) or part not in parts:
        held = "the plan of a whole model" if parts is None else ", ".join(sorted(parts))
        raise PlanMismatchError(f"{os.fspath(path)} has no plan of {part}; it has {held}")
    return parts[part]


def _unknown_fields(found: object, written: object, where: str) -> Iterator[str]:
    """Paths of what stands in a file and would not be written: nobody has read it."""
    if isinstance(found, dict) and isinstance(written, dict):
        for name, value in found.items():
            if name in written:
                yield from _unknown_fields(value, written[name], f"{where}.{name}")
            else:
                yield f"{where}.{name}"
    elif isinstance(found, list) and isinstance(written, (list, tuple)):
        for index, pair in enumerate(zip(found, written, strict=False)):
            yield from _unknown_fields(*pair, f"{where}[{index}]")


# A plan's file: one JSON document, which is refused unless every bit of its content agrees.
#
# ::
#
#     {"format": "gt-autoparallel plan", "version": 8, "sha256": "...", "content": {...}}
#
# The digest covers the canonical spelling of the content, so that white space may change and
# nothing else.
FORMAT = "gt-autoparallel plan"
FORMAT_VERSION = 8
"""1 did not know the classes and modes of modules; 2 what of a redistribution hides, nor strides of
meshes; 3 what is recomputed; 4 microbatches, nor gradients of inputs; 5 what the loss takes,
gradients of microbatches before, nor rivals; 6 what is in flight, nor what is gathered ahead; 7
what is gone and to come in a layer's turn."""


def write_document(content: Mapping[str, Any], target: Path) -> Path:
    """Write plain data; whoever reads ``target`` sees the old file or all of the new one.

    Args:
        content: of JSON values.
        target: where; its folder is made if missing.

    Returns:
        ``target``.

    Raises:
        OSError: the file cannot be written.
    """
    document = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "sha256": _digest(content),
        "content": content,
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with scratch.open("wb") as file:
            file.write(json.dumps(document, indent=1, sort_keys=True).encode("utf-8") + b"\n")
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(target)
    finally:
        scratch.unlink(missing_ok=True)
    return target


def read_document(path: Path) -> dict[str, Any]:
    """What a file holds, its digest checked before anything else of it is believed.

    Raises:
        PlanMismatchError: the file is no plan, of another version, damaged or edited.
        OSError: it cannot be read.
    """
    try:
        document = parse_json(read_regular(path))
    except ValueError as error:
        raise PlanMismatchError(f"{path} is damaged or no plan: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise PlanMismatchError(f"{path} is no plan: its format is not {FORMAT!r}")
    version = document.get("version")
    if version != FORMAT_VERSION:
        age = "an older" if type(version) is int and version < FORMAT_VERSION else "another"
        raise PlanMismatchError(
            f"{path} was written by {age} version of gt-autoparallel: its format version is "
            f"{version!r}, and {FORMAT_VERSION} is read here; plan again"
        )
    unknown = sorted(document.keys() - {"format", "version", "sha256", "content"})
    if unknown:
        raise PlanMismatchError(f"{path} has fields that no plan has: {', '.join(unknown)}")
    if document.get("sha256") != _digest(document.get("content")):
        raise PlanMismatchError(
            f"{path} was damaged or edited: its content does not have the digest it names; "
            "to change a plan, plan again with constraints"
        )
    return document


def _digest(content: object) -> str:
    return hashlib.sha256(canonical_json(content)).hexdigest()
