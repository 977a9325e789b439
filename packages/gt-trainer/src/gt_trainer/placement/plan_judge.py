"""Who simulates the steps of plans, where somebody does: a dry run, or a run before it starts.

torchtitan fixes the signature of what places a model, and what simulates a step builds on all of
the trainer, so that the judge comes by a context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh
from torchtitan.distributed import ParallelDims

from gt_autoparallel import Judge, PlanJudgement

NewJudge = Callable[[ParallelDims, DeviceMesh], Judge]
"""Makes the judge of plans for the mesh that is planned, of a run's meshes."""


@dataclass(slots=True, kw_only=True)
class Judging:
    """A judge to be, and what came of it."""

    new_judge: NewJudge | None
    judgement: PlanJudgement | None = None
    """Of the plan that a model was placed by inside of ``judged_by``."""


_JUDGING: ContextVar[Judging | None] = ContextVar("judging", default=None)


@contextmanager
def judged_by(new_judge: NewJudge | None) -> Iterator[Judging]:
    """Inside, plans are chosen by simulated steps; with None by their prices."""
    judging = Judging(new_judge=new_judge)
    token = _JUDGING.set(judging)
    try:
        yield judging
    finally:
        _JUDGING.reset(token)


def judge_of(parallel_dims: ParallelDims, mesh: DeviceMesh) -> Judge | None:
    """The judge of ``judged_by``, for one mesh; None if there is none."""
    judging = _JUDGING.get()
    if judging is None or judging.new_judge is None:
        return None
    return judging.new_judge(parallel_dims, mesh)


def note_judgement(judgement: PlanJudgement | None) -> None:
    """Tell whoever made the judge what came of it."""
    judging = _JUDGING.get()
    if judging is not None:
        judging.judgement = judgement
