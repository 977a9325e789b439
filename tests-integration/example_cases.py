"""What workers run of the programs in ``examples/``."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist

EXAMPLES = Path(__file__).parents[1] / "examples"


def printed_by(name: str, *options: str) -> str:
    """What a program prints that runs as its own main module, in the process group of the workers."""
    printed = io.StringIO()
    with (
        patch.object(sys, "argv", [name, *options]),
        patch.object(dist, "init_process_group", autospec=True) as init,
        patch.object(dist, "destroy_process_group", autospec=True) as destroy,
        contextlib.redirect_stdout(printed),
    ):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    init.assert_called_once_with("gloo")
    destroy.assert_called_with()  # the last: those before it are of groups of the program's own
    return printed.getvalue()


def losses_of_placed_example() -> tuple[list[float], list[float]]:
    """The losses of the placed model's loop on this rank, and those of one process."""
    example = runpy.run_path(str(EXAMPLES / "placed_hugging_face.py"))
    return example["train_placed"](), example["train_alone"]()
