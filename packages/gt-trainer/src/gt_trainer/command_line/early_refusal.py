"""Options that cannot go together, told before anything heavy is imported.

gt-config's rules need numbers and names alone, and so do those of ``preflight.plain_settings``.
What a configuration of the catalog has is in the table of known flags, and what was typed is typed:
a run that breaks these rules is refused at once. Nothing is accepted here. Whatever passes is
judged again, with everything else, once the configuration has been imported (``preflight``).

The defaults of a device give way to what does not go with them, and which device there is only
torch can say. So what is refused is refused with whichever of them is left. A configuration's EP
overlap gives way to a solver (``preflight.settled_defaults``).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from gt_config import CompileConfig, ConfigError, Violation
from gt_config.option_paths import default_option, with_option
from gt_trainer.command_line.command_line import CommandLine, UsageError
from gt_trainer.command_line.known_flags import KnownSettings, known_settings, typed_values
from gt_trainer.models.catalog import CATALOG
from gt_trainer.preflight.option_declarations import RunNumbers, Settings
from gt_trainer.preflight.plain_settings import (
    TypedFlags,
    plain_violations,
    topology_of_settings,
)

_COMPILE = "--compile."
_OVERLAP = "--compile.ep_overlap."
_NOT_YET = (
    "Found before anything was imported. What depends on the machine, files and graphs is checked\n"
    "once this is right."
)


def refuse_early(command: CommandLine, world_size: int) -> None:
    """Refuse a run that breaks a rule about plain numbers and names, without importing torch.

    Configurations beyond the catalog are not judged here, nor those of another torchtitan than the
    table of known flags was made with.

    Args:
        command: What was asked for.
        world_size: Ranks of the whole job.

    Raises:
        UsageError: Lists what is wrong.
    """
    if command.module not in CATALOG:
        return
    known = known_settings(command.config)
    if known is None:
        return
    if command.published is not None and known.model is not None:
        positions = command.published.positions or known.model.max_seq_len
        known = replace(known, model=replace(known.model, max_seq_len=positions))
    typed = typed_values(command.overrides)
    defaults = {flag: value for flag, value in known.gpu_defaults.items() if flag not in typed}
    settings = {**known.values, **{k: v for k, v in typed.items() if k in known.values}}
    if settings.get("--compile.autoparallel") and not any(f.startswith(_OVERLAP) for f in typed):
        settings |= {
            flag: default_option(CompileConfig, flag.removeprefix(_COMPILE))
            for flag in settings
            if flag.startswith(_OVERLAP)
        }
    flags = TypedFlags(names=command.typed_flags, configured=known.values)
    found = _violations(settings, world_size, known, flags)
    for count in range(1, len(defaults) + 1):
        for chosen in combinations(defaults.items(), count):
            among = _violations(settings | dict(chosen), world_size, known, flags)
            found = [each for each in found if each in among]
    if found:
        raise UsageError(f"{ConfigError(found)}\n{_NOT_YET}")


def _violations(
    settings: Settings, world_size: int, known: KnownSettings, typed: TypedFlags
) -> list[Violation]:
    topology = topology_of_settings(settings, world_size)
    options = CompileConfig()
    for flag, value in settings.items():
        if flag.startswith(_COMPILE):
            # JSON has lists for tuples.
            own = tuple(value) if isinstance(value, list) else value
            options = with_option(options, flag.removeprefix(_COMPILE), own)
    run = RunNumbers(settings=settings, topology=topology, model=known.model)
    return [*plain_violations(options, run, passes=known.passes, typed=typed)]
