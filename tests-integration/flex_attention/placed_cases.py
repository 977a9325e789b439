"""Models with torchtitan's FlexAttention that a solver placed, on the CPU.

Inductor has no backward of FlexAttention for CPUs, so that what ``autoparallel_backend`` compiles,
the whole step, runs here as it was given to the compiler.
"""

from __future__ import annotations

import pytest
from flex_attention.cases import own_flex_attention
from placement.cases import Found, PlacedCase, compare_with_whole_model, written_plan

from gt_autoparallel._torch_internals import operator_name
from gt_autoparallel.backend import recipe
from gt_autoparallel.graph.layouts import short_text
from gt_passes import DescribeOnly


def compare_placed(case: PlacedCase, folder: str) -> tuple[Found, tuple[str, ...]]:
    """What ``compare_with_whole_model`` says; and how the plan cuts the queries of each operator."""
    with own_flex_attention(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "InductorCompiler", DescribeOnly)
        found = compare_with_whole_model(case, folder)
    plan = written_plan(folder)
    cuts = [
        short_text(plan.options[node.index].operands[0])
        for node in plan.graph.of_kind("operator")
        if operator_name(node.target).startswith("higher_order.flex_attention")
    ]
    return found, tuple(cuts)
