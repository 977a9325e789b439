"""The sizes of a scaling curve: what is asked of each, and what is made of what it found."""

from __future__ import annotations

from dataclasses import replace

from planning.outcomes import outcome, report, scaling

from gt_trainer.planning import scaling_curve as curve
from gt_trainer.planning.candidates import PlanRequest

_REQUEST = PlanRequest(num_gpus=64, global_batch=128, gpus_per_node=8, fixed={})


def _curve(*, seconds=100.0, sizes=(64, 256)):
    """Points, and what was searched with how much time."""
    searched = []
    plan = report((outcome(8),)).plan

    def search(request, machines, *, seconds, enough):
        searched.append((request.num_gpus, request.global_batch, len(machines), enough))
        assert 0 < seconds <= 100
        return replace(plan, outcomes=((outcome(4, ms=500.0),),), least_us=2e5)

    points = curve.scaling_curve(search, _REQUEST, plan, seq_len=8192, seconds=seconds, sizes=sizes)
    return points, searched


def test_the_batch_grows_with_the_gpus_or_stays_and_the_plan_is_its_own_point():
    points, searched = _curve()
    assert [(each.num_gpus, each.global_batch_tokens, each.grows) for each in points] == [
        (64, 128 * 8192, True),
        (256, 512 * 8192, True),
        (64, 128 * 8192, False),
        (256, 128 * 8192, False),
    ]
    assert searched == [(256, 512, 1, 1), (256, 128, 1, 1)]
    assert [each.simulated for each in points[:2]] == [outcome(8), outcome(4, ms=500.0)]
    assert [each.least_us for each in points[:2]] == [1e5, 2e5]
    assert points[1].most_tokens_per_second_per_gpu == 512 * 8192 / 0.2 / 256


def _searched_in_turns(monkeypatch, *, needs):
    """What was searched with how many of 100 s, where points need some of their turn.

    Args:
        needs: seconds to the first recipe that fits, by GPUs and sequences.
    """
    now = [0.0]
    turns = []
    nothing = replace(report((outcome(8),)).plan, outcomes=(), num_left=1)

    def search(request, machines, *, seconds, enough):
        point = request.num_gpus, request.global_batch
        turns.append((*point, round(seconds, 1)))
        now[0] += min(seconds, needs[point])
        found = ((outcome(4),),) if needs[point] <= seconds else ()
        return replace(nothing, outcomes=found)

    monkeypatch.setattr(curve.time, "monotonic", lambda: now[0])
    plan = report((outcome(8),)).plan
    sizes = (64, 256, 1024)
    points = curve.scaling_curve(search, _REQUEST, plan, seq_len=8192, seconds=100, sizes=sizes)
    return turns, {
        (each.num_gpus, each.global_batch_tokens // 8192): each.simulated is not None
        for each in points
    }


def test_sizes_take_turns_from_the_nearest_on_and_what_is_left_is_for_those_without_an_answer(
    monkeypatch,
):
    needs = {(256, 512): 40, (256, 128): 5, (1024, 2048): 15, (1024, 128): 5}
    turns, has_answer = _searched_in_turns(monkeypatch, needs=needs)
    assert turns == [
        (256, 512, 25.0),
        (256, 128, 25.0),
        (1024, 2048, 35.0),
        (1024, 128, 55.0),
        (256, 512, 50.0),
    ]
    assert all(has_answer.values())


def test_a_second_turn_is_all_that_is_left_and_none_is_shorter_than_the_first(monkeypatch):
    needs = {(256, 512): 40, (256, 128): 60, (1024, 2048): 5, (1024, 128): 5}
    turns, has_answer = _searched_in_turns(monkeypatch, needs=needs)
    assert turns[4:] == [(256, 512, 40.0)]
    assert [point for point, has in has_answer.items() if not has] == [(256, 128)]


def test_without_time_left_nothing_takes_a_second_turn(monkeypatch):
    needs = dict.fromkeys([(256, 512), (256, 128), (1024, 2048), (1024, 128)], 60)
    turns, has_answer = _searched_in_turns(monkeypatch, needs=needs)
    assert turns == [(*point, 25.0) for point in needs]
    assert [point for point, has in has_answer.items() if has] == [(64, 128)]  # the plan's own


def test_a_batch_that_would_have_no_whole_sequences_is_left_out():
    odd = replace(_REQUEST, global_batch=3)
    asked = [(grows, each.num_gpus) for grows, each in curve._requests(odd, (32, 64))]
    assert asked == [(True, 64), (False, 32), (False, 64)]


def test_a_batch_that_was_given_as_a_flag_grows_too():
    given = replace(_REQUEST, fixed={"--training.global_batch_size": 128})
    asked = [each.fixed for _, each in curve._requests(given, (64, 256))]
    assert [each["--training.global_batch_size"] for each in asked] == [128, 512, 128, 128]


def test_the_size_of_the_plan_is_on_the_curve():
    points, _ = _curve(sizes=(256,))
    assert [(each.num_gpus, each.grows) for each in points][::2] == [(64, True), (64, False)]
    assert points[0].simulated == outcome(8)


def test_rows_say_what_is_bounded_what_is_simulated_and_what_cannot_be():
    text = str(report((outcome(8),), scaling=scaling()))
    _, bounded, *_ = rows = text[text.index(curve.SCALING_HEAD) :].splitlines()[:5]
    assert bounded == (
        "      64        524,288  growing        12,800         8,000  40.0%  "
        "dp_shard 8 | 1 x 1 seq selective"
    )
    assert rows[2] == "     256      2,097,152  growing         3,200             -"
    assert (
        rows[4]
        == "     256         65,536    fixed no recipe has this batch, these flags, and could fit"
    )


def test_data_has_the_curve():
    data = report((outcome(8),), scaling=scaling()).as_data()["scaling"]
    assert [each["num_gpus"] for each in data] == [64, 256, 64, 256]
    assert [each["grows"] for each in data] == [True, True, False, False]
    assert data[0]["simulated"]["step_us"] == 1e6
    assert data[1]["simulated"] is None
    assert data[3]["least_us"] is None
