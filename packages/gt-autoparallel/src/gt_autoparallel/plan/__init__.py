"""The plan: made from the chosen options, encoded, predicted, reported and compared.

::

    placement_plan      what a plan is
    plan_assembly       from the chosen options to a plan
    model_signature     what a plan was made for, and in what another model differs
    judgement           the simulated steps of a plan and its rivals
    plan_encoding, typed_fields, plan_document
                        a plan as JSON, values of the kind that a field has, and the file
    prediction          which collectives will run
    report, comparison, layer_ranges, numbers_as_text
                        plans for people; rows of repeated layers as one
    plan_picture, report_page
                        a plan drawn: what is shown, and the page
"""

from gt_autoparallel.plan.comparison import compare
from gt_autoparallel.plan.judgement import JudgedStep, PlanJudgement
from gt_autoparallel.plan.placement_plan import PlacementPlan
from gt_autoparallel.plan.plan_encoding import decode_plan, encode_plan, plan_digest
from gt_autoparallel.plan.prediction import predicted_collectives
from gt_autoparallel.plan.report import plan_report
from gt_autoparallel.plan.report_page import write_report_page

__all__ = [
    "JudgedStep",
    "PlacementPlan",
    "PlanJudgement",
    "compare",
    "decode_plan",
    "encode_plan",
    "plan_digest",
    "plan_report",
    "predicted_collectives",
    "write_report_page",
]
