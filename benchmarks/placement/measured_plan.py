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

from gt_autoparallel import Constraints
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
    """Plan ``name``, then ask again with what its workload has for that."""
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
    batch = (Shard(0),) + (Replicate(),) * (planner.mesh.num_axes - 1)
    pinned = Constraints(inputs={"tokens": batch})
    if workload.asks_again:
        metrics |= _asked(planner, "replan_constraint", limits, constraints=pinned)
    for share in workload.shares_of_memory:
        budget = round(share * plan.memory.total)
        metrics |= _asked(planner, f"replan_{share:g}", limits, memory_budget_bytes=budget)
    for gib in workload.budgets_gib:
        budget = round(gib * _BYTES_PER_GIB)
        metrics |= _asked(planner, f"replan_{gib:g}gib", limits, memory_budget_bytes=budget)
    if workload.larger_mesh is not None:
        larger = Planner(
            planner.graph, workload.larger_mesh, signature=planner.signature, progress=say
        )
        budget = round(workload.larger_budget_gib * _BYTES_PER_GIB)
        asked = f"ranks_{larger.mesh.num_ranks}_{workload.larger_budget_gib:g}gib"
        metrics |= _asked(larger, asked, limits, memory_budget_bytes=budget)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    metrics["peak_gib"] = peak / _KIB_PER_GIB
    notes = [
        (
            f"{plan.solver.num_options} options of {plan.solver.num_variables} choices, "
            f"found by {plan.solver.method}, audited"
        )
    ]
    print(json.dumps({"metrics": metrics, "notes": notes}))


def _asked(planner: Planner, name: str, limits: dict[str, float], **request: Any) -> dict[str, Any]:
    """What a further request to a planner takes, and what comes out."""
    stopwatch = _Stopwatch()
    plan = planner.find(**request, **limits)
    return {
        **stopwatch.seconds(name),
        f"{name}_gap": plan.solver.gap,
        f"{name}_objective_us": plan.objective_us,
        f"{name}_plan_gib": plan.memory.total / _BYTES_PER_GIB,
    }


if __name__ == "__main__":
    main(sys.argv[1])
