"""Applying a plan: parameters become DTensors, the forward runs the planned graph.

::

    apply_plan          from a model and a plan to the placed model
    evaluation          the placed model in evaluation mode
    placed_forward      the forward of the placed model; hooks that it would not run
    placed_model        by what plan, and on which meshes, a model is placed
    placed_tensors, placed_inputs, placed_experts
                        parameters, arguments and routed experts of the placed model
    recorded_forward    experts' forwards, of which autograd keeps no operands
    kept_results        experts that run again, and what of their first run is kept
    local_program, execution_order
                        the planned graph as one rank runs it
    run_redistribution  the steps of a redistribution, as functional collectives
    rank_mesh           the process groups of one rank
"""

from gt_autoparallel.apply.apply_plan import apply_plan, make_expert_meshes
from gt_autoparallel.apply.evaluation import allow_evaluation
from gt_autoparallel.apply.placed_model import PlacedModel, placed_model

__all__ = [
    "PlacedModel",
    "allow_evaluation",
    "apply_plan",
    "make_expert_meshes",
    "placed_model",
]
