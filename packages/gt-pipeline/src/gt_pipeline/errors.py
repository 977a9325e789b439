"""Every exception that gt-pipeline raises on purpose, in one tree.

::

    Exception
    └── GtPipelineError
        ├── StageLayoutError        (ValueError)    stages, ranks and layers that do not fit
        ├── StageNamesError         (ValueError)    names that do not say where a parameter goes
        ├── TiedParametersError     (ValueError)    one parameter under names of several stages
        ├── NotSplittableError      (ValueError)    stages that do not compute what the model does
        ├── ActionError             (ValueError)    what is no action of a pipeline schedule
        ├── ScheduleError           (ValueError)    a schedule that does not exist or cannot run
        ├── StageCaptureError       (ValueError)    a module that cannot be captured as a stage
        ├── StageCutError           (ValueError)    a stage's graph that cannot be cut into actions
        ├── StageGraphError                         a stage's graph that is broken after a pass
        ├── StageInputError         (ValueError)    a microbatch that is not as the captured one
        ├── StageOrderError         (RuntimeError)  a stage's methods called in an impossible order
        ├── RunnerSetupError        (ValueError)    stages, a schedule and ranks that do not fit
        ├── MicrobatchError         (ValueError)    inputs that cannot be split into microbatches
        ├── StageOutputError        (ValueError)    a stage that returns not what its signature says
        ├── PipelineStepError       (RuntimeError)  a step that failed on some rank, so on all
        └── RunnerClosedError       (RuntimeError)  a runner used after it was closed or failed

Errors about what was asked for list everything that is wrong with it, in ``problems``. All can be
pickled, so that they can cross processes.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial


class GtPipelineError(Exception):
    """Base of every error that gt-pipeline raises on purpose."""


class _ProblemsError(GtPipelineError):
    """What the errors that list problems have in common; never raised itself.

    Args:
        what: what was asked for, the beginning of the message.
        problems: what is wrong with it, a sentence each, with what is allowed.
    """

    def __init__(self, *, what: str, problems: Iterable[str]) -> None:
        self.what = what
        self.problems: tuple[str, ...] = tuple(problems)
        super().__init__(what, self.problems)

    def __reduce__(self) -> tuple[object, ...]:
        return (partial(type(self), what=self.what, problems=self.problems), ())

    def __str__(self) -> str:
        return "\n  - ".join([f"{self.what}:", *self.problems])


class StageLayoutError(_ProblemsError, ValueError):
    """Stages, ranks and layers that do not fit together; every reason is listed."""


class StageNamesError(_ProblemsError, ValueError):
    """Names that do not say where each parameter goes; every one is listed."""


class TiedParametersError(_ProblemsError, ValueError):
    """One parameter stands under names of several stages, and no shared group declares it."""


class NotSplittableError(_ProblemsError, ValueError):
    """The stages, run one after the other, do not compute what the model computes."""


class ActionError(_ProblemsError, ValueError):
    """What is no action of a pipeline schedule; the message lists every reason."""

    def __str__(self) -> str:
        return "\n  - ".join([f"{self.what} is no action of a pipeline:", *self.problems])


class ScheduleError(_ProblemsError, ValueError):
    """A schedule that does not exist or cannot run; the message lists every reason."""


class StageCaptureError(_ProblemsError, ValueError):
    """A module that has not the form of a pipeline stage; every reason is listed."""


class StageCutError(_ProblemsError, ValueError):
    """A stage's graph in which one action would need what only a later one makes."""


class StageGraphError(_ProblemsError):
    """The verifier found a stage's graph broken; every problem is listed."""


class StageInputError(_ProblemsError, ValueError):
    """A microbatch that differs from the captured one in structure, shape or dtype."""


class StageOrderError(GtPipelineError, RuntimeError):
    """A stage's methods were called in an order in which they cannot work."""


class RunnerSetupError(_ProblemsError, ValueError):
    """Stages, a schedule and ranks that do not fit together; what every rank found is listed."""


class MicrobatchError(_ProblemsError, ValueError):
    """Inputs of a step that cannot be split into microbatches; every one is listed."""


class StageOutputError(_ProblemsError, ValueError):
    """A stage returned tensors that are not those of its signature; every difference is listed."""


class PipelineStepError(GtPipelineError, RuntimeError):
    """A step failed on one rank, and so on all; no gradient of it reached any parameter.

    Args:
        rank: global rank that failed first, as far as the ranks could tell.
        stage: index of the stage that acted; None when it was no stage's action.
        action: in the schedule's text form, such as ``3F1``, or words for what is no action.
        reason: type and text of what was raised there.
    """

    def __init__(self, *, rank: int, stage: int | None, action: str, reason: str) -> None:
        self.rank = rank
        self.stage = stage
        self.action = action
        self.reason = reason
        super().__init__(rank, stage, action, reason)

    def __reduce__(self) -> tuple[object, ...]:
        where = partial(type(self), rank=self.rank, stage=self.stage)
        return (partial(where, action=self.action, reason=self.reason), ())

    def __str__(self) -> str:
        where = "" if self.stage is None else f" of stage {self.stage}"
        return (
            f"rank {self.rank} failed at {self.action}{where}: {self.reason}\n"
            "The step ended on all ranks, and none has added its gradients to parameters. "
            "To go on, build another runner over the same stages."
        )


class RunnerClosedError(GtPipelineError, RuntimeError):
    """A runner was used after it was closed, or after a step of it failed."""
