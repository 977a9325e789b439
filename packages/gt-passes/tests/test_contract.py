"""What a pass must declare, and what its context says."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

import pytest
import torch
from expecttest import assert_expected_inline
from pass_graphs import capture
from torch.fx import GraphModule

from gt_config.graph_kinds import EVERY_GRAPH, GraphKind
from gt_config.numerics import Numerics
from gt_passes import (
    CanonicalizeViews,
    ChangeBounds,
    GraphPass,
    PassContext,
    PassReport,
    RemoveDeadCode,
    ShareAllGathers,
)
from gt_passes.contract import check_declaration
from gt_passes.errors import GraphInputError, PassDeclarationError

OURS = (RemoveDeadCode, CanonicalizeViews, ShareAllGathers)


def test_every_violation_of_the_contract_is_listed():
    class Sloppy(GraphPass):
        name: ClassVar[str] = "sloppy-pass"
        runs_on = frozenset({"stage 0"})

        def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
            return PassReport(changed=False)

    with pytest.raises(PassDeclarationError) as error:
        check_declaration(Sloppy)
    assert_expected_inline(
        str(error.value).replace("test_every_violation_of_the_contract_is_listed.<locals>.", ""),
        """\
Sloppy does not declare a pass as the contract asks:
  - it is not a frozen dataclass: write @dataclass(frozen=True, ...)
  - its name is 'sloppy-pass', and its class name asks for 'sloppy'
  - numerics is None, not one of bitwise, reordered, approximate
  - runs_on is frozenset({'stage 0'}), not a frozenset of kinds of graph: some of STEP, MICROBATCH, STAGE, UNSHARD, FORWARD, FULL_BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, REDUCE_GRAD, OVERLAP_F_B, JOINT_FORWARD, JOINT_BACKWARD""",
    )


def test_a_pass_must_say_on_which_graphs_it_runs():
    @dataclass(frozen=True)
    class Nowhere(GraphPass):
        name: ClassVar[str] = "nowhere"
        numerics: ClassVar[Numerics] = "bitwise"

        def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
            return PassReport(changed=False)

    with pytest.raises(PassDeclarationError, match="runs_on is None, not a frozenset of kinds"):
        check_declaration(Nowhere)


def test_the_subclass_of_a_frozen_dataclass_must_be_one_itself():
    class RemoveDeadCodeToo(RemoveDeadCode):
        name: ClassVar[str] = "remove-dead-code-too"

    with pytest.raises(PassDeclarationError, match="it is not a frozen dataclass"):
        check_declaration(RemoveDeadCodeToo)


@pytest.mark.parametrize("pass_class", OURS)
def test_our_passes_keep_the_contract(pass_class: type[GraphPass]):
    check_declaration(pass_class)
    file_name = pass_class.__module__.rsplit(".", 1)[1]
    assert file_name == pass_class.name.replace("-", "_")
    for section in ("*Before*", "*After*", "*Refuses*", "*Preserves numerics*"):
        assert section in (pass_class.__doc__ or ""), section


@pytest.mark.parametrize("pass_class", OURS)
def test_our_passes_can_be_built_from_their_names(pass_class: type[GraphPass]):
    assert pass_class() == pass_class()
    assert all(option.kw_only for option in fields(pass_class))


def test_a_pass_promises_no_more_bytes_and_no_more_memory_unless_it_says_so():
    @dataclass(frozen=True)
    class Quiet(GraphPass):
        name: ClassVar[str] = "quiet"
        numerics: ClassVar[Numerics] = "bitwise"
        runs_on: ClassVar[frozenset[GraphKind]] = EVERY_GRAPH

        def run(self, graph_module: GraphModule, context: PassContext) -> PassReport:
            return PassReport(changed=False)

    assert Quiet().bounds == ChangeBounds(
        collective_bytes_growth=0.0, collective_bytes_may_shrink=False, peak_memory_growth=0.0
    )


def test_the_context_finds_the_fake_mode_of_a_graph():
    graph_module = capture(lambda w, x: w @ x, torch.ones(2, 2), torch.ones(2, 2))
    context = PassContext.from_graph(graph_module, static_input_names=("w",))
    assert context.fake_mode is next(iter(graph_module.graph.nodes)).meta["val"].fake_mode
    assert context.num_static_inputs == 1


def test_the_context_refuses_more_names_than_inputs():
    graph_module = capture(lambda x: x.cos(), torch.ones(2))
    with pytest.raises(GraphInputError) as error:
        PassContext.from_graph(graph_module, static_input_names=("w", "b"))
    assert_expected_inline(
        str(error.value),
        """2 static input names were given for a graph with 1 placeholders""",
    )


def test_the_context_refuses_a_graph_without_fake_values():
    graph_module = torch.fx.symbolic_trace(torch.nn.Linear(2, 2))
    with pytest.raises(GraphInputError, match="trace with fake tensors"):
        PassContext.from_graph(graph_module)
