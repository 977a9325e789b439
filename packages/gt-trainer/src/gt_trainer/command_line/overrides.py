"""Apply the dotted flags of the command line to a configuration, with tyro as torchtitan does.

torchtitan's own ``ConfigManager`` (torchtitan/config/manager.py) cannot be used whole: to list its
modules it imports torchtitan.experiments. Its registry of tyro rules can, so that a flag reads the
same for both. tyro reports one kind of mistake at a time, drawn in a box; here unknown flags are
all named, each with near matches, in plain text.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
from collections.abc import Iterator, Sequence
from typing import TypeVar

import tyro
from torchtitan.config.manager import ConfigManager, custom_registry

from gt_trainer.command_line.command_line import UsageError
from gt_trainer.command_line.known_flags import with_underscores
from gt_trainer.command_line.near_matches import did_you_mean

ConfigT = TypeVar("ConfigT")

_HELP_COLUMNS = 100
_FLAG_NAME = re.compile(r"--[\w.]+")
_BOX = "╭╮╰╯│─- "
_STYLE = (tyro.conf.HelptextFromCommentsOff,)
_HINT = "\ngt-train --help-all lists every flag"


def apply_overrides(config: ConfigT, arguments: Sequence[str]) -> ConfigT:
    """Return ``config`` with the flags in ``arguments`` applied.

    Args:
        config: A dataclass instance, the default of every flag. Not changed.
        arguments: Flags as typed, such as ``--training.steps 5``.

    Raises:
        UsageError: Flags are unknown, or a value does not fit its flag.
    """
    drawn = io.StringIO()
    try:
        with contextlib.redirect_stderr(drawn), contextlib.redirect_stdout(drawn):
            result, unknown = tyro.cli(
                type(config),
                args=list(arguments),
                default=config,
                return_unknown_args=True,
                registry=_registry(),
                use_underscores=True,
            )
    except SystemExit:
        raise UsageError(_plain(drawn.getvalue())) from None
    except (ValueError, TypeError, AssertionError) as error:  # a configuration's own check
        raise UsageError(str(error)) from None
    if unknown:
        raise UsageError(*_explain_unknown(unknown, config))
    return result


def help_text(config: object) -> str:
    """Return tyro's help on every flag of the configuration.

    Args:
        config: A dataclass instance; its values are the defaults that the help names.
    """
    drawn = io.StringIO()
    with (
        _columns(_HELP_COLUMNS),
        contextlib.redirect_stdout(drawn),
        contextlib.suppress(SystemExit),
    ):
        tyro.cli(
            type(config),
            args=["--help"],
            default=config,
            prog="gt-train",
            registry=_registry(),
            config=_STYLE,
            use_underscores=True,
        )
    text = "\n".join(line.rstrip() for line in drawn.getvalue().splitlines())
    return re.sub(r"\n{3,}", "\n\n", text) + "\n"


def flags_in(text: str) -> dict[str, str]:
    """Return the flags of a help text, each with what it takes: INT, {a,b}, nothing.

    Args:
        text: As of ``help_text``. The negative forms of switches are among the flags.
    """
    kinds: dict[str, str] = {}
    for head in re.findall(r"^ {2}(-{1,2}\w.*)$", text, re.MULTILINE):
        names = _FLAG_NAME.findall(head.partition(" {")[0])
        kinds |= dict.fromkeys(names, head.partition(names[-1])[2].strip(", "))
    return kinds


@functools.cache
def _registry() -> tyro.constructors.ConstructorRegistry:
    ConfigManager.register_tyro_rules(custom_registry)

    @custom_registry.primitive_rule
    def tuple_of_strings_rule(
        type_info: tyro.constructors.PrimitiveTypeInfo,
    ) -> tyro.constructors.PrimitiveConstructorSpec[tuple[str, ...]] | None:
        """Separate by commas, as torchtitan does for lists."""
        if type_info.type != tuple[str, ...]:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="A,B,C,...",
            instance_from_str=lambda args: tuple(part for part in args[0].split(",") if part),
            is_instance=lambda instance: (
                isinstance(instance, tuple) and all(isinstance(part, str) for part in instance)
            ),
            str_from_instance=lambda instance: [",".join(instance)],
        )

    return custom_registry


def _explain_unknown(unknown: Sequence[str], config: object) -> list[str]:
    known = flags_in(help_text(config))
    names = [argument.partition("=")[0] for argument in unknown if argument.startswith("-")]
    problems = [f"no flag {name!r}.{did_you_mean(with_underscores(name), known)}" for name in names]
    if not names:  # else these are the values of the unknown flags
        strays = ", ".join(map(repr, unknown))
        is_switch_value = any(stray.lower() in ("true", "false") for stray in unknown)
        hint = (
            " A switch takes no value: --GROUP.FLAG or --GROUP.no_FLAG." if is_switch_value else ""
        )
        problems.append(f"unexpected {strays}.{hint}")
    return [*problems[:-1], problems[-1] + _HINT]


@contextlib.contextmanager
def _columns(number: int) -> Iterator[None]:
    """Tell those who ask that the terminal has that width."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(number)
    try:
        yield
    finally:
        del os.environ["COLUMNS"]
        if before is not None:
            os.environ["COLUMNS"] = before


def _plain(drawn: str) -> str:
    """Take tyro's message out of its box.

    The first line is the box's title, and what follows on the flag is left to --help-all.
    """
    lines = [content for line in drawn.splitlines() if (content := line.strip(_BOX))]
    text: list[str] = []
    for line in lines[1:]:
        if line.startswith(("Argument helptext", "For full helptext")):
            break
        text.append(line)
    return " ".join(text) + _HINT
