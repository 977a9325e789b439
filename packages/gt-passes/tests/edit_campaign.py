"""Random edits of captured steps, judged by running them: ``make fuzz-edits``.

Each edit is put into a step by a pass that claims to change no bit. What the verifier accepts must
give, from the same inputs, what the step gave before. What it refuses may be right: that much is
not held against it.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import logging
import random
import sys
import warnings
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from memory_steps import MEMORY_STEPS, memory_step
from mutation_graphs import (
    STEP_NAMES,
    StepGraph,
    apply_passes,
    capture_attention,
    capture_step,
    step_graph,
)
from random_edits import UnfitEditError, edit_at_random
from run_with_peers import are_equal_bits, random_inputs, run_with_peers
from torch.fx import GraphModule

from gt_config.graph_kinds import EVERY_GRAPH, GraphKind
from gt_config.numerics import Numerics
from gt_passes import GraphPass, PassContext, PassManager, PassReport, VerificationError
from gt_passes.analysis.tensor_signature import signature
from gt_passes.registry import find_passes

EDITED_STEPS = (
    *STEP_NAMES,
    "attention",
    "fsdp, transformed",
    "hsdp-tensor-parallel, transformed",
    *MEMORY_STEPS,
)

TRANSFORMING = ("share-all-gathers", "bucket-all-gathers", "bucket-reduce-scatters")
"""What changes a step most, without a claim about memory."""


_OUTCOMES = ("accepted", "refused", "no graph", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomEdit(GraphPass):
    """A wrong pass, or a right one: it cannot say."""

    name: ClassVar[str] = "random-edit"
    numerics: ClassVar[Numerics] = "bitwise"
    runs_on: ClassVar[frozenset[GraphKind]] = EVERY_GRAPH

    draw: random.Random

    edits_memory: bool = False

    told: list[str]
    """What was done."""

    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        self.told.append(edit_at_random(graph_module, self.draw, edits_memory=self.edits_memory))
        return PassReport(changed=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """What became of the edits of a step."""

    num_by_outcome: Counter[str]
    """Accepted, refused, no graph (operators do not take what they were given), and failed."""

    wrong: list[str]
    """Those accepted that change a result or cannot be run, and those that end in another error."""


def edited_step(name: str) -> StepGraph:
    """Capture one of ``EDITED_STEPS``."""
    if name in MEMORY_STEPS:
        return memory_step(name)
    step, _, how = name.partition(", ")
    found = capture_attention() if step == "attention" else capture_step(step)
    if not how:
        return found
    passes = [pass_class() for pass_class in find_passes(TRANSFORMING)]
    apply_passes(found.graph_module, found.context, passes)
    return step_graph(name, found.graph_module, found.context)


def draw_of(step: StepGraph, number: int, *, seed: int) -> random.Random:
    """The draws of one edit, whatever others there are."""
    return random.Random(f"{seed} {step.name} {number}")


def try_edits(step: StepGraph, *, num_edits: int, seed: int) -> Outcomes:
    """Edit a step so often, each time anew, and run what the verifier accepts."""
    inputs = random_inputs(step.graph_module)
    expected = run_with_peers(step.graph_module, inputs)
    assert are_equal_bits(expected, run_with_peers(step.graph_module, inputs))
    counts: Counter[str] = Counter()
    wrong = []
    recorded = _recorded(step.graph_module)
    for number in range(num_edits):
        if _recorded(step.graph_module) != recorded:  # an operator resized its ``out``
            step = edited_step(step.name)
        told: list[str] = []
        edit = RandomEdit(
            draw=draw_of(step, number, seed=seed),
            told=told,
            edits_memory=step.name in MEMORY_STEPS,
        )
        graph_module = copy.deepcopy(step.graph_module)
        try:
            PassManager([edit], context=step.context).run(graph_module)
        except UnfitEditError:
            counts["no graph"] += 1
        except VerificationError:
            counts["refused"] += 1
        except Exception as error:  # noqa: BLE001 - the others are still to be tried
            counts["failed"] += 1
            wrong.append(_told(step, seed, number, told, f"not verified: {error!r}"))
        else:
            counts["accepted"] += 1
            try:
                is_same = are_equal_bits(expected, run_with_peers(graph_module, inputs))
                how = "accepted, and gives something else"
            except Exception as error:  # noqa: BLE001 - what cannot be run is no less wrong
                is_same, how = False, f"accepted, and does not run: {error!r}"
            if not is_same:
                wrong.append(_told(step, seed, number, told, how))
    return Outcomes(num_by_outcome=counts, wrong=wrong)


def _recorded(graph_module: GraphModule) -> list[Hashable]:
    """What is recorded of each value; copies of a graph share the values."""
    return [signature(node.meta.get("val")) for node in graph_module.graph.nodes]


def _told(step: StepGraph, seed: int, number: int, edits: list[str], how: str) -> str:
    return f"{step.name}, seed {seed}, edit {number}: {edits}: {how}"


@contextlib.contextmanager
def quiet_operators() -> Iterator[None]:
    """Operators that refuse their inputs log a traceback each, or warn; here many do."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Raw SymInt value")
            yield
    finally:
        logger.setLevel(level)


def main() -> int:
    """Run the command line; returns 1 if an edit is wrong, or none was accepted and so run."""
    parser = argparse.ArgumentParser(prog="edit_campaign", description=__doc__)
    parser.add_argument("--num-cases", type=int, default=2000, help="in all, alike on each step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", nargs="+", choices=EDITED_STEPS, default=EDITED_STEPS)
    options = parser.parse_args()
    if options.num_cases < 1:
        parser.error("--num-cases must be at least 1")
    total: Counter[str] = Counter()
    wrong: list[str] = []
    with quiet_operators():
        for index, name in enumerate(options.steps):
            num_edits = len(range(index, options.num_cases, len(options.steps)))
            found = try_edits(edited_step(name), num_edits=num_edits, seed=options.seed)
            print(f"{name}: {dict(found.num_by_outcome)}", flush=True)
            for each in found.wrong:
                print(f"WRONG: {each}", flush=True)
            total += found.num_by_outcome
            wrong += found.wrong
    counts = ", ".join(f"{total[each]} {each}" for each in _OUTCOMES)
    print(f"\nseed {options.seed}: {total.total()} edits, {counts}, {len(wrong)} wrong")
    if not total["accepted"]:
        print("no edit was accepted, so none was run and nothing is known")
    return 1 if wrong or not total["accepted"] else 0


if __name__ == "__main__":
    sys.exit(main())
