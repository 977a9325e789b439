"""Options and degrees addressed by dotted paths: ``mode``, ``ep_overlap.num_chunks``.

Whoever asks the same of every option must not forget one that is added later. Rules address a
configuration and a topology together, as ``config.mode`` and ``topology.tp``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar, get_args, get_origin

from gt_config._field_types import field_hints
from gt_config.compile_config import CompileConfig
from gt_config.topology import TOPOLOGY_FLAGS

ConfigT = TypeVar("ConfigT", bound=CompileConfig)


def flag_of(path: str) -> str:
    """Return the flag that sets the value at a path, as ``config.mode`` or ``topology.tp``."""
    root, _, names = path.partition(".")
    return TOPOLOGY_FLAGS[names] if root == "topology" else f"--compile.{names}"


def leaf_paths(cls: type, prefix: str) -> Iterator[str]:
    """Yield the path of every field of the dataclass ``cls``, nested dataclasses opened."""
    for name, hint in field_hints(cls).items():
        if is_dataclass(hint) and isinstance(hint, type):
            yield from leaf_paths(hint, f"{prefix}.{name}")
        else:
            yield f"{prefix}.{name}"


def option_paths(config_class: type[CompileConfig]) -> tuple[str, ...]:
    """Return the path of every option, also of those that a subclass adds, as declared."""
    return tuple(path.removeprefix("config.") for path in leaf_paths(config_class, "config"))


def option_at(config: object, path: str) -> Any:
    """Return the value at ``path``."""
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def field_at(config_class: type[CompileConfig], path: str) -> Field[Any]:
    """Return the field that declares the option at ``path``."""
    *outer, last = path.split(".")
    kind: Any = config_class
    for name in outer:
        kind = field_hints(kind)[name]
    return next(field for field in fields(kind) if field.name == last)


def default_option(config_class: type[CompileConfig], path: str) -> Any:
    """Return the default of the option at ``path``, as the configuration's class has it."""
    name, _, inner = path.partition(".")
    field = field_at(config_class, name)
    value = field.default if field.default_factory is MISSING else field.default_factory()
    return option_at(value, inner) if inner else value


def with_option(config: ConfigT, path: str, value: object) -> ConfigT:
    """Return a copy of ``config`` with another value at ``path``."""
    name, _, inner = path.partition(".")
    if inner:
        value = replace(getattr(config, name), **{inner: value})
    return replace(config, **{name: value})  # type: ignore[arg-type]  # mypy asks it of each field


def option_choices(config_class: type[CompileConfig], path: str) -> tuple[object, ...]:
    """Return all values that the option at ``path`` may have; empty if they cannot be listed."""
    name, _, inner = path.partition(".")
    hint: Any = field_hints(config_class)[name]
    if inner:
        hint = field_hints(hint)[inner]
    if hint is bool:
        return (False, True)
    return get_args(hint) if get_origin(hint) is Literal else ()
