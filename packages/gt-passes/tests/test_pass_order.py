"""Passes keep the order in which they are given, but for what their facts ask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import GraphModule

from gt_passes import GraphPass, PassContext, PassOrderError, PassReport
from gt_passes.facts import Fact
from gt_passes.pass_order import order_passes

FACTS = [Fact(name) for name in "abcdef"]


def make(name: str, *, requires: str = "", provides: str = "") -> GraphPass:
    """A pass that declares the facts with those one-letter names."""

    class Declared(GraphPass):
        def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
            return PassReport(changed=False)

    Declared.name = name
    Declared.requires = frozenset(map(Fact, requires))
    Declared.provides = frozenset(map(Fact, provides))
    return Declared()


def names(passes: tuple[GraphPass, ...]) -> list[str]:
    return [graph_pass.name for graph_pass in passes]


def test_a_valid_order_is_kept():
    passes = [make("one"), make("two", provides="a"), make("three", requires="a"), make("four")]
    assert order_passes(passes) == tuple(passes)


def test_a_pass_moves_behind_what_it_requires_and_no_further():
    passes = [make("one", requires="a"), make("two"), make("three", provides="a"), make("four")]
    assert names(order_passes(passes)) == ["two", "three", "one", "four"]


def test_one_provider_is_enough():
    passes = [make("clean", provides="a"), make("work", requires="a"), make("clean", provides="a")]
    assert names(order_passes(passes)) == ["clean", "work", "clean"]


def test_a_given_fact_needs_no_provider():
    assert names(order_passes([make("one", requires="a")], given_facts=[Fact("a")])) == ["one"]


def test_a_missing_provider_is_named():
    passes = [make("one", requires="ab"), make("two", provides="a"), make("three", requires="c")]
    with pytest.raises(PassOrderError) as error:
        order_passes(passes)
    assert_expected_inline(
        str(error.value),
        """\
the passes cannot be ordered:
  - one requires b, and no pass provides it
  - three requires c, and no pass provides it""",
    )


def test_passes_that_wait_for_each_other_are_named_without_those_behind_them():
    passes = [
        make("one", requires="a", provides="b"),
        make("two", requires="b", provides="a"),
        make("behind", requires="a"),
    ]
    with pytest.raises(PassOrderError) as error:
        order_passes(passes)
    assert_expected_inline(
        str(error.value),
        """\
the passes cannot be ordered:
  - one requires a, which only two provides, and that waits too
  - two requires b, which only one provides, and that waits too""",
    )


def test_a_pass_that_requires_what_only_it_provides_waits_for_itself():
    with pytest.raises(PassOrderError, match="one requires a, which only one provides"):
        order_passes([make("one", requires="a", provides="a")])


letters = st.text(alphabet="abcdef", max_size=2)
declarations = st.lists(st.tuples(letters, letters), max_size=8)


def built(declared: list[tuple[str, str]]) -> list[GraphPass]:
    return [
        make(f"pass-{position}", requires=requires, provides=provides)
        for position, (requires, provides) in enumerate(declared)
    ]


def is_valid(passes: list[GraphPass] | tuple[GraphPass, ...]) -> bool:
    established: set[Fact] = set()
    for graph_pass in passes:
        if not graph_pass.requires <= established:
            return False
        established |= graph_pass.provides
    return True


def reachable(passes: list[GraphPass]) -> bool:
    """Whether all can run. Facts only grow: running whatever can run reaches all there is."""
    established: set[Fact] = set()
    for _ in passes:
        for graph_pass in passes:
            if graph_pass.requires <= established:
                established |= graph_pass.provides
    return all(graph_pass.requires <= established for graph_pass in passes)


@given(declarations)
def test_an_order_is_found_exactly_when_there_is_one(declared: list[tuple[str, str]]):
    passes = built(declared)
    if not reachable(passes):
        with pytest.raises(PassOrderError, match="requires"):
            order_passes(passes)
        return
    ordered = order_passes(passes)
    assert sorted(map(id, ordered)) == sorted(map(id, passes))
    assert is_valid(ordered)


@given(declarations)
def test_an_order_that_is_valid_stays(declared: list[tuple[str, str]]):
    passes = built(declared)
    if is_valid(passes):
        assert order_passes(passes) == tuple(passes)


@given(declarations)
def test_ordering_again_changes_nothing(declared: list[tuple[str, str]]):
    try:
        ordered = order_passes(built(declared))
    except PassOrderError:
        return
    assert order_passes(ordered) == ordered


@dataclass(frozen=True)
class Plain(GraphPass):
    name: ClassVar[str] = "plain"

    def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
        return PassReport(changed=False)


def test_the_same_pass_may_occur_twice():
    first, second = Plain(), Plain()
    ordered = order_passes([first, second])
    assert ordered[0] is first
    assert ordered[1] is second
