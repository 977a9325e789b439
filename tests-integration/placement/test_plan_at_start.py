"""A run finds its plan before it trains, by simulated steps, once; and goes on with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from gt_autoparallel import PlacementPrices, read_plan

_TWO_STARTS = """
import sys
from gt_trainer.command_line.cli import main

flags = ["--nproc", "2", "--module", "placement.start_cases", "--config", "one_layer"]
flags += ["--dump_folder", sys.argv[1]]
sys.exit(main([*flags, "--training.steps", "1"]) or main([*flags, "--training.steps", "2"]))
"""
"""What is imported is imported once for both."""


def test_a_plan_is_judged_before_training_found_once_and_resumed_with(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", _TWO_STARTS, str(tmp_path)],
        env={**os.environ, "GT_DEVICE": "cpu", "PYTHONPATH": _path(), "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    said = run.stdout
    kept = tmp_path / "checkpoint" / "placement.json"
    assert said.count("Plans by their simulated steps:") == 1
    # The first start trains with what its child wrote, the second one with what it kept.
    read = [line.partition("the plan of ")[2] for line in said.splitlines() if "plan of /" in line]
    assert read == [str(tmp_path / "placement.json"), str(kept)]
    assert said.count("Placement: captured") == 1
    judgement = read_plan(kept, prices=PlacementPrices()).judgement
    assert judgement is not None
    assert {each.name for each in judgement.candidates} >= {"planner", "FSDP"}
    assert f"taken: {judgement.chosen}" in said
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def _path() -> str:
    """The folder of these tests, before whatever Python finds modules in now."""
    own = str(Path(__file__).parents[1])
    return os.pathsep.join(filter(None, (own, os.environ.get("PYTHONPATH"))))
