"""All that a runner holds of torch.distributed, in one place, so that one call can end it.

It knows nothing of the runner: a thread may hold it while nobody holds the runner any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from gt_pipeline.runner.failure import FailureReport, FailureWatch, StepAgreement
from gt_pipeline.runner.process_groups import close_group
from gt_pipeline.runner.shared_parameters import SharedParameter
from gt_pipeline.runner.transfers import Transfers


class Connections:
    """Process groups of a runner, and what its ranks tell each other. Empty on a single rank.

    Args:
        collective_groups: groups of others, closed when a step fails.
    """

    def __init__(self, collective_groups: Sequence[dist.ProcessGroup]) -> None:
        self.transfers: Transfers | None = None
        self.shared: tuple[SharedParameter, ...] = ()
        self.device = torch.device("cpu")
        """The device of the tensors that travel."""
        self.release_recordings: list[Callable[[], None]] = []
        """What drops recorded CUDA graphs, each of which holds on to groups."""
        self._collective_groups = tuple(collective_groups)
        self._agreement: StepAgreement | None = None
        self._watch: FailureWatch | None = None

    def agree(self, timeout: timedelta | None) -> None:
        """Let steps of all ranks succeed or fail together. Collective over them."""
        self._agreement = StepAgreement(timeout=timeout)
        self._watch = FailureWatch(self._agreement, self.close_waits)

    @property
    def agreement_group(self) -> dist.ProcessGroup | None:
        """A gloo group of all ranks; None if there is one."""
        return None if self._agreement is None else self._agreement.group

    def watch(self, step: int) -> None:
        """Look for failures of other ranks from now on."""
        if self._watch is not None:
            self._watch.start(step)

    def vote(self) -> bool:
        """Whether the step, which succeeded here, did so on all ranks."""
        if self._agreement is None or self._watch is None:
            return True
        try:
            return self._agreement.vote(succeeded=True)
        except RuntimeError:  # some rank is gone; there may be no report of it
            return False
        finally:
            self._watch.stop()

    def fail(self, step: int, mine: FailureReport, *, votes: bool) -> FailureReport:
        """Tell all ranks that a step failed here, and end what they wait for.

        A rank that has not voted yet ``votes``. Returned is what happened first, here or elsewhere.
        """
        first = mine if self._agreement is None else self._agreement.report(step, mine)
        self.close_waits()
        if self._agreement is not None and votes:
            with suppress(RuntimeError):  # a rank is gone, so its vote too
                self._agreement.vote(succeeded=False)
        if self._watch is not None:
            self._watch.stop()
        return first

    def close_waits(self) -> None:
        """Let everything that a rank may wait for in a step fail, except for the vote."""
        self._release_recordings()  # a group ends when no recording has it any more
        if self.transfers is not None:
            self.transfers.close(self.device)
        for shared in self.shared:
            if shared.process_group is not None:
                close_group(shared.process_group, self.device)
        for group in self._collective_groups:
            close_group(group, self.device)

    def release(self) -> None:
        """Give back threads and groups."""
        self._release_recordings()
        if self._watch is not None:
            self._watch.end()
        if self.transfers is not None:
            self.transfers.release()
        for shared in self.shared:
            shared.release()
        if self._agreement is not None:
            self._agreement.release()
        self.transfers, self.shared, self._agreement, self._watch = None, (), None, None

    def _release_recordings(self) -> None:
        for release in self.release_recordings:
            release()
