"""Placement problems of a few variables, written by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from gt_autoparallel.solver.problem import Edge, MemoryRow, Problem, Variable


def variable(name: str, costs: list[float], **fields: Any) -> Variable:
    fields.setdefault("memory_bytes", ())
    fields["memory_bytes"] = tuple(np.array(row, dtype=float) for row in fields["memory_bytes"])
    fields.setdefault("window", None)
    fields["window_compute_us"] = np.array(
        fields.get("window_compute_us", [0.0] * len(costs)), dtype=float
    )
    return Variable(name=name, cost_us=np.array(costs, dtype=float), **fields)


def edge(name: str, left: int, right: int, table: list[list[float]], **fields: Any) -> Edge:
    cost = np.array(table, dtype=float)
    fields.setdefault("window", None)
    fields["window_communication_us"] = np.array(
        fields.get("window_communication_us", np.zeros(cost.shape)), dtype=float
    )
    return Edge(
        name=name,
        left=left,
        right=right,
        left_labels=np.arange(cost.shape[0]),
        right_labels=np.arange(cost.shape[1]),
        cost_us=cost,
        **fields,
    )


def pair_problem(
    *, budgets: tuple[float, ...] = (), tables: tuple[list[list[float]], ...] = ()
) -> Problem:
    """Two variables of two options: cheap but large, or dear but small."""
    rows = [[10.0, 2.0], [3.0, 9.0]][: len(budgets)]
    return Problem(
        variables=tuple(variable(name, [1.0, 5.0], memory_bytes=rows) for name in "ab"),
        edges=tuple(edge(f"e{i}", 0, 1, table) for i, table in enumerate(tables)),
        windows=(),
        memory=tuple(
            MemoryRow(name=f"row{i}", budget_bytes=budget, fixed_bytes=1.0)
            for i, budget in enumerate(budgets)
        ),
    )
