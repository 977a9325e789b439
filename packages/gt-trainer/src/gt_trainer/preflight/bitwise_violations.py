"""What ``--compile.bitwise`` refuses: passes that round otherwise than an eager run.

Passes declare whether they keep every bit, so that this holds for one that is added later, too.
"""

from __future__ import annotations

from collections.abc import Iterator

from gt_config import CompileConfig, Topology, Violation
from gt_passes import PassOrderError, RecipeError
from gt_trainer.preflight.idle_options import RunOptions

_EAGER_COMPILES_IT_TOO = "compile-flex-attention"


def rounding_passes(run: RunOptions) -> tuple[str, ...]:
    """The names of a run's passes that may change a bit of an eager run, in order, each once."""
    names = (
        each.name
        for passes in run.passes().values()
        for each in passes
        if not each.preserves_numerics and each.name != _EAGER_COMPILES_IT_TOO
    )
    return tuple(dict.fromkeys(names))


def bitwise_violations(options: CompileConfig, topology: Topology) -> Iterator[Violation]:
    """Yield the options that a run with ``--compile.bitwise`` cannot have.

    Args:
        options: of the run.
        topology: of the run.
    """
    run = RunOptions(options=options, topology=topology)
    if not options.bitwise:
        return
    try:
        names = rounding_passes(run)
    except (RecipeError, PassOrderError):
        return  # told elsewhere
    for name in names:
        flags = [flag for flag in run.flags if _brings(run, flag, name)]
        for flag in flags:
            yield Violation(
                flag=flag,
                value=run.value(flag),
                allowed=f"{run.default(flag)!r} with --compile.bitwise: {name} rounds otherwise",
                fix="leave out one of the two",
            )


def _brings(run: RunOptions, flag: str, name: str) -> bool:
    """Whether a pass runs on account of an option."""
    if run.value(flag) == run.default(flag):
        return False
    try:
        return name not in rounding_passes(run.changed(flag, run.default(flag)))
    except (RecipeError, PassOrderError):
        return False
