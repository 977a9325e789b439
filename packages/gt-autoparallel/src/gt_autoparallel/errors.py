"""What can go wrong, by who can do something about it.

::

    PlacementError                      every failure of this package
    ├── PlacementInputError             what was asked for is wrong (also a ValueError)
    │   ├── UnsupportedModelError       the model cannot be captured or planned
    │   │   └── UnsupportedOperatorError    an operator has no rule
    │   └── ConstraintError             a constraint names or asks for what does not exist
    ├── InfeasiblePlacementError        no plan satisfies constraints and memory budget
    ├── UnrunnablePlanError             a step placed by a plan cannot be made
    ├── PlanMismatchError               a saved plan is damaged, or made for something else
    ├── AuditError                      a plan's cost is not what the solver said: our bug
    └── SolverError                     the solver gave no answer
        ├── OutOfTimeError              its time was over
        └── DearPlacementError          every plan costs more than is of use

``OpenSearchWarning`` comes with a plan that is fit for use.
"""

from __future__ import annotations


class PlacementError(Exception):
    """Every failure of this package."""


class PlacementInputError(PlacementError, ValueError):
    """What was asked for is wrong; the message lists every violation."""


class UnsupportedModelError(PlacementInputError):
    """The model cannot be captured or planned."""


class UnsupportedOperatorError(UnsupportedModelError):
    """Operators have no placement rule; the message names each of them and where it stands."""


class ConstraintError(PlacementInputError):
    """A constraint names something that does not exist, or asks for what no option offers."""


class InfeasiblePlacementError(PlacementError):
    """No plan satisfies constraints and memory budget; the message says which and by how much."""


class UnrunnablePlanError(PlacementError):
    """No step can be made of a model that a plan has placed, as it is asked for; for judges."""


class PlanMismatchError(PlacementError, ValueError):
    """A saved plan is damaged, or was made for another model, mesh or version."""


class AuditError(PlacementError):
    """Recomputing a plan's cost on the whole graph gave another number than the solver's."""


class SolverError(PlacementError):
    """The solver failed without an answer; the message says what it reported."""


class OutOfTimeError(SolverError):
    """A time limit passed before any choice was found."""

    def __init__(self, time_limit_seconds: float) -> None:
        super().__init__(time_limit_seconds)
        self.time_limit_seconds = time_limit_seconds

    def __str__(self) -> str:
        return (
            "no choice that keeps all budgets was found within "
            f"{self.time_limit_seconds} seconds; allow more time"
        )


class DearPlacementError(SolverError):
    """Every plan costs as much as a plan must cost less than, or more."""

    def __init__(self, least_us: float, below_us: float) -> None:
        super().__init__(least_us, below_us)
        self.least_us = least_us
        self.below_us = below_us

    def __str__(self) -> str:
        return (
            f"every plan costs {self.least_us:.0f} us or more; "
            f"one that costs less than {self.below_us:.0f} us was asked for"
        )


class OpenSearchWarning(UserWarning):
    """A search ended with a larger gap than was asked for; the message says what is proven."""
