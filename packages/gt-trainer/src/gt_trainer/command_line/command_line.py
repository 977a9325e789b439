"""The command line of ``gt-train``, as far as it can be judged without torch.

A misspelled model must not cost the seconds that importing torchtitan takes, ten of them where
Python's bytecode is missing. So our own options are read here, by a small parser, against the
torch-free catalog; what remains, the dotted flags of the configuration, is read later by
``gt_trainer.command_line.overrides``.

Everything wrong is reported at once.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from gt_config.errors import numbered_problems
from gt_trainer.command_line.known_flags import (
    SHORT_NAMES,
    contradictory_spellings,
    explain_flags,
    with_underscores,
    written_out,
)
from gt_trainer.command_line.near_matches import did_you_mean
from gt_trainer.command_line.plan_options import (
    PLAN_OPTIONS,
    TAKES_FLAGS,
    PlanOptions,
    plan_options,
)
from gt_trainer.command_line.usage import USAGE
from gt_trainer.launcher.rendezvous import Rendezvous
from gt_trainer.models.catalog import CATALOG, CatalogEntry
from gt_trainer.models.hugging_face.folder import folder_of, folder_problems
from gt_trainer.models.published_runs import PUBLISHED_RUNS, PublishedRun
from gt_trainer.models.torchtitan_modules import (
    is_own_module,
    torchtitan_configs,
    torchtitan_modules,
)

CommandAction = Literal[
    "train", "dry-run", "precompile", "plan", "report", "help", "help-all", "list", "version"
]

_DEFAULT_MODULE = "llama3"
_PRECOMPILE: CommandAction = "precompile"
_PLAN: CommandAction = "plan"
_WORDS: Mapping[str, CommandAction] = {"precompile": _PRECOMPILE, "plan": _PLAN}
"""Actions that are a word, and the first on the command line: they make what runs use."""

_REPORT: CommandAction = "report"
"""One that takes a folder, and no flags."""

_PRETENDING: tuple[CommandAction, ...] = ("dry-run", _PRECOMPILE)
"""Actions on ranks that do not exist."""

_FLAGS: Mapping[str, CommandAction] = {
    "--dry-run": "dry-run",
    "--help": "help",
    "-h": "help",
    "--help-all": "help-all",
    "--list": "list",
    "--version": "version",
}
_VALUED = (
    "--module",
    "--config",
    "--published",
    "--nproc",
    "--restarts",
    "--world-size",
    "--log-rank",
    "--trace",
    "--timeline",
    "--hardware",
    *PLAN_OPTIONS,
)


class UsageError(ValueError):
    """The command line is wrong; ``problems`` lists everything that is."""

    def __init__(self, *problems: str) -> None:
        self.problems: tuple[str, ...] = problems
        super().__init__(*problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        return numbered_problems("the command line", self.problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """What was asked for, names checked."""

    action: CommandAction = "train"
    module: str = _DEFAULT_MODULE
    """A name of the catalog, another of torchtitan's models, a Python module of the user's with
    configurations, or hf: and a folder of Hugging Face's."""
    config: str = ""
    """A name of the catalog, or of a function in that module."""
    published: PublishedRun | None = None
    """The run that somebody published, and that this one repeats; None for another."""
    num_processes: int | None = None
    """--nproc; None if it was not given."""
    restarts: int = 0
    """--restarts: how often the processes start again after one of them died."""
    world_size: int | None = None
    """--world-size; None if it was not given."""
    trace: Path | None = None
    """File for the dry run's trace; None writes none."""
    timeline: Path | None = None
    """File for the page of a pipeline's ranks; None writes none."""
    hardware: Path | None = None
    """Hardware file of the machine that is simulated; None for H100 SXM."""
    plan: PlanOptions = field(default_factory=PlanOptions)
    """Of the action plan."""
    shown_ranks: frozenset[int] = frozenset({0})
    """Ranks whose output is shown; the local ranks of --nproc."""
    overrides: tuple[str, ...] = ()
    """The flags of the configuration, as typed."""
    folder: Path | None = None
    """Of ``report``, the dump folder of the run."""

    @property
    def typed_flags(self) -> frozenset[str]:
        """The flags of the configuration that the user typed, without those of a published run."""
        published = 0 if self.published is None else len(self.published.flags)
        return flags_given(self.overrides[published:])


@dataclass(slots=True)
class _Reading:
    """What has been read so far."""

    actions: list[CommandAction] = field(default_factory=list)
    values: dict[str, str] = field(default_factory=dict)
    overrides: list[str] = field(default_factory=list)
    typed: list[str] = field(default_factory=list)
    """The overrides, with short names as they are."""
    problems: list[str] = field(default_factory=list)


def flags_given(overrides: Sequence[str]) -> frozenset[str]:
    """Return the flags among a configuration's overrides, as the help spells them.

    Args:
        overrides: As typed. The negative form of a switch counts as the switch.
    """
    names = {
        with_underscores(each.partition("=")[0]) for each in overrides if each.startswith("--")
    }
    return frozenset(names | {name.replace(".no_", ".") for name in names})


def parse_command_line(arguments: Sequence[str]) -> CommandLine:
    """Read our own options, and check the names of module and configuration.

    Args:
        arguments: The command line without the program's name.

    Raises:
        UsageError: Lists everything that is wrong with our own options.
    """
    if arguments and arguments[0] == _REPORT and not {"--help", "-h"} & {*arguments}:
        return CommandLine(action=_REPORT, folder=_folder_of_report(arguments[1:]))
    reading = _read(arguments)
    action = _choose_action(reading)
    if action in ("help", "list", "version"):
        return CommandLine(action=action)
    num_processes = _count(reading, "--nproc")
    world_size = _count(reading, "--world-size")
    published = _choose_published(reading)
    module, config = (
        _choose_config(reading) if published is None else (published.module, published.config)
    )
    if action == _PLAN and folder_of(module) is not None:
        reading.problems.append(
            f"plan counts the layers of torchtitan's decoders, and --module {module} is none"
        )
    shown = _ranks(reading, num_processes or 1)
    restarts = _count(reading, "--restarts", least=0)
    if restarts and (num_processes or 1) == 1:
        reading.problems.append(
            "--restarts starts the processes of --nproc again, and one alone has nobody who would"
        )
    if world_size is not None and action not in _PRETENDING:
        reading.problems.append(
            "--world-size says how many ranks a --dry-run or precompile pretends to have. To start "
            "processes, use --nproc"
        )
    trace = _written(
        reading,
        "--trace",
        action,
        otherwise="--trace writes the step that a --dry-run simulates. To trace a run, use "
        "--profiler.enable_profiling",
    )
    timeline = _written(
        reading,
        "--timeline",
        action,
        otherwise="--timeline writes the schedule of a pipeline that a --dry-run simulates",
    )
    hardware = _hardware(reading)
    plan = _plan(reading, action)
    if num_processes is not None and action in _PRETENDING:
        name = "precompile" if action == _PRECOMPILE else "--dry-run"
        reading.problems.append(
            f"{name} starts no processes, so --nproc means nothing: say --world-size"
        )
    if {"dry-run", _PRECOMPILE} <= {*reading.actions}:
        reading.problems.append("--dry-run stores nothing, and precompile does: leave out one")
    if action == _PRECOMPILE and not any(
        each.partition("=")[0] == "--compile.artifacts" for each in reading.overrides
    ):
        reading.problems.append("precompile needs --compile.artifacts, the folder to write to")
    if reading.problems:
        raise UsageError(*reading.problems)
    return CommandLine(
        action=action,
        module=module,
        config=config,
        published=published,
        num_processes=num_processes,
        restarts=restarts or 0,
        world_size=world_size or (None if published is None else published.world_size),
        trace=trace,
        timeline=timeline,
        hardware=hardware,
        plan=plan,
        shown_ranks=shown,
        # What is typed comes last, and counts.
        overrides=(*(() if published is None else published.flags), *reading.overrides),
    )


def _folder_of_report(rest: Sequence[str]) -> Path:
    if len(rest) != 1 or rest[0].startswith("-"):
        raise UsageError(
            "report takes the --dump_folder of a run and nothing else: gt-train report FOLDER"
        )
    return Path(rest[0])


def check_launch(command: CommandLine, rendezvous: Rendezvous | None) -> None:
    """Refuse --nproc and --dry-run in a process that a launcher already made one of many.

    Raises:
        UsageError: As said.
    """
    if rendezvous is None:
        return
    job = (
        f"rank {rendezvous.rank} of {rendezvous.world_size} of a job started by {rendezvous.source}"
    )
    if command.num_processes is not None:
        raise UsageError(
            f"--nproc {command.num_processes} starts local ranks, but this process already is "
            f"{job}: leave out one of the two"
        )
    if command.action in (*_PRETENDING, _PLAN) and rendezvous.world_size > 1:
        name = command.action if command.action in _WORDS else "--dry-run"
        raise UsageError(f"{name} needs one process only, and this is {job}")


def listing() -> str:
    """Return the table of modules and configurations for --list."""
    entries = [entry for configs in CATALOG.values() for entry in configs.values()]
    width = max(len(entry.config) for entry in entries)
    lines: list[str] = []
    for module, configs in CATALOG.items():
        lines.append(f"--module {module}")
        lines += [_line(entry, width) for entry in configs.values()]
    width = max(map(len, PUBLISHED_RUNS))
    lines.append("--published, with what was measured, as tokens/s/GPU and GiB")
    lines += [
        f"  {run.name:<{width}}  {run.description} "
        f"({run.tokens_per_second_per_gpu:,.0f}, {run.memory_gib})"
        for run in PUBLISHED_RUNS.values()
    ]
    return "\n".join(lines)


def usage() -> str:
    """Return the text of --help."""
    return USAGE.format(listing="\n".join(f"  {line}" for line in listing().splitlines()))


def _line(entry: CatalogEntry, width: int) -> str:
    return f"  --config {entry.config:<{width}}  {entry.description}"


def _read(arguments: Sequence[str]) -> _Reading:
    reading = _Reading()
    rest = list(arguments)
    if rest and rest[0] in _WORDS:
        reading.actions.append(_WORDS[rest.pop(0)])
    while rest:
        argument = rest.pop(0)
        name, has_value, value = argument.partition("=")
        option = name.replace("_", "-")
        if option in _FLAGS and not has_value:
            reading.actions.append(_FLAGS[option])
        elif option in _FLAGS:
            reading.problems.append(f"{option} takes no value, and was given {value!r}")
        elif option not in _VALUED:
            reading.typed.append(argument)
            reading.overrides.append(written_out(argument))
        elif option in reading.values:
            reading.problems.append(f"{option} is given twice")
            if not has_value and rest and _is_value(option, rest[0]):
                rest.pop(0)
        elif has_value:
            reading.values[option] = value
        elif rest and _is_value(option, rest[0]):
            reading.values[option] = rest.pop(0)
        else:
            reading.problems.append(f"{option} needs a value")
    _check_overrides(reading)
    return reading


def _is_value(option: str, argument: str) -> bool:
    if option != TAKES_FLAGS:
        return not argument.startswith("--")
    return not _is_ours(argument)


def _is_ours(argument: str) -> bool:
    return argument.partition("=")[0].replace("_", "-") in (*_FLAGS, *_VALUED)


def _check_overrides(reading: _Reading) -> None:
    """Point at misspelled flags. An undotted one may have been meant for an option of ours."""
    ours = [*_FLAGS, *_VALUED, *SHORT_NAMES]
    rest: list[str] = []
    for argument in reading.overrides:
        option = argument.partition("=")[0].replace("_", "-")
        is_ours = difflib.get_close_matches(option, ours, n=1, cutoff=0.75)
        if option.startswith("--") and "." not in option and is_ours:
            reading.problems.append(f"no option {option!r}.{did_you_mean(option, ours)}")
        else:
            rest.append(argument)
    if reading.values.get("--module", _DEFAULT_MODULE) in CATALOG:  # others may have more flags
        reading.problems += explain_flags(rest)
    reading.problems += contradictory_spellings(reading.typed)


def _choose_action(reading: _Reading) -> CommandAction:
    asked = list(dict.fromkeys(reading.actions))
    for action in ("help", "help-all", "list", "version"):
        if action in asked:
            return action
    return asked[0] if asked else "train"


def _count(reading: _Reading, option: str, *, least: int = 1) -> int | None:
    text = reading.values.get(option)
    if text is None:
        return None
    if not text.isdecimal() or int(text) < least:
        kind = "a positive integer" if least == 1 else f"an integer from {least} on"
        reading.problems.append(f"{option} is {text!r}, and must be {kind}")
        return None
    return int(text)


def _written(
    reading: _Reading, option: str, action: CommandAction, *, otherwise: str
) -> Path | None:
    """The file that a dry run is to write; ``otherwise`` refuses it where there is no dry run."""
    text = reading.values.get(option)
    if text is None:
        return None
    path = Path(text)
    if action != "dry-run":
        reading.problems.append(otherwise)
    elif path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        reading.problems.append(
            f"{option} is {text!r}, and must be a file in a folder that exists and can be written"
        )
    return path


def _hardware(reading: _Reading) -> Path | None:
    text = reading.values.get("--hardware")
    if text is None:
        return None
    path = Path(text)
    if not path.is_file():
        reading.problems.append(
            f"--hardware is {text!r}, and must be a file, as benchmarks/calibrate_simulation.py "
            "writes them"
        )
    return path


_NOT_IN_PLANS = ("--nproc", "--world-size", "--published", "--hardware", "--log-rank")
"""What a plan finds, or reads of its cluster."""


def _plan(reading: _Reading, action: CommandAction) -> PlanOptions:
    if action == _PLAN:
        unwanted = [option for option in _NOT_IN_PLANS if option in reading.values]
        if unwanted or "dry-run" in reading.actions:
            listed = ", ".join([*unwanted, *["--dry-run"] * ("dry-run" in reading.actions)])
            reading.problems.append(
                f"plan takes --gpus and --cluster, and simulates by itself: leave out {listed}"
            )
        plan = plan_options(reading.values, reading.problems)
        reading.problems += [
            f"--beside has {each}, which is the plan's to say: it takes flags of the configuration"
            for each in filter(_is_ours, plan.beside or ())
        ]
        return plan
    options = [option for option in PLAN_OPTIONS if option in reading.values]
    if options:
        reading.problems.append(f"{', '.join(options)} belongs to gt-train plan")
    return PlanOptions()


def _ranks(reading: _Reading, num_processes: int) -> frozenset[int]:
    text = reading.values.get("--log-rank", "0")
    if text == "all":
        return frozenset(range(num_processes))
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) < num_processes for part in parts):
        reading.problems.append(
            f"--log-rank is {text!r}, and must be 'all' or ranks from 0 to {num_processes - 1}, "
            "separated by commas"
        )
        return frozenset()
    return frozenset(int(part) for part in parts)


def _choose_published(reading: _Reading) -> PublishedRun | None:
    name = reading.values.get("--published")
    if name is None:
        return None
    others = [option for option in ("--module", "--config") if option in reading.values]
    if others:
        reading.problems.append(
            f"--published {name} says which model is run: leave out {' and '.join(others)}"
        )
    if name not in PUBLISHED_RUNS:
        reading.problems.append(
            f"no published run {name!r}.{did_you_mean(name, PUBLISHED_RUNS)}\n"
            f"published runs: {', '.join(PUBLISHED_RUNS)}"
        )
    return PUBLISHED_RUNS.get(name)


def _choose_config(reading: _Reading) -> tuple[str, str]:
    """Return module and configuration; either may be left out where the other implies it."""
    module, config = reading.values.get("--module"), reading.values.get("--config")
    folder = None if module is None else folder_of(module)
    if module is not None and folder is not None:
        reading.problems += [f"--module {module}: {each}" for each in folder_problems(folder)]
        if config is not None:
            reading.problems.append(f"--module {module} is one model: leave out --config {config}")
        return module, folder.resolve().name
    if module is not None and (module.endswith(".py") or os.sep in module):
        dotted = ".".join(Path(module).with_suffix("").parts)
        reading.problems.append(f"--module {module} is a path: give the module, --module {dotted}")
        return module, config or ""
    if module is not None and module.partition(".")[0] in sys.stdlib_module_names:
        reading.problems.append(
            f"--module {module} is of Python's standard library, which has no configurations"
        )
        return module, config or ""
    if module is not None and is_own_module(module):
        if config is None:
            reading.problems.append(f"--module {module} needs --config: a function in that module")
        return module, config or ""
    if module is not None and module not in CATALOG:
        return module, _choose_of_torchtitan(reading, module, config)
    homes = {name: home for home, configs in CATALOG.items() for name in configs}
    if config is None:
        module = module or _DEFAULT_MODULE
        return module, f"{module}_debugmodel"
    if config not in homes:
        config = _whole_name(module, config)
    if module is None and config in homes:
        return homes[config], config
    if module is None:
        reading.problems.append(
            f"no configuration {config!r}.{did_you_mean(config, homes)}\n"
            f"configurations: {', '.join(homes)}"
        )
        return "", config
    if config not in CATALOG[module]:
        home = f" It belongs to --module {homes[config]}." if config in homes else ""
        near = "" if home else did_you_mean(config, CATALOG[module])
        reading.problems.append(
            f"module {module!r} has no configuration {config!r}.{home}{near}\n"
            f"configurations of {module}: {', '.join(CATALOG[module])}"
        )
    return module, config


def _whole_name(module: str | None, config: str) -> str:
    """Return the one configuration that has this name after its module's, as torchtitan's flavors.

    ``debugmodel_sdpa`` and ``16B_sdpa`` are such names. Others are returned as they are.
    """
    modules = CATALOG if module is None else [module]
    names = [f"{each}_{config}".lower() for each in modules]
    found = [name for name, each in zip(names, modules, strict=True) if name in CATALOG[each]]
    return found[0] if len(found) == 1 else config


def _choose_of_torchtitan(reading: _Reading, module: str, config: str | None) -> str:
    """The configuration of a module that torchtitan has and the catalog has not."""
    known = torchtitan_configs(module)
    if not known:
        names = [*CATALOG, *torchtitan_modules()]
        reading.problems.append(
            f"no module {module!r}.{did_you_mean(module, names)}\n"
            f"modules: {', '.join(names)}; a Python module of yours; or hf:FOLDER"
        )
        return config or ""
    if config is None:
        debug = (name for name in known if name.endswith("_debugmodel"))
        config = next(debug, f"{module}_debugmodel")
    if config not in known:
        reading.problems.append(
            f"module {module!r} has no configuration {config!r}.{did_you_mean(config, known)}\n"
            f"configurations of {module}: {', '.join(known)}"
        )
    return config


BALANCE_FLAG = "--parallelism.pipeline_parallel_balance"
HARDWARE_FOR = (
    f"--hardware is the machine that a --dry-run simulates, by which {BALANCE_FLAG} simulated "
    "divides a pipeline, or that --compile.autoparallel plans for"
)
"""Refuses it for a run whose configuration balances and plans nothing."""
