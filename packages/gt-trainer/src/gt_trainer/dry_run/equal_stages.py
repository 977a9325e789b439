"""Which stages of a decoder are alike, so that one capture stands for all of them.

Two are alike if they hold the same modules but for the layers' indices, those layers are configured
alike, and both or neither of them is the first of the pipeline, and the last. Configurations say
all of it: whatever a layer's forward does follows from its own. How parameters are drawn does not
count, for no graph draws any.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

_LAYER = re.compile(r"layers\.(\d+)")
_DRAWN_ONLY = frozenset({"param_init"})


def equal_stages(
    names_per_stage: Sequence[Sequence[str]], layer_configs: Sequence[Any]
) -> tuple[int, ...]:
    """For each stage the first that is like it, itself if there is none before.

    Args:
        names_per_stage: modules of each stage, by their names in the model.
        layer_configs: torchtitan's, of each layer of the model.
    """
    last = len(names_per_stage) - 1
    first_of: dict[Hashable, int] = {}
    found = []
    for index, names in enumerate(names_per_stage):
        modules = tuple(_module(name, layer_configs) for name in names)
        found.append(first_of.setdefault((modules, index == 0, index == last), index))
    return tuple(found)


def _module(name: str, layer_configs: Sequence[Any]) -> Hashable:
    match = _LAYER.match(name)
    if match is None:
        return name
    rest = name[match.end() :]
    return "layers", rest, _value(layer_configs[int(match.group(1))])


def _value(value: Any) -> Hashable:
    """A configuration as something that compares by what it says."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = tuple(
            (field.name, _value(getattr(value, field.name)))
            for field in dataclasses.fields(value)
            if field.name not in _DRAWN_ONLY
        )
        return type(value), fields
    if isinstance(value, Mapping):
        return tuple((_value(key), _value(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_value, value))
    if isinstance(value, (set, frozenset)):
        return frozenset(map(_value, value))
    # Anything else is like itself alone, unless its class says otherwise.
    return value if isinstance(value, Hashable) else id(value)
