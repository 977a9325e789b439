"""After a pass only what changed is looked at, and what that misses is found at the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from edited_graphs import Edit, ReplaceOperators, X, aten, move, problems_of, updated_buffer
from expecttest import assert_expected_inline
from pass_graphs import capture, node_of, run_pass
from torch.fx import GraphModule

from gt_passes import VerificationError
from gt_passes.verifier.dataflow.check_dataflow import Dataflow
from gt_passes.verifier.repropagation import Repropagator
from gt_passes.verifier.verification_session import VerificationSession
from gt_passes.verifier.verifier import Verifier


def test_looks_only_at_changed_nodes_and_their_users(monkeypatch: pytest.MonkeyPatch):
    looked_at: list[list[str] | None] = []
    find_problems = Repropagator.find_problems

    def note(self, scan, fake_mode, *, only=None):
        looked_at.append(None if only is None else [node.name for node in only])
        return find_problems(self, scan, fake_mode, only=only)

    monkeypatch.setattr(Repropagator, "find_problems", note)
    graph_module = capture(lambda x: x.cos().sin().exp().tanh(), X)

    def retarget(edited: GraphModule) -> None:
        node_of(edited, "sin").target = aten.sinh.default

    assert problems_of(graph_module, retarget) == ""
    assert looked_at == [None, ["sin", "exp"], None]


def test_a_pass_that_did_nothing_costs_a_look(monkeypatch: pytest.MonkeyPatch):
    looked_at = []
    find_problems = Repropagator.find_problems

    def note(self, scan, fake_mode, *, only=None):
        looked_at.append(only)
        return find_problems(self, scan, fake_mode, only=only)

    monkeypatch.setattr(Repropagator, "find_problems", note)
    assert problems_of(capture(lambda x: x.cos(), X), lambda edited: None) == ""
    assert looked_at == [None, None]  # as captured, and at the end


def test_two_passes_on_a_graph_taken_as_verified_are_each_looked_at():
    def retarget(name: str, target: object) -> Edit:
        return lambda edited: setattr(node_of(edited, name), "target", target)

    def transpose_tanh(edited: GraphModule) -> None:
        tanh = node_of(edited, "tanh")
        tanh.target, tanh.meta["val"] = aten.t.default, tanh.meta["val"].t()

    def problems_after_each(*edits: Edit) -> list[str]:
        graph_module = capture(lambda x: x.cos().sin().exp().tanh().cosh(), X)
        passes = [ReplaceOperators(edit=edit) for edit in edits]
        session = VerificationSession(graph_module, passes=passes, same_groups={})
        session.take_as_verified()
        said = []
        for position, edit in enumerate(edits):
            edit(graph_module)
            said.append("\n".join(map(str, session.verify_pass(position))))
        return said

    first = retarget("cos", aten.tan.default)
    assert problems_after_each(first, retarget("tanh", aten.exp.default)) == ["", ""]
    found = problems_after_each(first, transpose_tanh)
    assert found[0] == ""
    assert "[fake re-propagation] node cosh (aten.cosh.default)" in found[1]
    assert "expected shape [6, 4], stride [1, 6]" in found[1]


@dataclass(frozen=True, kw_only=True)
class MoveNodes(ReplaceOperators):
    """As above, and keeps the dataflow."""

    name: ClassVar[str] = "move-nodes"
    keeps_dataflow: ClassVar[bool] = True


def test_the_dataflow_is_not_followed_again_when_no_call_can_tell(monkeypatch: pytest.MonkeyPatch):
    followed = []
    follow = Dataflow.of.__func__

    def note(cls, *args, **kwargs):
        followed.append(args)
        return follow(cls, *args, **kwargs)

    monkeypatch.setattr(Dataflow, "of", classmethod(note))
    independent = capture(lambda x: (x.cos(), x.sin()), X)
    run_pass(MoveNodes(edit=move("cos", after="sin")), independent)
    assert len(followed) == 1

    buffers = capture(updated_buffer, X, X.clone())
    with pytest.raises(VerificationError, match="dataflow"):
        run_pass(MoveNodes(edit=move("cos", after="copy_")), buffers)
    assert len(followed) == 3

    draws = capture(lambda x: (torch.rand_like(x), torch.rand_like(x)), X)
    with pytest.raises(VerificationError, match="dataflow"):
        run_pass(MoveNodes(edit=move("rand_like", after="rand_like_1")), draws)
    assert len(followed) == 5


def test_a_value_changed_in_place_is_found_at_the_end():
    def transpose_value(edited: GraphModule) -> None:
        node_of(edited, "cos").meta["val"].t_()

    with pytest.raises(VerificationError) as error:
        run_pass(ReplaceOperators(edit=transpose_value), capture(lambda x: x.cos().sin(), X))
    assert_expected_inline(
        str(error.value),
        """\
after all passes, the graph has 2 problems:
  1. [fake re-propagation] node cos (aten.cos.default)
     its recorded fake value is not what its operator gives on its inputs
     expected shape [4, 6], stride [6, 1], dtype torch.float32, device cpu
     got      shape [6, 4], stride [1, 6], dtype torch.float32, device cpu
  2. [fake re-propagation] node sin (aten.sin.default)
     its recorded fake value is not what its operator gives on its inputs
     expected shape [6, 4], stride [1, 6], dtype torch.float32, device cpu
     got      shape [4, 6], stride [6, 1], dtype torch.float32, device cpu
to reproduce: run Verifier().verify(graph_module) after each pass: one of them changed a value in node.meta["val"] in place""",
    )


def test_a_constant_of_which_another_value_is_recorded_is_found_at_the_end():
    constant = torch.randn(3, 5)
    graph_module = capture(lambda x: x.cos() * constant.sum(), X)
    (attribute,) = graph_module.graph.find_nodes(op="get_attr")

    def transpose_value(edited: GraphModule) -> None:
        attribute.meta["val"].t_()

    found = problems_of(graph_module, transpose_value)
    assert "expected shape [3, 5], stride [5, 1]" in found
    assert "got      shape [5, 3], stride [1, 5]" in found


class Switch:
    """A constant that cannot be hashed and can change inside."""

    __hash__ = None

    def __init__(self) -> None:
        self.is_on = False

    def __repr__(self) -> str:
        return "Switch()"


def sin_transposed_if(x: torch.Tensor, switch: Switch) -> torch.Tensor:
    return x.sin().t() if switch.is_on else x.sin()


def test_what_changed_inside_a_constant_of_a_call_is_found_at_the_end():
    switch = Switch()
    graph_module = capture(lambda x: x.cos().sin().exp(), X)
    sin = node_of(graph_module, "sin")
    sin.target, sin.args = sin_transposed_if, (*sin.args, switch)
    assert problems_of(graph_module, lambda edited: None) == ""

    found = problems_of(graph_module, lambda edited: setattr(switch, "is_on", True))
    assert "[fake re-propagation] node sin" in found
    assert "expected shape [6, 4], stride [1, 6]" in found
    assert "got      shape [4, 6], stride [6, 1]" in found


def test_operators_are_asked_again_at_the_end_only_where_a_value_changed(
    monkeypatch: pytest.MonkeyPatch,
):
    asked: list[list[str]] = []
    check = Repropagator._problems_of

    def note(self, nodes, recorded, fake_mode):
        asked.append([node.name for node in nodes if node.op == "call_function"])
        return check(self, nodes, recorded, fake_mode)

    def leave_out(edited: GraphModule) -> None:
        node_of(edited, "sin").replace_all_uses_with(node_of(edited, "cos"))
        edited.graph.erase_node(node_of(edited, "sin"))

    monkeypatch.setattr(Repropagator, "_problems_of", note)
    assert problems_of(capture(lambda x: x.cos().sin().exp(), X), leave_out) == ""
    assert asked == [["cos", "sin", "exp"], ["exp"], []]


def test_a_verifier_that_found_a_problem_finds_it_again():
    graph_module = capture(lambda x: x.cos().sin(), X)
    verifier = Verifier()
    node_of(graph_module, "cos").meta["val"].t_()
    scan = verifier.scan(graph_module)
    first = verifier.verify(graph_module, scan=scan)
    assert first.problems
    assert verifier.verify(graph_module, scan=scan) == first


@pytest.mark.parametrize(
    ("edit", "found"),
    [
        (move("cos", after="sin"), "was used before it has been defined"),
        (lambda edited: node_of(edited, "sin").append(node_of(edited, "x_1")), "placeholder"),
        (
            lambda edited: edited.graph.erase_node(edited.graph.output_node()),
            "a graph ends with its one output",
        ),
    ],
)
def test_a_graph_that_is_no_longer_well_formed_is_found(edit: Edit, found: str):
    assert found in problems_of(capture(lambda x: x.cos().sin(), X), edit)
