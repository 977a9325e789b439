"""Which passes take part, with which options, and random lists of them.

The registry decides: a pass that someone registers tomorrow is drawn tomorrow.
"""

from __future__ import annotations

import dataclasses
import importlib
import random
import types
import typing
from typing import Any, Literal

from fuzz.case import PassSpec
from gt_passes import GraphPass  # importing the package registers every pass
from gt_passes.registry import find_passes, known_passes

__all__ = ["build_passes", "draw_passes", "fuzzed_passes", "reason_to_exclude"]

_OPTION_VALUES: dict[str, tuple[Any, ...]] = {
    "cap_mib": (None, 1),
    "blocks_ahead": (1, 2, 3),
    "blocks_behind": (1, 2),
    "prefetch_layers": (1, 2),
    "defer_layers": (1, 2),
    "layers": ("layers.*", "layers.*.parts.*"),
    "offload_min_bytes": (0,),
    "host_budget_bytes": (None, 256),
}
"""Values to draw for options whose type does not tell them, by name."""

_EXCLUDED = {"cuda-graphs": "it needs a GPU"}


def fuzzed_passes() -> tuple[str, ...]:
    """The names of the passes that take part."""
    return tuple(name for name in known_passes() if reason_to_exclude(name) is None)


def reason_to_exclude(name: str) -> str | None:
    """Why a registered pass takes no part; None for one that does."""
    (pass_class,) = find_passes([name])
    if pass_class.numerics != "bitwise":
        return "it does not claim to keep every bit"
    return _EXCLUDED.get(name)


def draw_passes(source: random.Random) -> tuple[PassSpec, ...]:
    """Draw a list of passes: any subset in any order, sometimes one twice."""
    names = fuzzed_passes()
    drawn = source.sample(names, source.randint(1, min(len(names), 7)))
    if source.random() < 0.3:
        drawn.insert(source.randint(0, len(drawn)), source.choice(drawn))
    return tuple(PassSpec(name=name, options=_draw_options(name, source)) for name in drawn)


def build_passes(specs: tuple[PassSpec, ...]) -> tuple[GraphPass, ...]:
    """The passes that ``specs`` describe, in their order."""
    for spec in specs:
        importlib.import_module(spec.module)
    classes = find_passes(spec.name for spec in specs)
    return tuple(
        pass_class(**spec.options) for pass_class, spec in zip(classes, specs, strict=True)
    )


def _draw_options(name: str, source: random.Random) -> dict[str, Any]:
    (pass_class,) = find_passes([name])
    hints = typing.get_type_hints(pass_class)
    drawn = {}
    for option in dataclasses.fields(pass_class):  # type: ignore[arg-type]  # GraphPass itself is no dataclass
        values = _OPTION_VALUES.get(option.name) or _values_of(hints[option.name])
        if values and source.random() < 0.6:
            drawn[option.name] = source.choice(values)
    return drawn


def _values_of(hint: Any) -> tuple[Any, ...]:
    """All values of a type that has few; nothing for others."""
    origin = typing.get_origin(hint)
    if origin is Literal:
        return typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        values = [_values_of(option) for option in typing.get_args(hint)]
        return tuple(value for some in values for value in some) if all(values) else ()
    return {bool: (False, True), type(None): (None,)}.get(hint, ())
