"""Which step a pipeline with a solver trains with: the planned one, or the one by hand."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gt_autoparallel import JudgedStep
from gt_config import Fingerprint
from gt_trace.artifacts.regular_file import read_regular
from gt_trace.artifacts.strict_json import parse_json

_FORMAT = {"format": "gt-trainer pipeline judgement", "version": 3}

_NOISE = 1.01
"""Steps that differ by less are taken for equally fast."""


class NoJudgementError(ValueError):
    """A file does not say how a run's pipeline was judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineJudgement:
    """The simulated steps of a pipeline: as a solver places its stages, and by hand."""

    planned: JudgedStep | None
    """None where no step can be made of the plan: nothing is compared then."""

    by_hand: JudgedStep | None
    """None as ``planned`` is."""

    no_step_because: str = ""
    """Why no step can be made of the plan."""

    budget_bytes: int | None = None
    """What a rank was allowed to take; None if nobody asked for less than there is."""

    made_for: Fingerprint
    """The run whose steps these are, as ``judged_run`` says it."""

    plan_digest: str | None = None
    """``digest_of`` the plan's file, where a dry run left it; None if nobody is to find it."""

    def __post_init__(self) -> None:
        is_compared = self.planned is not None and self.by_hand is not None
        if is_compared == bool(self.no_step_because):
            raise ValueError("give two steps, or why there is none of the plan")

    @property
    def takes_by_hand(self) -> bool:
        """Whether the step by hand is faster by more than 1 %, or alone fits, or alone can be made.

        Above a budget that was asked for it is not taken, unless the plan takes still more, or has
        no step.
        """
        planned, by_hand = self.planned, self.by_hand
        if planned is None or by_hand is None:
            return True
        allowed = None if self.budget_bytes is None else max(self.budget_bytes, planned.peak_bytes)
        if not by_hand.fits or (allowed is not None and by_hand.peak_bytes > allowed):
            return False
        return not planned.fits or by_hand.step_us * _NOISE < planned.step_us

    def __str__(self) -> str:
        if self.planned is None or self.by_hand is None:
            return f"pipeline: by hand is taken, as the plan has no step: {self.no_step_because}"
        planned, by_hand = (f"{e.step_us / 1e3:,.1f} ms" for e in (self.planned, self.by_hand))
        if self.takes_by_hand:
            why = "is faster than" if self.planned.fits else "fits, unlike"
            return f"pipeline: by hand {by_hand} {why} the plan's {planned}: taken"
        against = _against(self.planned, self.by_hand)
        return f"pipeline: the plan's {planned} are taken, by hand {by_hand}{against}"


def _against(planned: JudgedStep, by_hand: JudgedStep) -> str:
    if not by_hand.fits:
        return ", which does not fit"
    if by_hand.step_us >= planned.step_us:
        return ""
    gib = by_hand.peak_bytes / 2**30
    if by_hand.step_us * _NOISE < planned.step_us:
        return f", which takes {gib:.2f} GiB and so more than asked for"
    return ", which is no more than 1 % faster"


def digest_of(plan_file: bytes) -> str:
    """What tells a plan's file from others."""
    return hashlib.sha256(plan_file).hexdigest()


def written_judgement(judgement: PipelineJudgement) -> bytes:
    """The judgement as a file."""
    content = {
        **_FORMAT,
        "planned": _as_dict(judgement.planned),
        "by_hand": _as_dict(judgement.by_hand),
        "no_step_because": judgement.no_step_because,
        "budget_bytes": judgement.budget_bytes,
        "made_for": json.loads(judgement.made_for.to_json()),
        "plan_digest": judgement.plan_digest,
    }
    return (json.dumps(content, indent=1) + "\n").encode()


def read_judgement(path: Path) -> PipelineJudgement:
    """Read how a pipeline was judged.

    Args:
        path: of a file with what ``written_judgement`` gave.

    Raises:
        NoJudgementError: the file is something else, of another version, or damaged.
        OSError: it cannot be read.
    """
    try:
        found: dict[str, Any] = parse_json(read_regular(path))
        if {name: found.pop(name) for name in _FORMAT} != _FORMAT:
            raise ValueError
        return PipelineJudgement(
            planned=_step(found.pop("planned")),
            by_hand=_step(found.pop("by_hand")),
            made_for=Fingerprint.from_json(json.dumps(found.pop("made_for"))),
            **found,
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        raise NoJudgementError(f"{path} does not say how a pipeline was judged") from None


def _as_dict(step: JudgedStep | None) -> dict[str, Any] | None:
    return None if step is None else asdict(step)


def _step(found: dict[str, Any] | None) -> JudgedStep | None:
    return None if found is None else JudgedStep(**found)
