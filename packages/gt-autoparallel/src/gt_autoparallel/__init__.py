"""Solver-chosen placement of tensors and operators.

``find_placement`` captures a model's training step on global tensors, lets an exact solver choose a
DTensor placement for each of them on a mesh, and works the plan out a second time before anybody
sees it. ``apply_plan`` places the model by it. Errors are drawn in ``gt_autoparallel.errors``.

Names are imported when they are first asked for: a launcher that only reads a plan file loads no
solver.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gt_autoparallel.apply import allow_evaluation, apply_plan
    from gt_autoparallel.audit import audit_plan
    from gt_autoparallel.comparison import compare
    from gt_autoparallel.constraints import Constraints, ModuleOutput
    from gt_autoparallel.costs import PlacementPrices
    from gt_autoparallel.errors import (
        AuditError,
        ConstraintError,
        InfeasiblePlacementError,
        PlacementError,
        PlacementInputError,
        PlanMismatchError,
        SolverError,
        UnsupportedModelError,
        UnsupportedOperatorError,
    )
    from gt_autoparallel.experts import ExpertBlock
    from gt_autoparallel.explanation import explain
    from gt_autoparallel.find import find_placement, planner_of_model
    from gt_autoparallel.layouts import Layout, MeshShape
    from gt_autoparallel.pinned_plans import (
        TensorParallelNames,
        expert_plans,
        expert_styles,
        expert_table,
        pinned_constraints,
    )
    from gt_autoparallel.placement_graph import ModelInterface, PlacementGraph
    from gt_autoparallel.plan import PlacementPlan
    from gt_autoparallel.plan_encoding import decode_plan, encode_plan
    from gt_autoparallel.plan_file import check_plan_fits, load_plan, read_plan, write_plan
    from gt_autoparallel.planner import Planner
    from gt_autoparallel.prediction import predicted_collectives, prediction_text
    from gt_autoparallel.report import plan_report, report_text
    from gt_autoparallel.report_page import write_report_page
    from gt_autoparallel.rules import register_rule

__all__ = [
    "AuditError",
    "ConstraintError",
    "Constraints",
    "ExpertBlock",
    "InfeasiblePlacementError",
    "Layout",
    "MeshShape",
    "ModelInterface",
    "ModuleOutput",
    "PlacementError",
    "PlacementGraph",
    "PlacementInputError",
    "PlacementPlan",
    "PlacementPrices",
    "PlanMismatchError",
    "Planner",
    "SolverError",
    "TensorParallelNames",
    "UnsupportedModelError",
    "UnsupportedOperatorError",
    "__version__",
    "allow_evaluation",
    "apply_plan",
    "audit_plan",
    "check_plan_fits",
    "compare",
    "decode_plan",
    "encode_plan",
    "expert_plans",
    "expert_styles",
    "expert_table",
    "explain",
    "find_placement",
    "load_plan",
    "pinned_constraints",
    "plan_report",
    "planner_of_model",
    "predicted_collectives",
    "prediction_text",
    "read_plan",
    "register_rule",
    "report_text",
    "write_plan",
    "write_report_page",
]

__version__ = "0.1.0"

_MODULE_OF = {
    "AuditError": "errors",
    "ConstraintError": "errors",
    "Constraints": "constraints",
    "ExpertBlock": "experts",
    "InfeasiblePlacementError": "errors",
    "Layout": "layouts",
    "MeshShape": "layouts",
    "ModelInterface": "placement_graph",
    "ModuleOutput": "constraints",
    "PlacementError": "errors",
    "PlacementGraph": "placement_graph",
    "PlacementInputError": "errors",
    "PlacementPlan": "plan",
    "PlacementPrices": "costs",
    "PlanMismatchError": "errors",
    "Planner": "planner",
    "SolverError": "errors",
    "TensorParallelNames": "pinned_plans",
    "UnsupportedModelError": "errors",
    "UnsupportedOperatorError": "errors",
    "allow_evaluation": "apply",
    "apply_plan": "apply",
    "audit_plan": "audit",
    "check_plan_fits": "plan_file",
    "compare": "comparison",
    "decode_plan": "plan_encoding",
    "encode_plan": "plan_encoding",
    "expert_plans": "pinned_plans",
    "expert_styles": "pinned_plans",
    "expert_table": "pinned_plans",
    "explain": "explanation",
    "find_placement": "find",
    "load_plan": "plan_file",
    "pinned_constraints": "pinned_plans",
    "plan_report": "report",
    "planner_of_model": "find",
    "predicted_collectives": "prediction",
    "prediction_text": "prediction",
    "read_plan": "plan_file",
    "register_rule": "rules",
    "report_text": "report",
    "write_plan": "plan_file",
    "write_report_page": "report_page",
}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"gt_autoparallel.{_MODULE_OF[name]}"), name)
