"""What goes into and comes out of the graph of an action, by name.

A joint graph is cut in many ways, and each piece takes what others give. No piece counts positions
in another one: a value is a slot, the same in the graph that makes it and in those that read it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

SlotKind = Literal[
    "parameter",
    "buffer",
    "unsharded",
    "argument",
    "output_gradient",
    "saved",
    "between",
    "output",
    "input_gradient",
    "unsharded_gradient",
    "gradient",
]
"""parameter, buffer: the stage's state, as it is stored.
unsharded: what UNSHARD makes of parameters.
argument: a microbatch's tensors, activations first.
output_gradient: arrives from the stage after.
saved: forward keeps it for the backward, per microbatch.
between: BACKWARD_INPUT keeps it for BACKWARD_WEIGHT, per microbatch.
output: leaves for the stage after; of the last stage the loss, and what it returns beside it.
input_gradient: leaves for the stage before.
unsharded_gradient: of one microbatch, before reduction; accumulated over microbatches.
gradient: what REDUCE_GRAD makes of the accumulated ones, as the parameter is stored."""

STATIC_KINDS: frozenset[SlotKind] = frozenset({"parameter", "buffer", "unsharded"})
"""Kinds that hold the same tensors for every microbatch between an UNSHARD and the next."""

_PREFIX: dict[SlotKind, str] = {
    "parameter": "p",
    "buffer": "b",
    "unsharded": "u",
    "argument": "a",
    "output_gradient": "t",
    "saved": "s",
    "between": "k",
    "unsharded_gradient": "g",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One value at the border of an action's graph."""

    kind: SlotKind
    name: str
    """Name of the state or argument that it is or belongs to; else of the node that computes it."""

    leaf: int = 0
    """Position among the plain tensors that have this name; 0 where there is one."""

    @property
    def is_static(self) -> bool:
        """Whether it is the same for every microbatch."""
        return self.kind in STATIC_KINDS

    @property
    def placeholder_name(self) -> str:
        """How a graph's input for it is called, if that is free: ``u_layers_0_wq_weight``."""
        words = re.sub(r"\W+", "_", self.name).strip("_")
        return f"{_PREFIX[self.kind]}_{words}" + (f"_{self.leaf}" if self.leaf else "")

    def __str__(self) -> str:
        return f"{self.kind} {self.name}" + (f" [{self.leaf}]" if self.leaf else "")
