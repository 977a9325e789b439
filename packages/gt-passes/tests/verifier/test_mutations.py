"""Mutation testing of the verifier: does it catch what wrong passes do, and only that?

Bugs of every kind in ``mutations_of_*`` are put into captured steps, and into what the passes made
of them, by a pass with the default declarations. The pass manager must refuse the result.
"""

from __future__ import annotations

import copy
import itertools
import logging
import random
from collections import Counter
from collections.abc import Iterator, Sequence

import mutations_of_attributes
import mutations_of_communication
import mutations_of_effects
import mutations_of_values
import pytest
from memory_steps import MEMORY_STEPS, memory_step
from mutation_graphs import (
    STAMPED_STEP_NAMES,
    STEP_NAMES,
    StepGraph,
    apply_passes,
    capture_attention,
    capture_stamped_step,
    capture_step,
    step_graph,
)
from mutation_kinds import KINDS, Bug, Mutate, find_bugs
from run_with_peers import are_equal_bits, random_inputs, run_with_peers
from torch.fx import GraphModule

from gt_passes import (
    GraphPass,
    PassManager,
    VerificationError,
    known_passes,
)
from gt_passes.registry import find_passes
from gt_passes.verifier.collective_order import CollectiveSequence, compare_collective_sequences
from gt_trace.node_metadata import module_fqn

KIND_MODULES = (
    mutations_of_attributes,
    mutations_of_communication,
    mutations_of_values,
    mutations_of_effects,
)
"""Importing them registers their kinds."""

BUGS_OF_A_KIND = 7
LEAST_RATE = 0.98

STAMPED_LAYER = 4
"""Of eight layers one whose nodes are copies of another's."""

ORDER = (
    "remove-dead-code",
    "canonicalize-views",
    "share-all-gathers",
    "tag-saved-tensors",
    "recompute-tagged",
    "offload-tagged",
    "reshard-after-forward",
    "bucket-all-gathers",
    "bucket-reduce-scatters",
    "bucket-all-reduces",
    "prefetch-all-gathers",
    "delay-waits",
)
"""The recipe's order; other registered passes follow, sorted."""

TRANSFORMING = ORDER[1:5] + ORDER[6:10]

OPTIONS: dict[str, dict[str, object]] = {"tag-saved-tensors": {"policy": "full_recompute"}}


def legal_passes() -> list[GraphPass]:
    """Every registered pass that keeps the dataflow, in the order of the recipe."""
    names = [name for name in ORDER if name in known_passes()]
    names += [name for name in known_passes() if name not in ORDER]
    return [
        pass_class(**OPTIONS.get(pass_class.name, {}))
        for pass_class in find_passes(names)
        if pass_class.keeps_dataflow
        and not pass_class.generates_code
        and pass_class.__module__.startswith("gt_passes.")
    ]


@pytest.fixture(scope="module")
def captured() -> dict[str, StepGraph]:
    steps = {name: capture_step(name) for name in STEP_NAMES}
    return {**steps, "attention": capture_attention()}


@pytest.fixture(scope="module")
def transformed(captured: dict[str, StepGraph]) -> dict[str, StepGraph]:
    """Two of the steps as passes leave them: with recomputation, and collectives in buckets."""
    found = {}
    for name in ("fsdp", "hsdp-tensor-parallel"):
        step = captured[name]
        graph_module = copy.deepcopy(step.graph_module)
        passes = [graph_pass for graph_pass in legal_passes() if graph_pass.name in TRANSFORMING]
        assert len(passes) == len(TRANSFORMING)
        apply_passes(graph_module, step.context, passes)
        named = f"{name}, transformed"
        found[named] = step_graph(named, graph_module, step.context)
    return found


def chosen_bugs(kind: str, steps: Sequence[StepGraph]) -> list[tuple[StepGraph, Bug]]:
    """Some bugs of a kind from every step, the same ones in every run."""
    by_step: list[list[tuple[StepGraph, Bug]]] = []
    for step in steps:
        bugs = find_bugs(step.graph_module.graph, kind)
        random.Random(f"{step.name} {kind}").shuffle(bugs)
        by_step.append([(step, bug) for bug in bugs])
    rounds = itertools.zip_longest(*by_step)
    return [chosen for chosen in itertools.chain(*rounds) if chosen][:BUGS_OF_A_KIND]


def catching_check(step: StepGraph, bug: Bug) -> str | None:
    """The first check that refuses a graph with a bug; None where none does.

    Last comes the one before the first step, in which this rank's collectives are compared with
    those of a rank whose graph has no bug.
    """
    graph_module = copy.deepcopy(step.graph_module)
    try:
        PassManager([Mutate(bug=bug)], context=step.context).run(graph_module)
    except VerificationError as error:
        return error.problems[0].check
    sequences = {0: CollectiveSequence.of(graph_module), 1: step.peer_sequence}
    return "collective order" if compare_collective_sequences(sequences) else None


@pytest.fixture
def quiet_fake_tensors() -> Iterator[None]:
    """Operators that refuse their inputs log a traceback each; here they are meant to."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


def test_seeded_bugs_are_caught(
    captured: dict[str, StepGraph], transformed: dict[str, StepGraph], quiet_fake_tensors: None
) -> None:
    seeded: Counter[str] = Counter()
    caught: Counter[str] = Counter()
    checks: Counter[str] = Counter()
    missed: list[str] = []
    steps = (*captured.values(), *transformed.values())
    for kind in KINDS:
        for step, bug in chosen_bugs(kind, steps):
            seeded[bug.kind] += 1
            check = catching_check(step, bug)
            if check is None:
                missed.append(f"{bug.kind} in {step.name}: {bug.site}")
            else:
                caught[bug.kind] += 1
                checks[check] += 1
    rate = caught.total() / seeded.total()
    print(f"\n{caught.total()} of {seeded.total()} bugs caught ({rate:.1%}), {len(seeded)} kinds")
    print("first caught by: " + ", ".join(f"{name} {n}" for name, n in checks.most_common()))
    for kind in KINDS:
        print(f"  {kind:<34}{caught[kind]:>3} of {seeded[kind]}")
    print("missed:", *missed or ["none"], sep="\n  ")
    assert seeded.total() >= 200
    assert len(seeded) >= 12
    assert set(seeded) == set(KINDS), "a kind of bug has no site in any graph"
    assert rate >= LEAST_RATE, missed


def bugs_in_a_stamped_layer(kind: str, step: StepGraph) -> list[Bug]:
    """The bugs of a kind whose site lies in one of the layers that were copied, shuffled."""
    graph = step.graph_module.graph
    modules = {node.name: module_fqn(node) or "" for node in graph.nodes}
    bugs = [
        bug
        for bug in find_bugs(graph, kind)
        if modules.get(bug.site.split()[0], "").startswith(f"layers.{STAMPED_LAYER}.")
    ]
    random.Random(f"{step.name} {kind}").shuffle(bugs)
    return bugs


@pytest.mark.parametrize("most", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", STAMPED_STEP_NAMES)
def test_a_bug_in_one_of_many_equal_layers_is_caught(
    name: str, most: int, quiet_fake_tensors: None
) -> None:
    """What is remembered from the other seven layers must not speak for this one."""
    step = capture_stamped_step(name)
    seeded: set[str] = set()
    missed = []
    for kind in KINDS:
        for bug in bugs_in_a_stamped_layer(kind, step)[:most]:
            seeded.add(kind)
            if catching_check(step, bug) is None:
                missed.append(f"{kind}: {bug.site}")
    print(f"\n{len(seeded)} kinds of bugs in one layer of many:", *sorted(seeded))
    assert not missed
    assert len(seeded) >= 20


def test_members_swapped_in_the_bucket_of_one_rank_are_found_before_the_first_step(
    captured: dict[str, StepGraph],
) -> None:
    """For itself the graph of that rank is right: what it puts in elsewhere, it takes elsewhere."""
    step = captured["fsdp"]
    buckets = [pass_class() for pass_class in find_passes(["bucket-all-gathers"])]

    def bucketed(*more: GraphPass) -> GraphModule:
        graph_module = copy.deepcopy(step.graph_module)
        PassManager([*buckets, *more], context=step.context).run(graph_module)
        return graph_module

    peer = bucketed()
    bugs = find_bugs(peer.graph, "members-of-a-bucket-in-another-order")
    assert bugs
    for bug in bugs:
        sequences = (peer, bucketed(Mutate(bug=bug)))
        (difference,) = compare_collective_sequences(
            {rank: CollectiveSequence.of(each) for rank, each in enumerate(sequences)}
        )
        mine, theirs = difference.calls
        assert mine.text.split(", exchange ")[0] == theirs.text.split(", exchange ")[0]


def test_legal_passes_are_not_refused(captured: dict[str, StepGraph]) -> None:
    for step in captured.values():
        passes = legal_passes()
        graph_module = copy.deepcopy(step.graph_module)
        report = PassManager(passes, context=step.context).run(graph_module)
        assert report.verified
        print(f"\n{step.name}\n{report}")


@pytest.mark.parametrize("name", MEMORY_STEPS)
def test_legal_passes_keep_the_bits_of_steps_that_write_to_memory(name: str) -> None:
    step = memory_step(name)
    inputs = random_inputs(step.graph_module)
    expected = run_with_peers(step.graph_module, inputs)
    PassManager(legal_passes(), context=step.context).run(step.graph_module)
    assert are_equal_bits(expected, run_with_peers(step.graph_module, inputs))


@pytest.mark.parametrize("make_pass", legal_passes(), ids=lambda graph_pass: graph_pass.name)
def test_each_legal_pass_alone_is_not_refused(
    captured: dict[str, StepGraph], make_pass: GraphPass
) -> None:
    for step in captured.values():
        graph_module = copy.deepcopy(step.graph_module)
        PassManager([make_pass], context=step.context).run(graph_module)
