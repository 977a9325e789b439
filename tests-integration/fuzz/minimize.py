"""The smallest case that still fails in the same way.

Greedy, from large pieces to small: passes, blocks, layers, instructions, settings. Each piece is
left out, and stays out if the case fails as before without it (Zeller's delta debugging, with one
piece at a time: cases are small).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from fuzz.case import Case, PartSpec, PassSpec, StepSpec

__all__ = ["minimize"]


def minimize(case: Case, fails: Callable[[Case], bool], *, num_trials: int = 120) -> Case:
    """Make a failing case smaller.

    Args:
        case: fails.
        fails: whether a case fails in the same way.
        num_trials: calls of ``fails`` at most.
    """
    while True:
        for smaller in _smaller(case):
            if num_trials == 0:
                return case
            num_trials -= 1
            if fails(smaller):
                case = smaller
                break
        else:
            return case


def _smaller(case: Case) -> Iterator[Case]:
    step = case.step
    for position in range(len(case.passes)):
        if len(case.passes) > 1:
            kept = case.passes[:position] + case.passes[position + 1 :]
            yield replace(case, passes=kept)
    for blocks in _smaller_blocks(step.blocks):
        yield replace(case, step=replace(step, blocks=blocks))
    for simpler in _simpler_steps(step):
        yield replace(case, step=simpler)
    for position, graph_pass in enumerate(case.passes):
        for option in graph_pass.options:
            rest = {name: value for name, value in graph_pass.options.items() if name != option}
            passes = list(case.passes)
            passes[position] = PassSpec(name=graph_pass.name, options=rest)
            yield replace(case, passes=tuple(passes))


def _smaller_blocks(
    blocks: tuple[tuple[PartSpec, ...], ...],
) -> Iterator[tuple[tuple[PartSpec, ...], ...]]:
    for number, block in enumerate(blocks):
        before, after = blocks[:number], blocks[number + 1 :]
        yield before + after
        for position, part in enumerate(block):
            left, right = block[:position], block[position + 1 :]
            if len(block) > 1:
                yield (*before, left + right, *after)
            program = part.options.get("program", [])
            for instruction in range(len(program)):
                shorter = program[:instruction] + program[instruction + 1 :]
                options = part.options | {"program": shorter}
                smaller = replace(part, options=options)
                yield (*before, (*left, smaller, *right), *after)


def _simpler_steps(step: StepSpec) -> Iterator[StepSpec]:
    plain = StepSpec(seed=step.seed)
    for setting in (
        "num_microbatches",
        "share_gathered",
        "optimizer",
        "log_metric",
        "tied",
        "param_dtype",
        "reduction",
        "sharding",
        "dim",
        "vocabulary",
    ):
        if getattr(step, setting) != getattr(plain, setting):
            yield replace(step, **{setting: getattr(plain, setting)})
