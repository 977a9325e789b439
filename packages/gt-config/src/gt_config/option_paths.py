"""Options addressed by dotted paths: ``mode``, ``ep_overlap.num_chunks``.

For whoever asks the same of every option (what does it do in this run?) and must not forget one
that is added later.
"""

from __future__ import annotations

from dataclasses import MISSING, fields, replace
from typing import Any, Literal, TypeVar, get_args, get_origin

from gt_config._field_types import field_hints
from gt_config._subject import leaf_paths
from gt_config.compile_config import CompileConfig

ConfigT = TypeVar("ConfigT", bound=CompileConfig)


def option_paths(config_class: type[CompileConfig]) -> tuple[str, ...]:
    """The path of every option, also of those that a subclass adds, as declared."""
    return tuple(path.removeprefix("config.") for path in leaf_paths(config_class, "config"))


def option_at(config: CompileConfig, path: str) -> Any:
    """The value at ``path``."""
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def default_option(config_class: type[CompileConfig], path: str) -> Any:
    """The default of the option at ``path``, as the configuration's class has it."""
    name, *inner = path.split(".")
    field = next(field for field in fields(config_class) if field.name == name)
    value: Any = field.default
    if field.default_factory is not MISSING:
        value = field.default_factory()
    for part in inner:
        value = getattr(value, part)
    return value


def with_option(config: ConfigT, path: str, value: object) -> ConfigT:
    """A copy of ``config`` with another value at ``path``."""
    name, _, inner = path.partition(".")
    if inner:
        value = replace(getattr(config, name), **{inner: value})
    return replace(config, **{name: value})  # type: ignore[arg-type]  # mypy asks it of each field


def option_choices(config_class: type[CompileConfig], path: str) -> tuple[object, ...]:
    """All values that the option at ``path`` may have; empty where they cannot be listed."""
    name, _, inner = path.partition(".")
    hint: Any = field_hints(config_class)[name]
    if inner:
        hint = field_hints(hint)[inner]
    if hint is bool:
        return (False, True)
    return get_args(hint) if get_origin(hint) is Literal else ()
