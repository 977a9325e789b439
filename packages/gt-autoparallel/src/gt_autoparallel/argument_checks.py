"""Arguments of functions that take a finished plan: all that is wrong with a call, in one error."""

from __future__ import annotations

import os

from gt_autoparallel.errors import PlacementInputError


def check_arguments(function: str, *problems: str | None) -> None:
    """Refuse a call of ``function`` with everything that is wrong with its arguments.

    Raises:
        PlacementInputError: not all problems are None; the message has the others.
    """
    found = [problem for problem in problems if problem is not None]
    if found:
        raise PlacementInputError(f"arguments of {function}:\n  " + "\n  ".join(found))


def kind_problem(
    value: object, name: str, kind: type | tuple[type, ...], allowed: str
) -> str | None:
    """What is wrong with an argument that must be a ``kind``."""
    if isinstance(value, kind):
        return None
    found = type(value).__name__
    article = "an" if found[0] in "aeiouAEIOU" else "a"
    return f"{name} is {'None' if value is None else f'{article} {found}'}; allowed: {allowed}"


def path_problem(value: object, name: str = "path") -> str | None:
    """What is wrong with an argument that must be the path of a file."""
    return kind_problem(value, name, (str, os.PathLike), "the path of a file")


def prices_problem(value: object, name: str = "prices") -> str | None:
    """What is wrong with an argument that must be ``StepPrices``."""
    if all(hasattr(value, part) for part in ("digest", "compute_us", "step_time")):
        return None
    return kind_problem(value, name, (), "prices of nodes and steps, as PlacementPrices()")
