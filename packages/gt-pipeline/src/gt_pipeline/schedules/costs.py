"""How long each kind of action takes, for ordering and simulating schedules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TypeAlias

from gt_pipeline.errors import ScheduleError
from gt_pipeline.schedules.actions import Action

CostModel: TypeAlias = Callable[[Action], float]
"""The time that an action takes, in any one unit. ``ActionCosts`` is one; a function that looks at
the stage, or the ``__getitem__`` of a dictionary of measurements, is another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionCosts:
    """The same cost for every action of a kind, in any one unit of time.

    By default every computation takes one unit (so a whole backward, dI + dW, takes two), and
    communication takes none: what published formulas count.

    Raises:
        ScheduleError: costs that are negative; lists each of them.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    full_backward: float | None = None
    """Time of a whole backward. None: that of dI and dW together."""

    overlap_f_b: float | None = None
    """Time of a forward overlapped with a whole backward. None: their sum, so that nothing is
    gained."""

    overlap_f_i: float | None = None
    """Time of a forward overlapped with a dI. None: their sum."""

    transfer: float = 0.0
    """Time of a transfer, from the moment at which both ranks are ready to send and receive."""

    unshard: float = 0.0
    reduce_grad: float = 0.0

    def __post_init__(self) -> None:
        problems = [
            f"{field.name} is {value!r}, not a time"
            for field in fields(self)
            if (value := getattr(self, field.name)) is not None and not value >= 0
        ]
        if problems:
            raise ScheduleError(what="costs of actions must be 0 or more", problems=problems)

    def __call__(self, action: Action) -> float:
        """The time that an action takes."""
        match action.kind:
            case "FORWARD":
                return self.forward
            case "BACKWARD_INPUT":
                return self.backward_input
            case "BACKWARD_WEIGHT":
                return self.backward_weight
            case "FULL_BACKWARD":
                return self._full_backward
            case "OVERLAP_F_B":
                return self._overlap(action)
            case "UNSHARD":
                return self.unshard
            case "REDUCE_GRAD":
                return self.reduce_grad
            case "RESHARD":
                return 0.0  # it drops memory and waits for nothing
            case _:
                return self.transfer

    @property
    def _full_backward(self) -> float:
        if self.full_backward is not None:
            return self.full_backward
        return self.backward_input + self.backward_weight

    def _overlap(self, action: Action) -> float:
        assert action.parts is not None
        is_full = action.parts[1].kind == "FULL_BACKWARD"
        together = self.overlap_f_b if is_full else self.overlap_f_i
        if together is not None:
            return together
        return self.forward + (self._full_backward if is_full else self.backward_input)


UNIT_COSTS = ActionCosts()
"""Costs of one unit for each of F, dI and dW, and of nothing for communication."""
