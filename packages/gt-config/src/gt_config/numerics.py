"""How close to an eager run what a pass or an option makes of it is.

A pass declares its class (``gt_passes.contract``); that of a run is the farthest of its passes and
options, which ``gt-train`` says at its start.
"""

from __future__ import annotations

from typing import Literal, get_args

Numerics = Literal["bitwise", "reordered", "approximate"]
"""bitwise: every bit of every result, on every input.
reordered: the same products and terms, whose sums are taken in another order.
approximate: what is summed is rounded otherwise too."""

NUMERICS: tuple[Numerics, ...] = get_args(Numerics)
"""From the closest to the farthest."""
