"""An adversary of the verifier: edits that know nothing of its rules, judged by running them.

Each edit is put into a captured step by a pass that claims to change no bit. What the verifier
accepts must give, from the same inputs, what the step gave before. What it refuses may be right:
that much is not held against it.
"""

from __future__ import annotations

import copy
import logging
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import pytest
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
from gt_passes.registry import find_passes

TRANSFORMING = ("share-all-gathers", "bucket-all-gathers", "bucket-reduce-scatters")
"""What changes a step most, without a claim about memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomEdit(GraphPass):
    """A wrong pass, or a right one: it cannot say."""

    name: ClassVar[str] = "random-edit"
    numerics: ClassVar[Numerics] = "bitwise"
    runs_on: ClassVar[frozenset[GraphKind]] = EVERY_GRAPH

    draw: random.Random

    told: list[str]
    """What was done."""

    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        self.told.append(edit_at_random(graph_module, self.draw))
        return PassReport(changed=True)


@pytest.fixture(autouse=True)
def quiet_fake_tensors() -> Iterator[None]:
    """Operators that refuse their inputs log a traceback each; here many do."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


def captured(name: str) -> StepGraph:
    step, _, how = name.partition(", ")
    found = capture_attention() if step == "attention" else capture_step(step)
    if not how:
        return found
    passes = [pass_class() for pass_class in find_passes(TRANSFORMING)]
    apply_passes(found.graph_module, found.context, passes)
    return step_graph(name, found.graph_module, found.context)


def outcomes(step: StepGraph, *, num_edits: int) -> tuple[Counter[str], list[str]]:
    """How often edits were refused, accepted and unfit; those accepted that changed a result."""
    inputs = random_inputs(step.graph_module)
    expected = run_with_peers(step.graph_module, inputs)
    assert are_equal_bits(expected, run_with_peers(step.graph_module, inputs))
    counts: Counter[str] = Counter()
    wrong = []
    for number in range(num_edits):
        told: list[str] = []
        edit = RandomEdit(draw=random.Random(f"{step.name} {number}"), told=told)
        graph_module = copy.deepcopy(step.graph_module)
        try:
            PassManager([edit], context=step.context).run(graph_module)
        except UnfitEditError:
            counts["unfit"] += 1
        except VerificationError:
            counts["refused"] += 1
        else:
            counts["accepted"] += 1
            try:
                is_same = are_equal_bits(expected, run_with_peers(graph_module, inputs))
            except RuntimeError:  # what cannot be run is no less wrong
                is_same = False
            if not is_same:
                wrong.append(f"{step.name}, edit {number}: {told}")
    print(f"\n{step.name}: {dict(counts)}")
    return counts, wrong


@pytest.mark.filterwarnings("ignore:Raw SymInt value")
@pytest.mark.parametrize("num_edits", [12, pytest.param(1500, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [*STEP_NAMES, "attention", "fsdp, transformed", "hsdp-tensor-parallel, transformed"]
)
def test_an_edit_that_is_accepted_changes_no_bit(name: str, num_edits: int) -> None:
    counts, wrong = outcomes(captured(name), num_edits=num_edits)
    assert not wrong
    assert counts["accepted"] > 0
    assert counts["refused"] > 0


@pytest.mark.parametrize("name", ["fsdp", "noisy-microbatches"])
def test_an_edit_that_changes_results_is_seen_by_running_it(name: str) -> None:
    """What the test above rests on: most of what is refused computes something else."""
    step = captured(name)
    inputs = random_inputs(step.graph_module)
    expected = run_with_peers(step.graph_module, inputs)
    differ = num_run = 0
    for number in range(40):
        graph_module = copy.deepcopy(step.graph_module)
        try:
            edit_at_random(graph_module, random.Random(f"{step.name} {number}"))
            found = run_with_peers(graph_module, inputs)
        except UnfitEditError:
            continue
        except RuntimeError:  # sizes that only the real values have
            continue
        num_run += 1
        differ += not are_equal_bits(expected, found)
    assert num_run >= 10
    assert differ >= num_run / 4
