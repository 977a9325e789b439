"""What workers run of the programs in ``examples/``."""

from __future__ import annotations

import runpy
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def losses_of_placed_example() -> tuple[list[float], list[float]]:
    """The losses of the placed model's loop on this rank, and those of one process."""
    example = runpy.run_path(str(EXAMPLES / "placed_hugging_face.py"))
    return example["train_placed"](), example["train_alone"]()
