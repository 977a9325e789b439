"""Checks a problem once, where it enters the solver."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from gt_autoparallel.errors import PlacementInputError
from gt_autoparallel.solver.problem import (
    Block,
    BoolArray,
    Edge,
    FloatArray,
    Problem,
    Variable,
)


def check_problem(problem: Problem, rivals: Sequence[Sequence[BoolArray]] = ()) -> None:
    """Raises if arrays and indices of ``problem``, or masks of rivals, do not fit each other.

    Raises:
        PlacementInputError: lists every violation.
    """
    violations: list[str] = []
    if not math.isfinite(problem.fixed_us):
        violations.append(f"fixed_us is {problem.fixed_us!r}; it must be finite")
    violations += [
        f"window {window.name!r}: multiplicity is {window.multiplicity!r}; at least 0"
        for window in problem.windows
        if window.multiplicity < 0
    ]
    violations += [
        f"memory row {row.name!r}: budget {row.budget_bytes!r} and fixed bytes "
        f"{row.fixed_bytes!r} must be numbers, the latter finite"
        for row in problem.memory
        if math.isnan(row.budget_bytes) or not math.isfinite(row.fixed_bytes)
    ]
    for variable in problem.variables:
        violations += [
            f"variable {variable.name!r}: {text}" for text in _of_variable(problem, variable)
        ]
    for edge in problem.edges:
        violations += [f"edge {edge.name!r}: {text}" for text in _of_edge(problem, edge)]
    shapes = [variable.cost_us.shape for variable in problem.variables]
    violations += [
        f"rival {number}: its masks are not one of all options for each variable"
        for number, rival in enumerate(rivals)
        if [mask.shape for mask in rival] != shapes
    ]
    if violations:
        raise PlacementInputError("placement problem: " + "; ".join(violations))


def check_blocks(problem: Problem) -> None:
    """Raises if what the blocks of ``problem`` say does not fit its variables, edges and windows.

    Raises:
        PlacementInputError: lists every violation.
    """
    block_of: dict[int, int] = {}
    block_of_row: dict[int, int] = {}
    violations: list[str] = []
    for number, block in enumerate(problem.blocks):
        violations += [f"block {block.name!r}: {text}" for text in _of_block(problem, block)]
        violations += [
            f"variable {problem.variables[variable].name!r} is in two blocks"
            for variable in block.variables
            if block_of.setdefault(variable, number) != number
        ]
        violations += [
            f"memory row {problem.memory[row].name!r} has passing bytes of two blocks"
            for row in block.passing_bytes
            if row in range(len(problem.memory)) and block_of_row.setdefault(row, number) != number
        ]
    for edge in problem.edges:
        blocks = {block_of[end] for end in (edge.left, edge.right) if end in block_of}
        if len(blocks) > 1:
            violations.append(f"edge {edge.name!r} ends in two blocks")
        windows = {window for number in blocks for window in problem.blocks[number].windows}
        if blocks and edge.window is not None and edge.window not in windows:
            violations.append(f"edge {edge.name!r} ends in a block that does not have its window")
    if violations:
        raise PlacementInputError("placement problem: " + "; ".join(violations))


def _of_block(problem: Problem, block: Block) -> list[str]:
    violations: list[str] = []
    for row, passing in block.passing_bytes.items():
        violations += _of_passing(problem, block, row, passing)
    violations += [
        f"window {problem.windows[window].name!r} has multiplicity "
        f"{problem.windows[window].multiplicity}; it must be one for each of {block.size} things"
        for window in block.windows
        if problem.windows[window].multiplicity != block.size
    ]
    for number in block.variables:
        variable = problem.variables[number]
        own = () if variable.window is None else (variable.window,)
        if not {*own, *variable.further_compute_us} <= {*block.windows}:
            violations.append(f"variable {variable.name!r} computes in a window of others")
    return violations


def _of_passing(
    problem: Problem, block: Block, row: int, passing: Sequence[FloatArray]
) -> list[str]:
    if row not in range(len(problem.memory)):
        return [f"has passing bytes in memory row {row!r}, which does not exist"]
    if len(passing) != len(block.variables):
        return [
            f"has passing bytes of {len(passing)} variables, and {len(block.variables)} variables"
        ]
    variables = [problem.variables[number] for number in block.variables]
    violations = []
    for variable, values in zip(variables, passing, strict=True):
        name, count = f"passing bytes of {variable.name!r}", len(variable.cost_us)
        if values.shape != (count,):
            violations.append(f"{name} have shape {values.shape}; its options ask for {(count,)}")
        elif not np.isfinite(values).all():
            violations.append(f"{name} are not all finite")
    return violations


def _of_variable(problem: Problem, variable: Variable) -> list[str]:
    count = len(variable.cost_us)
    violations = []
    if not count:
        violations.append("has no option")
    if len(variable.memory_bytes) != len(problem.memory):
        violations.append(
            f"has {len(variable.memory_bytes)} memory rows, the problem {len(problem.memory)}"
        )
    windows = [] if variable.window is None else [variable.window]
    violations += [
        f"window {window!r} does not exist"
        for window in (*windows, *variable.further_compute_us)
        if not 0 <= window < len(problem.windows)
    ]
    arrays = {"cost_us": variable.cost_us, "window_compute_us": variable.window_compute_us}
    arrays |= {f"further_compute_us[{w}]": t for w, t in variable.further_compute_us.items()}
    arrays |= {f"memory_bytes[{row}]": values for row, values in enumerate(variable.memory_bytes)}
    for name, values in arrays.items():
        if values.shape != (count,):
            violations.append(f"{name} has shape {values.shape}; its options ask for {(count,)}")
        else:
            violations += _bad_numbers(name, values)
    return violations


def _of_edge(problem: Problem, edge: Edge) -> list[str]:
    violations = []
    for side, variable, labels, count in (
        ("left", edge.left, edge.left_labels, edge.cost_us.shape[0]),
        ("right", edge.right, edge.right_labels, edge.cost_us.shape[-1]),
    ):
        if not 0 <= variable < len(problem.variables):
            violations.append(f"{side} variable {variable!r} does not exist")
            continue
        options = len(problem.variables[variable].cost_us)
        if labels.shape != (options,):
            violations.append(
                f"{side}_labels has shape {labels.shape}; the options of "
                f"{problem.variables[variable].name!r} ask for {(options,)}"
            )
        elif options and (labels.min() < 0 or labels.max() >= count):
            violations.append(
                f"{side}_labels are {labels.min()} to {labels.max()}; cost_us has labels "
                f"0 to {count - 1}"
            )
    if edge.window is not None and not 0 <= edge.window < len(problem.windows):
        violations.append(f"window {edge.window!r} does not exist")
    if edge.cost_us.ndim != 2 or edge.window_communication_us.shape != edge.cost_us.shape:
        violations.append(
            f"cost_us has shape {edge.cost_us.shape} and window_communication_us "
            f"{edge.window_communication_us.shape}; both must be [left labels, right labels]"
        )
    violations += _bad_numbers("cost_us", edge.cost_us)
    violations += _bad_numbers("window_communication_us", edge.window_communication_us)
    return violations


def _bad_numbers(name: str, values: FloatArray) -> list[str]:
    if np.isnan(values).any():
        return [f"{name} has nan"]
    if np.isneginf(values).any():
        return [f"{name} has -inf"]
    return []
