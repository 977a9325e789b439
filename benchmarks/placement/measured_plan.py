"""Plan one workload in this process and write what it took as one line of JSON.

Each time is told twice: by the clock, and of the processor, which counts on a busy machine.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any

from torch.distributed.tensor import Replicate, Shard

from gt_autoparallel import Constraints, PlacementPlan
from gt_autoparallel import planner as planner_module
from gt_autoparallel.planner import Planner
from placement.workloads import WORKLOADS

_KIB_PER_GIB = 2**20
_BYTES_PER_GIB = 2**30


class _Stopwatch:
    """Seconds by the clock and of the processor since it was made."""

    def __init__(self) -> None:
        self._begin = (time.perf_counter(), time.process_time())

    def seconds(self, name: str) -> dict[str, float]:
        """Under ``<name>_seconds`` and ``<name>_cpu_seconds``."""
        wall, cpu = self._begin
        return {
            f"{name}_seconds": time.perf_counter() - wall,
            f"{name}_cpu_seconds": time.process_time() - cpu,
        }


class _SolverCpu:
    """Stands for the solver in the planner, and keeps the processor time of its last solve."""

    def __init__(self) -> None:
        self._solve = planner_module.solve
        self.seconds = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Solves."""
        begin = time.process_time()
        try:
            return self._solve(*args, **kwargs)
        finally:
            self.seconds = time.process_time() - begin


def main(name: str) -> None:
    """Plan ``name``, then, on 8 x 8, ask again with a constraint and with a budget."""
    workload = WORKLOADS[name]
    limits = {
        "relative_gap": workload.relative_gap,
        "time_limit_seconds": workload.time_limit_seconds,
    }

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    planner_module.solve = solver = _SolverCpu()  # type: ignore[assignment]  # counts and solves
    whole, part = _Stopwatch(), _Stopwatch()
    planner = workload.planner(progress=say)
    metrics = part.seconds("capture")
    plan = planner.find(memory_budget_bytes=workload.memory_budget_bytes, **limits)
    metrics |= whole.seconds("total")
    metrics |= {
        "solve_seconds": plan.solver.seconds,
        "solve_cpu_seconds": solver.seconds,
        "gap": plan.solver.gap,
        "objective_us": plan.objective_us,
        "plan_gib": plan.memory.total / _BYTES_PER_GIB,
        "num_nodes": float(len(plan.graph.nodes)),
    }
    if name == "llama3_8b 8x8":
        metrics |= _asked_again(planner, plan, limits)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    metrics["peak_gib"] = peak / _KIB_PER_GIB
    notes = [
        (
            f"{plan.solver.num_options} options of {plan.solver.num_variables} choices, "
            f"found by {plan.solver.method}, audited"
        )
    ]
    print(json.dumps({"metrics": metrics, "notes": notes}))


def _asked_again(planner: Planner, plan: PlacementPlan, limits: dict[str, float]) -> dict[str, Any]:
    """Times of further requests to a planner that has made ``plan`` without constraint or budget.

    One pins the inputs, as a data loader gives them. One has a budget that the plan keeps. Two have
    budgets of nine and of seven tenths of what the plan takes, which only a plan keeps that gathers
    and computes again in the backward. The first of these builds that problem.
    """
    batch = (Shard(0),) + (Replicate(),) * (planner.mesh.num_axes - 1)
    requests: dict[str, dict[str, Any]] = {
        "replan_constraint": {"constraints": Constraints(inputs={"tokens": batch})},
        "replan_loose_budget": {"memory_budget_bytes": round(1.1 * plan.memory.total)},
        "replan_tight_budget": {"memory_budget_bytes": round(0.9 * plan.memory.total)},
        "replan_tighter_budget": {"memory_budget_bytes": round(0.7 * plan.memory.total)},
    }
    metrics: dict[str, Any] = {}
    for name, request in requests.items():
        stopwatch = _Stopwatch()
        planner.find(**request, **limits)
        metrics |= stopwatch.seconds(name)
    return metrics


if __name__ == "__main__":
    main(sys.argv[1])
