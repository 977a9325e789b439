"""Short names of the flags that people change most, and flags that are spelled in two ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from gt_trainer.command_line.known_flags import typed_pairs, with_underscores

SHORT_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "--steps": "--training.steps",
        "--lr": "--optimizer.param_groups.0.optimizer_kwargs.lr",
        "--batch": "--training.local_batch_size",
        "--seq-len": "--training.seq_len",
    }
)
"""The flags by their short names, as the help shows them."""


def written_out(argument: str) -> str:
    """Return an argument with the whole name of its flag; another one as it is.

    Args:
        argument: As typed: a flag, a flag with ``=`` and its value, or a value.
    """
    name, has_value, value = argument.partition("=")
    return SHORT_NAMES.get(name.replace("_", "-"), name) + has_value + value


def contradictory_spellings(arguments: Sequence[str]) -> list[str]:
    """Return a problem for each option that is typed by two names with two values.

    A flag that is repeated as it is may follow one of a script, and its last value counts.

    Args:
        arguments: Flags and values as typed, with short names.
    """
    spellings: dict[str, dict[str, bool | list[str]]] = {}
    for name, values in typed_pairs(arguments):
        group, _, last = with_underscores(written_out(name)).rpartition(".")
        value: bool | list[str] = values
        if not values:  # a switch
            value = not last.startswith("no_")
            last = last.removeprefix("no_")
        spellings.setdefault(f"{group}.{last}", {})[name] = value
    problems = []
    for flag, values_by_name in spellings.items():
        if len({*map(repr, values_by_name.values())}) > 1:
            told = " and ".join(
                name if isinstance(value, bool) else f"{name} {' '.join(value)}"
                for name, value in values_by_name.items()
            )
            problems.append(f"{told} are one option, {flag}, with two values: leave out one")
    return problems
