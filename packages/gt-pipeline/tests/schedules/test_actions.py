"""Actions: their text form, there and back, and what is none."""

from __future__ import annotations

from typing import get_args

import pytest
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from gt_pipeline.errors import ActionError
from gt_pipeline.schedules import Action
from gt_pipeline.schedules.actions import WITH_MICROBATCH, ActionKind, parse_action

_indices = st.integers(min_value=0, max_value=10_000)


@st.composite
def _simple_actions(draw: st.DrawFn) -> Action:
    kind = draw(st.sampled_from([kind for kind in get_args(ActionKind) if kind != "OVERLAP_F_B"]))
    return Action(draw(_indices), kind, draw(_indices) if kind in WITH_MICROBATCH else None)


@st.composite
def _overlaps(draw: st.DrawFn) -> Action:
    backward = draw(st.sampled_from(["FULL_BACKWARD", "BACKWARD_INPUT"]))
    stage, microbatch, other = draw(st.tuples(_indices, _indices, _indices))
    return Action.overlap(
        Action(stage, "FORWARD", microbatch),
        Action(stage + 1, backward, other),
    )


@given(st.one_of(_simple_actions(), _overlaps()))
def test_what_is_printed_is_read_back(action: Action) -> None:
    assert parse_action(str(action)) == action


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action(2, "FORWARD", 0)),
        (" 12I34 ", Action(12, "BACKWARD_INPUT", 34)),
        ("2RESHARD", Action(2, "RESHARD")),
        ("2REDUCE_GRAD", Action(2, "REDUCE_GRAD")),
        ("2SEND_B1", Action(2, "SEND_B", 1)),
        (
            "( 2F1 ; 3B0 )OVERLAP_F_B",
            Action.overlap(Action(2, "FORWARD", 1), Action(3, "FULL_BACKWARD", 0)),
        ),
    ],
)
def test_reads_the_text_form_of_pytorch(text: str, action: Action) -> None:
    assert parse_action(text) == action


def test_compute_parts_are_those_of_an_overlap_itself_or_none() -> None:
    overlap = parse_action("(2F1;3I0)OVERLAP_F_B")
    assert [str(part) for part in overlap.compute_parts] == ["2F1", "3I0"]
    assert parse_action("2W0").compute_parts == (parse_action("2W0"),)
    assert parse_action("2UNSHARD").compute_parts == ()


@pytest.mark.parametrize("text", ["", "F0", "2X0", "2F0 3", "-1F0", "(2F1)OVERLAP_F_B", "2F0;3B1"])
def test_refuses_text_that_is_no_action(text: str) -> None:
    with pytest.raises(ActionError, match="is no action of a pipeline"):
        parse_action(text)


def test_the_message_says_what_an_action_looks_like() -> None:
    with pytest.raises(ActionError) as caught:
        parse_action("2FORWARD0")
    assert_expected_inline(
        str(caught.value),
        """\
'2FORWARD0' is no action of a pipeline:
  - it is not <stage><kind>[microbatch], such as 2F0 or 1UNSHARD, nor (<forward>;<backward>)OVERLAP_F_B
  - kinds: UNSHARD, F, B, I, W, REDUCE_GRAD, OVERLAP_F_B, SEND_F, RECV_F, SEND_B, RECV_B, RESHARD""",
    )


def test_every_contradiction_of_the_fields_is_reported() -> None:
    with pytest.raises(ActionError) as caught:
        Action(-1, "FORWARD", None, (parse_action("2F1"), parse_action("3B0")))
    assert_expected_inline(
        str(caught.value),
        """\
Action(stage=-1, kind=FORWARD, microbatch=None, parts=['2F1', '3B0']) is no action of a pipeline:
  - stage -1 is negative
  - FORWARD needs a microbatch
  - FORWARD has no parts; only OVERLAP_F_B has""",
    )


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ("2B1", "3B0", "its first part must be a forward"),
        ("2F1", "3W0", r"its second part must be a backward \(B\) or a dI \(I\), not 3W0"),
        ("2F1", "2B1", "2B1 needs what 2F1 saves"),
    ],
)
def test_refuses_to_overlap_what_cannot_run_as_one(first: str, second: str, reason: str) -> None:
    with pytest.raises(ActionError, match=reason):
        Action.overlap(parse_action(first), parse_action(second))
