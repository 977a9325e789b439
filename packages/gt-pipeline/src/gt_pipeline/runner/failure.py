"""One rank fails, all ranks end: how they learn of it, and how they agree that a step succeeded.

A rank that waits for a tensor cannot look around. So a rank that fails does three things:

1. It writes what happened into the store of a control group, where the first report of a step wins.
2. It closes its transfers. With gloo this wakes the ranks at the other ends, which read the report,
   close theirs, and so on through the pipeline. Where closing reaches no other rank (NCCL), or
   ranks wait in a collective of their own graphs, a `FailureWatch` on each of them, a thread that
   looks for a report while a step runs, closes what its rank waits in.
3. It takes part in the vote that ends every step. As gradients are added to parameters after the
   vote, no rank keeps a part of a step that failed elsewhere.

The vote is over a gloo group of its own, also where tensors travel by NCCL: it needs no device.
A rank that dies without a word is noticed by whoever waits for it, at once with gloo, otherwise
when the group's timeout ends; those ranks report in its place.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Self

import torch
import torch.distributed as dist

from gt_pipeline.errors import PipelineStepError
from gt_pipeline.runner.process_groups import close_group, make_group, release_group

_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReport:
    """Where a step failed first."""

    rank: int
    stage: int | None
    action: str
    reason: str

    def error(self) -> PipelineStepError:
        """The exception that every rank raises for it."""
        return PipelineStepError(**asdict(self))

    def to_json(self) -> str:
        """Its form in the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of `to_json`."""
        return cls(**json.loads(text))


class StepAgreement:
    """What all ranks of the world tell each other about a step. Making one is collective.

    All ranks, not those of one pipeline: others wait for them where gradients are reduced.

    Args:
        timeout: after which a vote fails; None: as for other groups.
    """

    def __init__(self, *, timeout: timedelta | None = None) -> None:
        world = range(dist.get_world_size())
        group = make_group(
            world, purpose="pipeline step agreement", backend="gloo", timeout=timeout
        )
        assert group is not None
        self.group = group
        """A gloo group over all ranks."""

        # Its keys have the group's name before them, so runners do not read each other's reports.
        self._store = group.get_group_store()

    def report(self, step: int, report: FailureReport) -> FailureReport:
        """Tell of a failure.

        Returns:
            The first report of this step, which may be another rank's.
        """
        try:
            first = self._store.compare_set(_key(step), "", report.to_json())
        except RuntimeError:  # the store's host is gone; others see that by themselves
            return report
        return FailureReport.from_json(first.decode())

    def first_report(self, step: int) -> FailureReport | None:
        """What was reported first of a step; None if nothing was.

        Raises:
            RuntimeError: the store cannot be reached.
        """
        if not self._store.check([_key(step)]):
            return None
        return FailureReport.from_json(self._store.get(_key(step)).decode())

    def vote(self, *, succeeded: bool) -> bool:
        """Whether every rank succeeded. Each rank votes once a step.

        Raises:
            RuntimeError: a rank did not vote; the agreement cannot be used any more.
        """
        ballot = torch.tensor([int(succeeded)])
        try:
            self.group.allreduce([ballot], dist.ReduceOp.MIN).wait()
        except RuntimeError:
            close_group(self.group, torch.device("cpu"))  # whoever still waits for the vote ends
            raise
        return bool(ballot)

    def release(self) -> None:
        """Give the group back to torch.distributed."""
        release_group(self.group)


def _key(step: int) -> str:
    return f"failure of step {step}"


class FailureWatch:
    """A thread that looks for other ranks' reports while a step runs.

    Args:
        agreement: where reports stand.
        on_failure: called once, in the thread, when another rank has reported.
    """

    def __init__(self, agreement: StepAgreement, on_failure: Callable[[], None]) -> None:
        self._agreement = agreement
        self._on_failure = on_failure
        self._step = 0
        self._running = threading.Event()  # a step runs
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, name="gt-pipeline failure watch", daemon=True
        )
        self._thread.start()

    def start(self, step: int) -> None:
        """Watch a step until `stop`."""
        self._step = step
        self._running.set()

    def stop(self) -> None:
        """Stop watching the step."""
        self._running.clear()

    def end(self) -> None:
        """End the thread."""
        self._ended.set()
        self._running.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self) -> None:
        while self._running.wait():
            if self._ended.wait(_POLL_SECONDS):
                return
            if not self._running.is_set():
                continue
            try:
                failed = self._agreement.first_report(self._step) is not None
            except RuntimeError:  # whoever kept the store is gone, and the job with it
                failed = True
            if failed:
                self._on_failure()
                return
