"""What the next best layout of each parameter would cost, for a page that is read at once.

Asking ``explain`` about every layout is a search for each. Here one bound tells of all layouts what
they cost at least (``solver.option_bounds``), and a search is made for the most promising other
layout of each parameter alone, as long as the time lasts. Alike layers are asked about once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from gt_autoparallel.argument_checks import check_arguments
from gt_autoparallel.explanation import Alternative, Explanation, Question, new_planner
from gt_autoparallel.graph.layouts import Layout, short_text
from gt_autoparallel.plan.placement_plan import PlacementPlan, plan_problem
from gt_autoparallel.planner import Planner
from gt_autoparallel.solver import option_bounds
from gt_autoparallel.solver.problem import FloatArray

_SHARE_OF_BOUNDS = 0.3
"""Of the time: what the bound of all layouts may take."""


def next_best_layouts(
    plan: PlacementPlan, *, planner: Planner | None = None, time_limit_seconds: float = 20.0
) -> dict[str, Explanation]:
    """Why each parameter lies as it does, by name: its other layouts, the most promising priced.

    Of the layouts that no search was made for it is known what they cost at least. Making the
    problem of a plan anew takes as long again as it took when it was planned.

    Args:
        plan: the plan.
        planner: as for ``explain``.
        time_limit_seconds: for all bounds and searches together.

    Raises:
        PlacementInputError: what is given is no plan.
    """
    check_arguments("next_best_layouts", plan_problem(plan))
    planner = planner or new_planner(plan)
    placement = planner.problem(plan.request)
    started = time.perf_counter()
    near = placement.solution_of(plan.options, plan.recomputed)
    bounds = option_bounds(
        placement.problem, near=near, time_limit_seconds=_SHARE_OF_BOUNDS * time_limit_seconds
    )
    questions: dict[int, Question] = {}
    names: dict[str, int] = {}
    for node in plan.graph.of_kind("parameter"):
        number = placement.clustering.class_of_node[node.index]
        questions.setdefault(number, Question.of(plan, placement, node, near))
        names[str(node.target)] = number
    at_least = {
        number: _at_least(question, bounds[number], plan.solver.objective_us)
        for number, question in questions.items()
    }
    # Where a plan is closest to another one, the answer matters most.
    order = sorted(questions, key=lambda number: min(at_least[number].values(), default=math.inf))
    reasons: dict[int, Explanation] = {}
    for place, number in enumerate(order):
        left = started + time_limit_seconds - time.perf_counter()
        seconds = left / (len(order) - place)
        reasons[number] = _answered(questions[number], at_least[number], seconds)
    return {name: reasons[number] for name, number in names.items()}


def _at_least(question: Question, bounds: FloatArray, objective_us: float) -> dict[Layout, float]:
    """By layout, the most promising first, how much more it costs at least."""
    found = {
        layout: float(bounds[question.allows(layout)].min()) - objective_us
        for layout in question.offered
    }
    return dict(sorted(found.items(), key=lambda item: (item[1], short_text(item[0]))))


def _answered(question: Question, at_least: Mapping[Layout, float], seconds: float) -> Explanation:
    alternatives = []
    for place, (layout, bound_us) in enumerate(at_least.items()):
        if place == 0 and seconds > 0 and bound_us < math.inf:
            alternatives.append(question.answer(layout, time_limit_seconds=seconds))
        else:
            alternatives.append(Alternative.bounded(layout, at_least_us=bound_us))
    return question.explained(alternatives)
