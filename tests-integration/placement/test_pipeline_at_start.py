"""A pipeline that is faster by hand trains by hand, though a solver was asked, and goes on so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_STARTS = """
import dataclasses, sys
from gt_trainer.command_line import cli

launch = cli.launch

def launch_where_plans_are_slow(*args, **kwargs):
    from gt_trainer import run

    judge = run._judgement

    def judgement(*args):
        # Not before ranks are forked: it starts threads.
        from gt_trainer.dry_run import dry_run

        simulated = dry_run.captured_report

        def slow_if_planned(config, *args, **kwargs):
            found = simulated(config, *args, **kwargs)
            took = found.simulated.sensitivity
            time_us = took.time_us + 1e6 * config.compile.autoparallel
            took = dataclasses.replace(took, time_us=time_us)
            slow = dataclasses.replace(found.simulated, sensitivity=took)
            return dataclasses.replace(found, simulated=slow)

        dry_run.captured_report = slow_if_planned
        return judge(*args)

    run._judgement = judgement
    return launch(*args, **kwargs)

cli.launch = launch_where_plans_are_slow

def start(folder, steps, *further):
    flags = ["--nproc", "4", "--module", "placement.start_cases", "--config", "two_stages"]
    status = cli.main([*flags, "--dump_folder", folder, "--training.steps", steps, *further])
    if status:
        sys.exit(status)

by_hand = ["--compile.no_autoparallel", "--compile.autoparallel_solver.relative_gap", "0.001"]
for steps in ("1", "2"):
    start(sys.argv[1], steps)
    start(sys.argv[2], steps, *by_hand)
"""
"""A start and one that goes on, and the same by hand. What is imported is imported once for all."""


@pytest.mark.slow
def test_a_pipeline_trains_by_hand_where_that_is_faster_and_goes_on_by_hand(
    tmp_path: Path,
) -> None:
    judged, by_hand = tmp_path / "judged", tmp_path / "by_hand"
    own = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, (own, os.environ.get("PYTHONPATH"))))
    run = subprocess.run(
        [sys.executable, "-c", _STARTS, str(judged), str(by_hand)],
        env={**os.environ, "GT_DEVICE": "cpu", "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    said = [line.partition("pipeline: ")[2] for line in run.stdout.splitlines()]
    first, second = [line for line in said if line.startswith("by hand ")]
    kept = judged / "checkpoint" / "placed_by_hand.json"
    assert first.endswith(" ms: taken")
    assert second == f"{first}, kept in {kept}"
    assert not (kept.parent / "placement.json").exists()
    assert (judged / "placement.json").is_file()  # for who wants it all the same
    assert losses(judged) == losses(by_hand)
    assert len(losses(judged)) == 2


def losses(folder: Path) -> list[float]:
    """Of each step."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]
