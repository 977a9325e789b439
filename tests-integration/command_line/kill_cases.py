"""Training that is killed again and again, in forks of a process that has imported everything once.

``python -m command_line.kill_cases FOLDER NUM_KILLS SEED``, from ``tests-integration``. It imports
before it forks, so that what a kill meets is a start, a step or a save and hardly ever an import.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from gt_trainer.launcher import prepare_environment

if TYPE_CHECKING:
    from gt_trainer.trainer import GraphTrainer

NUM_STEPS = 12


def one_layer() -> GraphTrainer.Config:
    """A decoder of one layer that saves after each step."""
    from dataclasses import replace

    from gt_trainer.models.llama3 import llama3_debugmodel

    config = llama3_debugmodel()
    assert config.model_spec is not None
    config.model_spec.model.layers = config.model_spec.model.layers[:1]
    config.compile = replace(config.compile, mode="none")  # saves have nothing to do with capture
    config.training.seq_len, config.training.local_batch_size = 32, 1
    config.training.steps = NUM_STEPS
    config.checkpoint.interval = 1
    config.metrics.log_freq = 1
    return config


def start(folder: Path) -> int:
    """Start or resume the run of a folder; the process that trains."""
    from gt_trainer.command_line.cli import main

    pid = os.fork()
    if pid:
        return pid
    log = os.open(folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    flags = ["--module", "command_line.kill_cases", "--config", "one_layer"]
    os._exit(main([*flags, "--dump_folder", str(folder)]))


def recorded(folder: Path) -> list[tuple[int, float, float]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]


def campaign(folder: Path, *, num_kills: int, seed: int) -> dict[str, int]:
    """Kill runs at random moments until they were killed so often, and let the last one end.

    Raises:
        AssertionError: A run ended otherwise than well, or is not that which nobody killed.
    """
    draw = random.Random(seed)
    begin = time.monotonic()
    whole = folder / "whole"
    assert os.waitpid(start(whole), 0)[1] == 0, whole.with_suffix(".log").read_text()
    seconds = time.monotonic() - begin
    expected = recorded(whole)
    assert [step for step, *_ in expected] == [*range(1, NUM_STEPS + 1)]
    counts = {"kills": 0, "runs": 0, "while saving": 0}
    run = folder / "run-0"
    while True:
        pid = start(run)
        if counts["kills"] < num_kills:
            time.sleep(draw.uniform(0, 1.2 * seconds))
            os.kill(pid, signal.SIGKILL)  # one that has ended waits for us: its number is its own
        status = os.waitpid(pid, 0)[1]
        if status == signal.SIGKILL:
            counts["kills"] += 1
            saved = [*run.glob("checkpoint/step-*")]
            counts["while saving"] += any(not (each / ".metadata").exists() for each in saved)
            continue
        assert status == 0, run.with_suffix(".log").read_text()
        assert recorded(run) == expected, run
        shutil.rmtree(run)
        counts["runs"] += 1
        if counts["kills"] >= num_kills:
            return counts
        run = folder / f"run-{counts['runs']}"


if __name__ == "__main__":
    prepare_environment(os.environ, num_ranks=1)
    import gt_trainer.testing  # noqa: F401  # and with it what a run imports

    found = campaign(Path(sys.argv[1]), num_kills=int(sys.argv[2]), seed=int(sys.argv[3]))
    sys.stdout.write(f"{json.dumps(found)}\n")
