"""Plans that experts write by hand, as constraints: what the planner's own are measured against.

DDP, FSDP, Megatron's tensor parallelism with and without sequence parallelism, and their
combinations on two axes. A pinned plan is priced by the same planner, so that a comparison is one
of placements and of nothing else.
"""

from gt_autoparallel.pinned_plans.axis_styles import AxisStyle, pinned_constraints
from gt_autoparallel.pinned_plans.expert_table import (
    ExpertPlan,
    expert_plans,
    expert_styles,
    expert_table,
)
from gt_autoparallel.pinned_plans.tensor_parallel_names import TensorParallelNames

__all__ = [
    "AxisStyle",
    "ExpertPlan",
    "TensorParallelNames",
    "expert_plans",
    "expert_styles",
    "expert_table",
    "pinned_constraints",
]
