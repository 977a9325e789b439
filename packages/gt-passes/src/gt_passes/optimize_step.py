"""The default recipe on a captured step, in one call: for training loops of one's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from gt_config import (
    CompileConfig,
    ConfigError,
    Topology,
    Violation,
    find_violations,
    malformed_options,
)
from gt_passes.contract import GraphPass, PassContext
from gt_passes.pass_manager import PassManager
from gt_passes.pass_manager_report import PassManagerReport
from gt_passes.recipes import default_passes
from gt_passes.registry import known_passes
from gt_trace import TracedStep

_OF_NO_CAPTURED_STEP = (
    "bitwise",
    "require_float8",
    "capture_layers",
    "artifacts",
    "artifacts_max_gib",
    "on_shape_change",
    "mode",
    "autoparallel",
    "autoparallel_solver",
    "joint_partitioner",
    "debug_graph_passes",
    "pipeline_gathered_gib",
    "pipeline_deferred_weights",
    "accumulation",
    "async_tensor_parallel",
    "context_parallel",
)
"""Options of how a step is captured, started or judged."""


def optimize(
    traced: TracedStep,
    options: CompileConfig | None = None,
    *,
    passes: Sequence[GraphPass] | None = None,
    dump_directory: Path | None = None,
) -> PassManagerReport:
    """Run passes on a captured step, in place, and verify the graph after each.

    Args:
        traced: what ``gt_trace.trace_step`` returned, before or after it was bound.
        options: which passes run, as for ``default_passes``; None for the defaults.
        passes: these instead of the recipe's; of ``options``, ``verify_passes`` alone counts then.
        dump_directory: where to write the graph before and after each pass; None writes none.

    Returns:
        What each pass did. ``print`` shows a table.

    Raises:
        ConfigError: an option has a value that it cannot have, or would do nothing to a step that
            is captured; all of them at once.
        VerificationError: a pass broke the graph, which must not be used then.

    And what ``default_passes`` raises.
    """
    options = options if options is not None else CompileConfig()
    _check_options(options)
    chosen = default_passes(options, graph="STEP") if passes is None else passes
    manager = PassManager(
        chosen,
        context=PassContext.of_step(traced),
        verify=options.verify_passes,
        dump_directory=dump_directory,
    )
    return manager.run(traced.graph_module)


_FIELD = "CompileConfig."
"""What options are called where there are no flags."""


def _check_options(options: CompileConfig) -> None:
    """Refuse what is wrong whatever the model and the mesh are, which nobody names here."""
    known = known_passes()
    malformed = {_FIELD + path for path in malformed_options(options, known_passes=known)}
    anywhere = Topology(world=1, batch_size=1, seq_len=1)
    violations = find_violations(
        options,
        anywhere,
        known_passes=known,
        name_flag=lambda flag: flag.replace("--compile.", _FIELD),
    )
    refused = [each for each in violations if each.flag in malformed]
    refused += [each for each in _idle_options(options) if each.flag not in malformed]
    if refused:
        raise ConfigError(refused)


def _idle_options(options: CompileConfig) -> Iterator[Violation]:
    defaults = CompileConfig()
    for name in _OF_NO_CAPTURED_STEP:
        value, default = getattr(options, name), getattr(defaults, name)
        if value != default:
            yield Violation(
                flag=_FIELD + name,
                value=value,
                allowed=f"its default {default!r}: no pass on a captured step reads it",
                fix="leave it out",
            )
