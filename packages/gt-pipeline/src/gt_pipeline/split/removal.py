"""What stands in a stage where the whole model has a child that went to another stage.

A model's forward decides what it can bear. One that asks ``if self.norm is not None`` takes None;
one that calls every child takes ``"identity"``; a loop over a container needs nothing in the
place of an entry. :func:`gt_pipeline.split.check_splittable` tells whether a forward does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

Replacement = Literal["delete", "none", "identity"] | Callable[[str, nn.Module], nn.Module | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovalPolicy:
    """What replaces a child that a stage drops.

    ``"delete"`` takes an entry out of its container and leaves the names of the others as they
    are, ``"none"`` puts None in the place, ``"identity"`` a :class:`PassThrough`. A callable gets
    the qualified name and the child of the whole model, and returns a module without parameters,
    or None.

    Attributes:
        attribute: for a child that a forward reaches as an attribute; cannot be ``"delete"``.
        entry: for a child of a container (``ModuleList``, ``ModuleDict``, ``Sequential``, or what
            has a length and can be iterated and indexed as they can).
    """

    attribute: Replacement = "none"
    entry: Replacement = "delete"

    def __post_init__(self) -> None:
        allowed = {"attribute": ("none", "identity"), "entry": ("delete", "none", "identity")}
        problems = [
            f"{field} is {value!r}, must be a callable or one of "
            f"{', '.join(map(repr, allowed[field]))}"
            for field, value in (("attribute", self.attribute), ("entry", self.entry))
            if not callable(value) and value not in allowed[field]
        ]
        if problems:
            raise ValueError("RemovalPolicy: " + "; ".join(problems))


DEFAULT_POLICY = RemovalPolicy()


class PassThrough(nn.Module):
    """Returns its first argument, whatever else it is called with."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The first positional argument, or the first by name if there is none."""
        return args[0] if args else next(iter(kwargs.values()))
