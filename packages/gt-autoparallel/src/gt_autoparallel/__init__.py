"""Solver-chosen placement of tensors and operators.

``find_placement`` captures a model's training step on global tensors, lets an exact solver choose a
DTensor placement for each of them on a mesh, and works the plan out a second time before anybody
sees it. ``apply_plan`` places the model by it, and ``place`` does both on all ranks. In the order
of the story:

    graph       the captured step; meshes, layouts, and the steps from one layout to another
    prices      microseconds and bytes
    rules       how an operator may run, and what a rank then runs
    problem     from the graph and what is asked for to numbers
    solver      from numbers to a proven choice
    plan        the choice as a plan: stored, reported, compared
    audit       the second opinion
    apply       the placed model
    backend     what is done to the captured step of a placed model

and above them ``planner``, ``find``, ``explanation``, ``expert_table``, ``simulated_rivals``,
``plan_file``, ``place``. A file imports from its own folder and from those below it: the
workspace's ``pyproject.toml`` says which.
"""

from gt_autoparallel.apply import (
    PlacedModel,
    allow_evaluation,
    apply_plan,
    make_expert_meshes,
    placed_model,
)
from gt_autoparallel.audit import audit_plan
from gt_autoparallel.errors import (
    ConstraintError,
    InfeasiblePlacementError,
    OpenSearchWarning,
    PlacementError,
    PlanMismatchError,
    UnrunnablePlanError,
)
from gt_autoparallel.expert_table import expert_plans, expert_table
from gt_autoparallel.explanation import explain, explain_parameters
from gt_autoparallel.find import PlacementRequest, find_placement, planner_of_model
from gt_autoparallel.find_parts import PartToPlace, find_placements
from gt_autoparallel.graph.experts import ExpertBlock
from gt_autoparallel.graph.layouts import MeshShape
from gt_autoparallel.graph.placement_graph import ModelInterface
from gt_autoparallel.next_best import next_best_layouts
from gt_autoparallel.place import (
    SharedPlan,
    makes_plans,
    place,
    plan_on_first_rank,
    plans_on_first_rank,
)
from gt_autoparallel.plan import (
    JudgedStep,
    PlacementPlan,
    PlanJudgement,
    compare,
    decode_plan,
    encode_plan,
    plan_digest,
    plan_report,
    predicted_collectives,
    write_report_page,
)
from gt_autoparallel.plan_file import (
    check_plan_file,
    load_plan,
    read_plan,
    tensors_of_parts,
    write_plan,
    write_plans,
)
from gt_autoparallel.prices.costs import PlacementPrices
from gt_autoparallel.prices.memory import device_budget_bytes
from gt_autoparallel.prices.microbatches import Microbatches
from gt_autoparallel.problem.constraints import Constraints, ModuleOutput
from gt_autoparallel.rules import register_rule
from gt_autoparallel.simulated_rivals import Judge

__version__ = "0.1.0"

__all__ = [
    "ConstraintError",
    "Constraints",
    "ExpertBlock",
    "InfeasiblePlacementError",
    "Judge",
    "JudgedStep",
    "MeshShape",
    "Microbatches",
    "ModelInterface",
    "ModuleOutput",
    "OpenSearchWarning",
    "PartToPlace",
    "PlacedModel",
    "PlacementError",
    "PlacementPlan",
    "PlacementPrices",
    "PlacementRequest",
    "PlanJudgement",
    "PlanMismatchError",
    "SharedPlan",
    "UnrunnablePlanError",
    "__version__",
    "allow_evaluation",
    "apply_plan",
    "audit_plan",
    "check_plan_file",
    "compare",
    "decode_plan",
    "device_budget_bytes",
    "encode_plan",
    "expert_plans",
    "expert_table",
    "explain",
    "explain_parameters",
    "find_placement",
    "find_placements",
    "load_plan",
    "make_expert_meshes",
    "makes_plans",
    "next_best_layouts",
    "place",
    "placed_model",
    "plan_digest",
    "plan_on_first_rank",
    "plan_report",
    "planner_of_model",
    "plans_on_first_rank",
    "predicted_collectives",
    "read_plan",
    "register_rule",
    "tensors_of_parts",
    "write_plan",
    "write_plans",
    "write_report_page",
]
