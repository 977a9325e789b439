"""Plans on disk: one JSON file, which is refused unless every bit and everything around it agrees.

::

    {"format": "gt-autoparallel plan", "version": 2, "sha256": "...", "content": {...}}

The digest covers the canonical spelling of the content, so that white space may change and nothing
else. Loading for a model checks, besides, its parameters, its captured graph and the mesh: a plan
for another model is never applied. There is no switch to skip this.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
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
from gt_autoparallel.errors import PlanMismatchError
from gt_autoparallel.graph.capture import capture_placement_graph
from gt_autoparallel.graph.experts import ExpertBlock, opaque_experts
from gt_autoparallel.graph.graph_encoding import canonical_json, graph_digest
from gt_autoparallel.graph.layouts import MeshShape
from gt_autoparallel.graph.placement_graph import PlacementGraph
from gt_autoparallel.plan.model_signature import graph_differences, model_differences
from gt_autoparallel.plan.placement_plan import PlacementPlan, plan_problem
from gt_autoparallel.plan.plan_encoding import decode_plan, encode_plan
from gt_autoparallel.prices.costs import PlacementPrices, StepPrices
from gt_autoparallel.request_checks import check_model_arguments, mesh_shape
from gt_passes.simulation import CostModel

FORMAT = "gt-autoparallel plan"
FORMAT_VERSION = 2
"""1 did not know the classes and modes of modules."""


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
    target = Path(path)
    content = encode_plan(plan)
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


def read_plan(path: str | os.PathLike[str], *, prices: StepPrices) -> PlacementPlan:
    """Read a plan for a report, an audit or a comparison; ``check_plan_fits`` before applying it.

    Args:
        path: of a file that ``write_plan`` wrote.
        prices: those that the plan was made with.

    Raises:
        PlanMismatchError: the file is no plan, of another version, damaged or edited, or made with
            other prices.
        PlacementInputError: an argument is not what it must be.
        OSError: it cannot be read.
    """
    check_arguments("read_plan", path_problem(path), prices_problem(prices))
    document = _document(Path(path))
    try:
        return decode_plan(document["content"], prices)
    except PlanMismatchError as error:
        raise PlanMismatchError(f"{os.fspath(path)}: {error}") from error


def load_plan(
    path: str | os.PathLike[str],
    model: nn.Module,
    mesh: DeviceMesh | MeshShape,
    example_inputs: Sequence[Any],
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    cost_model: CostModel | None = None,
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
        compute_dtype: dtype to which parameters are cast for use.
        reduce_dtype: dtype in which gradients of cast parameters are summed over ranks.
        experts: routed experts, by the names of their modules.
        device: for whose kernels the graph is captured.

    Raises:
        PlanMismatchError: the file is damaged, or model, inputs, mesh or cost model are not those
            of the plan; names what differs.
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
    plan = read_plan(path, prices=PlacementPrices(cost_model))
    shape = mesh_shape(mesh)
    # What costs nothing to compare is compared before the model is captured.
    check_plan_fits(plan, model=model, mesh=shape, graph=plan.graph)
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
    check_plan_fits(plan, model=model, mesh=shape, graph=graph)
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
    problems = []
    if mesh != plan.mesh:
        problems.append(f"mesh is {mesh}, planned for {plan.mesh}")
    problems += model_differences(plan, model)
    if graph_digest(graph) != plan.signature.graph_digest:
        problems += graph_differences(plan.graph, graph)
    if problems:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise PlanMismatchError(f"the plan was made for something else; plan again:{lines}")


def _document(path: Path) -> dict[str, Any]:
    """What a file holds, its digest checked before anything else of it is believed."""
    try:
        document = json.loads(path.read_bytes())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
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
    if document.get("sha256") != _digest(document.get("content")):
        raise PlanMismatchError(
            f"{path} was damaged or edited: its content does not have the digest it names; "
            "to change a plan, plan again with constraints"
        )
    return document


def _digest(content: object) -> str:
    return hashlib.sha256(canonical_json(content)).hexdigest()
