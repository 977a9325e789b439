"""The flags of the configuration, judged before torch is imported.

The flags are fields of dataclasses that take seconds to import: a refusal takes 0.3 seconds with
the table ``known_flags.json``, and 12 without it. It holds what each flag takes, the values of
every configuration of the catalog that ``early_refusal`` judges, and the versions that it was made
with. With another torchtitan or tyro installed it is not consulted: misspelled flags and values are
found after the import. What the table passes, tyro still judges (``overrides``).

``write_known_flags`` writes the table anew; a test fails when it is out of date.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gt_trainer.command_line.near_matches import did_you_mean
from gt_trainer.preflight.option_declarations import ModelNumbers

TABLE = Path(__file__).with_suffix(".json")
"""File with what every flag takes, and the versions that it was made with."""

_SEPARATED = "A,B,C,..."
_NUMBERS = "[FLOAT [FLOAT ...]]"
_KINDS: Mapping[str, tuple[Callable[[str], object], str]] = {
    "INT": (int, "an integer"),
    "FLOAT": (float, "a number"),
    "STR": (str, "text"),
}


def explain_flags(arguments: Iterable[str]) -> list[str]:
    """Return a message for each flag that no configuration has, and each value that does not fit.

    Args:
        arguments: Flags and values as typed, without our own options.
    """
    table = _table()
    if table is None:
        return []
    kinds: dict[str, str] = table["kinds"]
    own_flags = {f"--{choice}" for choice in table["choices"]}
    problems: list[str] = []
    for typed, values in typed_pairs(arguments):
        name = with_underscores(typed)
        value = values[0] if values else None
        if name in kinds:
            problems += _explain_value(name, value, kinds[name])
        elif not name.startswith("--tyro_") and name.rpartition(".")[0] not in own_flags:
            problems.append(f"no flag {typed!r}.{did_you_mean(name, kinds)}")
    return list(dict.fromkeys(problems))


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownSettings:
    """Values of a configuration of the catalog that are judged before it is imported."""

    values: Mapping[str, Any]
    """By flag, as configured for a CPU: ``preflight.plain_settings``, and every ``--compile``."""
    gpu_defaults: Mapping[str, Any]
    """What is configured otherwise for a GPU, by flag; it gives way to what does not go with it."""
    model: ModelNumbers | None
    """Of its model; None of one that is not judged."""
    passes: tuple[str, ...]
    """Names of the registered passes."""


def known_settings(config: str) -> KnownSettings | None:
    """Return the values of a configuration of the catalog, None if they are not known.

    Args:
        config: The configuration's name.
    """
    table = _table()
    if table is None:
        return None
    first = next(iter(table["settings"].values()))
    own = table["settings"][config]
    return KnownSettings(
        values=first["values"] | own["values"],
        gpu_defaults=own["gpu_defaults"],
        model=None if own["model"] is None else ModelNumbers(**own["model"]),
        passes=tuple(table["passes"]),
    )


def flag_kinds() -> dict[str, str]:
    """Return what each flag takes, as INT or {a,b}; empty for a switch. Nothing if not known."""
    table = _table()
    return {} if table is None else table["kinds"]


def typed_values(arguments: Iterable[str]) -> dict[str, object]:
    """Return the values that were typed, as far as their flags say how to read them.

    The last one of a flag counts, as for tyro. Values that do not fit are ``explain_flags``'s to
    find, and are left out.

    Args:
        arguments: Flags and values as typed, without our own options.
    """
    kinds = flag_kinds()
    values: dict[str, object] = {}
    for typed, texts in typed_pairs(arguments):
        name = with_underscores(typed)
        if name not in kinds:
            continue
        if not kinds[name]:
            group, _, last = name.rpartition(".")
            is_on = f"{group}.no_{last}" in kinds
            values[name if is_on else f"{group}.{last.removeprefix('no_')}"] = is_on
        elif kinds[name] == _NUMBERS:
            with contextlib.suppress(ValueError):
                values[name] = tuple(map(float, texts))
        elif texts:
            with contextlib.suppress(ValueError):
                values[name] = _read_value(texts[0], kinds[name])
    return values


def typed_pairs(arguments: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag as typed, with its values.

    Args:
        arguments: Flags and values as typed.
    """
    found: tuple[str, list[str]] | None = None
    for argument in arguments:
        if not argument.startswith("--"):
            if found is not None:
                found[1].append(argument)
            continue
        if found is not None:
            yield found
        name, has_value, value = argument.partition("=")
        found = name, [value] * bool(has_value)
    if found is not None:
        yield found


def with_underscores(flag: str) -> str:
    """Return the flag as the help spells it."""
    return "--" + flag.removeprefix("--").replace("-", "_")


@functools.cache
def _table() -> dict[str, Any] | None:
    table: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    made_with = ("torchtitan", "tyro")
    is_current = all(importlib.metadata.version(name) == table[name] for name in made_with)
    return table if is_current else None


def _read_value(text: str, kind: str) -> object:
    """The value of a flag that takes one.

    Raises:
        ValueError: It does not fit, or nothing here says how to read it.
    """
    for part in kind.split("|"):
        if part == "{None}" and text == "None":
            return None
        if part.startswith("{") and text in part[1:-1].split(","):
            return text
        if part in _KINDS:
            with contextlib.suppress(ValueError):
                return _KINDS[part][0](text)
        if part == _SEPARATED:
            return tuple(each for each in text.split(",") if each)
    raise ValueError(f"{text!r} is no {kind}")


def _explain_value(name: str, value: str | None, kind: str) -> list[str]:
    if not kind:
        if value is None or ":" in value:  # a choice may follow, such as activation_checkpoint:full
            return []
        return [f"{name} takes no value, and was given {value!r}: --GROUP.FLAG or --GROUP.no_FLAG"]
    if value is None:
        return [f"{name} needs a value"]
    choices: list[str] = []
    allowed: list[str] = []
    for part in kind.split("|"):
        if part.startswith("{") and part.endswith("}") and "..." not in part:
            choices += part[1:-1].split(",")
        elif part in _KINDS:
            convert, meaning = _KINDS[part]
            with contextlib.suppress(ValueError):
                convert(value)
                return []
            allowed.append(meaning)
        else:
            return []  # a list, which tyro judges
    if value in choices:
        return []
    *others, last = [*map(repr, choices), *allowed]
    listed = f"{', '.join(others)} or {last}" if others else last
    why = _WHY_NOT.get((name, value)) or did_you_mean(value, choices)
    return [f"{name} is {value!r}, and must be {listed}{why and f'.{why}'}"]


_WHY_NOT = {
    ("--quantization.linears", "nvfp4"): " torchtitan's NVFP4 layer runs on Blackwell GPUs alone, "
    "is placed by its backend spmd_types alone, and cannot be emulated"
}
"""What torchtitan has and a run here has not: of a flag and its value, the reason."""


# Short names of the flags that people change most, and flags that are spelled in two ways.
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
