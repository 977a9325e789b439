"""Plan one workload in this process and write what it took as one line of JSON."""

from __future__ import annotations

import json
import resource
import sys
import time

from torch.distributed.tensor import Replicate, Shard

from gt_autoparallel import Constraints
from placement.workloads import WORKLOADS

_KIB_PER_GIB = 2**20


def main(name: str) -> None:
    """Plan ``name``, then ask again with a budget, then with a constraint."""
    workload = WORKLOADS[name]
    limits = {
        "relative_gap": workload.relative_gap,
        "time_limit_seconds": workload.time_limit_seconds,
    }

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    started, cpu = time.perf_counter(), time.process_time()
    planner = workload.planner(progress=say)
    captured = time.perf_counter()
    plan = planner.find(memory_budget_bytes=workload.memory_budget_bytes, **limits)
    metrics = {
        "total_seconds": time.perf_counter() - started,
        "capture_seconds": captured - started,
        "solve_seconds": plan.solver.seconds,
        "total_cpu_seconds": time.process_time() - cpu,
        "gap": plan.solver.gap,
        "objective_us": plan.objective_us,
        "num_nodes": float(len(plan.graph.nodes)),
    }
    if name == "llama3_8b 8x8":
        begin = time.perf_counter()
        batch = (Shard(0),) + (Replicate(),) * (planner.mesh.num_axes - 1)
        planner.find(constraints=Constraints(inputs={"tokens": batch}), **limits)
        metrics["replan_constraint_seconds"] = time.perf_counter() - begin
        begin = time.perf_counter()
        planner.find(memory_budget_bytes=round(0.9 * plan.memory.total), **limits)
        metrics["replan_budget_seconds"] = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    metrics["peak_gib"] = peak / _KIB_PER_GIB
    notes = [
        (
            f"{plan.solver.num_options} options of {plan.solver.num_variables} choices, "
            f"{plan.memory.total / 2**30:.1f} GiB a rank, found by {plan.solver.method}, audited"
        )
    ]
    print(json.dumps({"metrics": metrics, "notes": notes}))


if __name__ == "__main__":
    main(sys.argv[1])
