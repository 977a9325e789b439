"""Passes are found by name, and unknown names get near matches."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import ClassVar

import pytest
from expecttest import assert_expected_inline
from torch.fx import GraphModule

import gt_passes
from gt_config.graph_kinds import EVERY_GRAPH, GraphKind
from gt_config.numerics import Numerics
from gt_passes import (
    GraphPass,
    PassContext,
    PassReport,
    RemoveDeadCode,
    ShareAllGathers,
    known_passes,
    register_pass,
    registry,
)
from gt_passes.errors import PassDeclarationError, UnknownPassError
from gt_passes.registry import find_passes


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a test registers is forgotten after it."""
    monkeypatch.setattr(registry, "_PASSES", dict(registry._PASSES))


def test_knows_the_passes_of_this_package():
    assert known_passes() == tuple(sorted(known_passes()))
    assert {graph_pass.name for graph_pass in every_pass()} == set(known_passes())


def every_pass() -> set[type[GraphPass]]:
    """Every pass that ``gt_passes`` exports, without the bases of passes of one's own."""
    exported = (getattr(gt_passes, name) for name in gt_passes.__all__)
    return {
        each
        for each in exported
        if isinstance(each, type) and issubclass(each, GraphPass) and hasattr(each, "name")
    }


def test_finds_passes_in_the_order_of_their_names():
    found = find_passes(["share-all-gathers", "remove-dead-code"])
    assert found == (ShareAllGathers, RemoveDeadCode)


def test_unknown_names_are_one_error_with_near_matches(monkeypatch: pytest.MonkeyPatch):
    two = {each.name: each for each in (RemoveDeadCode, ShareAllGathers)}
    monkeypatch.setattr(registry, "_PASSES", two)
    with pytest.raises(UnknownPassError) as error:
        find_passes(["remove-dead-cod", "share-all-gathers", "quantize"])
    assert_expected_inline(
        str(error.value),
        """\
no graph pass is named 'remove-dead-cod'; did you mean 'remove-dead-code'?
no graph pass is named 'quantize'
known passes: remove-dead-code, share-all-gathers""",
    )
    assert error.value.names == ("remove-dead-cod", "quantize")
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


@pytest.mark.usefixtures("registered")
def test_a_registered_pass_is_known():
    @register_pass
    @dataclass(frozen=True)
    class CountOps(GraphPass):
        name: ClassVar[str] = "count-ops"
        numerics: ClassVar[Numerics] = "bitwise"
        runs_on: ClassVar[frozenset[GraphKind]] = EVERY_GRAPH

        def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
            return PassReport(changed=False)

    assert "count-ops" in known_passes()
    assert find_passes(["count-ops"]) == (CountOps,)
    assert register_pass(CountOps) is CountOps  # again, as when a module is reloaded


@pytest.mark.usefixtures("registered")
def test_a_name_is_given_once():
    @dataclass(frozen=True)
    class RemoveDeadCode(GraphPass):
        name: ClassVar[str] = "remove-dead-code"
        numerics: ClassVar[Numerics] = "bitwise"
        runs_on: ClassVar[frozenset[GraphKind]] = EVERY_GRAPH

        def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
            return PassReport(changed=False)

    with pytest.raises(PassDeclarationError) as error:
        register_pass(RemoveDeadCode)
    assert (
        "the name 'remove-dead-code' is taken by "
        "gt_passes.clean_up.remove_dead_code.RemoveDeadCode" in str(error.value)
    )
