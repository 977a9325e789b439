"""The options that nothing in a run reads, found from the marks of their fields (``readers``)."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from gt_config.compile_config import CompileConfig
from gt_config.errors import Violation
from gt_config.option_paths import default_option, field_at, flag_of, option_at, option_paths
from gt_config.readers import READERS_KEY, NeededValue, Readers
from gt_config.topology import Topology


def readers_of(config_class: type[CompileConfig], path: str) -> Readers | None:
    """Return the mark of the option at ``path``; None if it has none."""
    found: Readers | None = field_at(config_class, path).metadata.get(READERS_KEY)
    return found


def idle_options(
    config: CompileConfig, topology: Topology, *, asked: Collection[str] = ()
) -> Iterator[Violation]:
    """Yield every option that is not at its default and that nothing in the run reads.

    Args:
        config: A configuration whose values are of their types.
        topology: The extents of the run.
        asked: Flags that the user typed. Others may lack ranks to act between: a configuration is
            used with any number of them.
    """
    kind = type(config)
    for path in option_paths(kind):
        value, default = option_at(config, path), default_option(kind, path)
        if value == default:
            continue
        readers, flag = readers_of(kind, path), flag_of(f"config.{path}")
        because, remedy = what_lacks(readers, config, topology, looks_at_mesh=flag in asked)
        if because:
            yield idle(flag, value, default, because=because, remedy=remedy)


def idle(flag: str, value: object, default: object, *, because: str, remedy: str) -> Violation:
    """Return the refusal of an option that would do nothing."""
    return Violation(
        flag=flag,
        value=value,
        allowed=f"its default {default!r}, since {because} and it would do nothing",
        fix="drop the option" + (f", or use {remedy}" if remedy else ""),
    )


def what_lacks(
    readers: Readers | None, config: CompileConfig, topology: Topology, *, looks_at_mesh: bool
) -> tuple[str, str]:
    """Return why nothing reads an option and what would change that; two empty texts if it is read.

    Args:
        readers: The option's mark; None if it has none.
        config: As for ``idle_options``.
        topology: As for ``idle_options``.
        looks_at_mesh: Whether an option without ranks to act between is read by nothing.
    """
    if readers is None:
        return "nothing in this run reads it", ""
    values = {"config": config, "topology": topology}

    def value_of(need: NeededValue) -> object:
        root, _, path = need.path.partition(".")
        return option_at(values[root], path)

    unmet = [each for each in readers.needs if not each.holds_for(value_of(each))]
    remedies = [_remedy(each) for each in unmet]
    if looks_at_mesh and not config.autoparallel:
        degrees = [NeededValue(path=f"topology.{axis}") for axis in readers.axes]
        if degrees and not any(each.holds_for(value_of(each)) for each in degrees):
            # Ranks that share sequences shard parameters too, and are not what is meant here.
            lacking = [each for each in degrees if each.path != "topology.cp"]
            unmet += lacking
            remedies.append(" or ".join(_remedy(each) for each in lacking))
    because = " and ".join(f"{flag_of(each.path)} is {value_of(each)!r}" for each in unmet)
    return because, " and ".join(remedies)


def _remedy(need: NeededValue) -> str:
    """Return the flag with the values that are needed, as a user types it."""
    values = " or ".join(str(each) for each in need.values if each is not True)
    if not need.values and need.path.startswith("topology."):
        values = "2"
    return f"{flag_of(need.path)} {values}".strip()
