"""What a pipeline rank does, one action at a time, with the text form that PyTorch's tables use.

::

    2F0                    stage 2 runs the forward of microbatch 0
    2B0                    ... its whole backward; or in two halves:
    2I0  2W0               ... gradients of the inputs (dI), gradients of the weights (dW)
    (2F1;3B0)OVERLAP_F_B   a forward and a backward of one rank, run as one
    2SEND_F0  2RECV_F0     stage 2 sends its output of microbatch 0; receives its input
    2SEND_B0  2RECV_B0     stage 2 sends its input's gradient; receives its output's gradient
    2UNSHARD  2RESHARD     stage 2 gathers its parameters; drops what was gathered
    2REDUCE_GRAD           stage 2 reduces the gradients that its microbatches accumulated

These are types of our own, so that a schedule can be read, checked and drawn without a private
symbol of PyTorch. The text form is that of ``torch.distributed.pipelining.schedules._Action``:
whatever PyTorch prints or writes to CSV can be parsed here, and the other way round.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from gt_config.node_keys import OverlappedBackward, PipelineAction
from gt_pipeline.errors import ActionError

PointToPoint = Literal["SEND_F", "RECV_F", "SEND_B", "RECV_B"]
ActionKind = Literal[PipelineAction, PointToPoint, "RESHARD"]
"""What an action does: one of those that run a graph of a stage, or move or drop what it holds."""

_COMPUTE: frozenset[ActionKind] = frozenset(
    {"FORWARD", "FULL_BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "OVERLAP_F_B"}
)
WITH_MICROBATCH: frozenset[ActionKind] = (_COMPUTE - {"OVERLAP_F_B"}) | {*get_args(PointToPoint)}
_LETTERS: Mapping[ActionKind, str] = {
    "FORWARD": "F",
    "FULL_BACKWARD": "B",
    "BACKWARD_INPUT": "I",
    "BACKWARD_WEIGHT": "W",
}
TEXT_OF_KIND: Mapping[ActionKind, str] = {
    kind: _LETTERS.get(kind, kind) for kind in get_args(ActionKind)
}
"""How PyTorch's tables write each kind."""

_KIND_OF_TEXT: Mapping[str, ActionKind] = {text: kind for kind, text in TEXT_OF_KIND.items()}
_SIMPLE = re.compile(rf"(\d+)({'|'.join(sorted(_KIND_OF_TEXT, key=len, reverse=True))})(\d*)")
_COMPOUND = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")


@dataclass(frozen=True, slots=True)
class Action:
    """One action of one rank.

    Args:
        stage: index of the virtual stage that acts. Of OVERLAP_F_B: the forward's.
        kind: what is done.
        microbatch: index of the microbatch; None for the kinds that concern all of them, and for
            OVERLAP_F_B, whose parts have one each.
        parts: of OVERLAP_F_B, its forward and its backward (``B`` or ``I``), of two stages of one
            rank, or of one stage and two microbatches. None for every other kind.

    Raises:
        ActionError: the fields contradict each other.
    """

    stage: int
    kind: ActionKind
    microbatch: int | None = None
    parts: tuple[Action, Action] | None = None

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ActionError(what=self._describe(), problems=problems)

    @classmethod
    def overlap(cls, forward: Action, backward: Action) -> Action:
        """The OVERLAP_F_B of a forward and a backward."""
        return cls(forward.stage, "OVERLAP_F_B", None, (forward, backward))

    @property
    def is_compute(self) -> bool:
        """Whether it runs a stage's graph of one microbatch, or of two."""
        return self.kind in _COMPUTE

    @property
    def is_send(self) -> bool:
        """Whether it hands a tensor to another rank."""
        return self.kind in ("SEND_F", "SEND_B")

    @property
    def is_receive(self) -> bool:
        """Whether it takes a tensor from another rank."""
        return self.kind in ("RECV_F", "RECV_B")

    @property
    def is_point_to_point(self) -> bool:
        """Whether it is a send or a receive."""
        return self.is_send or self.is_receive

    @property
    def compute_parts(self) -> tuple[Action, ...]:
        """The compute actions in it, in order: two of an OVERLAP_F_B, else itself or nothing."""
        if self.parts is not None:
            return self.parts
        return (self,) if self.is_compute else ()

    def __str__(self) -> str:
        if self.parts is not None:
            return f"({self.parts[0]};{self.parts[1]}){self.kind}"
        microbatch = "" if self.microbatch is None else str(self.microbatch)
        return f"{self.stage}{TEXT_OF_KIND[self.kind]}{microbatch}"

    def _describe(self) -> str:
        return (
            f"Action(stage={self.stage!r}, kind={self.kind}, microbatch={self.microbatch!r}, "
            f"parts={None if self.parts is None else [str(part) for part in self.parts]})"
        )

    def _problems(self) -> list[str]:
        problems: list[str] = []
        if self.stage < 0:
            problems.append(f"stage {self.stage} is negative")
        has_microbatch = self.kind in WITH_MICROBATCH
        if has_microbatch and self.microbatch is None:
            problems.append(f"{self.kind} needs a microbatch")
        if not has_microbatch and self.microbatch is not None:
            problems.append(f"{self.kind} takes no microbatch")
        if self.microbatch is not None and self.microbatch < 0:
            problems.append(f"microbatch {self.microbatch} is negative")
        if self.kind == "OVERLAP_F_B":
            return problems + self._problems_of_parts()
        if self.parts is not None:
            problems.append(f"{self.kind} has no parts; only OVERLAP_F_B has")
        return problems

    def _problems_of_parts(self) -> list[str]:
        if self.parts is None or len(self.parts) != 2:
            return ["OVERLAP_F_B needs two parts, a forward and a backward"]
        problems: list[str] = []
        forward, backward = self.parts
        if forward.kind != "FORWARD":
            problems.append(f"its first part must be a forward (F), not {forward}")
        if backward.kind not in get_args(OverlappedBackward):
            problems.append(
                f"its second part must be a backward (B) or a dI (I), not {backward}: "
                "run any other action by itself"
            )
        if forward.stage != self.stage:
            problems.append(f"stage {self.stage} is not that of its forward, {forward}")
        if (forward.stage, forward.microbatch) == (backward.stage, backward.microbatch):
            problems.append(f"{backward} needs what {forward} saves, so they cannot run as one")
        return problems


def parse_action(text: str) -> Action:
    """Read an action's text form, as ``str(action)`` and PyTorch's ``_Action`` print it.

    Spaces around it and its parts do not count.

    Raises:
        ActionError: not an action, or its fields contradict each other.
    """
    stripped = text.strip()
    if match := _COMPOUND.fullmatch(stripped):
        first, second = match.groups()
        return Action.overlap(parse_action(first), parse_action(second))
    if match := _SIMPLE.fullmatch(stripped):
        stage, kind, microbatch = match.groups()
        return Action(int(stage), _KIND_OF_TEXT[kind], int(microbatch) if microbatch else None)
    raise ActionError(
        what=repr(text),
        problems=[
            (
                "it is not <stage><kind>[microbatch], such as 2F0 or 1UNSHARD, "
                "nor (<forward>;<backward>)OVERLAP_F_B"
            ),
            f"kinds: {', '.join(_KIND_OF_TEXT)}",
        ],
    )
