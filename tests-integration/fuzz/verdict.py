"""What came of a case, and how bad that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fuzz.case import Case, StepSpec
from fuzz.worker import Prepared, Transformed, execute, prepare, transform
from gt_trace.testing import GlooWorkers, WorkerError

__all__ = ["BAD_OUTCOMES", "Judge", "Outcome", "Verdict"]

Outcome = Literal[
    "equal",
    "no case",
    "silent difference",
    "hang",
    "ranks disagree",
    "crash",
    "false alarm",
    "caught",
]

BAD_OUTCOMES: dict[Outcome, str] = {
    "silent difference": "the verifier accepts the graph, and it computes something else",
    "hang": "the graph, or a pass, does not come back (or its process ends)",
    "ranks disagree": "ranks would launch different collectives, or only some accept the graph",
    "crash": "a pass raises an error",
    "false alarm": "the verifier refuses a graph that computes the same",
    "caught": "the verifier refuses a graph that computes something else, or cannot be executed",
}
"""All that is not as it should be, the worst first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What came of a case."""

    outcome: Outcome
    details: str = ""
    changed: bool = False
    """Whether any pass changed the graph."""

    @property
    def is_failure(self) -> bool:
        """Whether somebody must look at it."""
        return self.outcome in BAD_OUTCOMES


class Judge:
    """Tries cases on worker processes. A step that is tried again is not captured again.

    Args:
        timeout: seconds that one call may take; a call that takes longer is a hang.
    """

    def __init__(self, *, timeout: float = 60.0) -> None:
        preload = ["gt_passes", "fuzz.worker"]
        self._workers = {
            num_ranks: GlooWorkers(num_ranks, timeout=timeout, preload=preload)
            for num_ranks in (2, 4)
        }
        self._prepared: dict[int, tuple[StepSpec, list[Prepared]]] = {}

    def close(self) -> None:
        """End the workers."""
        for workers in self._workers.values():
            workers.close()

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def judge(self, case: Case) -> Verdict:
        """Try a case."""
        workers = self._workers[case.step.num_ranks]
        try:
            problems = [p.problem for p in self._prepare(case.step) if p.problem is not None]
        except WorkerError as error:
            return self._ended(case, "no case", f"when captured: {error}")
        if problems:
            return Verdict(outcome="no case", details=problems[0])
        try:
            made: list[Transformed] = workers.run(transform, case.passes, True)
        except WorkerError as error:
            return self._ended(case, "hang", f"in a pass: {error}")
        outcomes = {one.outcome for one in made}
        if len(outcomes) > 1 or not _launch_alike(made):
            texts = (
                f"rank {rank}: {one.outcome}\n{one.text}\n"
                + "\n".join(f"{name} among {ranks}" for name, ranks in one.collectives)
                for rank, one in enumerate(made)
            )
            return Verdict(outcome="ranks disagree", details="\n".join(texts))
        if outcomes == {"crashed"}:
            return Verdict(outcome="crash", details=made[0].text)
        if outcomes == {"refused by the verifier"}:
            return self._judge_refused(case, made[0].text)
        try:
            differences = self._execute(case)
        except WorkerError as error:
            return self._ended(case, "hang", f"when executed: {error}")
        if differences:
            return Verdict(outcome="silent difference", details="\n".join(differences))
        return Verdict(outcome="equal", changed=any(one.changed for one in made))

    def _judge_refused(self, case: Case, reason: str) -> Verdict:
        """Whether the verifier is right."""
        workers = self._workers[case.step.num_ranks]
        try:
            made: list[Transformed] = workers.run(transform, case.passes, False)
            if any(one.outcome != "transformed" for one in made):
                return Verdict(outcome="caught", details=reason)
            differences = self._execute(case)
        except WorkerError as error:
            return self._ended(case, "caught", f"{reason}\nand indeed: {error}")
        if differences:
            return Verdict(outcome="caught", details="\n".join([reason, *differences]))
        return Verdict(outcome="false alarm", details=reason)

    def _prepare(self, step: StepSpec) -> list[Prepared]:
        known = self._prepared.get(step.num_ranks)
        if known is None or known[0] != step:
            self._prepared.pop(step.num_ranks, None)
            known = (step, self._workers[step.num_ranks].run(prepare, step))
            self._prepared[step.num_ranks] = known
        return known[1]

    def _execute(self, case: Case) -> list[str]:
        by_rank: list[list[str]] = self._workers[case.step.num_ranks].run(execute)
        return [
            f"rank {rank}: {difference}"
            for rank, differences in enumerate(by_rank)
            for difference in differences
        ]

    def _ended(self, case: Case, outcome: Outcome, details: str) -> Verdict:
        """The workers are gone, and with them what they had captured."""
        self._prepared.pop(case.step.num_ranks, None)
        return Verdict(outcome=outcome, details=details)


def _launch_alike(made: Sequence[Transformed]) -> bool:
    """Whether all ranks launch the same operators in one order, and each among the same ranks.

    And whether they are agreed on what they exchange, as ranks ask before the first step.
    """
    if len({one.digest for one in made}) > 1:
        return False
    if len({tuple(name for name, _ in one.collectives) for one in made}) > 1:
        return False
    return all(
        made[member].collectives[position][1] == ranks
        for one in made
        for position, (_, ranks) in enumerate(one.collectives)
        for member in ranks
    )
