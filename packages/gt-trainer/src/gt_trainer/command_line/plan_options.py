"""The options of ``gt-train plan``, as far as they can be judged without torch."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gt_trainer.command_line.known_flags import written_out

TAKES_FLAGS = "--beside"
"""The option whose value begins like a flag."""

PLAN_OPTIONS = (
    "--cluster",
    "--gpus",
    "--global-batch-tokens",
    "--minutes",
    "--what-if",
    "--scaling",
    TAKES_FLAGS,
    "--page",
)
_RELAXABLE = ("nic", "memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What ``gt-train plan`` was asked."""

    cluster: str = "h100_sxm"
    gpus: int | None = None
    """None for as many as the configuration is meant for."""

    global_batch_tokens: int | None = None
    """None for a sequence on each GPU."""

    minutes: float = 10.0
    what_if: Mapping[str, float] = field(default_factory=dict)
    scaling_minutes: float | None = None
    """For other numbers of GPUs; None looks at none."""

    beside: tuple[str, ...] | None = None
    """Flags of a run that is simulated, too, as typed; None for none."""

    page: Path | None = None
    """File for the page; None writes none."""


def plan_options(values: Mapping[str, str], problems: list[str]) -> PlanOptions:
    """Read the options.

    Args:
        values: as typed, by option.
        problems: what is wrong is added to them.
    """

    def positive(option: str) -> float | None:
        text = values.get(option)
        if text is None:
            return None
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if math.isfinite(number) and number > 0:
            return number
        problems.append(f"{option} is {text!r}, and must be a number above 0")
        return None

    def whole(option: str) -> int | None:
        number = positive(option)
        if number is not None and number != int(number):
            problems.append(f"{option} is {values[option]!r}, and must be a whole number")
        return None if number is None else int(number)

    page = values.get("--page")
    if page is not None and Path(page).suffix == ".json":
        problems.append(f"--page is {page!r}, where the plan's data would be: name it .html")
    if page is not None and (Path(page).is_dir() or not Path(page).parent.is_dir()):
        problems.append(f"--page is {page!r}, and must be a file in a folder that exists")
    return PlanOptions(
        cluster=values.get("--cluster", PlanOptions().cluster),
        gpus=whole("--gpus"),
        global_batch_tokens=whole("--global-batch-tokens"),
        minutes=positive("--minutes") or PlanOptions().minutes,
        scaling_minutes=positive("--scaling"),
        what_if=_what_if(values.get("--what-if", ""), problems),
        beside=_beside(values.get(TAKES_FLAGS), problems),
        page=None if page is None else Path(page),
    )


def _beside(text: str | None, problems: list[str]) -> tuple[str, ...] | None:
    if text is None:
        return None
    try:
        flags = tuple(map(written_out, shlex.split(text)))
    except ValueError as error:
        problems.append(f"--beside is {text!r}, which is no command line: {error}")
        return None
    if not flags or not flags[0].startswith("--"):
        problems.append(
            f"--beside is {text!r}, and takes the flags of a run in one word, such as "
            "'--parallelism.tensor_parallel_degree 8 --compile.memory_policy selective'"
        )
    return flags


def _what_if(text: str, problems: list[str]) -> dict[str, float]:
    found = {}
    for part in filter(None, text.split(",")):
        name, _, number = part.partition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if name in _RELAXABLE and math.isfinite(value) and value > 0:
            found[name] = value
        else:
            problems.append(
                f"--what-if has {part!r}, and takes nic=GBIT_PER_S and memory=GB, such as "
                "nic=800,memory=141"
            )
    return found
