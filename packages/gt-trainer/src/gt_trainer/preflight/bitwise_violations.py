"""What ``--compile.bitwise`` refuses: whatever may change a bit of an eager run.

Passes declare their class of numerics, so that this holds for one that is added later, too. What
else than passes has one is listed here.
"""

from __future__ import annotations

from collections.abc import Iterator

from gt_config import CompileConfig, Topology, Violation
from gt_config.numerics import Numerics
from gt_passes import RecipeError
from gt_trainer.preflight.idle_options import PIPELINE, RunOptions

_BITWISE = "--compile.bitwise"
_EAGER_COMPILES_IT_TOO = "compile-flex-attention"


def what_changes_bits(run: RunOptions) -> dict[str, Numerics]:
    """What of a run may change a bit of an eager one, and how: names of passes, in order, and more.

    Raises:
        RecipeError: passes that were added or left out by name do not fit the others.
    """
    found: dict[str, Numerics] = {
        each.name: each.numerics
        for passes in run.passes().values()
        for each in passes
        if each.numerics != "bitwise" and each.name != _EAGER_COMPILES_IT_TOO
    }
    return found | {what: "reordered" for what, _ in _besides_passes(run)}


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
        found = what_changes_bits(run)
    except RecipeError:
        return  # told elsewhere
    besides = dict(_besides_passes(run))
    for each, numerics in found.items():
        asking = (flag for flag in run.flags if _brings(run, flag, each))
        flags = [besides[each]] if each in besides else [*asking]
        for flag in flags or [_BITWISE]:
            allowed = False if flag == _BITWISE else run.default(flag)
            yield Violation(
                flag=flag,
                value=run.value(flag),
                allowed=f"{allowed!r} with {_BITWISE}: {each} is {numerics}",
                fix="leave out one of the two",
            )


def _besides_passes(run: RunOptions) -> Iterator[tuple[str, str]]:
    """What sums in another order, and is no pass; and the flag that asks for it."""
    options = run.options
    overlap = options.ep_overlap
    if options.mode == "aot_fx_trace" and overlap.enabled and overlap.strategy == "eager":
        yield "the sum of gradients over chunks", "--compile.ep_overlap.enabled"
    if "MICROBATCH" in run.graphs:
        yield "one reduction of several microbatches", "--compile.accumulation"
    topology = run.topology
    if topology.pp > 1 and topology.world > topology.pp:
        yield "one reduction of all microbatches of a pipeline", PIPELINE
    if options.autoparallel:
        yield "a placement that a solver chooses", "--compile.autoparallel"


def _brings(run: RunOptions, flag: str, name: str) -> bool:
    """Whether an option brings a pass, be it that another one would bring it too."""
    if run.value(flag) == run.default(flag):
        return False
    alone = RunOptions(
        options=type(run.options)(mode=run.options.mode), topology=run.topology
    ).changed(flag, run.value(flag))
    for with_it, without in ((run, run.changed(flag, run.default(flag))), (alone, None)):
        try:
            is_without = without is None or name not in what_changes_bits(without)
            if name in what_changes_bits(with_it) and is_without:
                return True
        except RecipeError:
            continue
    return False
