"""Stages of several units hold what their units hold, put together."""

from __future__ import annotations

from gt_pipeline.estimates import ActionMemory, StageMemory, joined_memory, memory_of_one
from gt_pipeline.estimates.joined_memory import overlapped_memory


def action(extra: int, launched: int = 0) -> ActionMemory:
    return ActionMemory(extra_bytes=extra, launched_bytes=launched, num_unsized=0)


def layer(saved: int = 6) -> StageMemory:
    return StageMemory(
        state_bytes=10,
        num_parameters=4,
        parameter_bytes=8,
        gathered_bytes=20,
        saved_bytes=saved,
        between_bytes=4,
        accumulated_bytes=30,
        reduced_bytes=7,
        entering_bytes=2,
        leaving_bytes=2,
        actions={
            "UNSHARD": action(25, 20),
            "FORWARD": action(50),
            "FULL_BACKWARD": action(60),
            "BACKWARD_INPUT": action(40),
            "BACKWARD_WEIGHT": action(35),
            "REDUCE_GRAD": action(15, 5),
        },
    )


def test_a_stage_of_one_unit_is_the_unit() -> None:
    assert joined_memory([layer()]) == layer()


def test_what_is_held_between_actions_adds_up_and_activations_between_units_are_saved() -> None:
    two = joined_memory([layer(), layer()])
    assert (two.state_bytes, two.gathered_bytes, two.accumulated_bytes) == (20, 40, 60)
    assert two.saved_bytes == 6 + 6 + 2
    assert (two.entering_bytes, two.leaving_bytes) == (2, 2)


def test_the_peak_of_an_action_is_on_top_of_what_units_before_have_left() -> None:
    two = joined_memory([layer(), layer()])
    assert two.actions["UNSHARD"].extra_bytes == 50
    # The first forward leaves what it saved and what it passes on.
    assert two.actions["FORWARD"].extra_bytes == 6 + 2 + 50
    # The last unit's backward leaves its gradients, and gives up what was saved.
    assert two.actions["FULL_BACKWARD"].extra_bytes == 30 - 6 + 60
    # Its dI leaves less than there was.
    assert two.actions["BACKWARD_INPUT"].extra_bytes == 40


def test_one_of_two_is_what_two_are_made_of() -> None:
    for saved in (0, 6):
        two = joined_memory([layer(saved), layer(saved)])
        one = memory_of_one(two, 2)
        assert one == layer(saved)
        assert joined_memory([one, one]) == two
    assert memory_of_one(layer(), 1) == layer()


def test_a_pair_may_be_at_both_peaks_at_once() -> None:
    actions = layer().actions
    pair = overlapped_memory(actions["FORWARD"], actions["FULL_BACKWARD"])
    assert pair.extra_bytes == 110
    assert pair.launched_bytes == 0
