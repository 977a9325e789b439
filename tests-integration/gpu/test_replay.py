"""What is recorded once and replayed ever after is what eager computes."""

from __future__ import annotations

import torch
from gpu import replay_cases
from gpu.sites import Site


def test_launches_and_waits_of_two_communicators_stand_in_one_piece(site: Site) -> None:
    counts, equal = replay_cases.two_communicators(site)
    assert counts["pieces"] == 1
    assert equal == [True] * 5


def test_replays_draw_the_random_numbers_that_a_captured_step_draws(site: Site) -> None:
    captured, replayed = replay_cases.random_numbers_over_replays(site)
    assert len({loss.item() for loss in captured}) == len(captured) == 6
    assert all(map(torch.equal, captured, replayed))


def test_a_parameter_that_moved_is_recorded_anew(site: Site) -> None:
    equal, num_recorded = replay_cases.a_parameter_that_moved(site)
    assert equal == [True] * 7
    assert num_recorded == 2  # one piece, twice


def test_recordings_are_released_before_their_process_groups(site: Site) -> None:
    equal, is_initialized = replay_cases.released_and_recorded_anew(site)
    assert equal == [True] * 16
    assert not is_initialized


def test_what_a_step_returned_outlives_the_next_replay(site: Site) -> None:
    assert replay_cases.results_that_are_kept(site) == [True] * 6
