"""What an action takes from a neighbouring stage, and what it makes for one.

A stage's forward makes its output, which the next stage's forward takes. A stage's backward (whole,
or dI) makes the gradient of its input, which the backward of the stage before takes. dW makes
nothing for others.
"""

from __future__ import annotations

from typing import NamedTuple

from gt_config.node_keys import Direction
from gt_pipeline.schedules.actions import Action, ActionKind

_BACKWARDS = ("FULL_BACKWARD", "BACKWARD_INPUT")


class Product(NamedTuple):
    """The output of a stage's forward, or of its backward, for one microbatch."""

    stage: int
    """The stage that makes it."""

    direction: Direction
    microbatch: int

    @property
    def consumer_stage(self) -> int:
        """The stage that takes it."""
        return self.stage + 1 if self.direction == "forward" else self.stage - 1

    @property
    def send(self) -> Action:
        """The action by which the rank of the stage that makes it hands it over."""
        kind: ActionKind = "SEND_F" if self.direction == "forward" else "SEND_B"
        return Action(self.stage, kind, self.microbatch)

    @property
    def receive(self) -> Action:
        """The action by which the rank of the stage that takes it gets it."""
        kind: ActionKind = "RECV_F" if self.direction == "forward" else "RECV_B"
        return Action(self.consumer_stage, kind, self.microbatch)


def produced_by(part: Action, num_stages: int) -> Product | None:
    """What a compute action, other than OVERLAP_F_B, makes for a neighbouring stage."""
    assert part.microbatch is not None
    if part.kind == "FORWARD" and part.stage < num_stages - 1:
        return Product(part.stage, "forward", part.microbatch)
    if part.kind in _BACKWARDS and part.stage > 0:
        return Product(part.stage, "backward", part.microbatch)
    return None


def consumed_by(part: Action, num_stages: int) -> Product | None:
    """What a compute action, other than OVERLAP_F_B, takes from a neighbouring stage."""
    assert part.microbatch is not None
    if part.kind == "FORWARD" and part.stage > 0:
        return Product(part.stage - 1, "forward", part.microbatch)
    if part.kind in _BACKWARDS and part.stage < num_stages - 1:
        return Product(part.stage + 1, "backward", part.microbatch)
    return None


def transferred_by(action: Action) -> Product:
    """What a send or a receive moves."""
    assert action.microbatch is not None
    match action.kind:
        case "SEND_F":
            return Product(action.stage, "forward", action.microbatch)
        case "RECV_F":
            return Product(action.stage - 1, "forward", action.microbatch)
        case "SEND_B":
            return Product(action.stage, "backward", action.microbatch)
        case "RECV_B":
            return Product(action.stage + 1, "backward", action.microbatch)
    raise AssertionError(f"{action} is not a transfer")
