"""Options that would do nothing in the run that is asked for: found, not listed.

An option does something in a run if another value of it would change what passes run on a graph of
that run, or if something else than passes reads it. Passes declare on which graphs they run, and
recipes are values that can be compared, so that the first can be asked of every option, also of one
that is added later; ``read_elsewhere`` answers the second. What remains is refused by name, with
the other option on account of which it does nothing, which is found in the same way.

Design: docs/decisions/0020-where-passes-run.md.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast, get_args

from gt_config import (
    CompileConfig,
    Topology,
    Violation,
    find_violations,
    malformed_options,
)
from gt_config.graph_kinds import STEP_GRAPHS, GraphKind
from gt_config.option_paths import (
    default_option,
    option_at,
    option_choices,
    option_paths,
    with_option,
)
from gt_passes import GraphPass, RecipeError, known_passes
from gt_trainer.steps.recipe import ReshardChoice, graphs_of, passes_of

_COMPILE = "--compile."
_RESHARD = "--parallelism.fsdp_reshard_after_forward"
PIPELINE = "--parallelism.pipeline_parallel_degree"
_DATA_PARALLEL = "--parallelism.data_parallel_shard_degree"
_REPLICATED = "--parallelism.data_parallel_replicate_degree"
_TENSOR_PARALLEL = "--parallelism.tensor_parallel_degree"
_DEGREES = {
    PIPELINE: "pp",
    _DATA_PARALLEL: "dp_shard",
    _REPLICATED: "dp_replicate",
    _TENSOR_PARALLEL: "tp",
}
"""Axes of the mesh that decide whether an option does something, by the flags of their degrees."""

_NAMES = ("passes", "disable_passes")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """All options of a run that recipes are read off, and what they are judged with."""

    options: CompileConfig
    topology: Topology
    reshard_after_forward: ReshardChoice = "default"
    looks_at_mesh: bool = True
    """Whether passes are left out that find no collective on the axes of this run's mesh."""

    @property
    def flags(self) -> tuple[str, ...]:
        """Every option, as it is typed."""
        return (*(_COMPILE + path for path in option_paths(type(self.options))), _RESHARD)

    @property
    def graphs(self) -> tuple[GraphKind, ...]:
        """The kinds of graph that the run captures."""
        return graphs_of(self.options, has_pipeline=self.topology.pp > 1)

    def value(self, flag: str) -> object:
        """What the option is set to."""
        if flag in _DEGREES:
            return getattr(self.topology, _DEGREES[flag])
        if flag == _RESHARD:
            return self.reshard_after_forward
        return option_at(self.options, flag.removeprefix(_COMPILE))

    def default(self, flag: str) -> object:
        """What the option is if nobody sets it."""
        if flag == _RESHARD:
            return "default"
        if flag == PIPELINE:
            return 1
        return default_option(type(self.options), flag.removeprefix(_COMPILE))

    def choices(self, flag: str) -> tuple[object, ...]:
        """All values that the option may have; empty where they cannot be listed."""
        if flag == _RESHARD:
            return get_args(ReshardChoice)
        return option_choices(type(self.options), flag.removeprefix(_COMPILE))

    def changed(self, flag: str, value: object) -> RunOptions:
        """The same run with another value of one option."""
        if flag in _DEGREES:
            assert isinstance(value, int)
            axis = _DEGREES[flag]
            world = self.topology.world // getattr(self.topology, axis) * value
            return replace(self, topology=replace(self.topology, **{axis: value, "world": world}))
        if flag == _RESHARD:
            return replace(self, reshard_after_forward=cast(ReshardChoice, value))
        return replace(self, options=with_option(self.options, flag.removeprefix(_COMPILE), value))

    def passes(self) -> dict[GraphKind, tuple[GraphPass, ...]]:
        """Return the passes that run on each graph.

        Raises:
            RecipeError: passes that were added or left out by name do not fit the others.
        """
        return {
            graph: tuple(
                each
                for each in passes_of(
                    self.options, graph, reshard_after_forward=self.reshard_after_forward
                )
                if self._finds_work(each)
            )
            for graph in self.graphs
        }

    def _finds_work(self, graph_pass: GraphPass) -> bool:
        """Whether there are collectives for the pass; a plan may make them on any axis."""
        axes = graph_pass.mesh_axes
        if not axes or not self.looks_at_mesh or self.options.autoparallel:
            return True
        return any(getattr(self.topology, axis) > 1 for axis in axes)


def read_elsewhere(run: RunOptions) -> Iterator[str]:
    """The paths of the options that something else than passes reads in ``run``."""
    options, graphs = run.options, run.graphs
    yield from ("mode", "autoparallel")  # what is captured, and who places the model
    yield from ("bitwise", "require_float8")  # what is refused
    if run.topology.cp > 1:
        yield "context_parallel"  # what attention is placed
    if options.autoparallel:
        yield from (p for p in option_paths(type(options)) if p.startswith("autoparallel_solver."))
    if graphs:
        yield from ("verify_passes", "debug_graph_passes")  # what surrounds the passes
        yield "on_shape_change"
        yield "artifacts"
        if options.artifacts is not None:
            yield "artifacts_max_gib"
    is_whole = not STEP_GRAPHS.isdisjoint(graphs)
    if is_whole or "STAGE" in graphs:
        yield "capture_layers"
    if "STAGE" in graphs:
        yield from ("pipeline_gathered_gib", "pipeline_deferred_weights")
    if "JOINT_FORWARD" in graphs:
        yield "joint_partitioner"
    chunks_eagerly = options.ep_overlap.enabled and options.ep_overlap.strategy == "eager"
    if chunks_eagerly and (is_whole or "STAGE" in graphs):
        # Modules are made to run in chunks before the capture.
        yield from ("ep_overlap.num_chunks", "ep_overlap.chunk_dim", "ep_overlap.module_fqn")


def idle_option_violations(
    options: CompileConfig,
    topology: Topology,
    *,
    reshard_after_forward: ReshardChoice = "default",
    asked: Collection[str] = (),
) -> Iterator[Violation]:
    """Every option that was set and does nothing; what is malformed is left to ``gt_config``.

    Args:
        options: of the run.
        topology: of the run.
        reshard_after_forward: torchtitan's option.
        asked: flags that the user typed. Others may do nothing for want of ranks alone: a
            configuration is used with any number of them.
    """
    for path in malformed_options(options, known_passes=known_passes()):
        options = with_option(options, path, default_option(type(options), path))
    run = RunOptions(
        options=options, topology=topology, reshard_after_forward=reshard_after_forward
    )
    try:
        run.passes()
    except RecipeError as error:
        yield from _misfits(run, error)
        for path in _NAMES:
            run = run.changed(_COMPILE + path, ())
    for flag in run.flags:
        value, default = run.value(flag), run.default(flag)
        if value == default:
            continue
        run = replace(run, looks_at_mesh=flag in asked)
        if not _does_something(run, flag):
            allowed = f"its default {default!r}"
            yield _violation(run, flag, value, allowed=allowed, what="the option")
        elif isinstance(value, tuple) and flag.removeprefix(_COMPILE) not in read_elsewhere(run):
            for item in _idle_items(run, flag, value):
                yield _violation(run, flag, item, allowed="to leave it out", what="it")


def _misfits(run: RunOptions, error: RecipeError) -> Iterator[Violation]:
    """What passes say of the names of passes that were added and left out."""
    told = False
    for path in _NAMES:
        names = option_at(run.options, path)
        problems = [
            problem
            for problem in error.problems
            if any(problem.startswith(repr(name)) for name in names)
        ]
        if problems:
            yield _misfit(path, names, problems)
            told = True
    if not told:
        yield _misfit("passes", option_at(run.options, "passes"), error.problems)


def _misfit(path: str, names: object, problems: Sequence[str]) -> Violation:
    return Violation(
        flag=_COMPILE + path,
        value=names,
        allowed="names that fit the recipe",
        fix=f"drop a name: {'; '.join(problems)}",
    )


def _does_something(run: RunOptions, flag: str) -> bool:
    if flag.removeprefix(_COMPILE) in read_elsewhere(run):
        return True
    others = (run.default(flag), *run.choices(flag))
    return any(_differ(run, run.changed(flag, other)) for other in others)


def _idle_items(run: RunOptions, flag: str, items: tuple[object, ...]) -> list[object]:
    """The items of an option of several that could be left out."""
    return [
        item
        for index, item in enumerate(items)
        if not _differ(run, run.changed(flag, (*items[:index], *items[index + 1 :])))
    ]


def _differ(run: RunOptions, other: RunOptions) -> bool:
    if run == other:
        return False
    try:
        return run.passes() != other.passes()
    except RecipeError:
        return True  # names that fit one recipe and not the other: it is another


def _violation(run: RunOptions, flag: str, value: object, *, allowed: str, what: str) -> Violation:
    causes = dict(_causes(run, flag, value))
    because = " and ".join(f"{cause} is {run.value(cause)!r}" for cause in causes)
    because = because or "nothing in this run reads it"
    switches = [_typed(cause, values) for cause, values in causes.items()]
    return Violation(
        flag=flag,
        value=value,
        allowed=f"{allowed}, since {because} and it would do nothing",
        fix=", or use ".join([f"drop {what}", *switches]),
    )


def _causes(run: RunOptions, flag: str, value: object) -> Iterator[tuple[str, list[object]]]:
    """Other options but for which this one would do something, with the values that would do."""
    candidates: list[tuple[str, tuple[object, ...]]] = [
        (other, run.choices(other) or ((),) * isinstance(run.value(other), tuple))
        for other in run.flags
        if other != flag and not (run.looks_at_mesh and other == f"{_COMPILE}autoparallel")
    ]
    if run.topology.pp > 1:
        candidates.insert(0, (PIPELINE, (1,)))
    candidates[:0] = [
        (degree, (2,))
        for degree in (_DATA_PARALLEL, _REPLICATED, _TENSOR_PARALLEL)
        if run.looks_at_mesh and run.value(degree) == 1
    ]
    for other, choices in candidates:
        values = [
            choice
            for choice in choices
            if choice != run.value(other) and _helps(run.changed(other, choice), other, flag, value)
        ]
        if values:
            yield other, values


def _helps(changed: RunOptions, other: str, flag: str, value: object) -> bool:
    """Whether with ``other`` changed the value does something, and ``other`` may be changed so."""
    whole = changed.value(flag)
    try:
        changed.passes()
    except RecipeError:
        return False
    if not _does_something(changed, flag):
        return False
    if value != whole and isinstance(whole, tuple) and value in _idle_items(changed, flag, whole):
        return False
    refused = find_violations(changed.options, changed.topology, known_passes=known_passes())
    return other not in {violation.flag for violation in refused}


def _typed(flag: str, values: list[object]) -> str:
    if values[0] == ():
        return f"no {flag}"
    return flag if values[0] is True else f"{flag} {' or '.join(map(str, values))}"
