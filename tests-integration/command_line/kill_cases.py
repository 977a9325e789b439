"""Training that is killed again and again, in forks of a process that has imported everything once.

``python -m command_line.kill_cases FOLDER NUM_KILLS SEED [NUM_RANKS]``, from ``tests-integration``.
That process has imported what a run imports, has one thread, no model and no process group; each
fork calls ``gt-train``'s own entry point. What is tested is what they leave on the disk.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gt_trainer.launcher import prepare_environment
from gt_trainer.launcher.fork_safety import check_can_fork
from gt_trainer.launcher.rank_process import die_with
from gt_trainer.metrics.metrics_history import METRICS_FILE, read_metrics
from gt_trainer.run_files import STARTUP_FILE
from gt_trainer.step_folders import has_metadata, newest_checkpoint, step_folders, step_of

if TYPE_CHECKING:
    from gt_trainer.trainer import GraphTrainer

NUM_STEPS = 12
NUM_KEPT = 5
PHASES = ("set-up", "step", "before a save", "first save", "planning", "writing", "publishing")
"""Where a kill meets a run, as its folder tells; of a save, first its files' plan, then they."""

TARGETS = ("launcher", "one rank", "all ranks")
"""Who is killed of several processes."""

_AIMS = (None, "before a save", "planning", "writing", "publishing")
_SHORT_SECONDS = 0.004
_MOST_SECONDS = 120.0
_KILLED_BY_LAUNCHER = 128 + signal.SIGKILL


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
    config.checkpoint.interval, config.checkpoint.keep_latest_k = 1, NUM_KEPT
    config.metrics.log_freq = 1
    return config


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One process that trains, from its start to its end; what it wrote is younger than it."""

    folder: Path
    pid: int
    started: float

    def phase(self) -> str:
        """What it does, or did when it ended."""
        if not self._wrote(self.folder / STARTUP_FILE):
            return "set-up"
        saves = [each for each in step_folders(self._checkpoints) if self._wrote(each)]
        if not saves or has_metadata(saves[-1]):
            return "before a save" if self.trained_step() > self.saved_step() else "step"
        if self.saved_step() == 0:
            return "first save"
        names = [each.name for each in saves[-1].iterdir() if self._wrote(each)]
        if any(name.startswith((".metadata", "checksums")) for name in names):
            return "publishing"
        return "writing" if names else "planning"

    def saved_step(self) -> int:
        """The step of the newest checkpoint, of an earlier life too; 0 if there is none."""
        newest = newest_checkpoint(self._checkpoints)
        return 0 if newest is None else step_of(newest)

    def trained_step(self) -> int:
        """The last step that metrics tell of; -1 before it trains."""
        path = self.folder / METRICS_FILE
        records = read_metrics(path) if self._wrote(path) else [{"step": -1}]
        return int(records[-1]["step"]) if records else 0

    def has_ended(self) -> bool:
        """Whether it has; its number stays its own until it is waited for."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def wait_until(self, is_so: Callable[[], bool], *, poll_seconds: float) -> None:
        """Return then, or when it has ended."""
        deadline = time.monotonic() + _MOST_SECONDS
        while not is_so() and not self.has_ended():
            assert time.monotonic() < deadline, f"{self.folder}: {self.phase()}, and no end"
            time.sleep(poll_seconds)

    def processes(self, target: str, draw: random.Random) -> list[int]:
        """The numbers of those that a target means."""
        if target == "launcher":
            return [self.pid]
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        ranks = [int(child) for child in children.split()]
        return ranks if target == "all ranks" or not ranks else [draw.choice(ranks)]

    @property
    def _checkpoints(self) -> Path:
        return self.folder / "checkpoint"

    def _wrote(self, path: Path) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return path.stat().st_mtime > self.started
        return False


def start(folder: Path, *, num_ranks: int = 1, more_flags: Sequence[str] = ()) -> Life:
    """Start or resume the run of a folder; its process leaves the names of its modules there."""
    from gt_trainer.command_line.cli import main

    check_can_fork()
    parent, started = os.getpid(), time.time()
    pid = os.fork()
    if pid:
        return Life(folder=folder, pid=pid, started=started)
    die_with(parent)
    log = os.open(folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    flags = ["--module", "command_line.kill_cases", "--config", "one_layer", *more_flags]
    flags += ["--dataloader.dataset_path", str(folder.parent / "text")]
    if num_ranks > 1:
        shards = ["--parallelism.data_parallel_shard_degree", str(num_ranks)]
        flags += ["--nproc", str(num_ranks), *shards]
    status = main([*flags, "--dump_folder", str(folder)])
    folder.with_suffix(".modules").write_text("\n".join(sys.modules))
    os._exit(status)


def import_what_a_run_imports(folder: Path) -> None:
    """Import each module that a run of one step has imported in the end."""
    life = start(folder, more_flags=["--training.steps", "1"])
    assert os.waitpid(life.pid, 0)[1] == 0, folder.with_suffix(".log").read_text()
    for name in folder.with_suffix(".modules").read_text().split():
        with contextlib.suppress(ImportError):  # some are made by others, and found by nobody
            importlib.import_module(name)


def recorded(folder: Path) -> list[tuple[int, float, float]]:
    lines = map(json.loads, (folder / METRICS_FILE).read_text().splitlines())
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]


class Campaign:
    """Runs that are killed until they were killed so often; each one's last life ends."""

    def __init__(self, folder: Path, *, num_ranks: int, seed: int) -> None:
        self._folder = folder
        self._num_ranks = num_ranks
        self._draw = random.Random(seed)
        whole = folder / "whole"
        life = start(whole, num_ranks=num_ranks)
        assert os.waitpid(life.pid, 0)[1] == 0, whole.with_suffix(".log").read_text()
        self._seconds = time.time() - life.started
        self._set_up_seconds = (whole / STARTUP_FILE).stat().st_mtime - life.started
        self._expected = recorded(whole)
        assert [step for step, *_ in self._expected] == [*range(1, NUM_STEPS + 1)]

    def run(self, num_kills: int) -> Iterator[Counter[str]]:
        """Yield how many kills met what, and how many runs ended, with each run that does.

        Raises:
            AssertionError: A run ended otherwise than well, or is not that which nobody killed.
        """
        targets = TARGETS if self._num_ranks > 1 else ()
        counts = Counter(dict.fromkeys(("kills", "runs", *PHASES, *targets), 0))
        while counts["kills"] < num_kills:
            run = self._folder / f"run-{counts['runs']}"
            for met in self._kills(run, at_most=num_kills - counts["kills"]):
                counts.update(("kills", *met))
            assert recorded(run) == self._expected, run
            kept = [
                step_of(each) for each in step_folders(run / "checkpoint") if has_metadata(each)
            ]
            assert kept[-NUM_KEPT:] == [*range(NUM_STEPS - NUM_KEPT + 1, NUM_STEPS + 1)], run
            shutil.rmtree(run)
            counts["runs"] += 1
            yield counts

    def _kills(self, run: Path, *, at_most: int) -> Iterator[tuple[str, ...]]:
        """Yield what each kill met, until a life ends well."""
        num_kills = 0
        while True:
            life = start(run, num_ranks=self._num_ranks)
            target = self._kill(life) if num_kills < at_most else None
            status = os.waitstatus_to_exitcode(os.waitpid(life.pid, 0)[1])
            if status == 0:
                return
            was_killed = target is not None and status in (-signal.SIGKILL, _KILLED_BY_LAUNCHER)
            assert was_killed, f"{target}, {status}: {run.with_suffix('.log').read_text()}"
            num_kills += 1
            yield (life.phase(), target) if self._num_ranks > 1 else (life.phase(),)

    def _kill(self, life: Life) -> str | None:
        """Kill at a random moment, mostly of one phase, if it has not ended; None: let it end."""
        after_step = self._draw.randint(life.saved_step(), NUM_STEPS)
        if self._draw.random() < self._set_up_seconds / self._seconds:
            time.sleep(self._draw.uniform(0, self._set_up_seconds))
        elif after_step == NUM_STEPS:
            return None
        else:
            aim = self._draw.choice(_AIMS)
            life.wait_until(lambda: life.trained_step() >= after_step, poll_seconds=0.004)
            if aim is None:
                step_seconds = (self._seconds - self._set_up_seconds) / (NUM_STEPS - 1)
                time.sleep(self._draw.uniform(0, step_seconds))
            else:
                life.wait_until(lambda: life.phase() == aim, poll_seconds=0.0003)
                time.sleep(self._draw.uniform(0, _SHORT_SECONDS))
        target = self._draw.choice(TARGETS) if self._num_ranks > 1 else "launcher"
        for pid in life.processes(target, self._draw):  # ours waits for us if it has ended
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return target


if __name__ == "__main__":
    prepare_environment(os.environ, num_ranks=1)
    import gt_trainer.testing  # noqa: F401  # and with it most of what a run imports

    where, num_kills, seed, *num_ranks = sys.argv[1:]
    (Path(where) / "text").mkdir()
    for each in (Path(__file__), *Path(__file__).parents[2].glob("*.md")):
        shutil.copy(each, Path(where) / "text")
    import_what_a_run_imports(Path(where) / "imported")
    campaign = Campaign(Path(where), num_ranks=int(*num_ranks or [1]), seed=int(seed))
    for counts in campaign.run(int(num_kills)):
        sys.stdout.write(f"{json.dumps(counts)}\n")
        sys.stdout.flush()
