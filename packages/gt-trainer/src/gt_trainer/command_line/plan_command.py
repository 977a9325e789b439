"""``gt-train plan``, once the configuration has been imported."""

from __future__ import annotations

import contextlib
import logging
import operator
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from gt_trainer.command_line.command_line import CommandLine, UsageError, flags_given
from gt_trainer.command_line.known_flags import with_underscores
from gt_trainer.command_line.overrides import apply_overrides
from gt_trainer.models.catalog import INTENDED_WORLD_SIZE
from gt_trainer.planning.candidates import NoRecipeError
from gt_trainer.planning.cluster import ClusterFileError, load_cluster
from gt_trainer.planning.plan_run import PlanQuestion, make_plan, write_plan_page
from gt_trainer.planning.run_beside import RunBeside
from gt_trainer.planning.run_recipe import RunRecipe
from gt_trainer.trainer import GraphTrainer

_SHARDS = "--parallelism.data_parallel_shard_degree"
_IN_RECIPES = frozenset(
    RunRecipe(
        pp=2, schedule="1F1B", microbatch=1, global_batch=1, memory_policy="", ep_overlap=True
    ).settings()
)
"""Flags that a recipe sets."""

_SAME_SECONDS = 1.0
"""A SIGTERM so soon after the first is the same: ``timeout`` sends two, one to the group."""


class _Termination:
    """SIGTERM while a plan is searched: it ends the search.

    Again, later, it ends the process at once.
    """

    def __init__(self) -> None:
        self._asked_at: float | None = None
        self._previous = signal.getsignal(signal.SIGTERM)

    @property
    def was_asked(self) -> bool:
        """Whether SIGTERM came."""
        return self._asked_at is not None

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Inside it is kept; at the end it goes to whoever handled it before."""
        if self._previous in (signal.SIG_IGN, None):  # None: it could not be put back
            yield
            return
        signal.signal(signal.SIGTERM, self._ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, self._previous)
        if self.was_asked:
            signal.raise_signal(signal.SIGTERM)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
        elif now >= self._asked_at + _SAME_SECONDS:
            signal.signal(number, self._previous)
            signal.raise_signal(number)


@contextlib.contextmanager
def _without_lines_of_meshes() -> Iterator[None]:
    """Log nothing of each mesh that is made, as torchtitan does."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(before)


@_without_lines_of_meshes()
def asked_plan(
    config: GraphTrainer.Config,
    command: CommandLine,
    *,
    tell: Callable[[str], None],
    show: Callable[[str], object],
) -> None:
    """Make the plan that a command line asks for, and show it.

    SIGTERM ends the search: what was found by then is shown, and written nowhere.

    Args:
        config: with the flags of the command line.
        command: the command line.
        tell: is told of progress, line by line.
        show: is given the answer.

    Raises:
        UsageError: it cannot be, the text says what is nearest; or, after the answer was shown,
            nothing in it can be run.
    """
    options = command.plan
    of_recipes, further = split_overrides(command.overrides)
    values = {flag: _value(config, flag) for flag in sorted(flags_given(of_recipes) & _IN_RECIPES)}
    if values.get(_SHARDS) == -1:  # whatever is left
        del values[_SHARDS]
    termination = _Termination()
    try:
        question = PlanQuestion(
            cluster=load_cluster(options.cluster),
            num_gpus=options.gpus or INTENDED_WORLD_SIZE.get(command.config, 1),
            global_batch_tokens=options.global_batch_tokens,
            minutes=options.minutes,
            scaling_minutes=options.scaling_minutes,
            what_if=options.what_if,
            fixed=values,
            beside=_beside(config, command),
            further=further,
            model_flags=f"--module {command.module} --config {command.config}",
        )
        with termination.handled():
            found = make_plan(
                config,
                question,
                asked=flags_given(further),
                tell=lambda line: tell(f"gt-train: {line}"),
                is_stopped=lambda: termination.was_asked,
            )
            show(f"{found}\n")
    except (ClusterFileError, NoRecipeError) as error:
        raise UsageError(str(error)) from None
    if options.page is not None:
        written = write_plan_page(found, config, options.page, asked=flags_given(further))
        show(f"written: {', '.join(map(str, written))}\n")
    if found.without_answer is not None:
        raise UsageError(found.without_answer)


def _beside(config: GraphTrainer.Config, command: CommandLine) -> RunBeside | None:
    """The run with further flags."""
    flags = command.plan.beside
    if flags is None:
        return None
    try:
        changed = apply_overrides(config, flags)
    except UsageError as error:
        raise UsageError(*(f"--beside: {each}" for each in error.problems)) from None
    typed = (*command.overrides, *flags)
    return RunBeside(flags=typed, asked=flags_given(typed), config=changed)


def split_overrides(overrides: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What was typed of flags that recipes set, and of all others."""
    of_recipes: list[str] = []
    further: list[str] = []
    mine = further
    for argument in overrides:
        if argument.startswith("--"):
            name = with_underscores(argument.partition("=")[0]).replace(".no_", ".")
            mine = of_recipes if name in _IN_RECIPES else further
        mine.append(argument)
    return tuple(of_recipes), tuple(further)


def _value(config: GraphTrainer.Config, flag: str) -> object:
    return operator.attrgetter(flag.removeprefix("--"))(config)
