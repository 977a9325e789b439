"""The answer in words."""

import dataclasses
import re

from planning.outcomes import outcome, report

from gt_trainer.planning.plan_answer import binding, ranking_changes, why_slower
from gt_trainer.planning.recipe_outcome import Unsimulated
from gt_trainer.planning.run_beside import SimulatedBeside


def test_the_answer_ranks_what_fits_and_says_what_binds():
    too_large = outcome(8, ms=700.0, gib=90)
    text = str(report((outcome(4),), (outcome(2, ms=1250.0),), (too_large,)))
    rows = [line for line in text.splitlines() if re.match(r" +[\d,]+\.\dms ", line)]
    assert [row.split("GiB")[0].split() for row in rows] == [
        ["1,000.0ms", "8,000", "40.0%", "40.0"],
        ["1,250.0ms", "6,400", "40.0%", "40.0"],
    ]
    assert (
        "  candidates       100: 90 bounded away (20 of them by memory), 3 simulated, 0 refused by "
        "the rules of a run, 0 failed, 0 left; 12 s"
    ) in text
    assert (
        "  binds            80% of the step computes; most of the rest: 15.0% FSDP unshard" in text
    )
    assert (
        "  memory binds     dp_shard 8 | 1 x 1 seq selective would take -30.0% and needs 90.0 GiB "
        "of 74.0"
    ) in text
    assert "  second           250.0 ms behind, 200.0 ms of computing more: " in text
    assert "time was up" not in text


def test_the_answer_ends_with_command_lines():
    *_, command, dry_run = str(report((outcome(8),))).splitlines()
    assert command.strip().startswith(
        "gt-train --module llama3 --config llama3_8b --training.seq_len 8192 --parallelism."
    )
    assert dry_run == f"{command} --dry-run --world-size 8"


def test_a_search_that_stopped_says_that_something_may_be_faster():
    text = str(report((outcome(8),), num_left=7, refusals=(("--a 1: allowed is 2", 3),)))
    assert "  time was up      one of those left may be faster: give more --minutes" in text
    assert "  refused          3 with --a 1: allowed is 2" in text


def test_a_search_that_stopped_before_it_knew_all_candidates_says_so():
    refusals = (("--a 1: allowed is 2", 3),)
    stopped = report(refusals=refusals, has_all_candidates=False)
    text = str(stopped)
    assert "  stopped          before all candidates were known: others may be faster" in text
    assert stopped.as_data()["has_all_candidates"] is False
    assert stopped.without_answer == (
        "nothing was simulated in 12 s, and it was stopped before all candidates were known"
    )


def test_nothing_that_fits_is_told_with_the_least_that_was_simulated():
    text = str(report((outcome(8, gib=90),), (outcome(4, gib=80),)))
    assert (
        "  nothing fits     the least that was simulated needs 80.0 GiB of 74.0: dp_replicate 2 x "
        "dp_shard 4 | 1 x 1 seq selective"
    ) in text


def test_a_relaxed_machine_is_compared_with_the_best_on_the_one_that_is_there():
    now, then = outcome(8), outcome(8, ms=900.0)
    faster_then = outcome(4, ms=800.0)
    text = str(report((now, then), (outcome(4, ms=1100.0), faster_then), machines=2))
    assert (
        "  what if          H100 SXM (nic 800): 800.0 ms, -20.0%, with dp_replicate 2 x dp_shard 4"
    ) in text


def test_the_ranking_survives_or_it_is_said_what_changes_it():
    steady = [outcome(8), outcome(4, ms=1250.0)]
    assert ranking_changes(steady) == []
    shaky = [outcome(8, moved={"network 30% slower": 2e6}), outcome(4, ms=1250.0)]
    ((moved, winner, gain),) = ranking_changes(shaky)
    assert (moved, winner) == ("network 30% slower", shaky[1])
    assert gain == 2e6 / 1.375e6 - 1
    assert "  sensitivity      the first stays first with ±30%" in str(
        report(*[(o,) for o in steady])
    )
    assert "all of them, among the 2 simulated that fit" in str(report(*[(o,) for o in steady]))
    assert "sensitivity" not in str(report((steady[0],)))
    assert "  sensitivity      network 30% slower: dp_replicate 2" in str(
        report(*[(o,) for o in shaky])
    )


def test_a_bubble_can_bind_and_be_why_another_is_slower():
    best, other = outcome(8), outcome(4, ms=1200.0, bubble=0.3, computing_us=800e3)
    assert binding(other).endswith("30.0% bubble")
    assert why_slower(best, other).startswith("200.0 ms behind, 360.0 ms of bubble more")


def test_a_slower_recipe_may_wait_for_the_host():
    best = outcome(ms=1000)
    other = outcome(dp_shard=4, ms=1200, computing_us=800e3)
    assert why_slower(best, other).startswith("200.0 ms behind, 160.0 ms of waiting for the host")


def test_programs_read_the_same_as_data():
    data = report((outcome(8, gib=90),), (outcome(4),)).as_data()
    (recipe,) = data["recipes"]
    assert data["num_simulated"] == 2
    assert data["simulated"] is True
    assert recipe["command"].startswith("gt-train --module llama3")
    assert recipe["step_us"] == 1e6


def test_a_plan_with_a_recipe_that_fits_is_an_answer():
    assert report((outcome(8),)).without_answer is None


def test_a_plan_without_one_says_why_in_a_sentence():
    assert report((outcome(8, gib=90),), num_left=7).without_answer == (
        "none of the 1 recipes that were simulated fits, and 7 are left: give more --minutes"
    )
    assert report(num_left=9).without_answer == (
        "nothing was simulated in 12 s, and 9 are left: give more --minutes"
    )
    failed = report()
    failure = Unsimulated(recipe=outcome(8).recipe, reason="no such operator")
    plan = dataclasses.replace(failed.plan, failures=(failure,))
    assert dataclasses.replace(failed, plan=plan).without_answer == (
        "nothing was simulated in 12 s: no such operator"
    )
    refusals = (("--a 1: allowed is 2", 3), ("--b 4: allowed is 5", 1))
    assert report(refusals=refusals).without_answer == (
        "the rules of a run refuse every recipe that could fit: 3 with --a 1: allowed is 2; 1 with "
        "--b 4: allowed is 5"
    )


def test_the_answer_says_where_the_ranks_of_each_axis_are():
    text = str(report((outcome(8),)))
    assert "  ranks            fsdp 8: neighbors, all over NVLink" in text


def test_what_nothing_else_explains_waits_for_the_host():
    waiting = outcome(8, computing_us=500_000.0)
    assert binding(waiting) == (
        "50% of the step computes; most of the rest: 30.0% waiting for the host"
    )


def _beside(run, *outcomes):
    run_beside = SimulatedBeside(flags=("--batch", "a b"), result=run)
    return dataclasses.replace(report(*outcomes), beside=run_beside)


def test_a_run_beside_is_compared_with_the_first():
    first, slower, large = outcome(8), outcome(4, ms=1250.0), outcome(2, gib=90)

    def told(run, *outcomes):
        lines = str(_beside(run, *outcomes)).splitlines()
        (line,) = (each for each in lines if each.startswith("  beside  "))
        return line.removeprefix("  beside           ")

    assert told(slower, (first,)) == (
        "1,250.0 ms and 40.0 GiB, 1.25 times the first: 250.0 ms behind, 200.0 ms of computing "
        f"more: {slower.recipe}"
    )
    assert told(first, (slower,)) == (
        f"1,000.0 ms and 40.0 GiB, 0.80 times the first, no recipe that fits is known to be faster: "
        f"{first.recipe}"
    )
    assert told(first, (first,)).startswith("1,000.0 ms and 40.0 GiB, 1.00 times the first, no ")
    assert told(first, (large,)) == f"{first.recipe} fits: 1,000.0 ms and 40.0 GiB"
    for found in [(first,)], [(large,)]:
        assert told(large, *found) == (
            f"{large.recipe} does not fit: 1,000.0 ms and 90.0 GiB of 74.0"
        )
    failed = Unsimulated(recipe=first.recipe, reason="it broke")
    assert told(failed, (first,)) == f"{first.recipe} was not simulated: it broke"
    assert "  beside  " not in str(report((first,)))


def test_a_run_beside_is_in_the_data_and_not_among_recipes():
    first, large = outcome(8), outcome(2, gib=90)
    assert report((first,)).as_data()["beside"] is None
    data = _beside(large, (first,)).as_data()
    assert len(data["recipes"]) == 1
    beside = data["beside"]
    assert (beside["fits"], beside["step_us"], beside["peak_bytes"]) == (False, 1e6, 90 * 2**30)
    command = "gt-train --module llama3 --config llama3_8b --batch 'a b'"
    assert beside["command"] == command
    failed = Unsimulated(recipe=first.recipe, reason="it broke")
    assert _beside(failed, (first,)).as_data()["beside"] == {
        "command": command,
        "unsimulated": "it broke",
    }
