"""How long is an optimizer step, and how long does it take to get to the first one?

Ours against torchtitan's graph_trainer (graph and eager mode) and core torchtitan, on two
four-process gloo workloads::

    python benchmarks/bench_train_step.py [--json FILE] [--steps 9] [--starts 1]

Each peer is paired with ours: both are started, stay alive, and are then stepped in turn, in an
order that alternates, so that whatever else the machine does hits both alike. (All four at once
would need 28 GiB.) Ours is started by the command that users type (``gt-train --nproc 4``: one
import, then forks); peers are four plain processes that find each other by environment variables,
which is less work than torchrun makes of it. See ``train_step/peers.py`` for what CPU demands of
the peers.

Ours starts with an empty folder for captured graphs (``--compile.artifacts``), and once more with
what that start has stored, which is told apart as warm.

The losses of a pair are compared at every step, so that nobody is timed on another task.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from report import Report, Row, Sample
from train_step.commands import STARTUP_PARTS, STEP_PARTS, StepPart
from train_step.contestants import NAMES, Contestant, ContestantError, ContestantName, Step
from train_step.workloads import WORKLOADS, Workload

from gt_trainer.late_imports import hint_to_compile

_STEP_TIME_GOALS: dict[ContestantName, float] = {"graph": 0.8, "eager": 0.45}
_STARTUP_GOALS: dict[ContestantName, float] = {"graph": 0.33}
_WARM_STARTUP_GOALS: dict[ContestantName, float] = {"graph": 0.2}

_NUM_STRICT_STEPS = 3
_STRICT_TOLERANCE = 1e-5
_LOOSE_TOLERANCE = 1e-2
"""Rounding differences grow from step to step, and may send a token to another expert."""


class DisagreementError(RuntimeError):
    """Contestants computed different losses, so their times must not be compared."""


Steps = dict[ContestantName, list[Step]]


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends the ranks
    report = Report(benchmark="train_step")
    report.notes.append(
        f"{options.steps} timed steps after {options.warmup} untimed ones; {options.starts} "
        "start(s). Peers: 4 plain processes; ours: gt-train --nproc 4. OMP_NUM_THREADS=1."
    )
    if (hint := hint_to_compile(torch)) is not None:
        # Four times for a peer, once for ours.
        report.notes.append(f"Imports are mostly Python's compiler: {hint}")
    report.notes.append(f"load average at the start: {os.getloadavg()[0]:.2f}")
    try:
        for key in options.workload:
            with tempfile.TemporaryDirectory(prefix="bench_train_step_") as folder:
                _measure(key, report, options=options, folder=Path(folder))
    except (ContestantError, DisagreementError) as error:
        print(error, file=sys.stderr)
        return 1
    print(report.table())
    if options.json is not None:
        report.write(options.json)
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--steps", type=int, default=9, help="timed steps (default: 9)")
    parser.add_argument("--warmup", type=int, default=2, help="untimed steps before (default: 2)")
    parser.add_argument("--starts", type=int, default=1, help="starts of each (default: 1)")
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--peers", nargs="*", choices=[n for n in NAMES if n != "ours"])
    options = parser.parse_args(arguments)
    if options.steps < 1 or options.starts < 1 or options.warmup < 0:
        parser.error("--steps and --starts must be at least 1, --warmup at least 0")
    if options.peers is None:
        options.peers = [name for name in NAMES if name != "ours"]
    return options


def _measure(key: str, report: Report, *, options: argparse.Namespace, folder: Path) -> None:
    pairings = [
        _measure_pairing(names, key, report, options=options, folder=folder / names[-1])
        for names in ([["ours", peer] for peer in options.peers] or [["ours"]])
    ]
    # All peers of one metric side by side.
    report.rows += [row for of_metric in zip(*pairings, strict=True) for row in of_metric]


def _measure_pairing(
    names: list[ContestantName],
    key: str,
    report: Report,
    *,
    options: argparse.Namespace,
    folder: Path,
) -> list[Row]:
    workload = WORKLOADS[key]
    starts: Steps = {name: [] for name in names}
    warm_starts: list[Step] = []
    with ExitStack() as stack:
        contestants: list[Contestant] = []
        for number in range(options.starts):
            for name in names:
                artifacts = folder / f"artifacts{number}" if name == "ours" else None
                _say(f"{workload.name}: starting {NAMES[name]}")
                contestant = Contestant(
                    name,
                    workload,
                    workload_key=key,
                    folder=folder / f"{name}{number}",
                    artifacts=artifacts,
                )
                starts[name].append(contestant.first_step)
                _say(f"  first update after {contestant.first_step.seconds:.1f} s")
                if artifacts is not None:
                    warm_starts.append(_warm_start(workload, key, folder, artifacts))
                if number < options.starts - 1:
                    with contestant:
                        continue
                contestants.append(stack.enter_context(contestant))
        steps = _step_in_turn(contestants, options.warmup + options.steps)
    history = {name: [starts[name][-1], *steps[name]] for name in names}
    report.notes.append(f"{workload.name}, {' and '.join(names)}: {_check_losses(history)}")
    timed = {name: steps[name][options.warmup :] for name in names}
    return _rows(workload, starts, warm_starts, timed)


def _warm_start(workload: Workload, key: str, folder: Path, artifacts: Path) -> Step:
    """Start ours once more, with what its cold start has stored, and stop it."""
    again = folder / f"warm_{artifacts.name}"
    with Contestant(
        "ours", workload, workload_key=key, folder=again, artifacts=artifacts
    ) as contestant:
        _say(f"  warm: first update after {contestant.first_step.seconds:.1f} s")
        return contestant.first_step


def _step_in_turn(contestants: list[Contestant], num_steps: int) -> Steps:
    steps: Steps = {contestant.name: [] for contestant in contestants}
    for number in range(num_steps):
        first = number % len(contestants)
        for contestant in contestants[first:] + contestants[:first]:
            steps[contestant.name].append(contestant.step())
        _say(
            f"step {number + 2}: "
            + ", ".join(f"{name} {taken[-1].seconds:.2f} s" for name, taken in steps.items())
        )
    return steps


def _check_losses(history: Steps) -> str:
    """Compare the losses with ours, step by step.

    Raises:
        DisagreementError: They differ by more than rounding explains.
    """
    ours = [step.loss for step in history["ours"]]
    largest = 0.0
    problems = []
    for name, steps in history.items():
        for number, (step, loss) in enumerate(zip(steps, ours, strict=True), start=1):
            difference = abs(step.loss - loss) / abs(loss)
            strict = number <= _NUM_STRICT_STEPS
            tolerance = _STRICT_TOLERANCE if strict else _LOOSE_TOLERANCE
            largest = max(largest, difference)
            if not difference <= tolerance:  # also where one of them is not a number
                problems.append(
                    f"{NAMES[name]}, step {number}: loss {step.loss!r}, ours {loss!r}: "
                    f"{difference:.1e} apart, allowed {tolerance:g}"
                )
    if problems:
        raise DisagreementError("\n".join(["losses disagree:", *problems]))
    return (
        f"losses agree at each of {len(ours)} steps "
        f"({ours[0]:.4f} to {ours[-1]:.4f}, at most {largest:.1e} apart)"
    )


def _rows(workload: Workload, starts: Steps, warm_starts: list[Step], timed: Steps) -> list[Row]:
    peers: list[ContestantName] = [name for name in starts if name != "ours"]

    def compare(
        metric: str,
        steps: Steps,
        value: Callable[[Step], float],
        goals: dict[ContestantName, float] | None = None,
    ) -> list[Row]:
        samples = {name: Sample.of([value(step) for step in steps[name]]) for name in starts}
        ours = Row(workload=workload.name, metric=metric, unit="s", ours=samples["ours"])
        return [
            dataclasses.replace(
                ours, peer=samples[peer], peer_name=NAMES[peer], goal=(goals or {}).get(peer)
            )
            for peer in peers
        ] or [ours]

    def startup_part(part: str) -> Callable[[Step], float]:
        return lambda step: step.ranks[0].startup[part]

    def startup_cpu_part(part: str) -> Callable[[Step], float]:
        def of_all_processes(step: Step) -> float:
            launcher = step.launcher_cpu_seconds if part == "imports" else 0.0
            return launcher + sum(rank.startup_cpu[part] for rank in step.ranks)

        return of_all_processes

    def step_part(part: StepPart) -> Callable[[Step], float]:
        return lambda step: sum(rank.cpu_parts.get(part, 0.0) for rank in step.ranks)

    rows = compare("step_time", timed, lambda step: step.seconds, _STEP_TIME_GOALS)
    rows += compare("startup_to_update", starts, lambda step: step.seconds, _STARTUP_GOALS)
    warm: Steps = {**starts, "ours": warm_starts}
    rows += compare("warm_startup_to_update", warm, lambda step: step.seconds, _WARM_STARTUP_GOALS)
    rows += compare("cpu_per_step", timed, lambda step: step.cpu_seconds)
    rows += compare("cpu_to_update", starts, lambda step: step.cpu_seconds)
    rows += compare("warm_cpu_to_update", warm, lambda step: step.cpu_seconds)
    for part in STARTUP_PARTS:
        rows += compare(f"startup_{part}", starts, startup_part(part))
    for part in STARTUP_PARTS:
        rows += compare(f"cpu_startup_{part}", starts, startup_cpu_part(part))
    for part in STEP_PARTS:
        rows += compare(f"cpu_{part}", timed, step_part(part))
    return rows


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
